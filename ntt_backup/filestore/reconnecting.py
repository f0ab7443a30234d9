"""A store that is opened anew when the target was lost, for commands that read for hours.

The store waits as a run does (`run.backoff_base`, `run.backoff_cap`, at most `run.outage_timeout`),
and asks for what has not come yet. The first contact has no patience: who has typed a command wants
to hear at once that the target cannot be reached. Writing is left out: what was sent of a file is
lost with the connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, Generic, TypeVar

from ntt_backup.client.backoff import OutageClock
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, ProtocolViolation, RemoteUnreachable
from ntt_backup.filestore.contract import (
    FileUnreadable,
    Hash,
    Range,
    ReadableStore,
    SharedStore,
    StoredFile,
)
from ntt_backup.process.threads import Cancelled
from ntt_backup.wire.framing import FORMAT

R = TypeVar("R", bound=ReadableStore)
T = TypeVar("T")

# How often bytes of a file are asked for that do not come while the target answers otherwise.
_TRIES: Final = 5
# Of the ranges that are asked for together. A link of 28 ms is idle once in so many.
_MOST_RANGES: Final = 1024
_MOST_BYTES: Final = 32 << 20


def _some_of(ranges: Iterator[Range]) -> Iterator[Range]:
    """Yields the next ranges. What makes them may read by the same store, and has its errors then:
    so they are made before they are asked for.
    """
    room = _MOST_BYTES
    for one in islice(ranges, _MOST_RANGES):
        yield one
        room -= one.length
        if room <= 0:
            return


class ReconnectingStore(Generic[R]):
    """See the module. The contract is `contract.ReadableStore`.

    Args:
        open_: Opens the store.
        run: The settings of the waits.
        on_outage: Receives the error of an outage, and for how many seconds it will be waited.
        stop: Ends the waits, with Cancelled.

    Raises:
        BackupError: As open_ raises.
    """

    def __init__(
        self,
        open_: Callable[[], R],
        run: RunSettings,
        on_outage: Callable[[BackupError, float], None],
        stop: threading.Event | None = None,
    ) -> None:
        self._open = open_
        self._attempts = run.attempts
        self._clock = OutageClock.of(run)
        self._on_outage = on_outage
        self._stop = stop or threading.Event()
        self._violations = 0
        # Whether the target has ever answered: opening a bucket asks it nothing.
        self._met = False
        self._lock = threading.Lock()
        self._store: R | None = open_()

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    def cancelled(self) -> None:
        """Raises Cancelled where the command is ending."""
        if self._stop.is_set():
            raise Cancelled

    def list(self, below: str = "") -> Iterator[StoredFile]:
        return iter(self.do(lambda store: [*store.list(below)]))

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        left = iter(ranges)
        while waiting := deque(_some_of(left)):
            source: R | None = None
            pieces: Iterator[bytes] = iter(())

            def piece(store: R, waiting: deque[Range] = waiting) -> bytes:
                nonlocal source, pieces
                if store is not source:
                    source, pieces = store, store.read([*waiting])
                return next(pieces)

            while waiting:
                data = self.do(piece)
                waiting.popleft()
                yield data

    def do(self, work: Callable[[R], T], *, name: str = "") -> T:
        """Returns what work returns; calls it again, with another store, after an outage.

        Args:
            work: Asks the store.
            name: The file that may have errors of its own; "" where there is none.

        Raises:
            BackupError: Waiting does not help, or has lasted for too long.
            FileUnreadable: Of this file alone nothing comes.
            Cancelled: The command is ending.
        """
        tried = 0
        while True:
            self.cancelled()
            store: R | None = None
            try:
                store = self._current()
                done = work(store)
            except BackupError as error:
                wait_s = self._wait_after(error)
                if store is not None:
                    self._drop(store)
                tried = tried + 1 if name and self._answers() else 0
                if tried == _TRIES:
                    raise FileUnreadable(f"{name}: {error}") from error
                self._on_outage(error, wait_s)
                if self._stop.wait(wait_s):
                    raise Cancelled from None
            else:
                with self._lock:
                    self._clock.over()
                    self._violations = 0
                    self._met = True
                return done

    def _current(self) -> R:
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _drop(self, store: R) -> None:
        """Closes a store that was lost, unless another thread has done that."""
        with self._lock:
            if self._store is not store:
                return
            self._store = None
        with suppress(BackupError):
            store.close()

    def _wait_after(self, error: BackupError) -> float:
        """Returns for how many seconds to wait after an error; raises the error otherwise."""
        with self._lock:
            hope = error.retryable and self._met
            self._violations += isinstance(error, ProtocolViolation)
            wait_s = self._clock.next_wait(time.monotonic()) if hope else None
            if wait_s is None or self._violations >= self._attempts:
                raise error
        return wait_s

    def _answers(self) -> bool:
        """Returns whether the target answers now, apart from one file."""
        return False


class ReconnectingSharedStore(ReconnectingStore[SharedStore]):
    """The same for a store of packs, which several threads read at once."""

    @property
    def hashes(self) -> bool:
        """See `contract.SharedStore`."""
        return self.do(lambda store: store.hashes)

    def stat(self, name: str) -> StoredFile | None:
        """See `contract.SharedStore`. Raises FileUnreadable where of this file alone nothing is
        told.
        """
        return self.do(lambda store: store.stat(name), name=name)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        """See `contract.SharedStore`. Raises FileUnreadable where these bytes alone do not come."""

        def fetch(store: SharedStore) -> bytes:
            found = store.fetch(name, start, length)
            file = store.stat(name) if len(found) < length else None
            if file is not None and file.size >= start + length:
                raise RemoteUnreachable(
                    "the target's answer was cut off",
                    detail=f"{name}: {len(found)} bytes of {length} from {start}",
                    hint="look at the target's log, and at proxies before it",
                )
            return found

        return self.do(fetch, name=name)

    def prove(self, name: str, by: Hash = "sha256") -> str:
        """See `contract.SharedStore`."""
        return self.do(lambda store: store.prove(name, by), name=name)

    def _answers(self) -> bool:
        # All stores of packs have this file. Of one that was lost in part a server may refuse
        # everything.
        try:
            self._current().stat(FORMAT)
        except BackupError:
            return False
        return True
