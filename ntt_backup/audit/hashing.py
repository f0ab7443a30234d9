"""A batch of blobs is hashed in one of three ways: by the remote, once fetched, or in the store.

The cheapest is to ask the remote for its hashes: only names go over the link. Where the remote has
no BLAKE3, fetching the content proves as much and costs the whole transfer. Each way runs in
several threads, takes jobs from one queue and gives back what it found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.client.pool import ReconnectingSession
from ntt_backup.client.read_session import ReadSession
from ntt_backup.client.verdicts import hash_mismatch, remote_failure
from ntt_backup.model import Blob, Failure, total_size
from ntt_backup.process.threads import WorkQueue
from ntt_backup.source.inspection import Store
from ntt_backup.wire import read_messages, write_messages

Job = tuple[Blob, ...]

# Jobs asked for on one connection: while one is hashed, the next has reached the remote.
_AHEAD: Final = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a job. bytes: of content that was hashed."""

    blobs: Job
    bytes: int
    failures: tuple[Failure, ...]


CheckQueue = WorkQueue[Job, Checked]


def hash_remote(session: ReconnectingSession, jobs: CheckQueue, *, fetch: bool) -> None:
    """Checks all jobs by the remote's own hashes, or by fetching their content."""
    if fetch:
        _check(session, jobs, ReadSession.ask_contents, _receive_contents)
    else:
        _check(session, jobs, ReadSession.ask_verdicts, _receive_verdicts)


def hash_in_store(root: Path, jobs: CheckQueue) -> None:
    """Checks all jobs in the store. Raises SourceError where that is away as a whole."""
    store = Store(root)
    while (job := jobs.take(wait=True)) is not None:
        seen = store.inspect(job, verify=True)
        jobs.give(Checked(job, total_size(seen.ready), tuple(seen.failed)))


def _check(
    session: ReconnectingSession,
    jobs: CheckQueue,
    ask: Callable[[ReadSession, Sequence[bytes]], None],
    receive: Callable[[ReadSession, Job], Checked],
) -> None:
    """Asks for jobs ahead of their answers; a new session asks again for those without one."""
    asked: deque[Job] = deque()

    def work(session: ReadSession) -> None:
        for again in asked:
            ask(session, _digests(again))
        while True:
            while len(asked) < _AHEAD and (job := jobs.take(wait=not asked)) is not None:
                asked.append(job)
                ask(session, _digests(job))
            if not asked:
                return
            checked = receive(session, asked[0])
            asked.popleft()
            jobs.give(checked)
            session.settled += 1

    session.do(work)


def _digests(job: Job) -> list[bytes]:
    return [bytes.fromhex(blob.blobid) for blob in job]


def _receive_verdicts(session: ReadSession, job: Job) -> Checked:
    verdicts = session.verdicts(total_size(job))
    failures = (
        remote_failure(
            job[one.position].blobid, one.verdict, one.text or hash_mismatch(one.size, one.found)
        )
        for one in verdicts.exceptions
    )
    return Checked(job, verdicts.bytes, tuple(failures))


def _receive_contents(session: ReadSession, job: Job) -> Checked:
    hashing = Hashing()
    session.contents(hashing)
    return Checked(job, hashing.bytes, tuple(hashing.failures))


class Hashing:
    """Takes contents, hashes them, and keeps none."""

    def __init__(self) -> None:
        self.bytes = 0
        self.failures: list[Failure] = []
        self._large: write_messages.Large | None = None
        self._hasher = blake3()

    def whole(self, digest: bytes, content: memoryview) -> None:
        self.bytes += len(content)
        self._compare(digest, blake3(content).digest(), len(content))

    def begin(self, large: write_messages.Large) -> None:
        self._large = large
        self._hasher = blake3()

    def piece(self, data: memoryview) -> None:
        self.bytes += len(data)
        self._hasher.update(data)

    def end(self, problem: str) -> None:
        assert self._large is not None
        if problem:
            self.not_given(self._large.digest, read_messages.UNREADABLE, problem)
        else:
            self._compare(self._large.digest, self._hasher.digest(), self._large.size)

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(remote_failure(digest.hex(), verdict, text))

    def _compare(self, digest: bytes, found: bytes, size: int) -> None:
        if found != digest:
            self.not_given(digest, read_messages.WRONG, hash_mismatch(size, found))
