"""A store is opened anew when the remote was lost, for the commands that read for hours.

It waits as a run does (`run.backoff_base`, `run.backoff_cap`, at most `run.outage_timeout`), and
asks for what has not come yet. The first contact has no patience: who has typed a command wants to
hear at once that the remote is unavailable. Writing is left out: what was sent of a file is lost
with the connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Generic, TypeVar

from ntt_backup.client.backoff import OutageClock
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, ProtocolViolation
from ntt_backup.filestore.contract import Range, ReadableStore, StoredFile

R = TypeVar("R", bound=ReadableStore)
T = TypeVar("T")


class _Replaced(Exception):
    """The store was opened anew while ranges were asked for."""


class PatientStore(Generic[R]):
    """See the module. The contract is `contract.ReadableStore`; on_outage is told the error
    and for how many seconds it will be waited. Raises what open_ raises.
    """

    def __init__(
        self,
        open_: Callable[[], R],
        run: RunSettings,
        on_outage: Callable[[BackupError, float], None],
    ) -> None:
        self._open = open_
        self._attempts = run.attempts
        self._clock = OutageClock.of(run)
        self._on_outage = on_outage
        self._violations = 0
        # Whether the remote has ever answered: opening a bucket asks it nothing.
        self._met = False
        self._store: R | None = open_()

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def list(self, below: str = "") -> Iterator[StoredFile]:
        return iter(self.do(lambda store: [*store.list(below)]))

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        left = iter(ranges)
        asked: deque[Range] = deque()
        broken: list[Exception] = []
        source: R | None = None
        pieces: Iterator[bytes] = iter(())

        def later(store: R) -> Iterator[Range]:
            while True:
                try:
                    one = next(left)
                except StopIteration:
                    return
                except Exception as error:
                    # They come from no store's answer, and will not come again.
                    broken.append(error)
                    raise
                asked.append(one)
                # What makes ranges may read by this object itself, and may have lost the remote.
                if store is not self._store:
                    raise _Replaced
                yield one

        def piece(store: R) -> bytes | None:
            nonlocal source, pieces
            if store is not source:
                source, pieces = store, store.read(chain([*asked], later(store)))
            return next(pieces, None)

        while (data := self.do(piece, broken)) is not None:
            asked.popleft()
            yield data

    def do(self, work: Callable[[R], T], broken: Iterable[Exception] = ()) -> T:
        """Returns what work returns; calls it again with another store when the remote was
        lost. Raises BackupError for what waiting does not mend, or lasts for too long, and where
        something is in broken.
        """
        while True:
            try:
                if self._store is None:
                    self._store = self._open()
                done = work(self._store)
            except _Replaced:
                continue
            except BackupError as error:
                if any(True for _ in broken) or not self._met or not error.retryable:
                    raise
                self._violations += isinstance(error, ProtocolViolation)
                wait_s = self._clock.next_wait(time.monotonic())
                if wait_s is None or self._violations >= self._attempts:
                    raise
                with suppress(BackupError):
                    self.close()
                self._on_outage(error, wait_s)
                time.sleep(wait_s)
            else:
                self._clock.over()
                self._violations = 0
                self._met = True
                return done
