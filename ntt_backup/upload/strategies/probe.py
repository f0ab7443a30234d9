"""A probe examines the remote before a run, and may send trial blobs."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.client.channel import Channel
from ntt_backup.errors import RemoteDenied, SourceError
from ntt_backup.formatting import many
from ntt_backup.model import Batch, Blob
from ntt_backup.name_hash import NEW_HASHER, HashOfNames
from ntt_backup.source.store import Store

TRIAL_SECONDS: Final = 60.0
LINGERS: Final = (
    "something that the remote account starts at every login keeps each connection open after its"
    " end, which costs two seconds each; have it started with </dev/null >/dev/null 2>&1"
)
# What a preflight warns of, in the words of `try_out`.
NOT_APPEND_ONLY: Final = "not append-only"
# Two batches in a row show that the remote finds the border between them.
_SIZES: Final = ((1, 513, 70_000), (0, 4096))


@dataclass(frozen=True, slots=True)
class Facts:
    """Holds what a remote says about itself. Bytes and seconds; None where it does not say.

    program: what will receive the blobs, with its version. placed: by-hash exists, or the marker of
    packs. readable: whether something is there that `verify` and `restore` need. free_inodes: how
    many more files fit. other_layout: what tells the other layout is there.
    identity: of the target; "" where it has none, None where an old receiver does not tell. empty:
    by-hash is missing, or has nothing in it. names: the hash of names that the marker says; "" for
    none.
    """

    system: str
    program: str
    free_bytes: int | None
    skew_s: float | None
    placed: bool
    readable: bool = True
    free_inodes: int | None = None
    other_layout: bool = False
    identity: str | None = ""
    empty: bool = False
    names: str = ""


class Probe(Protocol):
    """Examines the remote before a run, over the same kind of connection as the run.

    Methods are called in this order, `try_out` and `make_place` only where wanted. They raise as
    `Session` does. strategy is known once the remote has answered.
    """

    @property
    def strategy(self) -> str: ...

    @property
    def lingers(self) -> bool:
        """Whether, after `close`, another process on the remote held a connection open."""
        ...

    def facts(self) -> Facts:
        """Returns what the remote says about itself."""
        ...

    def try_out(self) -> str:
        """Sends trial blobs, and leaves none of them behind; returns a few words on the result."""
        ...

    def make_place(self) -> str:
        """Makes by-hash, or the marker of packs, and gives the target an identity where it has
        none. Returns the identity that the target has then.
        """
        ...

    def close(self) -> None:
        """Ends the connection. Never raises."""
        ...


class Ahead(Protocol):
    """What a probe has opened, and a session goes on with: a connection, or a file store."""

    @property
    def channel(self) -> Channel: ...
    def abort(self) -> None: ...


class SessionProbe(Probe, Protocol):
    """A probe whose connection a session may go on with."""

    def connect(self) -> None:
        """Connects to the remote, where that is not left to `facts`."""
        ...

    def hand_over(self) -> Ahead | None:
        """Ends the probe, and returns what `open_session` can go on with; None for nothing."""
        ...


@contextmanager
def trial(hash_: HashOfNames = "blake3") -> Iterator[tuple[Store, list[Batch]]]:
    """Makes batches of random blobs, in a store of their own. hash_: of their names.

    Raises SourceError where this machine has no room for them: a run that watches waits for it.
    """
    with ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="ntt-check-")
            place = Path(stack.enter_context(temporary))
            batches = [
                Batch("trial", tuple(_make(place, size, hash_) for size in sizes))
                for sizes in _SIZES
            ]
        except OSError as error:
            raise SourceError(
                "this machine has no room for a few trial blobs",
                detail=error.strerror or str(error),
                hint="free space in /tmp, or set TMPDIR to a directory that has some",
            ) from error
        yield Store(place, hash=hash_), batches


def _make(root: Path, size: int, hash_: HashOfNames) -> Blob:
    content = os.urandom(size)
    blobid = NEW_HASHER[hash_](content).hexdigest()
    path = root / relative_path(blobid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Blob(blobid, size)


def require_time(since: float) -> None:
    """Raises RemoteDenied where a trial that began at this monotonic time takes too long."""
    if time.monotonic() > since + TRIAL_SECONDS:
        raise RemoteDenied(
            "the remote gave no receipt for the trial batches",
            detail=f"waited {TRIAL_SECONDS:.0f} s for it to store and sync them",
            hint="look at the remote's disk: is it very slow, or does it report errors?",
        )


def described(batches: Sequence[Batch]) -> str:
    """Returns how many blobs in how many batches, in words."""
    blobs = sum(len(batch.blobs) for batch in batches)
    return f"{many(blobs, 'trial blob')} in {many(len(batches), 'batch', 'batches')}"
