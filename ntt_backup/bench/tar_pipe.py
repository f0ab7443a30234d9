"""`tar | ssh tar` is a measure for the strategies.

Each has finished when the remote has synced and has said so. No hash is checked, and where one
breaks, nobody knows what has arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ntt_backup.bench.remote import connect
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.remote_errors import explain_batch
from ntt_backup.client.transport import Transport
from ntt_backup.errors import RemoteUnreachable, SourceError
from ntt_backup.model import Blob
from ntt_backup.process.spawn import start, wait_for
from ntt_backup.upload.strategies.tar import name_list, tar_argv, tar_environment

_STORE: Final = """
message=$({ cd "$root/by-hash" && tar -x -o -f - && { sync -f . || sync; }; } 2>&1)
if [ $? = 0 ]; then echo ok; else echo "err $(printf "%s" "$message" | tr "\\n\\r" "  ")"; fi
"""


def send_tar(
    transport: Transport, store: Path, root: str, blobs: Sequence[Blob], patience: float
) -> None:
    """Sends blobs to a tar on the remote; returns when that has unpacked and synced them.

    patience: seconds in which nothing moves. Raises SourceError, and what the remote's answer says.
    """
    said = b""

    def hear(more: bytes) -> None:
        nonlocal said
        said += more

    channel = connect(transport, _STORE, root=root)
    try:
        for chunk in archive(store, blobs):
            channel.send(memoryview(chunk), hear, patience=patience)
            channel.hear(hear, 0.0)
        channel.end_input()
        deadline = time.monotonic() + patience
        while b"\n" not in said:
            channel.hear(hear, 1.0)
            if time.monotonic() > deadline:
                raise RemoteUnreachable("the remote does not answer", detail="after an archive")
        channel.close()  # in good order, so that both ends write down what they used
    except RemoteUnreachable:
        if not said.startswith(b"err "):
            raise
    finally:
        channel.abort()
    word, _, text = said.decode("utf-8", "backslashreplace").strip().partition(" ")
    if word == "err":
        raise explain_batch(text)


def archive(store: Path, blobs: Sequence[Blob]) -> Iterator[bytes]:
    """Yields a tar archive of blobs, as tar writes it. Raises SourceError."""
    with name_list(relative_path(blob.blobid) for blob in blobs) as names:
        tar = start(tar_argv(store), stdin=names.fileno(), env=tar_environment(os.environ))
    try:
        while (data := tar.read()) != b"":
            if data is None:
                wait_for(reading=tar.fds, timeout=1.0)
                tar.drain_stderr()
            else:
                yield data
        if tar.wait(1.0) != 0:
            detail = tar.stderr.text or f"status {tar.status}"
            raise SourceError("tar failed on this machine", detail=detail)
    finally:
        tar.kill()
