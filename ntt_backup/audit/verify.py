"""Verify checks that what the catalog calls copied is on the remote, and right.

The catalog and the disks drift apart: bits rot, a disk is lost, somebody cleans up. Listings show
names and sizes; only hashing the content proves it. All of it takes days, so a check can be a
sample, or end after some hours; the next one begins with what was checked longest ago.

A blob that is missing or wrong becomes pending again, with the reason, and the next run sends it.
Before the first is marked, the remote must show any blob at all: an empty directory is a disk that
is not mounted, and marks nothing. A blob that cannot be read is reported and left alone: the disk
must be looked at, and sending it again would not help.

All sources are checked by one class, which each of them extends: a remote that proves its blobs, or
whose blobs are fetched and hashed here (`audit.proof`); the local store; and, in `verify_packs`, a
target with packs.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Final, Generic, Literal, TypeVar

from ntt_backup.audit.proof import (
    JOB_BLOBS,
    JOB_BYTES,
    Blobs,
    Fetch,
    Hashes,
    Proof,
    Proved,
    RemoteQuestion,
    answer_questions,
    require_sums,
    store_of,
)
from ntt_backup.audit.register import open_store
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import BY_WORD, UNCHECKED
from ntt_backup.catalog.identities import identified
from ntt_backup.catalog.ledger import note_unchecked, record_checks
from ntt_backup.catalog.selection import Checks, Choice
from ntt_backup.client.session_pool import ReconnectingSession, SessionPool
from ntt_backup.config import RemoteConfig, StoreConfig
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.errors import SOME_FAILED, BackupError, RemoteUnreachable
from ntt_backup.formatting import many
from ntt_backup.model import WHOLE, Blob, Failure, Failures, Reason, Shard, total_size
from ntt_backup.process.threads import WorkQueue, run_threads
from ntt_backup.source.store import Store
from ntt_backup.upload.batching import cut

_RECORD_BLOBS: Final = 2000
_RECORD_SECONDS: Final = 5.0
_LOST: Final = {Reason.REMOTE_MISSING, Reason.REMOTE_CORRUPT}

# Scripts read the words in JSON.
Way = Literal["there", "download", "local"]
Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class Question:
    """The choice of blobs to check, and the limits of the check.

    Attributes:
        way: Hash blobs on the remote (`there`), after a download, or in the local store.
        trust_remote: Take the hashes that the remote tells, and do not read the store.
        prefix: Check only blobids that begin with this.
        shard: Check only these blobids, and packs whose smallest blobid is one of these.
        fraction: Check a random sample of this part, from 0 to 1.
        max_duration: Start no new job after this time in seconds. Where packs are lost, the second
            half of the time is for what these held.
        max_bytes: Read at most this many bytes of content.
        older_than: Check only blobs whose last check is at least so many seconds ago.
        workers: The number of threads.
        bwlimit: The limit of what a download fetches.
    """

    way: Way = "there"
    trust_remote: bool = False
    prefix: str = ""
    shard: Shard = WHOLE
    fraction: float | None = None
    max_duration: float | None = None
    max_bytes: int | None = None
    older_than: float | None = None
    workers: int = 2
    bwlimit: Timetable | None = None

    @property
    def choice(self) -> Choice:
        """Returns the blobs to choose, for the catalog."""
        shard = self.shard
        return Choice(self.prefix, self.older_than, self.fraction, shard.lo, shard.hi)


class Budget:
    """Compares the time and the bytes of a check with the limits of the question."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._limit = inf if question.max_bytes is None else question.max_bytes
        self._asked = 0
        self.started = time.monotonic()

    @property
    def time_is_up(self) -> bool:
        return self.is_spent(1.0)

    def is_spent(self, part: float) -> bool:
        """Returns whether a part of the time, from 0 to 1, has passed."""
        limit = self._question.max_duration
        return limit is not None and time.monotonic() - self.started >= limit * part

    @property
    def left(self) -> float:
        """Returns the bytes that may still be asked for."""
        return self._limit - self._asked

    def allows(self, size: int) -> bool:
        """Counts `size` bytes to read. Returns whether the limit still allows them."""
        self._asked += size
        return self._asked <= self._limit

    def ever_allows(self, size: int) -> bool:
        """Returns whether a check with this limit can read a blob or pack of `size` bytes at all.
        A larger one is never checked, so it would come first in each call, and end the call.
        """
        return size <= self._limit


@dataclass(slots=True)
class Findings:
    """The results of a check so far.

    Attributes:
        total: The number of blobs to check; `checked` of them are checked, `bytes` were hashed.
        requeued: Blobs that were made pending again.
        lost_packs: Packs that are missing or damaged as a whole.
        left_out: Blobs that no call with this max_bytes reads.
        by_size: Blobs of which only the size of their file could be compared.
        by_remote_hash: Blobs that are right by the hash that the remote tells, without a proof.
        unchecked: Blobs that neither the store nor the remote can hash. They are not `checked`.
        strangers: Sealed packs that were read and that this host has not signed.
        complete: Whether all blobs were checked.
        wrong: The failures.
    """

    total: int = 0
    checked: int = 0
    bytes: int = 0
    requeued: int = 0
    lost_packs: int = 0
    left_out: int = 0
    by_size: int = 0
    by_remote_hash: int = 0
    unchecked: int = 0
    strangers: int = 0
    complete: bool = False
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong or self.lost_packs else 0

    @property
    def doubts(self) -> str:
        """Returns, for the history, how many blobs were found right or left without a proof."""
        said = []
        if self.by_remote_hash:
            said.append(f"{many(self.by_remote_hash, 'blob')} {BY_WORD}")
        if self.unchecked:
            said.append(f"{many(self.unchecked, 'blob')} {UNCHECKED}")
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class Checked(Generic[Job]):
    """The result of a job.

    Attributes:
        job: What was checked.
        blobs: How many blobs that were.
        bytes: Of content that was hashed.
        failures: Of blobs that the remote, or the store, has nowhere right.
        lost: Why a pack as a whole does not count any more, None where it does.
        whole: Whether all of the job was looked at.
        by_size: Whether only the size could be compared of all that a server says.
        by_remote_hash: How many blobs are right by the remote's word alone.
        unchecked: Blobs that could not be checked.
        of_source: The blobs that the local store has, but not right.
    """

    job: Job
    blobs: int
    bytes: int = 0
    failures: tuple[Failure, ...] = ()
    lost: Failure | None = None
    whole: bool = True
    by_size: bool = False
    by_remote_hash: int = 0
    unchecked: frozenset[str] = frozenset()
    of_source: tuple[Failure, ...] = ()


@dataclass
class Check(ABC, Generic[Job]):
    """Gives jobs to threads, and records in the catalog what they have found.

    Attributes:
        conn: The catalog.
        target: The name of the target.
        question: What to check.
        on_progress: Is called about five times a second.
        jobs: Brings jobs to the threads, and back what they have found.
        has_blobs: Whether the source is known to have any blob.
    """

    # What is said, and what may help, where the source has no blob at all.
    empty: ClassVar[str]
    hint: ClassVar[str]

    conn: Connection
    target: str
    question: Question
    on_progress: Callable[[Findings], None]
    jobs: WorkQueue[Job, Checked[Job]]

    def __post_init__(self) -> None:
        self.found = Findings()
        self.budget = Budget(self.question)
        self.has_blobs = False
        # Whether the last job is in the queue.
        self._listed = False
        self._right: list[str] = []
        self._tried: list[str] = []
        # A blob that is wrong in several places is found wrong in each of them.
        self._lost: dict[str, Failure] = {}
        self._recorded = self.budget.started

    @abstractmethod
    def next_job(self) -> Job | None:
        """Returns what to check next; None, once, where nothing is left, or the limits allow no
        more.
        """

    @abstractmethod
    def blobs_of(self, job: Job) -> Blobs:
        """Returns the blobs that are marked as checked where a job finds them right."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Returns whether the source has no blob at all."""

    def run(self, threads: Callable[[Callable[[], None]], None]) -> Findings:
        """Checks all that is asked for. threads: does the jobs in threads until no more come, and
        calls what it is given meanwhile. Raises BackupError; what was found is recorded.
        """
        try:
            with settling(self._settle):
                threads(self._step)
        finally:
            self.jobs.close()
        self._settle()
        self.found.complete = self.found.checked + self.found.unchecked >= self.found.total
        self.finish()
        self.found.duration_s = time.monotonic() - self.budget.started
        return self.found

    def finish(self) -> None:
        """Does what is left to do when all jobs are done, and their results are recorded."""

    def next_blobs(self, checks: Checks, count: int) -> list[Blob]:
        """Returns the next blobs of a list; none at its end. A row without a blobid was never
        copied, and has no file.
        """
        while blobs := checks.next(count):
            good = [blob for blob in blobs if is_blobid(blob.blobid)]
            self.found.total -= len(blobs) - len(good)
            if good:
                return good
        return []

    def take_result(self, checked: Checked[Job]) -> None:
        """Counts the result of a job."""
        found = self.found
        found.checked += checked.blobs
        found.bytes += checked.bytes
        found.by_size += checked.blobs if checked.by_size else 0
        found.by_remote_hash += checked.by_remote_hash
        found.unchecked += len(checked.unchecked)
        not_right = checked.unchecked.union(failure.blobid for failure in checked.failures)
        for failure in checked.of_source:
            found.wrong.add(failure)
        for failure in checked.failures:
            found.wrong.add(failure)
            if failure.reason in _LOST:
                self._lost[failure.blobid] = failure
            else:
                self._tried.append(failure.blobid)
        self._tried += checked.unchecked
        # The size of a file proves nothing about its content.
        if not checked.by_size:
            self._right += [
                b.blobid for b in self.blobs_of(checked.job) if b.blobid not in not_right
            ]

    def record(self, right: list[str], lost: list[Failure], tried: list[str]) -> None:
        """Records which blobs are right, makes pending those that are lost, and has wait their turn
        what was tried in vain.
        """
        self.has_blobs = self.has_blobs or bool(right)
        if lost:
            self.require_blobs()
        if right or lost:
            self.found.requeued += record_checks(self.conn, self.target, right, lost)
        if tried:
            note_unchecked(self.conn, self.target, tried)

    def require_blobs(self) -> None:
        """Raises RemoteUnreachable where the remote has no blob at all."""
        if not self.has_blobs and self.is_empty():
            raise RemoteUnreachable(
                self.empty,
                detail=f"looked for {many(self.found.checked, 'blob')} that should be there",
                hint=f"{self.hint} Nothing was marked. If the backup is really lost, see"
                " 'When the remote has lost its disk' in docs/first-aid.md",
            )
        self.has_blobs = True

    def _step(self) -> None:
        """Takes results and adds jobs, without waiting."""
        self._take_results()
        while not (self._listed or self.jobs.full):
            if (job := self.next_job()) is not None:
                self.jobs.add_job(job)
            else:
                self._listed = True
                self.jobs.close()
        due = time.monotonic() - self._recorded > _RECORD_SECONDS
        if due or len(self._right) + len(self._lost) + len(self._tried) >= _RECORD_BLOBS:
            self._record()
        self.on_progress(self.found)

    def _settle(self) -> None:
        """Records the results so far."""
        self._take_results()
        self._record()

    def _take_results(self) -> None:
        for checked in self.jobs.take_results():
            self.take_result(checked)
        self.found.duration_s = time.monotonic() - self.budget.started

    def _record(self) -> None:
        self._recorded = time.monotonic()
        right, lost, tried = self._right, list(self._lost.values()), self._tried
        self._right, self._lost, self._tried = [], {}, []
        self.record(right, lost, tried)


@contextmanager
def settling(settle: Callable[[], None]) -> Iterator[None]:
    """Calls settle where the block raises an error, and raises the error again. Results that were
    not recorded would have to be found again.
    """
    try:
        yield
    except BaseException:
        with suppress(BackupError):
            settle()
        raise


_BlobQueue = WorkQueue[Blobs, Checked[Blobs]]


class _BlobCheck(Check[Blobs]):
    """Checks blobs by themselves: of the store where that is local, else what was copied."""

    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._checks = Checks(self.conn, self.target, self.question.choice, local=self.local)
        self._ahead: list[Blob] = []
        self.found.total = self._checks.total

    def next_job(self) -> Blobs | None:
        """Returns the next blobs, in the order of their directories, as disks like it."""
        while len(self._ahead) < JOB_BLOBS and not self.budget.time_is_up:
            blobs = self.next_blobs(self._checks, JOB_BLOBS)
            if not blobs:
                break
            fitting = [blob for blob in blobs if self.budget.ever_allows(blob.expected)]
            self.found.left_out += len(blobs) - len(fitting)
            self._ahead += fitting
        if self.budget.time_is_up:
            return None
        sizes = (blob.expected for blob in self._ahead)
        count = cut(sizes, JOB_BLOBS, int(min(JOB_BYTES, self.budget.left)))
        job, self._ahead = self._ahead[:count], self._ahead[count:]
        if not job or not self.budget.allows(total_size(job)):
            return None
        return tuple(sorted(job, key=lambda blob: blob.blobid))

    def blobs_of(self, job: Blobs) -> Blobs:
        return job


# --- the store ------------------------------------------------------------------------------------


def verify_store(
    conn: Connection,
    settings: StoreConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
) -> Findings:
    """Checks the store's own blobs, and changes nothing. Raises BackupError."""
    stop, news = threading.Event(), threading.Event()
    jobs = _BlobQueue(2 * question.workers, lambda: None, news.set)
    store = open_store(settings, conn)
    check = _StoreCheck(conn, settings.target, question, on_progress, jobs, store)
    return check.run(lambda step: run_threads(question.workers, check.work, step, stop, news))


@dataclass
class _StoreCheck(_BlobCheck):
    local = True

    store: Store

    def work(self, _name: str) -> None:
        """Does the jobs of one thread. Raises SourceError where the store is away as a whole."""
        while (job := self.jobs.take_job(wait=True)) is not None:
            seen = self.store.inspect(job, verify=True)
            size = total_size(seen.ready)
            self.jobs.add_result(Checked(job, len(job), size, tuple(seen.failed)))

    def is_empty(self) -> bool:
        return False

    def record(self, right: list[str], lost: list[Failure], tried: list[str]) -> None:
        """Records nothing: the catalog tells of remotes."""


# --- a remote that a receiver serves --------------------------------------------------------------


def verify_remote(
    conn: Connection,
    settings: RemoteConfig,
    question: Question,
    *,
    on_progress: Callable[[Findings], None],
    on_outage: Callable[[BackupError, float], None],
) -> Findings:
    """Checks what is copied to the target. Raises BackupError; what was found is recorded."""
    settings = identified(conn, settings)
    fetching = question.way == "download"
    words = ("get" if fetching else "verify", "list")
    source = None if fetching or question.trust_remote else store_of(settings, conn)
    pool = SessionPool(settings, "verify", words, on_outage, question.bwlimit)
    try:
        session = pool.open_first()
        if not fetching:
            require_sums(session, source)
        jobs = _BlobQueue(2 * question.workers, pool.cancelled, pool.wake)
        check = _RemoteCheck(conn, settings.target, question, on_progress, jobs, pool, source)
        return check.run(lambda step: pool.run(question.workers, check.work, step))
    finally:
        pool.close()


@dataclass
class _RemoteCheck(_BlobCheck):
    """Has the remote prove that it has the blobs, or fetches them; see `audit.proof`."""

    empty = "by-hash on the remote is empty"
    hint = "is its disk mounted?"

    pool: SessionPool
    source: Store | None

    def work(self, session: ReconnectingSession) -> None:
        """Does the jobs of one thread."""
        answer_questions(self.jobs, self._question, _checked, session)

    def _question(self, job: Blobs) -> RemoteQuestion:
        if self.question.way == "download":
            return Fetch(job)
        return Hashes(Proved(job), job) if self.source is None else Proof(job, self.source)

    def is_empty(self) -> bool:
        return self.pool.is_empty()


def _checked(found: Proved) -> Checked[Blobs]:
    return Checked(
        found.job,
        len(found.job) - len(found.unchecked),
        found.bytes,
        tuple(found.failures),
        by_remote_hash=len(found.by_remote_hash),
        unchecked=frozenset(found.unchecked),
        of_source=tuple(found.of_source),
    )
