"""Restore: the blobs back from the remote, on the day when nothing else is left.

No catalog is asked: the remote's own listing says what there is, and each blob's name says what it
must be. One connection lists, page by page, as fast as batches are taken; the others leave out what
the destination has already and fetch the rest, the next batch asked for before the last has come,
so that no round trip is waited for. Memory is bounded however many blobs there are, and a call that
was interrupted is simply made again.

A blob that is missing, cannot be read, or does not hash to its name is told of and left out; all
the others come. How far it is needs no count: blobids are hashes, so the part of their space that
is done is the part of the work.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from ntt_backup.client.pool import FarSide, Reader
from ntt_backup.client.read_session import ReadingSession
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import SOME_FAILED, BackupError
from ntt_backup.model import Failures
from ntt_backup.restore.block_repair import mend
from ntt_backup.restore.target_dir import Landing, Place
from ntt_backup.wire.write_messages import RESUMABLE

Entry = tuple[bytes, int | None]

_BATCH_BLOBS: Final = 1000
_BATCH_BYTES: Final = 32 << 20
_AHEAD: Final = 2
_MOST_DAMAGED: Final = 100
_WAIT_SECONDS: Final = 0.5


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


class Wanted(Protocol):
    """What to restore. words: what must be allowed there for it."""

    words: Sequence[str]

    def batches(self, reader: Reader) -> Iterator[Batch]:
        """All of it, cut; parts add up to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What is asked for at once. part: of all the work, from 0 to 1; None where nobody knows."""

    entries: list[Entry]
    part: float | None


class Everything:
    """All that the remote lists, or what begins with a prefix."""

    words: Sequence[str] = ("list", "get")

    def __init__(self, prefix: str = "") -> None:
        self._low = int(prefix.ljust(64, "0"), 16)
        self._span = 1 << 4 * (64 - len(prefix))

    def batches(self, reader: Reader) -> Iterator[Batch]:
        done = self._low
        for names in reader.names(self._low, self._low + self._span):
            for entries in _cut(names):
                last = int.from_bytes(entries[-1][0], "big")
                yield Batch(entries, (last - done) / self._span)
                done = last


class Chosen:
    """The blobids of a list, in any order and of any length."""

    words: Sequence[str] = ("get",)

    def __init__(self, blobids: Iterable[str]) -> None:
        self._blobids = iter(blobids)

    def batches(self, reader: Reader) -> Iterator[Batch]:
        while chosen := sorted(set(itertools.islice(self._blobids, _BATCH_BLOBS))):
            yield Batch([(bytes.fromhex(one), None) for one in chosen], None)


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
    """Fetch what is wanted and not there yet. Raises BackupError; what is there then is right."""
    far = FarSide(settings, "restore", wanted.words, on_outage)
    place = Place(destination)
    try:
        work = _Work(place, wanted, far, workers=workers, trust_size=trust_size)
        far.crew(workers + 1, work.run, lambda: on_progress(work.state()))
        place.sync()
        return work.state()
    finally:
        place.close()


class _Work:
    """What the threads share: one lists, the others fetch."""

    def __init__(
        self, place: Place, wanted: Wanted, far: FarSide, *, workers: int, trust_size: bool
    ) -> None:
        self._place = place
        self._wanted = wanted
        self._far = far
        self._trust_size = trust_size
        self._queue: queue.Queue[Batch] = queue.Queue(2 * workers)
        self._listed = False
        self._lock = threading.Lock()
        self._threads = itertools.count()
        self._done = Restored()
        self._started = time.monotonic()

    def state(self) -> Restored:
        """How far it is; for the thread that waits."""
        self._done.duration_s = time.monotonic() - self._started
        return self._done

    def run(self, reader: Reader) -> None:
        """One thread, to its end."""
        number = next(self._threads)
        if number == 0:
            for batch in self._wanted.batches(reader):
                self._put(batch)
            self._listed = True
            return
        landing = Landing(self._place, f"w{number}", self.fetched)
        try:
            reader.do(Fetching(self, landing).work)
        finally:
            landing.close()

    def _put(self, batch: Batch) -> None:
        while True:
            self._far.cancelled()
            try:
                return self._queue.put(batch, timeout=_WAIT_SECONDS)
            except queue.Full:
                continue

    def take(self, *, wait: bool) -> Batch | None:
        """The next batch; None where there is none now, or with wait, where there will be none."""
        while True:
            self._far.cancelled()
            listed = self._listed
            try:
                return self._queue.get(timeout=_WAIT_SECONDS if wait and not listed else 0.001)
            except queue.Empty:
                if listed or not wait:
                    return None

    def has(self, landing: Landing, entry: Entry) -> bool:
        """Whether the destination has it."""
        self._far.cancelled()
        right = landing.is_right(*entry, trust_size=self._trust_size)
        with self._lock:
            self._done.right += right
        return right

    def settle(self, landing: Landing, part: float | None) -> None:
        """What has come gets its names; so much of the work is done."""
        restored = landing.settle()
        failures, landing.failures = landing.failures, []
        with self._lock:
            self._done.restored += restored
            for failure in failures:
                self._done.wrong.add(failure)
            if part is not None:
                self._done.part = (self._done.part or 0.0) + part

    def fetched(self, count: int) -> None:
        """So many bytes came."""
        with self._lock:
            self._done.bytes += count


class Fetching:
    """One thread's batches: the next ones asked for before the first has come.

    Its state outlives a session, so that `work` can go on with another one.
    """

    def __init__(self, shared: _Work, landing: Landing) -> None:
        self._shared = shared
        self._landing = landing
        self._next: deque[Batch] = deque()
        self._under_way: deque[Batch] = deque()
        self._damaged: deque[bytes] = deque()
        self._resumed = 0

    def work(self, session: ReadingSession) -> None:
        """All that is left."""
        landing, under_way = self._landing, self._under_way
        landing.forget()
        self._next.extendleft(reversed(under_way))
        under_way.clear()
        while True:
            while len(under_way) < _AHEAD and self._ask(session):
                pass
            if under_way:
                session.contents(landing)
                self._shared.settle(landing, under_way.popleft().part)
                session.settled += 1
                again = landing.again()
                self._next.extendleft(Batch([(digest, None)], None) for digest in again)
            elif self._damaged:
                mend(session, landing, self._damaged[0])
                self._damaged.popleft()
                self._shared.settle(landing, None)
                session.settled += 1
            elif not self._refill(wait=True):
                return

    def _ask(self, session: ReadingSession) -> bool:
        """Whether another batch was asked for. What is there in part waits for its turn."""
        if len(self._damaged) >= _MOST_DAMAGED or not (self._next or self._refill(wait=False)):
            return False
        batch = self._next[0]
        digests = [digest for digest, _ in batch.entries]
        resumable = len(digests) == 1 and self._landing.has_part(digests[0])
        if resumable and self._under_way:
            return False
        offset = 0
        if resumable:
            offset = self._landing.resume(digests[0])
            session.settled += offset > self._resumed  # So much of it will not be asked for again.
            self._resumed = offset
        session.ask_contents(digests, offset)
        self._under_way.append(self._next.popleft())
        return True

    def _refill(self, *, wait: bool) -> bool:
        """Take a batch, and leave out what is there; whether there is anything to do now."""
        shared, landing = self._shared, self._landing
        while (batch := shared.take(wait=wait)) is not None:
            lacking = [entry for entry in batch.entries if not shared.has(landing, entry)]
            damaged = {digest for digest, _ in lacking if landing.has_base(digest)}
            self._damaged.extend(damaged)
            absent = [entry for entry in lacking if entry[0] not in damaged]
            if absent:
                self._next.append(Batch(absent, batch.part))
                return True
            shared.settle(landing, batch.part)
            if damaged:
                return wait
        return False


def _cut(entries: Iterable[tuple[bytes, int]]) -> Iterator[list[Entry]]:
    """Cut by count and by size; a blob that may be resumed travels alone."""
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
