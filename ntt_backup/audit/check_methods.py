"""The three ways to have a batch of blobs checked: hashed there, fetched and hashed, hashed here.

The cheap way is to ask the remote for its hashes: nothing but names goes over the link. Where the
remote has no BLAKE3 the content itself can be fetched and hashed here, which proves just as much
and costs the whole transfer. Checking the store is the third: the same question to our own disks.

Each runs in several threads, takes jobs from a `WorkQueue` and gives back what it found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.client.pool import ReconnectingSession, WorkQueue
from ntt_backup.client.read_session import ReadSession, hash_mismatch, remote_failure
from ntt_backup.model import Blob, Failure, total_size
from ntt_backup.source.inspection import Store
from ntt_backup.wire import read_messages

Job = tuple[Blob, ...]

# Questions under way on one connection: while one is hashed, the next is there already.
_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a job. bytes: of content that was hashed."""

    blobs: Job
    bytes: int
    failures: tuple[Failure, ...]


CheckQueue = WorkQueue[Job, Checked]


def hash_there(session: ReconnectingSession, jobs: CheckQueue) -> None:
    """Jobs to their end, hashed by the remote."""
    under_way: deque[Job] = deque()

    def ask(session: ReadSession, job: Job) -> None:
        session.ask_verdicts([bytes.fromhex(blob.blobid) for blob in job])

    def work(session: ReadSession) -> None:
        for job in under_way:
            ask(session, job)
        while _more(jobs, under_way, lambda job: ask(session, job)):
            said = session.verdicts()
            jobs.give(_judged(under_way.popleft(), said))
            session.settled += 1

    session.do(work)


def download(session: ReconnectingSession, jobs: CheckQueue) -> None:
    """Jobs to their end, fetched from the remote and hashed here."""
    under_way: deque[Job] = deque()

    def ask(session: ReadSession, job: Job) -> None:
        session.ask_contents([bytes.fromhex(blob.blobid) for blob in job])

    def work(session: ReadSession) -> None:
        for job in under_way:
            ask(session, job)
        while _more(jobs, under_way, lambda job: ask(session, job)):
            taker = _Hashing()
            session.contents(taker)
            jobs.give(Checked(under_way.popleft(), taker.bytes, tuple(taker.failures)))
            session.settled += 1

    session.do(work)


def hash_here(root: Path, jobs: CheckQueue) -> None:
    """Jobs to their end, from the store. Raises SourceError where that is away as a whole."""
    store = Store(root)
    while (job := jobs.take(wait=True)) is not None:
        seen = store.inspect(job, verify=True)
        jobs.give(Checked(job, total_size(seen.ready), tuple(seen.failed)))


def _more(jobs: CheckQueue, under_way: deque[Job], ask: Callable[[Job], None]) -> bool:
    """Ask ahead, as far as there are jobs; whether there is an answer to wait for."""
    while len(under_way) < _AHEAD:
        job = jobs.take(wait=not under_way)
        if job is None:
            break
        under_way.append(job)
        ask(job)
    return bool(under_way)


def _judged(job: Job, said: read_messages.Verdicts) -> Checked:
    failures = (
        remote_failure(
            job[one.position].blobid, one.verdict, one.text or hash_mismatch(one.size, one.found)
        )
        for one in said.exceptions
    )
    return Checked(job, said.bytes, tuple(failures))


class _Hashing:
    """Takes contents and keeps none of them."""

    def __init__(self) -> None:
        self.bytes = 0
        self.failures: list[Failure] = []
        self._digest = b""
        self._hasher = blake3()

    def whole(self, digest: bytes, content: memoryview) -> None:
        self.bytes += len(content)
        self._require(digest, blake3(content).digest(), len(content))

    def begin(self, large: read_messages.Large) -> None:
        self._digest = large.digest
        self._size = large.size
        self._hasher = blake3()

    def piece(self, data: memoryview) -> None:
        self.bytes += len(data)
        self._hasher.update(data)

    def end(self, problem: str) -> None:
        if problem:
            self.not_given(self._digest, read_messages.UNREADABLE, problem)
        else:
            self._require(self._digest, self._hasher.digest(), self._size)

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(remote_failure(digest.hex(), verdict, text))

    def _require(self, digest: bytes, found: bytes, size: int) -> None:
        if found != digest:
            self.not_given(digest, read_messages.WRONG, hash_mismatch(size, found))


def in_order(blobs: Sequence[Blob]) -> Job:
    """A job as the far side reads it best: one directory after the other."""
    return tuple(sorted(blobs, key=lambda blob: blob.blobid))
