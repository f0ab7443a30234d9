"""`bench strategies` compares these ways to send; one worker does this in each.

Every strategy that is registered is compared. It is used through its `Session`, as a run uses it,
with the same window and the same checks; only the catalog is left out. A plain `tar | ssh tar` is
the measure for them. This tar has finished when the remote has synced and has said so. No hash is
checked, and where it breaks, nobody knows what has arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.bench.helpers import Answer, Ready
from ntt_backup.bench.remote import connect
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.remote_errors import explain_batch
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Transport
from ntt_backup.config import RunSettings
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import RemoteUnreachable, SourceError
from ntt_backup.model import Batch, Blob, Receipt, total_size
from ntt_backup.process.spawn import start, wait_for
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies import STRATEGIES, open_session
from ntt_backup.upload.strategies.session import Outcome, Session
from ntt_backup.upload.strategies.tar import name_list, tar_argv, tar_environment

_STORE: Final = """
message=$({ cd "$root/by-hash" && tar -x -o -f - && { sync -f . || sync; }; } 2>&1)
if [ $? = 0 ]; then echo ok; else echo "err $(printf "%s" "$message" | tr "\\n\\r" "  ")"; fi
"""


@dataclass(frozen=True, slots=True)
class Way:
    """Says how a worker sends its batches.

    Attributes:
        strategy: The strategy of the session; None for a plain tar.
        codec: The codec in place of run.codec; "" leaves run.codec as it is set.
    """

    name: str
    strategy: str | None = None
    codec: str = ""


PLAIN: Final = Way("tar-pipe")
UNCOMPRESSED: Final = Way("stream-none", strategy="stream", codec="none")
COMPRESSED: Final = Way("stream-zst", strategy="stream", codec="zstd-1")
WAYS: Final = (
    *(Way(name, strategy=name) for name, one in STRATEGIES.items() if not one.packs),
    UNCOMPRESSED,
    COMPRESSED,
    PLAIN,
)


def choose(names: Sequence[str]) -> list[Way]:
    """Returns the ways of these names, all for none. Raises ValueError for an unknown name."""
    if unknown := sorted(set(names) - {way.name for way in WAYS}):
        known = ", ".join(way.name for way in WAYS)
        raise ValueError(f"{', '.join(unknown)}: none of {known}")
    return [way for way in WAYS if not names or way.name in names]


@dataclass(frozen=True, slots=True)
class Load:
    """Holds the batches that a worker sends, and their destination.

    The blobs come from the store, and go into root/by-hash on the remote, or into a bucket.
    """

    way: Way
    transport: Transport
    store: Path
    root: str
    worker: str
    run: RunSettings
    batches: Sequence[tuple[Blob, ...]] = ()
    bucket: RemoteSettings | None = None

    @property
    def blobs(self) -> list[Blob]:
        return [blob for batch in self.batches for blob in batch]


def send(load: Load, ready: Ready) -> Answer:
    """Connects, sends everything, and returns when the remote has answered for all of it."""
    ready()  # connecting is part of the work
    began = time.monotonic()
    if load.way.strategy is not None:
        send_by_session(load, load.way.strategy)
    else:
        _send_tar(load)
    size = sum(map(total_size, load.batches))
    return Answer(began=began, ended=time.monotonic(), size=size)


def send_by_session(load: Load, strategy: str) -> None:
    """Opens a session of the strategy, sends the batches and closes it."""
    run = load.run.model_copy(update={"codec": load.way.codec}) if load.way.codec else load.run
    spec = SessionSpec(
        transport=load.transport,
        root=load.root,
        owner="bench",
        run_id="bench",
        slot=load.worker,
        run=run,
        bucket=load.bucket,
    )
    session = open_session(strategy, spec, Store(load.store))
    try:
        for number, blobs in enumerate(load.batches):
            _await(session, run.window - 1, run.receipt_timeout)
            session.put(Batch(f"{load.worker}-{number}", blobs))
        _await(session, 0, run.receipt_timeout)
    except BaseException:
        session.abort()
        raise
    session.close()


def _await(session: Session, left: int, patience: float) -> None:
    """Returns when at most left batches are in flight. patience: seconds without an answer."""
    deadline = time.monotonic() + patience
    while len(session.in_flight) > left:
        if outcomes := session.collect(1.0):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            raise RemoteUnreachable("the remote does not answer", detail="for a batch")
        _require_stored(outcomes)
    _require_stored(session.collect(0.0))


def _require_stored(outcomes: Sequence[Outcome]) -> None:
    """Raises where a batch was refused, or a blob of it, which could be read a moment ago."""
    for outcome in outcomes:
        if not isinstance(outcome, Receipt):
            raise outcome.error
        if outcome.failed:
            first = outcome.failed[0]
            raise SourceError(
                "a blob of the sample can no longer be sent",
                detail=f"{first.blobid}, {first.reason}: {first.detail}",
                hint="run the benchmark again; it draws another sample",
            )


# --- tar | ssh tar --------------------------------------------------------------------------------


def _send_tar(load: Load) -> None:
    """Sends the blobs to a tar on the remote; returns when that has unpacked and synced them.

    Raises SourceError, and what the remote's answer says.
    """
    said, patience = b"", load.run.receipt_timeout

    def hear(more: bytes) -> None:
        nonlocal said
        said += more

    channel = connect(load.transport, _STORE, root=load.root)
    try:
        for chunk in archive(load.store, load.blobs):
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
