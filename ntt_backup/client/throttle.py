"""A limit bounds the bandwidth of several processes together, without messages between them.

Fixed shares would waste the bandwidth that one process does not need. So each process counts the
bytes that it sends in shared memory, and sends while the sum is below the limit. There is no lock:
each process writes only its own counter, so a killed process blocks nobody, and its successor
continues the counter. Several may write the common start time at once; they write the same value.

The limit may follow a timetable, may be changed while data is sent, and may be paused.
"""

from __future__ import annotations

import math
import mmap
import random
import time
from collections.abc import Callable
from datetime import datetime
from threading import Lock
from typing import Final, Protocol

from ntt_backup.config.bandwidth_timetable import Timetable, parse_timetable

_FLOAT_BYTES: Final = 8
_SMALLEST_SHARE: Final = 4096
_NO_LIMIT: Final = 1 << 30
_BY_TIMETABLE: Final = -1.0
# The interval at which the timetable is read, and the end of a pause is noticed.
_LOOK_SECONDS: Final = 0.25

# Indexes of floats in shared memory, which count bytes exactly up to 9e15: the time since which
# tokens gather, the rate that was set, whether sending is paused; then the bytes of each sender.
_SINCE: Final = 0
_SET: Final = 1
_HELD: Final = 2
_SENT: Final = 3


class Limit:
    """Holds the senders together to a timetable, or to the rate that was set since.

    Copies of this process share the limit.

    The limit is a token bucket of a quarter of a second. Tokens are spent in shares of at least an
    ssh packet: the overhead of ssh for shares of thirty bytes would double the traffic. All senders
    may take a share at the same instant; the next shares wait for it.

    clock returns monotonic seconds, wall the local time.
    """

    def __init__(
        self,
        timetable: Timetable | None,
        senders: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.timetable = timetable or parse_timetable("off")
        self.senders = senders
        self.clock = clock
        self._wall = wall
        area = memoryview(mmap.mmap(-1, (_SENT + senders) * _FLOAT_BYTES))
        self.shared: memoryview[float] = area.cast("d")
        self.shared[_SET] = _BY_TIMETABLE
        self._looked = -math.inf
        self._by_timetable = 0.0

    def sender(self, index: int) -> SenderPace:
        """Returns the pace of the sender with this number, counted from 0."""
        return SenderPace(self, index)

    @property
    def sent(self) -> int:
        """The bytes that all senders have sent while there was a limit."""
        return int(sum(self.shared[_SENT:]))

    @property
    def rate(self) -> int | None:
        """The present rate in bytes a second; None for no limit."""
        rate = self.rate_at(self.clock())
        return None if math.isinf(rate) else int(rate)

    def rate_at(self, now: float) -> float:
        """Returns the rate in bytes a second; infinite for no limit."""
        if (rate := self.shared[_SET]) != _BY_TIMETABLE:
            return rate
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            found = self.timetable.at(self._wall())
            self._by_timetable = math.inf if found is None else found
        return self._by_timetable

    def set(self, rate: float | None) -> None:
        """Sets the rate in bytes a second, instead of the timetable; None for no limit."""
        self.shared[_SET] = math.inf if rate is None else rate

    def follow(self, timetable: Timetable | None = None) -> None:
        """Ends the rate that was set.

        Args:
            timetable: The timetable from now on; None for the former one. Copies of this process
                know only the timetable that they were made with, so a process that has set another
                one must call this method again at each of its changes.
        """
        if timetable is None:
            self.shared[_SET] = _BY_TIMETABLE
        else:
            self.timetable = timetable
            self.set(timetable.at(self._wall()))

    @property
    def held(self) -> bool:
        """Whether sending is paused."""
        return self.shared[_HELD] > 0

    @held.setter
    def held(self, held: bool) -> None:
        self.shared[_HELD] = held


class Pace(Protocol):
    """Limits one sender. All numbers are bytes."""

    def allowance(self, *, begun: bool = False) -> int:
        """Returns the number of bytes that may be sent now.

        begun: they continue a request, which cannot be paused.
        """
        ...

    def delay(self) -> float:
        """Returns the seconds, above 0, after which to ask for an allowance again."""
        ...

    def spend(self, sent: int) -> None:
        """Counts bytes as sent."""
        ...


class SenderPace:
    """The pace of one sender of a `Limit`."""

    def __init__(self, limit: Limit, index: int) -> None:
        self._limit = limit
        self._own = _SENT + index
        self._set_rate(limit.rate_at(limit.clock()))

    def _set_rate(self, rate: float) -> None:
        least = min(rate, _SMALLEST_SHARE)
        self._rate = rate
        self._share = max(rate / 20 / self._limit.senders, least)
        # More than a share, since rounding may leave less than a share.
        self.burst = max(rate / 4, 2 * least)

    def allowance(self, *, begun: bool = False) -> int:
        limit = self._limit
        if limit.shared[_HELD] and not begun:
            return 0
        now = limit.clock()
        if (rate := limit.rate_at(now)) != self._rate:
            self._set_rate(rate)
        if math.isinf(rate):
            return _NO_LIMIT
        sent = limit.sent
        # A full bucket gathers no more tokens: they count from a later time. A debt is at most one
        # share of each sender: a larger one remains from another rate.
        owed = self._share * limit.senders
        since = max(limit.shared[_SINCE], now - (self.burst + sent) / rate)
        limit.shared[_SINCE] = min(since, now - (sent - owed) / rate)
        return int(self._share) if self._missing(now, sent) <= 0 else 0

    def delay(self) -> float:
        """Returns the seconds until the next try to take a share.

        After these seconds a share is free if no other sender takes it, or the limit may have
        changed. With several senders the delay is up to twice as long, at random, so that not
        always the same sender comes first.
        """
        limit = self._limit
        if limit.held or math.isinf(self._rate):
            return _LOOK_SECONDS
        delay = max(1e-3, self._missing(limit.clock(), limit.sent) / self._rate)
        delay = min(delay, _LOOK_SECONDS)
        return delay * (1 + random.random()) if limit.senders > 1 else delay

    def spend(self, sent: int) -> None:
        if not math.isinf(self._rate):
            self._limit.shared[self._own] += sent

    def _missing(self, now: float, sent: int) -> float:
        return self._share + sent - (now - self._limit.shared[_SINCE]) * self._rate


class SharedPace:
    """A pace that the threads of one process share, for what they send or for what they fetch.

    Attributes:
        taken: The number of bytes that were taken; they are counted without a limit, too.
        throttled: When the limit last gave nothing, in monotonic seconds.
    """

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self._lock = Lock()
        self.taken = 0
        self.throttled = 0.0

    @staticmethod
    def of(timetable: Timetable | None) -> SharedPace | None:
        """Returns a new shared pace; None for no limit."""
        return None if timetable is None else SharedPace(Limit(timetable, 1).sender(0))

    def pause(self) -> float:
        """Returns the seconds to wait before a share can be taken; 0 if there is one."""
        with self._lock:
            if self._pace is None or self._pace.allowance():
                return 0.0
            return self._pace.delay()

    def take_now(self, wanted: int, *, begun: bool = False) -> int:
        """Takes a share of at most `wanted` bytes, and returns its size; 0 if there is none now.

        begun: see `Pace.allowance`; a server would not wait for the rest of a request.
        """
        with self._lock:
            if self._pace is not None:
                wanted = min(wanted, self._pace.allowance(begun=begun))
                self._pace.spend(wanted)
                self.throttled = self.throttled if wanted else time.monotonic()
            self.taken += wanted
            return wanted

    def take(self, wanted: int, *, begun: bool) -> int:
        """Waits for a share and takes it; see `take_now`."""
        while not (allowed := self.take_now(wanted, begun=begun)):
            time.sleep(self.pause())
        return allowed

    def give_back(self, count: int) -> None:
        """Returns bytes that were taken and not used."""
        with self._lock:
            self.taken -= count
            if self._pace is not None:
                self._pace.spend(-count)


_process_pace: list[Pace] = []


def set_process_pace(pace: Pace) -> None:
    """Sets the pace of this process, which sends beside other processes under one limit."""
    _process_pace[:] = [pace]


def process_pace(timetable: Timetable | None) -> Pace | None:
    """Returns the pace of this process; None for no limit.

    timetable: the limit of a process that has no pace yet, and sends alone.
    """
    if _process_pace:
        return _process_pace[0]
    return None if timetable is None else Limit(timetable, 1).sender(0)
