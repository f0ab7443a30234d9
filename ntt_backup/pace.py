"""A limit on what several processes send together, without a word between them.

A share for each would leave unused what one of them does not need. So all count what they send, in
memory that they share, and each goes by the sum: it sends while all together are below the limit.
There is no lock. Each writes its own counter and no other, and only reads those; one that is killed
at any instant holds nobody up, and its successor counts on.

Called by `transport.channel`; made by the coordinator for its workers.
"""

from __future__ import annotations

import mmap
import time

from ntt_backup.planner import Throttle

_BYTES = 8


class Limit:
    """bytes_per_second for so many senders together. Copies of this process share it."""

    def __init__(self, bytes_per_second: float, senders: int) -> None:
        self._rate = bytes_per_second
        self._sent = memoryview(mmap.mmap(-1, senders * _BYTES)).cast("Q")

    def sender(self, index: int) -> Pace:
        """The part in it of the sender with this number, counted from 0."""
        return Pace(self._rate, self._sent, index)


class Pace:
    """How much one sender may send now, in bytes.

    sent: what each has sent since the beginning; this one counts at index.
    """

    def __init__(self, bytes_per_second: float, sent: memoryview, index: int) -> None:
        self._sent = sent
        self._index = index
        self._throttle = Throttle(bytes_per_second, len(sent), time.monotonic(), sum(sent))

    def allowance(self) -> int:
        """Bytes that may be sent at this moment; 0 for none."""
        return self._throttle.allowance(time.monotonic(), sum(self._sent))

    def delay(self) -> float:
        """Seconds until something may be sent again, if the others send nothing meanwhile."""
        return self._throttle.delay()

    def spend(self, sent: int) -> None:
        """Count what was sent."""
        self._sent[self._index] += sent


def alone(bytes_per_second: float | None) -> Pace | None:
    """The pace of a sender that shares its limit with nobody; None where there is no limit."""
    return None if bytes_per_second is None else Limit(bytes_per_second, 1).sender(0)
