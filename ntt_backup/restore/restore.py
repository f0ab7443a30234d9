"""Restore: fetches blobs from the remote into a directory.

It needs no catalog: the remote's own listing says what there is, and a blob's name what it must be.
One connection lists, page by page, as fast as batches are taken. The others leave out what the
directory has already and fetch the rest; the next batch is asked for before the last has come, so
that no round trip is waited for. Memory is bounded however many blobs there are, and a call that
was interrupted is made again.

A blob that is missing, unreadable, or does not hash to its name is reported and left out; all
others are restored. Progress needs no count: blobids are hashes, so the part of their space that is
done is the part of the work.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ntt_backup.client.pool import ReconnectingSession, SessionPool, WorkQueue
from ntt_backup.client.read_session import ReadSession
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import SOME_FAILED, BackupError
from ntt_backup.model import Failures
from ntt_backup.restore.block_repair import repair
from ntt_backup.restore.target_dir import RestoreTarget, TargetWriter, destination
from ntt_backup.wire.write_messages import RESUMABLE

Entry = tuple[bytes, int | None]

_BATCH_BLOBS: Final = 1000
_BATCH_BYTES: Final = 32 << 20
_AHEAD: Final = 2
_MOST_DAMAGED: Final = 100


@dataclass(slots=True)
class Restored:
    """What a restore has done so far. right: blobs that the destination had. bytes: what was
    fetched. part: of the work, from 0 to 1; None where that is not known.
    """

    restored: int = 0
    right: int = 0
    bytes: int = 0
    part: float | None = None
    duration_s: float = 0.0
    wrong: Failures = field(default_factory=Failures)

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What is asked for at once. part: of all the work, from 0 to 1; None where not known."""

    entries: list[Entry]
    part: float | None


class Wanted(NamedTuple):
    """What to restore. words: what the receiver must allow. The parts of batches add up to 1."""

    words: Sequence[str]
    batches: Callable[[ReconnectingSession], Iterator[Batch]]


def everything(prefix: str = "") -> Wanted:
    """Returns all that the remote lists, or what begins with a prefix."""
    low, span = int(prefix.ljust(64, "0"), 16), 1 << 4 * (64 - len(prefix))

    def batches(session: ReconnectingSession) -> Iterator[Batch]:
        done = low
        for names in session.names(low, low + span):
            for entries in _cut(names):
                last = int.from_bytes(entries[-1][0], "big")
                yield Batch(entries, (last - done) / span)
                done = last

    return Wanted(("list", "get"), batches)


def chosen(blobids: Iterator[str]) -> Wanted:
    """Returns the blobids of a list, in any order and of any length."""

    def batches(_session: ReconnectingSession) -> Iterator[Batch]:
        while some := sorted(set(itertools.islice(blobids, _BATCH_BLOBS))):
            yield Batch([(bytes.fromhex(one), None) for one in some], None)

    return Wanted(("get",), batches)


def restore(
    settings: RemoteConfig,
    destination: Path,
    wanted: Wanted,
    *,
    workers: int,
    trust_size: bool,
    on_progress: Callable[[Restored], None],
    on_outage: Callable[[BackupError, float], None],
) -> Restored:
    """Fetches what is wanted and missing. Raises BackupError; what is there then is right."""
    pool = SessionPool(settings, "restore", wanted.words, on_outage)
    target = RestoreTarget(destination)
    try:
        queue: WorkQueue[Batch, None] = WorkQueue(2 * workers, pool.cancelled)
        work = _Work(target, wanted, pool, queue, trust_size)
        pool.run(workers + 1, work.run, lambda: on_progress(work.state()))
        target.sync()
        return work.state()
    finally:
        target.close()


@dataclass
class _Work:
    """What the threads share: one lists, the others fetch."""

    target: RestoreTarget
    wanted: Wanted
    pool: SessionPool
    queue: WorkQueue[Batch, None]
    trust_size: bool

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.threads = itertools.count()
        self.done = Restored()
        self.started = time.monotonic()

    def state(self) -> Restored:
        """Returns how far it is."""
        self.done.duration_s = time.monotonic() - self.started
        return self.done

    def run(self, session: ReconnectingSession) -> None:
        """Does the work of one thread; the first one lists."""
        number = next(self.threads)
        if number == 0:
            for batch in self.wanted.batches(session):
                self.queue.put(batch)
            self.queue.close()
            return
        writer = TargetWriter(self.target, f"w{number}", self.fetched)
        try:
            fetching = Fetching(self, writer)

            def work(session: ReadSession) -> None:
                with destination(self.target.root):
                    fetching.work(session)

            session.do(work)
        finally:
            writer.close()

    def has(self, writer: TargetWriter, entry: Entry) -> bool:
        """Returns whether the destination has this blob, and right."""
        self.pool.cancelled()
        right = writer.is_right(*entry, trust_size=self.trust_size)
        with self.lock:
            self.done.right += right
        return right

    def finish(self, writer: TargetWriter, part: float | None) -> None:
        """Publishes what has come, and counts it; part: of all the work."""
        restored = writer.publish()
        failures, writer.failures = writer.failures, []
        with self.lock:
            self.done.restored += restored
            for failure in failures:
                self.done.wrong.add(failure)
            if part is not None:
                self.done.part = (self.done.part or 0.0) + part

    def fetched(self, count: int) -> None:
        """Counts bytes that came."""
        with self.lock:
            self.done.bytes += count


class Fetching:
    """The batches of one thread. Its state outlives a session: `work` continues with another."""

    def __init__(self, shared: _Work, writer: TargetWriter) -> None:
        self._shared = shared
        self._writer = writer
        self._next: deque[Batch] = deque()
        self._under_way: deque[Batch] = deque()
        self._damaged: deque[bytes] = deque()
        self._resumed = 0

    def work(self, session: ReadSession) -> None:
        """Fetches all that is left."""
        writer, under_way = self._writer, self._under_way
        writer.forget()
        self._next.extendleft(reversed(under_way))
        under_way.clear()
        while True:
            while len(under_way) < _AHEAD and self._ask(session):
                pass
            if under_way:
                session.contents(writer)
                self._shared.finish(writer, under_way.popleft().part)
                session.settled += 1
                again = writer.again()
                self._next.extendleft(Batch([(digest, None)], None) for digest in again)
            elif self._damaged:
                repair(session, writer, self._damaged[0])
                self._damaged.popleft()
                self._shared.finish(writer, None)
                session.settled += 1
            elif not self._refill(wait=True):
                return

    def _ask(self, session: ReadSession) -> bool:
        """Asks for another batch, if there is one now; returns whether it did. One that has come in
        part is asked for when nothing else is under way.
        """
        if len(self._damaged) >= _MOST_DAMAGED or not (self._next or self._refill(wait=False)):
            return False
        batch = self._next[0]
        digests = [digest for digest, _ in batch.entries]
        resumable = len(digests) == 1 and self._writer.has_part(digests[0])
        if resumable and self._under_way:
            return False
        offset = 0
        if resumable:
            offset = self._writer.resume(digests[0])
            session.settled += offset > self._resumed  # That part is not asked for again.
            self._resumed = offset
        session.ask_contents(digests, offset)
        self._under_way.append(self._next.popleft())
        return True

    def _refill(self, *, wait: bool) -> bool:
        """Takes a batch and leaves out what the destination has; returns whether there is work."""
        shared, writer = self._shared, self._writer
        while (batch := shared.queue.take(wait=wait)) is not None:
            lacking = [entry for entry in batch.entries if not shared.has(writer, entry)]
            damaged = {digest for digest, _ in lacking if writer.has_base(digest)}
            self._damaged.extend(damaged)
            absent = [entry for entry in lacking if entry[0] not in damaged]
            if absent:
                self._next.append(Batch(absent, batch.part))
                return True
            shared.finish(writer, batch.part)
            if damaged:
                return wait
        return False


def _cut(entries: Iterable[tuple[bytes, int]]) -> Iterator[list[Entry]]:
    """Yields batches, cut by count and by size. A blob that may be resumed is a batch alone."""
    batch: list[Entry] = []
    total = 0
    for digest, size in entries:
        full = len(batch) == _BATCH_BLOBS or total + size > _BATCH_BYTES
        if batch and (full or size > RESUMABLE):
            yield batch
            batch, total = [], 0
        batch.append((digest, size))
        total += size
    if batch:
        yield batch
