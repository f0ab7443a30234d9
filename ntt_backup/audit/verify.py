"""Verify: checks that what the catalog calls copied is on the remote, and right.

The catalog and the disks drift apart: bits rot, a disk is lost, somebody cleans up. Listings show
names and sizes; only hashing the content proves it. All of it takes days, so a check can be a
sample, or end after some hours; the next one begins with what was checked longest ago.

A blob that is missing or wrong becomes pending again, with the reason, and the next run sends it.
Before the first is marked, the remote must show any blob at all: an empty directory is a disk that
is not mounted, and marks nothing. A blob that cannot be read is reported and left alone: the disk
must be looked at, and sending it again would not help.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from ntt_backup.audit.hashing import CheckQueue, Job, fetch_and_hash, hash_in_store, hash_on_remote
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import record_checks
from ntt_backup.catalog.selection import Checks
from ntt_backup.client.pool import SessionPool, run_threads
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.errors import SOME_FAILED, BackupError, RemoteUnreachable, Unsupported
from ntt_backup.format import many
from ntt_backup.model import Blob, Failure, Failures, Reason, is_blobid
from ntt_backup.upload.batching import cut

# What is asked for again when the link drops, and a step of the progress of a download.
_JOB_BLOBS: Final = 1000
_JOB_BYTES: Final = 64 << 20
_RECORD_BLOBS: Final = 2000
_RECORD_SECONDS: Final = 5.0
_LOST: Final = {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT}

# Scripts read the words in JSON.
Way = Literal["there", "download", "local"]


@dataclass(frozen=True, slots=True)
class Question:
    """What to check, and how. way: hash on the remote (`there`), after a download, or the local
    store. fraction: a random part. Times are in seconds.
    """

    way: Way = "there"
    prefix: str = ""
    fraction: float | None = None
    max_duration: float | None = None
    older_than: float | None = None
    workers: int = 2


@dataclass(slots=True)
class Findings:
    """What a check has found so far. total: how many blobs were to be checked; complete: all were
    checked. requeued: how many are pending again.
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
    """Checks what is copied to the target. Raises BackupError; what was found is recorded."""
    fetching = question.way == "download"
    pool = SessionPool(settings, "verify", ("get" if fetching else "verify", "list"), on_outage)
    try:
        session = pool.open_first()
        if not fetching and not session.banner.can_hash:
            raise Unsupported(
                "the remote cannot hash: it has no BLAKE3",
                detail=f"receiver {session.banner.version}, Python {session.banner.python}",
                hint="install it on the remote, on Debian by `apt-get install b3sum` ('BLAKE3 on"
                " the remote' in docs/operations.md), or fetch every blob and hash it locally:"
                " `ntt-backup-remote verify --download`",
            )
        jobs = CheckQueue(2 * question.workers, pool.cancelled, pool.wake)
        check = _Check(conn, settings.target, question, jobs, on_progress, pool)
        work = fetch_and_hash if fetching else hash_on_remote
        pool.run(question.workers, lambda session: work(session, jobs), check.step)
        return check.end()
    finally:
        pool.close()


def verify_store(
    conn: Connection,
    settings: StoreConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
) -> Findings:
    """Checks the store's own blobs, and changes nothing. Raises BackupError."""
    root = settings.source.root
    stop, news = threading.Event(), threading.Event()
    jobs = CheckQueue(2 * question.workers, lambda: None, news.set)
    check = _Check(conn, settings.target, question, jobs, on_progress, None)
    try:
        run_threads(question.workers, lambda _: hash_in_store(root, jobs), check.step, stop, news)
    finally:
        jobs.close()
    return check.end()


class _Check:
    """Feeds the queue from the catalog, and records the results. pool is None for the store."""

    def __init__(
        self,
        conn: Connection,
        target: str,
        question: Question,
        jobs: CheckQueue,
        on_progress: Callable[[Findings], None],
        pool: SessionPool | None,
    ) -> None:
        self._conn = conn
        self._target = target
        self._jobs = jobs
        self._pool = pool
        self._on_progress = on_progress
        self._started = self._recorded = time.monotonic()
        self._limit = question.max_duration
        self._checks = Checks(
            conn,
            target,
            prefix=question.prefix,
            older_than=question.older_than,
            fraction=question.fraction,
            local=pool is None,
        )
        self._found = Findings(total=self._checks.total)
        self._ahead: list[Blob] = []
        self._exhausted = False
        self._has_blobs = False
        self._right: list[str] = []
        self._lost: list[Failure] = []

    def step(self) -> None:
        """Takes results and adds jobs, without waiting."""
        self._take_results()
        while not self._jobs.full and (job := self._next_job()):
            self._jobs.put(job)
        if self._exhausted and not self._ahead:
            self._jobs.close()
        due = time.monotonic() - self._recorded > _RECORD_SECONDS
        if due or len(self._right) + len(self._lost) >= _RECORD_BLOBS:
            self._record()
        self._on_progress(self._found)

    def end(self) -> Findings:
        """Records the last results. The threads have ended."""
        self._take_results()
        self._record()
        self._found.complete = self._found.checked >= self._found.total
        return self._found

    def _next_job(self) -> Job:
        if self._limit is not None and time.monotonic() - self._started >= self._limit:
            self._exhausted = True
            self._ahead.clear()
        if not self._exhausted and len(self._ahead) < _JOB_BLOBS:
            blobs = self._checks.next(_JOB_BLOBS)
            self._exhausted = not blobs
            # A row without a blobid was never copied, and has no file.
            good = [blob for blob in blobs if is_blobid(blob.blobid)]
            self._found.total -= len(blobs) - len(good)
            self._ahead += good
        count = cut(self._ahead, _JOB_BLOBS, _JOB_BYTES)
        job, self._ahead = self._ahead[:count], self._ahead[count:]
        # One directory after the other, as disks like it.
        return tuple(sorted(job, key=lambda blob: blob.blobid))

    def _take_results(self) -> None:
        found = self._found
        for checked in self._jobs.done():
            found.checked += len(checked.blobs)
            found.bytes += checked.bytes
            wrong = {failure.blobid for failure in checked.failures}
            self._right += [blob.blobid for blob in checked.blobs if blob.blobid not in wrong]
            self._lost += [failure for failure in checked.failures if failure.reason in _LOST]
            for failure in checked.failures:
                found.wrong.add(failure)
        found.duration_s = time.monotonic() - self._started

    def _record(self) -> None:
        self._recorded = time.monotonic()
        right, lost = self._right, self._lost
        self._right, self._lost = [], []
        if self._pool is None:
            return
        self._has_blobs = self._has_blobs or bool(right)
        if lost and not self._has_blobs:
            self._require_blobs(self._pool)
        self._found.requeued += record_checks(self._conn, self._target, right, lost)

    def _require_blobs(self, pool: SessionPool) -> None:
        """Raises RemoteUnreachable where the remote has no blob at all."""
        if pool.is_empty():
            raise RemoteUnreachable(
                "by-hash on the remote is empty",
                detail=f"looked for {many(self._found.checked, 'blob')} that should be there",
                hint="is its disk mounted? Nothing was marked. If the backup is really lost, see"
                " 'When the remote has lost its disk' in docs/operations.md",
            )
        self._has_blobs = True


def sample_bound(found: Findings) -> float | None:
    """Returns the largest part of all blobs that may be wrong, with 95 % confidence, where all of a
    sample was right.

    The rule of three: if a part p were wrong, n of n would be right with (1 - p)^n < e^(-pn).
    """
    return min(1.0, 3 / found.checked) if found.checked and not found.wrong else None
