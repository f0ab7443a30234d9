"""Verify checks that what the catalog calls copied is on the remote, and right.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final, Literal

from ntt_backup.audit.hashing import CheckQueue, Job, hash_in_store, hash_remote
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import record_checks
from ntt_backup.catalog.selection import Checks, Choice
from ntt_backup.client.pool import SessionPool
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.config.timetable import Timetable
from ntt_backup.errors import SOME_FAILED, BackupError, RemoteUnreachable, Unsupported
from ntt_backup.format import many
from ntt_backup.model import Blob, Failure, Failures, Reason, total_size
from ntt_backup.process.threads import run_threads
from ntt_backup.upload.batching import cut

# What is asked for again when the link drops, and a step of the progress of a download.
_JOB_BLOBS: Final = 1000
_JOB_BYTES: Final = 64 << 20
_RECORD_BLOBS: Final = 2000
_RECORD_SECONDS: Final = 5.0
LOST: Final = {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT}

# Scripts read the words in JSON.
Way = Literal["there", "download", "local"]


@dataclass(frozen=True, slots=True)
class Question:
    """Holds what to check, and how. way: hash on the remote (`there`), after a download, or the
    local store. fraction: a random part. Times are in seconds, max_bytes is of content; bwlimit: of
    what a download brings.
    """

    way: Way = "there"
    prefix: str = ""
    fraction: float | None = None
    max_duration: float | None = None
    max_bytes: int | None = None
    older_than: float | None = None
    workers: int = 2
    bwlimit: Timetable | None = None

    @property
    def choice(self) -> Choice:
        """Returns which of what was copied, or of the store, is checked."""
        return Choice(self.prefix, self.older_than, self.fraction)


class Budget:
    """Counts the time and the bytes of a check, from now on, against the question's limits."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._limit = inf if question.max_bytes is None else question.max_bytes
        self._asked = 0
        self.started = time.monotonic()

    @property
    def time_is_up(self) -> bool:
        limit = self._question.max_duration
        return limit is not None and time.monotonic() - self.started >= limit

    @property
    def left(self) -> float:
        """Returns the bytes that may still be asked for."""
        return self._limit - self._asked

    def allows(self, size: int) -> bool:
        """Returns whether so many bytes more may be asked for, and counts them."""
        self._asked += size
        return self._asked <= self._limit

    def ever_allows(self, size: int) -> bool:
        """Returns whether any call with this limit may ask for so many bytes. What is larger would
        be the first of each call, since it is never checked, and the end of it.
        """
        return size <= self._limit


@dataclass(slots=True)
class Findings:
    """Holds what a check has found so far, of total blobs; requeued are pending again. lost_packs:
    packs of a bucket that do not count any more. left_out: blobs that no call with this limit
    reads. by_size: blobs of which nothing but the size of their object could be compared.
    strangers: sealed packs that were read and that this host has not signed.
    """

    total: int = 0
    checked: int = 0
    bytes: int = 0
    requeued: int = 0
    lost_packs: int = 0
    left_out: int = 0
    by_size: int = 0
    strangers: int = 0
    complete: bool = False
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong or self.lost_packs else 0


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
    words = ("get" if fetching else "verify", "list")
    pool = SessionPool(settings, "verify", words, on_outage, question.bwlimit)
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
        work = partial(hash_remote, jobs=jobs, fetch=fetching)
        with settling(check.settle):
            pool.run(question.workers, work, check.step)
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


@contextmanager
def settling(settle: Callable[[], None]) -> Iterator[None]:
    """Calls settle where the context ends with an error, which goes on: what is known of a
    check, and not recorded, would be checked again.
    """
    try:
        yield
    except BaseException:
        with suppress(BackupError):
            settle()
        raise


@dataclass
class _Check:
    """Feeds the queue from the catalog, and records the results. pool is None for the store."""

    conn: Connection
    target: str
    question: Question
    jobs: CheckQueue
    on_progress: Callable[[Findings], None]
    pool: SessionPool | None
    ahead: list[Blob] = field(default_factory=list)
    exhausted: bool = False
    has_blobs: bool = False
    right: list[str] = field(default_factory=list)
    lost: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = Budget(self.question)
        self.recorded = self.budget.started
        local = self.pool is None
        self.checks = Checks(self.conn, self.target, self.question.choice, local=local)
        self.found = Findings(total=self.checks.total)

    def step(self) -> None:
        """Takes results and adds jobs, without waiting."""
        self._take_results()
        while not self.jobs.full and (job := self._next_job()):
            self.jobs.put(job)
        if self.exhausted and not self.ahead:
            self.jobs.close()
        due = time.monotonic() - self.recorded > _RECORD_SECONDS
        if due or len(self.right) + len(self.lost) >= _RECORD_BLOBS:
            self._record()
        self.on_progress(self.found)

    def end(self) -> Findings:
        """Records the last results. The threads have ended."""
        self.settle()
        self.found.complete = self.found.checked >= self.found.total
        return self.found

    def settle(self) -> None:
        """Records what is known."""
        self._take_results()
        self._record()

    def _next_job(self) -> Job:
        if self.budget.time_is_up:
            self._stop()
        if not self.exhausted and len(self.ahead) < _JOB_BLOBS:
            blobs = self.checks.next(_JOB_BLOBS)
            self.exhausted = not blobs
            # A row without a blobid was never copied, and has no file.
            good = [blob for blob in blobs if is_blobid(blob.blobid)]
            self.found.total -= len(blobs) - len(good)
            fitting = [blob for blob in good if self.budget.ever_allows(blob.expected)]
            self.found.left_out += len(good) - len(fitting)
            self.ahead += fitting
        count = cut(self.ahead, _JOB_BLOBS, int(min(_JOB_BYTES, self.budget.left)))
        job, self.ahead = self.ahead[:count], self.ahead[count:]
        if not self.budget.allows(total_size(job)):
            self._stop()
            return ()
        # One directory after the other, as disks like it.
        return tuple(sorted(job, key=lambda blob: blob.blobid))

    def _stop(self) -> None:
        """Leaves the rest for the next call."""
        self.exhausted = True
        self.ahead.clear()

    def _take_results(self) -> None:
        found = self.found
        for checked in self.jobs.done():
            found.checked += len(checked.blobs)
            found.bytes += checked.bytes
            wrong = {failure.blobid for failure in checked.failures}
            self.right += [blob.blobid for blob in checked.blobs if blob.blobid not in wrong]
            self.lost += [failure for failure in checked.failures if failure.reason in LOST]
            for failure in checked.failures:
                found.wrong.add(failure)
        found.duration_s = time.monotonic() - self.budget.started

    def _record(self) -> None:
        self.recorded = time.monotonic()
        right, lost = self.right, self.lost
        self.right, self.lost = [], []
        if self.pool is None:
            return
        self.has_blobs = self.has_blobs or bool(right)
        if lost and not self.has_blobs:
            self._require_blobs(self.pool)
        self.found.requeued += record_checks(self.conn, self.target, right, lost)

    def _require_blobs(self, pool: SessionPool) -> None:
        """Raises RemoteUnreachable where the remote has no blob at all."""
        if pool.is_empty():
            raise RemoteUnreachable(
                "by-hash on the remote is empty",
                detail=f"looked for {many(self.found.checked, 'blob')} that should be there",
                hint="is its disk mounted? Nothing was marked. If the backup is really lost, see"
                " 'When the remote has lost its disk' in docs/first-aid.md",
            )
        self.has_blobs = True
