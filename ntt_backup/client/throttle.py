"""A limit on what several processes send together, without messages between them.

A fixed share for each would leave unused what one of them does not need. So all count what they
send in shared memory, and each sends while the sum is below the limit. There is no lock: each
writes its own counter and no other, so a process that is killed blocks nobody, and its successor
counts on. Several may write the common start time at once; they write the same.
"""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from typing import Final

_FLOAT_BYTES: Final = 8
_SMALLEST_SHARE: Final = 4096


class Limit:
    """Holds bytes_per_second for so many senders together. Copies of this process share it.

    It is a token bucket that holds a quarter of a second (burst), and gives it out in shares that
    are worth an ssh packet: what ssh adds to shares of thirty bytes would double the traffic. All
    senders may take a share at the same instant; the next ones wait for it.
    """

    def __init__(
        self, bytes_per_second: float, senders: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        least = min(bytes_per_second, _SMALLEST_SHARE)
        self.rate = bytes_per_second
        self.share = max(bytes_per_second / 20 / senders, least)
        self.burst = max(bytes_per_second / 4, least)
        self.clock = clock
        # Floats, which count bytes exactly up to 9e15: first since when tokens gather, then what
        # each sender has sent.
        area = memoryview(mmap.mmap(-1, (1 + senders) * _FLOAT_BYTES))
        self.shared: memoryview[float] = area.cast("d")

    def sender(self, index: int) -> Pace:
        """Returns the pace of the sender with this number, counted from 0."""
        return Pace(self, index)

    @property
    def sent(self) -> int:
        """What all senders have sent, in bytes."""
        return int(sum(self.shared[1:]))


class Pace:
    """Tells one sender how much it may send now, in bytes."""

    def __init__(self, limit: Limit, index: int) -> None:
        self._limit = limit
        self._own = 1 + index

    def allowance(self) -> int:
        """Returns how many bytes may be sent at this moment."""
        limit = self._limit
        now, sent = limit.clock(), limit.sent
        # A bucket that is full gathers no more: tokens count from a later time on.
        limit.shared[0] = max(limit.shared[0], now - (limit.burst + sent) / limit.rate)
        return int(limit.share) if self._missing(now, sent) <= 0 else 0

    def delay(self) -> float:
        """Returns the seconds, above 0, until a share is there if the others send nothing.

        It is up to twice as long where there are others, by chance: of several that wait for the
        same moment it is not always the same one that comes first.
        """
        limit = self._limit
        delay = max(1e-3, self._missing(limit.clock(), limit.sent) / limit.rate)
        return delay * (1 + random.random()) if len(limit.shared) > 2 else delay

    def spend(self, sent: int) -> None:
        """Counts what was sent."""
        self._limit.shared[self._own] += sent

    def _missing(self, now: float, sent: int) -> float:
        limit = self._limit
        return limit.share + sent - (now - limit.shared[0]) * limit.rate


def alone(bytes_per_second: float | None) -> Pace | None:
    """Returns the pace of a single sender; None where there is no limit."""
    return None if bytes_per_second is None else Limit(bytes_per_second, 1).sender(0)
