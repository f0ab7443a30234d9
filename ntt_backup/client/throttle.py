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
from typing import Final

_FLOAT_BYTES: Final = 8
_SMALLEST_SHARE: Final = 4096


class Throttle:
    """Computes how many bytes one of several senders may send now: a token bucket. Pure.

    Its state is two figures that all senders share: since when tokens have gathered, in monotonic
    seconds, and how many bytes all have sent. The bucket holds a quarter of a second, and gives it
    out in shares that are worth an ssh packet: what ssh adds to shares of thirty bytes would double
    the traffic. All senders may take a share at the same instant; the next ones wait for it.
    """

    def __init__(self, bytes_per_second: float, senders: int) -> None:
        self._rate = bytes_per_second
        least = min(bytes_per_second, _SMALLEST_SHARE)
        self.share = max(bytes_per_second / 20 / senders, least)
        self.burst = max(bytes_per_second / 4, least)

    def since(self, since: float, now: float, sent: int) -> float:
        """Return since when tokens count: later than before once the bucket is full."""
        return max(since, now - (self.burst + sent) / self._rate)

    def allowance(self, since: float, now: float, sent: int) -> int:
        """Return how many bytes may be sent at this moment."""
        return int(self.share) if self._missing(since, now, sent) <= 0 else 0

    def delay(self, since: float, now: float, sent: int) -> float:
        """Return the seconds, above 0, until a share is there if nobody sends meanwhile."""
        return max(1e-3, self._missing(since, now, sent) / self._rate)

    def _missing(self, since: float, now: float, sent: int) -> float:
        return self.share + sent - (now - since) * self._rate


class Limit:
    """Holds bytes_per_second for so many senders together. Copies of this process share it."""

    def __init__(self, bytes_per_second: float, senders: int) -> None:
        self._throttle = Throttle(bytes_per_second, senders)
        # Floats, which count bytes exactly up to 9e15: first since when tokens gather, then what
        # each sender has sent.
        area = memoryview(mmap.mmap(-1, (1 + senders) * _FLOAT_BYTES))
        self._shared: memoryview[float] = area.cast("d")

    def sender(self, index: int) -> Pace:
        """Return the pace of the sender with this number, counted from 0."""
        return Pace(self._throttle, self._shared, index)


class Pace:
    """Tells one sender how much it may send now, in bytes."""

    def __init__(self, throttle: Throttle, shared: memoryview[float], index: int) -> None:
        self._throttle = throttle
        self._shared = shared
        self._own = 1 + index

    def allowance(self) -> int:
        """Return how many bytes may be sent at this moment."""
        now, sent = time.monotonic(), self._sent
        since = self._throttle.since(self._shared[0], now, sent)
        self._shared[0] = since
        return self._throttle.allowance(since, now, sent)

    def delay(self) -> float:
        """Return the seconds until something may be sent again if the others send nothing.

        It is up to twice as long where there are others, by chance: of several that wait for the
        same moment it is not always the same one that comes first.
        """
        delay = self._throttle.delay(self._shared[0], time.monotonic(), self._sent)
        return delay * (1 + random.random()) if len(self._shared) > 2 else delay

    def spend(self, sent: int) -> None:
        """Count what was sent."""
        self._shared[self._own] += sent

    @property
    def _sent(self) -> int:
        return int(sum(self._shared[1:]))


def alone(bytes_per_second: float | None) -> Pace | None:
    """Return the pace of a single sender; None where there is no limit."""
    return None if bytes_per_second is None else Limit(bytes_per_second, 1).sender(0)
