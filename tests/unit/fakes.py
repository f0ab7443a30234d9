"""A catalog, a remote and a coordinator in memory, for the worker's loop: they can fail on command.

They keep the rules that the real ones keep: claims vanish with their connection, what is recorded
must be on the remote, what is answered is not sent again. Whoever breaks one fails the test on the
spot, so a test only says what goes wrong and looks at how things stand in the end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ntt_backup.catalog.connection import Server
from ntt_backup.catalog.latest_server import LatestServer
from ntt_backup.errors import (
    BatchRejected,
    CatalogUnavailable,
    RemoteCannotStore,
    RemoteUnreachable,
    SessionExpired,
)
from ntt_backup.events import BlobFailed
from ntt_backup.model import Batch, Blob, Failure, Reason, Receipt, StoredPack
from ntt_backup.process.messages import Message
from ntt_backup.upload.strategies.session import Rejection


class Clock:
    """Stands for the module `time`, and moves when it is told to."""

    now = 10.0

    def monotonic(self) -> float:
        return self.now


class Script:
    """What happens at each call, in order; afterwards all goes well."""

    def __init__(self, faults: Sequence[str] = ()) -> None:
        self._faults = deque(faults)

    def next(self, *possible: str) -> str:
        """The next fault, where it is one of those possible here, else "ok"."""
        if self._faults and self._faults[0] in ("ok", *possible):
            return self._faults.popleft()
        return "ok"


class FakeCatalog:
    """The table, the locks, and the connections to them."""

    def __init__(self, blobs: Sequence[Blob], script: Script | None = None) -> None:
        self.pending = {blob.blobid: blob for blob in blobs}
        self.copied: set[str] = set()
        self.failed: dict[str, Failure] = {}
        self.script = script or Script()
        self.remote: FakeRemote | None = None
        self.locks: dict[int, FakeCatalogSession] = {}
        self.connections = 0
        self.searches = 0  # takes that end before they have found anything
        self.looks = 0  # questions for anything pending that end before that is known
        self.on_look: Callable[[], object] = lambda: None
        self.heard = False
        self.server, self.latest = Server("7", 1), LatestServer()
        self.notify, self.notified = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def connect(self) -> FakeCatalogSession:
        if self.script.next("catalog away") != "ok":
            raise CatalogUnavailable("no catalog")
        self.connections += 1
        return FakeCatalogSession(self)

    @staticmethod
    def range_of(blobid: str) -> int:
        return int(blobid[:2], 16)

    def insert(self, blob: Blob, *, heard: bool) -> None:
        """heard: the notification came with an answer, such as that to a sign of life."""
        self.pending[blob.blobid] = blob
        self.heard = heard
        if not heard:
            os.write(self.notified, b"!")

    def close(self) -> None:
        os.close(self.notify)
        os.close(self.notified)


class FakeCatalogSession:
    """One connection: it is claims and ledger in one."""

    def __init__(self, catalog: FakeCatalog) -> None:
        self._catalog = catalog
        self._given: set[str] = set()
        self._lost = False
        self.claims = self
        self.ledger = self
        self.server, self.host = catalog.server, "db2:5432"
        self.moved = catalog.latest.note(self.server.system, self.server.timeline)

    def require_latest(self) -> None:
        self._catalog.latest.require(self.server.system, self.server.timeline)

    def _work(self, what: str) -> None:
        assert not self._lost, "a lost connection was used again"
        expired = f"session expired at {what}"
        if (fault := self._catalog.script.next(f"catalog lost at {what}", expired)) != "ok":
            self.close()
            raise (SessionExpired if fault == expired else CatalogUnavailable)(fault)

    def take(self, limit: int) -> list[tuple[Blob, int]]:
        self._work("take")
        self._catalog.searches -= 1
        taken: list[tuple[Blob, int]] = []
        if self.searching:
            return taken
        for blobid, blob in sorted(self._catalog.pending.items()):
            index = self._catalog.range_of(blobid)
            owner = self._catalog.locks.setdefault(index, self)
            if owner is self and blobid not in self._given and len(taken) < limit:
                self._given.add(blobid)
                taken.append((blob, index))
        return taken

    def unrecorded(self, blobids: set[str]) -> set[str]:
        self._work("look for marks")
        return blobids - self._catalog.copied

    def exhausted(self) -> frozenset[int]:
        mine = {index for index, owner in self._catalog.locks.items() if owner is self}
        open_ones = {
            self._catalog.range_of(blobid) for blobid in self._catalog.pending.keys() - self._given
        }
        return frozenset(mine - open_ones)

    def release(self, indexes: frozenset[int]) -> None:
        self._work("release")
        for index in indexes:
            assert self._catalog.locks.pop(index) is self
            self._given = {one for one in self._given if self._catalog.range_of(one) != index}

    def reopen(self, indexes: frozenset[int]) -> None:
        self._given = {one for one in self._given if self._catalog.range_of(one) not in indexes}

    @property
    def searching(self) -> bool:
        return self._catalog.searches > 0

    def any_pending(self) -> bool | None:
        self._work("look")
        self._catalog.on_look()
        self._catalog.looks -= 1
        return bool(self._catalog.pending) if self._catalog.looks < 0 else None

    def fileno(self) -> int:
        return self._catalog.notify

    def drain_notifications(self) -> bool:
        heard, self._catalog.heard = self._catalog.heard, False
        if heard:
            return True
        try:
            return bool(os.read(self._catalog.notify, 4096))
        except BlockingIOError:
            return False

    def record(
        self, stored: Sequence[Blob], failed: Sequence[Failure], packs: Sequence[StoredPack]
    ) -> None:
        self._work("record")
        assert self._catalog.remote is not None
        for blob in stored:
            assert blob.blobid in self._catalog.remote.stored, "copied, but not on the remote"
            self._catalog.copied.add(blob.blobid)
            self._catalog.pending.pop(blob.blobid, None)
        for failure in failed:
            self._catalog.failed[failure.blobid] = failure
            self._catalog.pending.pop(failure.blobid, None)

    def keep(self) -> None: ...

    def close(self) -> None:
        self._lost = True
        self._catalog.locks = {
            index: owner for index, owner in self._catalog.locks.items() if owner is not self
        }


class FakeRemote:
    """What is stored there, and the sessions that lead to it. poison: blobs it always refuses.
    unreadable: blobs that the store does not give.
    """

    def __init__(
        self, catalog: FakeCatalog, script: Script | None = None, poison: Sequence[str] = ()
    ) -> None:
        catalog.remote = self
        self.catalog = catalog
        self.script = script or Script()
        self.poison = frozenset(poison)
        self.unreadable: set[str] = set()
        self.stored: set[str] = set()
        self.batches: list[Batch] = []
        self.answered: set[str] = set()
        self.most_in_flight = 0
        self.sessions: list[FakeSession] = []
        self.on_put: Callable[[Batch], object] = lambda batch: None

    def connect(self) -> FakeSession:
        if self.script.next("remote away") != "ok":
            raise RemoteUnreachable("no remote")
        assert not any(session.usable for session in self.sessions), "a second session"
        self.sessions.append(FakeSession(self))
        return self.sessions[-1]

    def accept(self, batch: Batch) -> None:
        """Judge a batch that the worker sends, by the rules."""
        blobids = {blob.blobid for blob in batch.blobs}
        assert blobids.isdisjoint(self.answered), "sent again in spite of its receipt"
        assert batch.ranges == {self.catalog.range_of(blobid) for blobid in blobids} or (
            batch.ranges >= {self.catalog.range_of(blobid) for blobid in blobids}
        )
        assert batch.ranges <= self.catalog.locks.keys(), "sent without a claim"
        self.batches.append(batch)
        self.on_put(batch)

    def settle(self, batch: Batch) -> Receipt | Rejection:
        if self.poison.intersection(blob.blobid for blob in batch.blobs):
            return Rejection(batch, BatchRejected("poisoned"))
        stored = tuple(blob for blob in batch.blobs if blob.blobid not in self.unreadable)
        blobids = {blob.blobid for blob in stored}
        self.stored |= blobids
        self.answered |= blobids
        away = {blob.blobid for blob in batch.blobs} - blobids
        failed = tuple(Failure(blobid, Reason.MISSING, "no such file") for blobid in sorted(away))
        return Receipt(batch, stored, failed, 1, 0.1)


class FakeSession:
    """See `strategies.Session`."""

    lingers = False

    def __init__(self, remote: FakeRemote) -> None:
        self._remote = remote
        self._flights: list[Batch] = []
        self._arrived: list[Receipt | Rejection] = []
        self.usable = True

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        return tuple(self._flights)

    def put(self, batch: Batch) -> None:
        assert self.usable
        fault = self._remote.script.next(
            "lost in put", "answered, then lost in put", "changed", "changed, stream lost"
        )
        self._remote.accept(batch)
        if fault.startswith("changed"):
            self.usable = fault == "changed"
            raise BatchRejected("changed")
        self._flights.append(batch)
        self._remote.most_in_flight = max(self._remote.most_in_flight, len(self._flights))
        if fault.endswith("lost in put"):
            if fault.startswith("answered"):
                self._answer()
            self._lose()

    def collect(self, timeout: float) -> list[Receipt | Rejection]:
        if self.usable and self._flights and timeout > 0:
            fault = self._remote.script.next("lost", "answered, then lost", "busy", "full")
            if fault == "busy":
                error = RemoteUnreachable("short of resources")
                self._arrived.append(Rejection(self._flights.pop(0), error))
            elif fault == "full":
                self._answer()
                if self._flights:
                    full = RemoteCannotStore("full")
                    self._arrived.insert(0, Rejection(self._flights.pop(0), full))
            elif fault == "lost":
                self._lose()
            else:
                self._answer()
                if fault == "answered, then lost":
                    self._lose()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        assert not self._flights, "closed with batches in flight"
        self.usable = False

    def abort(self) -> None:
        self.usable = False

    def _answer(self) -> None:
        self._arrived.append(self._remote.settle(self._flights.pop(0)))

    def _lose(self) -> None:
        self.usable = False
        raise RemoteUnreachable("lost")


class FakeStore:
    """Measures nothing, since every blob has its size. Nothing in it is young."""

    paths = None

    def __init__(self) -> None:
        self.error: Exception | None = None

    def measure(self, blobs: Sequence[Blob]) -> list[Blob]:
        if self.error is not None:
            raise self.error
        return list(blobs)

    def ages_of_young(self, failures: Sequence[Failure]) -> dict[str, float]:
        return {}


class FakeDisk:
    """Stands for `ReadAhead`: places on it are in the order of blobids, backwards."""

    batches = 4

    def __init__(self) -> None:
        self._unread: list[str] = []

    def arranged(self, claimed: list[tuple[Blob, int]]) -> list[tuple[Blob, int]]:
        self._unread += [blob.blobid for blob, _ in reversed(claimed)]
        return claimed[::-1]

    def read(self, count: int) -> None:
        """Reads so many of the blobs that are next."""
        del self._unread[:count]

    @property
    def reading(self) -> bool:
        return bool(self._unread)

    def has_read(self, blobs: Iterable[Blob]) -> bool:
        return all(one.blobid not in self._unread for one in blobs)

    def at_hand(self, blobs: Sequence[Blob]) -> AbstractContextManager[None]:
        assert self.has_read(blobs)
        return nullcontext()


@dataclass
class FakePipe:
    """An event pipe that keeps what the worker says. on_event is told of each message."""

    catalog: FakeCatalog
    events: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False
    hurried: bool = False
    fd: int = -1
    on_event: Callable[[dict[str, Any]], object] = lambda event: None
    on_state: Callable[[str], object] = lambda state: None
    on_tick: Callable[[], object] = lambda: None

    def emit(self, message: Message) -> None:
        if isinstance(message, BlobFailed):
            assert message.blobid in self.catalog.failed, "told before it was recorded"
        told = {"event": message.kind, **message.fields}
        self.events.append(told)
        self.on_event(told)

    def state(self, state: str, quiet: float = 0.0) -> None:
        self.on_state(state)

    def stop(self) -> None:
        """Says so, and wakes whoever waits, as a word from the coordinator does."""
        self.stopping = self.hurried = True

    def take_hurry(self) -> bool:
        hurried, self.hurried = self.hurried, False
        return hurried

    def of(self, event: str) -> list[dict[str, Any]]:
        return [told for told in self.events if told["event"] == event]


def blobs(count: int) -> list[Blob]:
    """Blobs spread over all ranges."""
    return [Blob(f"{number * 37 % 256:02x}{number:062x}", 10) for number in range(count)]
