"""Plain tars over ssh, there and back: what an old hand would type, as a measure for the rest.

`tar | ssh tar`, with one thing changed each: a compressor between, a connection a batch, an archive
on disk first. So that only this one thing differs, all have finished when the remote has synced,
and has said so. None of them checks a hash, and none of them knows what arrived when it breaks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ntt_backup.bench.remote import HELLO, connect
from ntt_backup.bench.streams import arrival
from ntt_backup.bench.tasks import Item
from ntt_backup.client.error_text import explain_batch
from ntt_backup.client.transport import Transport
from ntt_backup.errors import BackupError, RemoteUnreachable, SourceError
from ntt_backup.process.pipeline import Child, start, wait_for, write
from ntt_backup.upload.strategies.tar_archive import name_list, tar_argv, tar_environment

# Each codec: the command that packs here, and the one that unpacks there.
CODECS: Final = {
    "": ("", "cat"),
    "gz": ("gzip", "gzip -dc"),
    "zst-1": ("zstd -q -1", "zstd -dcq"),
    "zst-3": ("zstd -q -3", "zstd -dcq"),
}

_CHUNK: Final = 256 * 1024
_STORE: Final = (
    HELLO
    + """
message=$({ cd "$root/by-hash" && $decode | tar -x -o -f - && { sync -f . || sync; }; } 2>&1)
if [ $? = 0 ]; then echo ok; else echo "err $(printf "%s" "$message" | tr "\\n\\r" "  ")"; fi
"""
)
_FETCH: Final = (
    'cd "$root/by-hash" || exit 1\n' + HELLO + "IFS= read -r go && exec tar -c -f - $prefixes\n"
)


def archive(store: Path, items: Sequence[Item], codec: str) -> Iterator[bytes]:
    """The tar of items, as it is made. Raises SourceError when tar fails."""
    with _tar(_argv(store, codec), items) as tar:
        while (data := tar.read()) != b"":
            if data is not None:
                yield data
                continue
            wait_for(reading=tar.fds, timeout=1.0)
            tar.drain_stderr()
        _require(tar)


def archive_on_disk(store: Path, items: Sequence[Item], codec: str, file: Path) -> Iterator[bytes]:
    """The same, made as a whole before the first of it is handed over."""
    argv = [f"--file={file}" if word == "--file=-" else word for word in _argv(store, codec)]
    with _tar(argv, items) as tar:
        while tar.wait(1.0) is None:
            continue
        _require(tar)
    with file.open("rb") as source:
        while data := source.read(_CHUNK):
            yield data
    file.unlink()


def deliver(way: Transport, root: str, codec: str, data: Iterator[bytes], patience: float) -> None:
    """Hand an archive to a tar on the remote; returns when that has unpacked and synced it.

    patience: seconds without any life. Raises what the remote's words mean.
    """
    said = b""

    def hear(more: bytes) -> None:
        nonlocal said
        said += more

    channel = connect(way, _STORE, root=root, decode=CODECS[codec][1])
    try:
        for chunk in data:
            channel.send(memoryview(chunk), hear, patience=patience)
            channel.hear(hear, 0.0)
        channel.end_input()
        deadline = time.monotonic() + patience
        while b"\n" not in said:
            channel.hear(hear, 1.0)
            if time.monotonic() > deadline:
                raise RemoteUnreachable("the remote does not answer", detail="after an archive")
        channel.close()  # in good order: both ends write down what they used
    except RemoteUnreachable:
        if not said.startswith(b"err "):
            raise
    finally:
        channel.abort()
    word, _, text = said.decode("utf-8", "backslashreplace").strip().partition(" ")
    if word == "err":
        raise explain_batch(text)


def fetch(way: Transport, root: str, prefixes: Sequence[str], into: Path, patience: float) -> int:
    """Unpack what lies below root/by-hash in the directories of prefixes; bytes of the archive."""
    channel = connect(way, _FETCH, root=root, prefixes=" ".join(prefixes))
    tar = None
    got = 0
    try:
        argv = ["tar", "--extract", "--file=-", f"--directory={into}"]
        tar = start(argv, env=tar_environment(os.environ))
        channel.send(memoryview(b"go\n"), lambda _: None, patience=patience)
        while data := arrival(channel, patience):
            got += len(data)
            _hand(tar, memoryview(data))
        if channel.wait(patience) != 0:
            raise channel.lost()
        tar.close_stdin()
        tar.wait(patience)
        _require(tar)
    finally:
        channel.abort()
        if tar is not None:
            tar.kill()
    return got


def _argv(store: Path, codec: str) -> list[str]:
    program = CODECS[codec][0]
    return [*tar_argv(store), *([f"--use-compress-program={program}"] if program else [])]


@contextmanager
def _tar(argv: Sequence[str], items: Sequence[Item]) -> Iterator[Child]:
    with name_list(item.blobid for item in items) as names:
        tar = start(argv, stdin=names.fileno(), env=tar_environment(os.environ))
    try:
        yield tar
    finally:
        tar.kill()


def _hand(tar: Child, data: memoryview) -> None:
    while data:
        tar.drain_stderr()
        try:
            data = data[write(tar.stdin_fd, data) :]
        except BrokenPipeError:
            tar.wait(1.0)
            raise _failed(tar) from None
        if data:
            wait_for(writing=[tar.stdin_fd], timeout=1.0)


def _require(tar: Child) -> None:
    tar.wait(1.0)
    if tar.status != 0:
        raise _failed(tar)


def _failed(tar: Child) -> BackupError:
    detail = tar.stderr.text or f"status {tar.status}"
    return SourceError("tar failed on this machine", detail=detail, hint="is there room in TMPDIR?")
