"""Verify: is what the catalog calls copied really there, and right?

Flags in a database drift from what is on the disks: bits rot, a disk is lost, somebody cleans up.
The obvious answer, to compare listings, sees names and sizes; only hashing the content proves it.
All of it takes days, so a check can be a sample, or end after some hours and go on next time with
what was checked longest ago.

A blob that is missing or wrong becomes pending again, with the reason, and the next run mends it.
Before the first is blamed, the remote must show any blob at all: an empty directory is a disk that
is not mounted, and marks nothing. One that cannot be read is told of and left alone: that is a
disk to look at, not a blob to send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from ntt_backup.audit.hashing import (
    Checked,
    Desk,
    Job,
    download,
    hash_here,
    hash_there,
    in_order,
)
from ntt_backup.catalog import Connection
from ntt_backup.catalog.check_results import Checks, record_checks
from ntt_backup.client.pool import Crew, FarSide
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.errors import SOME_FAILED, BackupError, RemoteUnreachable, Unsupported
from ntt_backup.format import many
from ntt_backup.model import Blob, Failure, Failures, Reason, is_blobid
from ntt_backup.planner import cut

# Half of it may be asked for again when the link drops; and where it is downloaded, the size of a
# step of the progress shown.
_JOB_BLOBS: Final = 1000
_JOB_BYTES: Final = 64 << 20
_RECORD_BLOBS: Final = 2000
_RECORD_SECONDS: Final = 5.0
_LOST: Final = {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT}

Way = Literal["there", "download", "local"]


@dataclass(frozen=True, slots=True)
class Question:
    """What to check, and how. fraction: a random part. Times are in seconds."""

    way: Way = "there"
    prefix: str = ""
    fraction: float | None = None
    max_duration: float | None = None
    older_than: float | None = None
    workers: int = 2


@dataclass(slots=True)
class Findings:
    """What a check has found so far. total: how many blobs were to be checked; complete: all of
    them were. requeued: how many are pending again.
    """

    total: int = 0
    checked: int = 0
    bytes: int = 0
    requeued: int = 0
    complete: bool = False
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong else 0


def verify_remote(
    conn: Connection,
    settings: RemoteConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
    on_outage: Callable[[BackupError, float], None],
) -> Findings:
    """Check what is copied to the target. Raises BackupError; what was found before is recorded."""
    fetching = question.way == "download"
    far = FarSide(settings, "verify", ("get" if fetching else "verify", "list"), on_outage)
    session = far.greet()
    if not fetching and not session.banner.can_hash:
        far.close()
        raise Unsupported(
            "the remote cannot hash: it has no BLAKE3",
            detail=f"receiver {session.banner.version}, Python {session.banner.python}",
            hint="install it there, on Debian by `apt-get install b3sum` ('BLAKE3 on the remote' in"
            " docs/operations.md), or let `ntt-backup-remote verify --download` fetch every blob"
            " and hash it here",
        )
    desk = Desk(2 * question.workers, far.cancelled, far.wake)
    work = download if fetching else hash_there
    try:
        inquiry = _Inquiry(conn, settings.target, question, desk, on_progress, far)
        far.crew(question.workers, lambda reader: work(reader, desk), inquiry.step)
        return inquiry.end()
    finally:
        far.close()


def verify_store(
    conn: Connection,
    settings: StoreConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
) -> Findings:
    """Check the store's own blobs, and change nothing. Raises BackupError."""
    root = settings.source.root
    stop, news = threading.Event(), threading.Event()
    desk = Desk(2 * question.workers, lambda: None, news.set)
    inquiry = _Inquiry(conn, settings.target, question, desk, on_progress, None)
    try:
        Crew(question.workers, lambda _: hash_here(root, desk), stop, news).run(inquiry.step)
    finally:
        desk.close()
    return inquiry.end()


class _Inquiry:
    """Feeds the crew from the catalog, and records what comes back. far is None for the store."""

    def __init__(
        self,
        conn: Connection,
        target: str,
        question: Question,
        desk: Desk,
        on_progress: Callable[[Findings], None],
        far: FarSide | None,
    ) -> None:
        self._conn = conn
        self._target = target
        self._desk = desk
        self._far = far
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._limit = question.max_duration
        self._checks = Checks(
            conn,
            target,
            prefix=question.prefix,
            older_than=question.older_than,
            fraction=question.fraction,
            local=far is None,
        )
        self.found = Findings(total=self._checks.total)
        self._ahead: list[Blob] = []
        self._exhausted = False
        self._alive = False
        self._right: list[str] = []
        self._lost: list[Failure] = []
        self._recorded = self._started

    def step(self) -> None:
        """Called again and again while the crew is at work."""
        for checked in self._desk.done():
            self._take(checked)
        while not self._desk.full and (job := self._next_job()):
            self._desk.put(job)
        now = time.monotonic()
        if self._exhausted and not self._ahead:
            self._desk.close()
        due = now - self._recorded > _RECORD_SECONDS
        if due or len(self._right) + len(self._lost) >= _RECORD_BLOBS:
            self._record()
        self.found.duration_s = now - self._started
        self._on_progress(self.found)

    def end(self) -> Findings:
        """Once the crew is done."""
        for checked in self._desk.done():
            self._take(checked)
        self._record()
        self.found.complete = self.found.checked >= self.found.total
        self.found.duration_s = time.monotonic() - self._started
        return self.found

    def _next_job(self) -> Job:
        over = self._limit is not None and time.monotonic() - self._started >= self._limit
        if over:
            self._exhausted = True
            self._ahead.clear()
        if not self._exhausted and len(self._ahead) < _JOB_BLOBS:
            blobs = self._checks.next(_JOB_BLOBS)
            self._exhausted = not blobs
            # A row that is no blobid was never copied by us; there is no such file to look for.
            good = [blob for blob in blobs if is_blobid(blob.blobid)]
            self.found.total -= len(blobs) - len(good)
            self._ahead += good
        count = cut(self._ahead, _JOB_BLOBS, _JOB_BYTES)
        job, self._ahead = self._ahead[:count], self._ahead[count:]
        return in_order(job)

    def _take(self, checked: Checked) -> None:
        found = self.found
        found.checked += len(checked.blobs)
        found.bytes += checked.bytes
        wrong = {failure.blobid for failure in checked.failures}
        self._right += [blob.blobid for blob in checked.blobs if blob.blobid not in wrong]
        for failure in checked.failures:
            found.wrong.add(failure)
            if failure.reason in _LOST:
                self._lost.append(failure)

    def _record(self) -> None:
        self._recorded = time.monotonic()
        right, lost = self._right, self._lost
        self._right, self._lost = [], []
        if self._far is None:
            return
        self._alive = self._alive or bool(right)
        if lost and not self._alive:
            self._require_life(self._far)
        self.found.requeued += record_checks(self._conn, self._target, right, lost)

    def _require_life(self, far: FarSide) -> None:
        """Nothing was right so far: the remote must have any blob at all."""
        if far.is_empty():
            raise RemoteUnreachable(
                "by-hash on the remote is empty",
                detail=f"looked for {many(self.found.checked, 'blob')} that should be there",
                hint="is its disk mounted? Nothing was marked. If the backup is really lost, see"
                " 'When the remote has lost its disk' in docs/operations.md",
            )
        self._alive = True


def sample_bound(found: Findings) -> float | None:
    """Which part of all may be wrong at most, with 95 % confidence, where a sample was all right.

    The rule of three: if a part p were wrong, n of n would be right with (1 - p)^n < e^(-pn).
    """
    return min(1.0, 3 / found.checked) if found.checked and not found.wrong else None
