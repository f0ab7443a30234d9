"""Restore: the blobs back from the remote, on the day when nothing else is left.

No catalog is asked: the remote's own listing says what there is, and each blob's name says what it
must be. The space of blobids is cut into ranges; every worker takes one after the other, lists it
page by page, leaves out what the destination has already, and fetches the rest in batches, the next
one asked for before the last has come. So memory is bounded however many blobs there are, and a
call that was interrupted is simply made again.

A blob that is missing, cannot be read, or does not hash to its name is told of and left out; all
the others come. How far it is needs no count: blobids are hashes, so the part of their space that
is done is the part of the work.

Called by `cli.restore`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from ntt_backup.config import RemoteConfig
from ntt_backup.errors import BackupError
from ntt_backup.farside import FarSide, Reader
from ntt_backup.landing import Landing, Place
from ntt_backup.mending import mend
from ntt_backup.model import Failure, Reason
from ntt_backup.remote.frames import RESUMABLE
from ntt_backup.strategy.reading import ReadingSession

Entry = tuple[bytes, int | None]

_SPACE: Final = 1 << 256
_RANGES: Final = 64
_BATCH_BLOBS: Final = 1000
_BATCH_BYTES: Final = 32 << 20
_AHEAD: Final = 2
_TOLD: Final = 1000


@dataclass(slots=True)
class Restored:
    """What a restore has done so far. right: blobs that the destination had. bytes: what was
    fetched. part: of the work, from 0 to 1; None where that is not known. failures: the first.
    """

    restored: int = 0
    right: int = 0
    bytes: int = 0
    part: float | None = 0.0
    duration_s: float = 0.0
    wrong: Counter[Reason] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 7 if self.wrong else 0


class Wanted(Protocol):
    """What to restore. part: how much of it has been handed out."""

    words: Sequence[str]

    @property
    def part(self) -> float | None: ...

    def shares(self) -> Iterator[Callable[[Reader], Iterator[list[Entry]]]]:
        """Ways to get the pages of one share of it each; taken by one thread at a time."""
        ...


class Everything:
    """All that the remote lists, or what begins with a prefix."""

    words: Sequence[str] = ("list", "get")

    def __init__(self, prefix: str = "") -> None:
        self._low = int(prefix.ljust(64, "0"), 16)
        self._span = 1 << 4 * (64 - len(prefix))
        self._done = 0
        self._lock = threading.Lock()

    @property
    def part(self) -> float:
        return self._done / self._span

    def shares(self) -> Iterator[Callable[[Reader], Iterator[list[Entry]]]]:
        count = min(_RANGES, self._span)
        for number in range(count):
            low = self._low + self._span * number // count
            high = self._low + self._span * (number + 1) // count
            yield partial(self._pages, low, high)

    def _pages(self, low: int, high: int, reader: Reader) -> Iterator[list[Entry]]:
        done = low
        for names in reader.names(low, high):
            yield list(names)
            after = int.from_bytes(names[-1][0], "big") if names else high
            with self._lock:
                self._done += after - done
            done = after
        with self._lock:
            self._done += high - done


class Chosen:
    """The blobids of a list, in any order and of any length."""

    words: Sequence[str] = ("get",)
    part: float | None = None

    def __init__(self, blobids: Iterable[str]) -> None:
        self._blobids = iter(blobids)

    def shares(self) -> Iterator[Callable[[Reader], Iterator[list[Entry]]]]:
        while chosen := sorted(set(itertools.islice(self._blobids, _BATCH_BLOBS))):
            page: list[Entry] = [(bytes.fromhex(one), None) for one in chosen]
            yield partial(_alone, page)


def _alone(page: list[Entry], _: Reader) -> Iterator[list[Entry]]:
    return iter([page])


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
    far.look().close()
    place = Place(destination)
    try:
        work = _Work(place, wanted, far, trust_size=trust_size)
        far.crew(workers, work.run, lambda: on_progress(work.state()))
        place.sync()
        return work.state()
    finally:
        place.close()


class _Work:
    """What the workers share."""

    def __init__(self, place: Place, wanted: Wanted, far: FarSide, *, trust_size: bool) -> None:
        self._place = place
        self._wanted = wanted
        self._far = far
        self._trust_size = trust_size
        self._shares = wanted.shares()
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._done = Restored()
        self._started = time.monotonic()

    def state(self) -> Restored:
        """How far it is; for the thread that waits."""
        with self._lock:
            self._done.part = self._wanted.part
            self._done.duration_s = time.monotonic() - self._started
        return self._done

    def run(self, reader: Reader) -> None:
        """One worker, to the end of the shares."""
        landing = Landing(self._place, f"w{next(self._names)}", self._on_bytes)
        try:
            while True:
                with self._lock:
                    share = next(self._shares, None)
                if share is None:
                    return
                for page in share(reader):
                    lacking = [entry for entry in page if not self._has(landing, entry)]
                    with self._lock:
                        self._done.right += len(page) - len(lacking)
                    damaged = {one for one, _ in lacking if landing.has_base(one)}
                    for digest in damaged:
                        reader.do(partial(self._mend, landing, digest))
                    self._fetch(reader, landing, [one for one in lacking if one[0] not in damaged])
        finally:
            landing.close()

    def _has(self, landing: Landing, entry: Entry) -> bool:
        self._far.cancelled()
        return landing.is_right(*entry, trust_size=self._trust_size)

    def _fetch(self, reader: Reader, landing: Landing, entries: list[Entry]) -> None:
        batches = deque(_batches(entries))
        under_way: deque[list[bytes]] = deque()

        def ask(session: ReadingSession) -> bool:
            """Whether the next batch was asked for. What is there in part waits for its turn."""
            batch = batches[0]
            resumable = len(batch) == 1 and landing.has_part(batch[0])
            if resumable and under_way:
                return False
            session.ask_contents(batch, landing.resume(batch[0]) if resumable else 0)
            under_way.append(batches.popleft())
            return True

        def work(session: ReadingSession) -> None:
            landing.forget()
            batches.extendleft(reversed(under_way))
            under_way.clear()
            while batches or under_way:
                while batches and len(under_way) < _AHEAD and ask(session):
                    pass
                session.contents(landing)
                under_way.popleft()
                self._settle(landing)
                batches.extendleft([digest] for digest in landing.again())

        reader.do(work)

    def _mend(self, landing: Landing, digest: bytes, session: ReadingSession) -> None:
        landing.forget()
        mend(session, landing, digest)
        self._settle(landing)

    def _settle(self, landing: Landing) -> None:
        restored, _ = landing.settle()
        failures, landing.failures = landing.failures, []
        with self._lock:
            self._done.restored += restored
            for failure in failures:
                self._done.wrong[failure.reason] += 1
                if len(self._done.failures) < _TOLD:
                    self._done.failures.append(failure)

    def _on_bytes(self, count: int) -> None:
        with self._lock:
            self._done.bytes += count


def _batches(entries: Iterable[Entry]) -> Iterator[list[bytes]]:
    """Cut by count and by size; a blob that may be resumed travels alone."""
    batch: list[bytes] = []
    total = 0
    for digest, size in entries:
        expected = size or 0
        full = len(batch) == _BATCH_BLOBS or total + expected > _BATCH_BYTES
        if batch and (full or expected > RESUMABLE):
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += expected
    if batch:
        yield batch
