"""Trial blobs, for a look at a remote before the job: made here, sent there, and compared."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.errors import RemoteDenied, SourceError
from ntt_backup.model import Batch, Blob, relative_path
from ntt_backup.source.inspection import Store
from ntt_backup.upload.strategies.session import SessionPlan

TRIAL_SECONDS: Final = 60.0
# Two batches in a row show that the far side finds the border between them.
_SIZES: Final = ((1, 513, 70_000), (0, 4096))


@contextmanager
def trial(plan: SessionPlan, root: str) -> Iterator[tuple[SessionPlan, list[Batch]]]:
    """Batches of random blobs in a store of their own, and the plan to send them to root with.

    Raises SourceError where this machine has no room for them: a run that watches waits for it.
    """
    with ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="ntt-check-")
            place = Path(stack.enter_context(temporary))
            batches = [
                Batch("trial", tuple(_make(place, size) for size in sizes)) for sizes in _SIZES
            ]
        except OSError as error:
            raise SourceError(
                "this machine has no room for a few trial blobs",
                detail=error.strerror or str(error),
                hint="free space in /tmp, or set TMPDIR to a directory that has some",
            ) from error
        yield replace(plan, store=Store(place), root=root), batches


def _make(place: Path, size: int) -> Blob:
    content = os.urandom(size)
    blobid = blake3(content).hexdigest()
    path = place / relative_path(blobid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return Blob(blobid, size)


class Deadline:
    """How long a remote may take for the trial. Raises RemoteDenied when it is over."""

    def __init__(self) -> None:
        self._end = time.monotonic() + TRIAL_SECONDS

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise RemoteDenied(
                "the remote gave no receipt for the trial batches",
                detail=f"waited {TRIAL_SECONDS:.0f} s for it to store and sync them",
            )
