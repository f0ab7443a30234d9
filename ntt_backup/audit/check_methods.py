"""The three ways to have a batch of blobs checked: hashed there, fetched and hashed, hashed here.

The cheap way is to ask the remote for its hashes: nothing but names goes over the link. Where the
remote has no BLAKE3 the content itself can be fetched and hashed here, which proves just as much
and costs the whole transfer. Checking the store is the third: the same question to our own disks.

Each runs in the threads of a crew, takes jobs from a `Desk` and gives back what it found.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.client.pool import Reader
from ntt_backup.client.read_session import ReadingSession, failure_there, mismatch_there
from ntt_backup.model import Blob, Failure, total_size
from ntt_backup.source.inspection import Store
from ntt_backup.wire import read_messages, write_messages

Job = tuple[Blob, ...]

# Questions under way on one connection: while one is hashed, the next is there already.
_AHEAD: Final = 2
_WAIT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a job. bytes: of content that was hashed."""

    blobs: Job
    bytes: int
    failures: tuple[Failure, ...]


class Desk:
    """Jobs for the crew, and what came of them. room: how many may lie here untaken.

    wake is called when something came: there is room again, and a fast disk must not wait for it.
    """

    def __init__(self, room: int, cancelled: Callable[[], None], wake: Callable[[], None]) -> None:
        self._cancelled = cancelled
        self._wake = wake
        self._jobs: queue.Queue[Job] = queue.Queue(room)
        self._done: queue.SimpleQueue[Checked] = queue.SimpleQueue()
        self._closed = False

    @property
    def full(self) -> bool:
        return self._jobs.full()

    def put(self, job: Job) -> None:
        """From one thread only, and where there is room."""
        self._jobs.put_nowait(job)

    def close(self) -> None:
        """There will be no more jobs."""
        self._closed = True

    def take(self, *, wait: bool) -> Job | None:
        """The next job; None where there is none now, or with wait, where there will be none."""
        while True:
            self._cancelled()
            closed = self._closed
            try:
                return self._jobs.get(timeout=_WAIT_SECONDS if wait and not closed else 0.001)
            except queue.Empty:
                if closed or not wait:
                    return None

    def give(self, checked: Checked) -> None:
        self._done.put(checked)
        self._wake()

    def done(self) -> list[Checked]:
        """What has come since the last call."""
        found: list[Checked] = []
        while not self._done.empty():
            found.append(self._done.get())
        return found


def hash_there(reader: Reader, desk: Desk) -> None:
    """Jobs to their end, hashed by the remote."""
    under_way: deque[Job] = deque()

    def ask(session: ReadingSession, job: Job) -> None:
        session.ask_verdicts([bytes.fromhex(blob.blobid) for blob in job])

    def work(session: ReadingSession) -> None:
        for job in under_way:
            ask(session, job)
        while _more(desk, under_way, lambda job: ask(session, job)):
            said = session.verdicts()
            desk.give(_judged(under_way.popleft(), said))
            session.settled += 1

    reader.do(work)


def download(reader: Reader, desk: Desk) -> None:
    """Jobs to their end, fetched from the remote and hashed here."""
    under_way: deque[Job] = deque()

    def ask(session: ReadingSession, job: Job) -> None:
        session.ask_contents([bytes.fromhex(blob.blobid) for blob in job])

    def work(session: ReadingSession) -> None:
        for job in under_way:
            ask(session, job)
        while _more(desk, under_way, lambda job: ask(session, job)):
            taker = _Hashing()
            session.contents(taker)
            desk.give(Checked(under_way.popleft(), taker.bytes, tuple(taker.failures)))
            session.settled += 1

    reader.do(work)


def hash_here(root: Path, desk: Desk) -> None:
    """Jobs to their end, from the store. Raises SourceError where that is away as a whole."""
    store = Store(root)
    while (job := desk.take(wait=True)) is not None:
        seen = store.inspect(job, verify=True)
        desk.give(Checked(job, total_size(seen.ready), tuple(seen.failed)))


def _more(desk: Desk, under_way: deque[Job], ask: Callable[[Job], None]) -> bool:
    """Ask ahead, as far as there are jobs; whether there is an answer to wait for."""
    while len(under_way) < _AHEAD:
        job = desk.take(wait=not under_way)
        if job is None:
            break
        under_way.append(job)
        ask(job)
    return bool(under_way)


def _judged(job: Job, said: read_messages.Verdicts) -> Checked:
    failures = (
        failure_there(
            job[one.position].blobid, one.verdict, one.text or mismatch_there(one.size, one.found)
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

    def begin(self, large: write_messages.Large) -> None:
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
        self.failures.append(failure_there(digest.hex(), verdict, text))

    def _require(self, digest: bytes, found: bytes, size: int) -> None:
        if found != digest:
            self.not_given(digest, read_messages.WRONG, mismatch_there(size, found))


def in_order(blobs: Sequence[Blob]) -> Job:
    """A job as the far side reads it best: one directory after the other."""
    return tuple(sorted(blobs, key=lambda blob: blob.blobid))
