"""A limit on what several processes send together, without a word between them.

A share for each would leave unused what one of them does not need. So all count what they send, in
memory that they share, and each goes by the sum: it sends while all together are below the limit.
There is no lock. Each writes its own counter and no other; one that is killed at any instant holds
nobody up, and its successor counts on. That tokens gather from a later moment on, after a pause of
all, may be written by several at once, who write the same.
"""

from __future__ import annotations

import mmap
import random
import time

from ntt_backup.planner import Throttle

_BYTES = 8


class Limit:
    """bytes_per_second for so many senders together. Copies of this process share it."""

    def __init__(self, bytes_per_second: float, senders: int) -> None:
        self._throttle = Throttle(bytes_per_second, senders)
        # Floats, which count bytes exactly up to 9e15: first since when tokens gather, then what
        # each sender has sent.
        area = memoryview(mmap.mmap(-1, (1 + senders) * _BYTES))
        self._shared: memoryview[float] = area.cast("d")

    def sender(self, index: int) -> Pace:
        """The part in it of the sender with this number, counted from 0."""
        return Pace(self._throttle, self._shared, index)


class Pace:
    """How much one sender may send now, in bytes."""

    def __init__(self, throttle: Throttle, shared: memoryview[float], index: int) -> None:
        self._throttle = throttle
        self._shared = shared
        self._own = 1 + index

    def allowance(self) -> int:
        """Bytes that may be sent at this moment; 0 for none."""
        now, sent = time.monotonic(), self._sent
        since = self._throttle.since(self._shared[0], now, sent)
        self._shared[0] = since
        return self._throttle.allowance(since, now, sent)

    def delay(self) -> float:
        """Seconds until something may be sent again, if the others send nothing meanwhile.

        Up to twice as long where there are others, by chance: of several that wait for the same
        moment it is not always the same one that comes first.
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
    """The pace of a sender that shares its limit with nobody; None where there is no limit."""
    return None if bytes_per_second is None else Limit(bytes_per_second, 1).sender(0)
