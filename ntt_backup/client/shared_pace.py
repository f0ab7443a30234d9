"""The threads of one process share a pace, for what they send or for what they fetch."""

from __future__ import annotations

import time
from threading import Lock
from typing import Protocol

from ntt_backup.client.throttle import Limit
from ntt_backup.config.timetable import Timetable


class Pace(Protocol):
    """Says how much may go now; see `throttle.Pace`."""

    def allowance(self, *, begun: bool = False) -> int: ...
    def delay(self) -> float: ...
    def spend(self, sent: int) -> None: ...


class SharedPace:
    """A pace for the threads of one sender."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._lock = Lock()

    @staticmethod
    def of(timetable: Timetable | None) -> SharedPace | None:
        """Returns a pace of its own; None where there is no limit."""
        return None if timetable is None else SharedPace(Limit(timetable, 1).sender(0))

    def pause(self) -> float:
        """Returns the seconds to wait before anything may go; 0 for none."""
        with self._lock:
            return 0.0 if self._pace.allowance() else self._pace.delay()

    def take_now(self, wanted: int, *, begun: bool = False) -> int:
        """Counts a share as gone, and returns its bytes; 0 where none may go now. begun: of a
        request that has begun: a server would not wait for the rest of it.
        """
        with self._lock:
            allowed = min(wanted, self._pace.allowance(begun=begun))
            self._pace.spend(allowed)
            return allowed

    def take(self, wanted: int, *, begun: bool) -> int:
        """Waits for a share; see `take_now`."""
        while not (allowed := self.take_now(wanted, begun=begun)):
            with self._lock:
                delay = self._pace.delay()
            time.sleep(delay)
        return allowed

    def give_back(self, count: int) -> None:
        """Takes back so many bytes of what was taken, which did not go."""
        with self._lock:
            self._pace.spend(-count)
