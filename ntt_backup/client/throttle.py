"""A limit bounds what several processes send together, without messages between them.

A fixed share for each would leave unused what one of them does not need. So all count what they
send in shared memory, and each sends while the sum is below the limit. There is no lock: each
writes its own counter and no other, so a process that is killed blocks nobody, and its successor
counts on. Several may write the common start time at once; they write the same.

The limit may follow a timetable, be set anew while they send, and be held altogether.
"""

from __future__ import annotations

import math
import mmap
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from ntt_backup.config.timetable import Timetable, parse

_FLOAT_BYTES: Final = 8
_SMALLEST_SHARE: Final = 4096
_NO_LIMIT: Final = 1 << 30
_BY_TIMETABLE: Final = -1.0
# How often the timetable is looked at, and whether a pause has ended.
_LOOK_SECONDS: Final = 0.25

# In shared memory, as floats, which count bytes exactly up to 9e15: since when tokens gather, the
# rate that was set, whether all is held; then what each sender has sent.
_SINCE: Final = 0
_SET: Final = 1
_HELD: Final = 2
_SENT: Final = 3


class Limit:
    """Holds so many senders together to a timetable, or to what was set since. Copies of this
    process share it.

    It is a token bucket that holds a quarter of a second (burst), and gives it out in shares that
    are worth an ssh packet: what ssh adds to shares of thirty bytes would double the traffic. All
    senders may take a share at the same instant; the next ones wait for it.
    """

    def __init__(
        self,
        timetable: Timetable | None,
        senders: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.timetable = timetable or parse("off")
        self.senders = senders
        self.clock = clock
        self._wall = wall
        area = memoryview(mmap.mmap(-1, (_SENT + senders) * _FLOAT_BYTES))
        self.shared: memoryview[float] = area.cast("d")
        self.shared[_SET] = _BY_TIMETABLE
        self._looked = -math.inf
        self._by_timetable = 0.0

    def sender(self, index: int) -> Pace:
        """Returns the pace of the sender with this number, counted from 0."""
        return Pace(self, index)

    @property
    def sent(self) -> int:
        """What all senders have sent, in bytes; while there is a limit."""
        return int(sum(self.shared[_SENT:]))

    @property
    def rate(self) -> int | None:
        """The bytes a second of this moment; None for no limit."""
        rate = self.rate_at(self.clock())
        return None if math.isinf(rate) else int(rate)

    def rate_at(self, now: float) -> float:
        """Returns the bytes a second; infinite for no limit."""
        if (rate := self.shared[_SET]) != _BY_TIMETABLE:
            return rate
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            found = self.timetable.at(self._wall())
            self._by_timetable = math.inf if found is None else found
        return self._by_timetable

    def set(self, rate: float | None) -> None:
        """Sets the bytes a second from now on, whatever the timetable says; None for no limit."""
        self.shared[_SET] = math.inf if rate is None else rate

    def follow(self, timetable: Timetable | None = None) -> None:
        """Takes back what was set. timetable: holds from now on; since copies of this process know
        only the one that they were made with, it has to be called again and again then.
        """
        if timetable is None:
            self.shared[_SET] = _BY_TIMETABLE
        else:
            self.timetable = timetable
            self.set(timetable.at(self._wall()))

    @property
    def held(self) -> bool:
        """Whether nothing may be sent at all."""
        return self.shared[_HELD] > 0

    @held.setter
    def held(self, held: bool) -> None:
        self.shared[_HELD] = held


class Pace:
    """Tells one sender how much it may send now, in bytes."""

    def __init__(self, limit: Limit, index: int) -> None:
        self._limit = limit
        self._own = _SENT + index
        self._set_rate(limit.rate_at(limit.clock()))

    def _set_rate(self, rate: float) -> None:
        least = min(rate, _SMALLEST_SHARE)
        self._rate = rate
        self._share = max(rate / 20 / self._limit.senders, least)
        # More than a share: what rounding leaves of one is never enough.
        self.burst = max(rate / 4, 2 * least)

    def allowance(self, *, begun: bool = False) -> int:
        """Returns how many bytes may be sent at this moment. begun: of something whose beginning
        was sent, and which cannot be held.
        """
        limit = self._limit
        if limit.shared[_HELD] and not begun:
            return 0
        now = limit.clock()
        if (rate := limit.rate_at(now)) != self._rate:
            self._set_rate(rate)
        if math.isinf(rate):
            return _NO_LIMIT
        sent = limit.sent
        # A bucket that is full gathers no more: tokens count from a later time on. Nor is more
        # owed than all can have taken at once: that is left of another rate.
        owed = self._share * limit.senders
        since = max(limit.shared[_SINCE], now - (self.burst + sent) / rate)
        limit.shared[_SINCE] = min(since, now - (sent - owed) / rate)
        return int(self._share) if self._missing(now, sent) <= 0 else 0

    def delay(self) -> float:
        """Returns the seconds, above 0, after which to ask again: until a share is there if the
        others send nothing, or until the limit may have changed.

        It is up to twice as long where there are others, by chance: of several that wait for the
        same moment it is not always the same one that comes first.
        """
        limit = self._limit
        if limit.held or math.isinf(self._rate):
            return _LOOK_SECONDS
        delay = max(1e-3, self._missing(limit.clock(), limit.sent) / self._rate)
        delay = min(delay, _LOOK_SECONDS)
        return delay * (1 + random.random()) if limit.senders > 1 else delay

    def spend(self, sent: int) -> None:
        """Counts what was sent."""
        if not math.isinf(self._rate):
            self._limit.shared[self._own] += sent

    def _missing(self, now: float, sent: int) -> float:
        return self._share + sent - (now - self._limit.shared[_SINCE]) * self._rate


_joined: list[Pace] = []


def join(pace: Pace) -> None:
    """Lets `alone` return this pace in this process, which sends beside others."""
    _joined[:] = [pace]


def alone(timetable: Timetable | None) -> Pace | None:
    """Returns the pace of a single sender; None where there is no limit."""
    if _joined:
        return _joined[0]
    return None if timetable is None else Limit(timetable, 1).sender(0)
