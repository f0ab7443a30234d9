"""The workers of a run choose one level of compression, which follows the link and the CPUs.

A worker that tried another level alone would use the link that the others leave free, and the CPU
that they need. So all workers count in shared memory, and the one that finds that a period has
passed decides for all. There is no lock, so a killed process blocks nobody: each worker writes only
its own counts. Two workers rarely decide at the same instant; then the next period corrects that.

The measure is the time that a byte of content takes with each step. A step is tried where it may
take less, and kept where it does: a higher step while the workers wait for the link, a lower step
while they do not. A busy CPU needs no rule of its own, since each step takes longer there.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Callable
from typing import Final

_MOST_STEPS: Final = 16
# Indexes of floats in shared memory: the step and the number of steps; the senders that have begun;
# begin and length of the period; the bytes on the wire up to which time says nothing about the
# step; the time for a byte of content with each step, 0 if unknown; the counts of all senders when
# the period began. The counts of each sender follow.
_STEP, _STEPS, _SENDERS, _SINCE, _PERIOD, _UNFELT, _COSTS = range(7)
_BEFORE: Final = _COSTS + _MOST_STEPS
# Counts: seconds at work, of them compressing and waiting for the link; frames of which enough was
# tried to be compressed; bytes of content, and on the wire.
_LASTED, _WORKED, _WAITED, _FRAMES, _CONTENT, _WIRE, _COUNTS = range(7)
_OWN: Final = _BEFORE + _COUNTS
_UNKNOWN: Final = array("d", bytes(_MOST_STEPS * 8))

# Seconds: of the first period with a step; of the longest, since it doubles while nothing changes;
# between two frames at most, since a longer time is no time of sending.
_FIRST_PERIOD, _LONGEST_PERIOD, _LONGEST_GAP = 0.05, 0.5, 0.2
# The shares of the time above which much is waited for the link, and below which little is.
_MUCH, _LITTLE = 0.3, 0.1
# The time that the next step adds, as a multiple of that of this step: at most 2 for zstd and text.
_ADDS: Final = 2
# Another step must take less than this share of the time: a period may err by as much.
_CLEARLY: Final = 0.95
# The time of a higher or lower step that took longer is believed to shrink to this share with each
# period. So the step is tried again, the more rarely the longer it took, since things change.
_FADES: Final = (0.98, 0.9)
# A frame of fewer bytes of content does not count: each call takes some time of its own.
_LEAST_FRAME: Final = 1 << 16
# The first bytes of a sender say nothing about the link: the pipe and the window of ssh take them.
_BUFFERS: Final = 2 << 20


class Effort:
    """Chooses a step of compression, 0 for none. Copies of this process share it."""

    def __init__(self, senders: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        area = memoryview(mmap.mmap(-1, (_OWN + senders * _COUNTS) * 8))
        self.shared: memoryview[float] = area.cast("d")
        self.clock = clock
        self.shared[_STEP], self.shared[_PERIOD] = 1, _FIRST_PERIOD

    def sender(self, index: int) -> Sender:
        """Returns the sender with this number, counted from 0."""
        return Sender(self, _OWN + index * _COUNTS)

    def judge(self, now: float) -> None:
        """Chooses the step, if a period has passed."""
        shared = self.shared
        sums = array("d", (sum(shared[_OWN + count :: _COUNTS]) for count in range(_COUNTS)))
        senders = sum(wire > 0 for wire in shared[_OWN + _WIRE :: _COUNTS])
        if (more := senders - shared[_SENDERS]) > 0:
            # The times are those of fewer senders, and the buffers of the others are empty.
            shared[_COSTS:_BEFORE] = _UNKNOWN
            shared[_SENDERS] = senders
            shared[_UNFELT] = sums[_WIRE] + more * _BUFFERS
        if 0 < shared[_UNFELT] <= sums[_WIRE]:
            shared[_UNFELT], shared[_SINCE], shared[_BEFORE:_OWN] = 0.0, now, sums
            return
        seen = [after - before for after, before in zip(sums, shared[_BEFORE:_OWN], strict=True)]
        # Where nobody had anything to send, no time counts.
        lasted = min(now - shared[_SINCE], seen[_LASTED])
        # About two frames of each sender, so that one more or less matters little.
        if lasted < shared[_PERIOD] or seen[_FRAMES] < 2 * senders - 1:
            return
        step, shared[_SINCE], shared[_BEFORE:_OWN] = int(shared[_STEP]), now, sums
        if not shared[_UNFELT]:
            cost, known = lasted / seen[_CONTENT], shared[_COSTS + step]
            if shared[_PERIOD] == _LONGEST_PERIOD and not known / 2 < cost < known * 2:
                shared[_COSTS:_BEFORE] = _UNKNOWN  # Another link, or other content.
            shared[_COSTS + step] = cost
        if (chosen := self._choose(step, seen)) == step:
            shared[_PERIOD] = min(_LONGEST_PERIOD, 2 * shared[_PERIOD])
            return
        shared[_STEP], shared[_PERIOD] = chosen, _FIRST_PERIOD
        # Each sender may have a frame of the last step under way. Without compression the link is
        # not felt before the buffers are full.
        unfelt = senders * (seen[_WIRE] / seen[_FRAMES] if chosen else _BUFFERS)
        shared[_UNFELT] = max(shared[_UNFELT], sums[_WIRE] + unfelt)

    def _choose(self, step: int, seen: list[float]) -> int:
        """Returns the next step: the one above or below if it takes less time, or may do so."""
        shared, felt = self.shared, not self.shared[_UNFELT]
        waited, worked = seen[_WAITED], seen[_WORKED]
        higher = waited > max(_MUCH * seen[_LASTED], _ADDS * worked)
        lower = waited < _LITTLE * seen[_LASTED] < worked and felt
        for other, may, fades in zip((step + 1, step - 1), (higher, lower), _FADES, strict=True):
            if 0 <= other < shared[_STEPS]:
                known = shared[_COSTS + other]
                less = (known or may) and known < _CLEARLY * shared[_COSTS + step]
                # What is waited for is felt.
                if less if felt else may:
                    return other
                if may:
                    shared[_COSTS + other] = known * fades
        return step


class Sender:
    """The part of one sender in the effort of all. own: the index of the sender's first count."""

    def __init__(self, effort: Effort, own: int) -> None:
        self._effort = effort
        self._shared = effort.shared
        self._own = own
        self._noted = effort.clock()

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, which is the same for all senders."""
        self._shared[_STEPS] = steps

    def set_near(self) -> None:
        """Begins without compression, unless something was sent: the remote answers at once."""
        if not self._shared[_SENDERS]:
            self._shared[_STEP] = 0

    @property
    def step(self) -> int:
        return int(self._shared[_STEP])

    def note(self, worked: float, waited: float, raw: int, wire: int) -> None:
        """Notes the seconds of compressing a frame and of waiting for the link, and its sizes.

        raw: its bytes of content; 0 where compressing was not tried. wire: those on the wire.
        """
        now = self._effort.clock()
        lasted = min(now - self._noted, worked + waited + _LONGEST_GAP)
        self._noted = now
        counts = (lasted, worked, waited, raw >= _LEAST_FRAME, raw or wire, wire)
        for index, more in enumerate(counts, self._own):
            self._shared[index] += more
        self._effort.judge(now)
