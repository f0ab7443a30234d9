"""How hard all workers of a run compress: one verdict, which follows the link and the CPUs.

A worker that tried another level alone would see the link that the others leave free, and the CPU
that they take. So all count in shared memory, and who finds that a period has passed decides for
all. There is no lock, so that a process that is killed blocks nobody. Each writes its own counts
only. Two rarely decide at the same instant; then the next period puts their step right.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

_MOST_STEPS: Final = 16
# Seconds between two frames that count: what is longer is no time of sending.
_LONGEST_GAP: Final = 0.2
# Of what a sender counts: seconds that it was at work, that it compressed, and that it waited for
# the link; frames that compressing was tried for, their bytes of content and on the wire; and the
# bytes of all frames on the wire.
_NAMES: Final = ("lasted", "worked", "waited", "frames", "raw", "wire", "all")
# What the senders share; see _State.
_OF_PERIOD: Final = ("since", "idle", "cpus", "period", "unfelt", "shrinks", "price")


class Load(NamedTuple):
    """The sum of all CPUs' seconds since the machine's start: the idle ones, and all."""

    idle: float
    all: float


def cpu_load() -> Load:
    """Returns the load from /proc/stat; without that file, CPUs that are never idle."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)[1:9]
    except OSError:
        return Load(0.0, time.monotonic())
    tick = 1 / os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, waiting, *rest = (int(word) * tick for word in words)
    return Load(idle + waiting, user + nice + system + idle + waiting + sum(rest))


class _Counts(ctypes.Structure):
    """See _NAMES."""

    lasted: float
    worked: float
    waited: float
    frames: float
    raw: float
    wire: float
    all: float
    _fields_ = [(name, ctypes.c_double) for name in _NAMES]


class _State(ctypes.Structure):
    """What the senders share, apart from their counts.

    senders: how many have sent anything. since, idle, cpus, before: the clock, the load and the
    sum of all counts when the period began. unfelt: until so many bytes were sent in all, their
    time says nothing about the step; 0 where it does. shrinks, price: what the lowest compression
    makes of a byte, and its seconds for one. costs: the seconds for a byte with each step; 0 where
    that was not seen.
    """

    step: int
    steps: int
    senders: int
    since: float
    idle: float
    cpus: float
    period: float
    unfelt: float
    shrinks: float
    price: float
    costs: ctypes.Array[ctypes.c_double]
    _fields_ = [
        ("step", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("senders", ctypes.c_int),
        *((name, ctypes.c_double) for name in _OF_PERIOD),
        ("before", _Counts),
        ("costs", ctypes.c_double * _MOST_STEPS),
    ]


class Effort:
    """Chooses a step of compression, 0 for none: higher while the link is the bottleneck, lower
    while the CPUs are. Copies of this process share it.

    It begins with the lowest step, which a near remote leaves after one frame (see `skip_lowest`).
    It goes one step at a time, after a period of `FIRST_PERIOD`, which doubles up to `PERIOD` while
    nothing changes. What a byte took with each step is remembered: while a CPU is idle, no step is
    left for one that sent less. That is believed less with time, so such a step is tried again, the
    more rarely the less it sent.
    """

    FIRST_PERIOD: Final = 0.05
    PERIOD: Final = 0.5
    # The first one without compression: the receiver still unpacks what came before.
    _PLAIN_PERIOD: Final = 0.1
    # Shares of the time that were spent waiting for the link, or compressing.
    _MUCH: Final = 0.3
    _LITTLE: Final = 0.1
    # What the next step adds, as a multiple of this one's time; of zstd's levels above the lowest
    # 0.6, 1.7, 0.9 and 1.7 for text.
    _ADDS: Final = (1, 1, 2, 1, 2)
    # The share of the CPUs that is idle.
    _USED_UP: Final = 0.05
    # Seconds of waiting that a second of the lowest compression must save where no CPU is idle:
    # what is waited for then may be the CPU, so the saving looks larger than it is.
    _MUST_SAVE: Final = 1.25
    # Of the time for a byte with the step below: a period may err by that much.
    _CLEARLY: Final = 0.95
    # What is remembered of a step grows by no more than this factor in a period. Where a sender
    # ends, what it has under way is not counted: the step would look slow, and not be tried again
    # for seconds.
    _GROWS: Final = 1.2
    # The time of another step is believed to shrink so much with each period: it may have changed.
    _FADES: Final = 0.98
    # A period needs so many bytes of content: each call takes some time of its own, so a few bytes
    # would look dear.
    _LEAST_RAW: Final = 1 << 18
    # The first bytes of a sender say nothing about the link: the pipe and ssh's window take them
    # in. These hold nearly twice as many, but the first period outlasts the rest.
    _BUFFERS: Final = 2 << 20

    def __init__(
        self,
        senders: int = 1,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], Load] = cpu_load,
    ) -> None:
        size = ctypes.sizeof(_State)
        area = mmap.mmap(-1, size + senders * ctypes.sizeof(_Counts))
        self._state = _State.from_buffer(area)
        self._counts = (_Counts * senders).from_buffer(area, size)
        self._clock = clock
        self._load = load
        self._state.step, self._state.period, self._state.shrinks = 1, self.FIRST_PERIOD, 1.0

    def sender(self, index: int) -> Sender:
        """Returns the sender with this number, counted from 0."""
        return Sender(self, self._state, self._counts[index], self._clock)

    def _begin(self, sums: _Counts) -> None:
        state = self._state
        state.idle, state.cpus = self._load()
        state.before = sums
        state.since = self._clock()

    def skip_lowest(self) -> None:
        """Ends the first period as soon as a frame shows what compression saves and costs. Then
        nothing is compressed. Changes nothing once the time of any step is known.
        """
        state = self._state
        if state.step == 1 and not any(state.costs):
            state.period = 0.0
            self.judge(self._clock())

    def judge(self, now: float) -> None:
        """Chooses the step, if a period has passed."""
        state = self._state
        sums = _Counts(*(sum(getattr(one, name) for one in self._counts) for name in _NAMES))
        if not state.since:
            self._begin(_Counts())
        senders = sum(one.all > 0 for one in self._counts)
        if senders > state.senders:
            self._join(senders, sums.all)
        if state.unfelt and sums.all >= state.unfelt:
            state.unfelt = 0.0
            self._begin(sums)
            return
        seen = _Counts(*(getattr(sums, name) - getattr(state.before, name) for name in _NAMES))
        # Where nobody had anything to send, no time counts.
        lasted = min(now - state.since, seen.lasted)
        # About two frames of each sender, so that one more or less within a period matters little.
        frames = 2 * senders - 1
        enough = lasted >= state.period and seen.frames >= frames and seen.raw >= self._LEAST_RAW
        # Without compression the link is not felt before the buffers are full.
        if not enough or (state.unfelt and not state.step):
            return
        before, idle, cpus = state.step, state.idle, state.cpus
        self._begin(sums)
        self._choose(seen, lasted, Load(state.idle - idle, state.cpus - cpus))
        if state.step != before:
            # Each other sender has a frame of the last step under way.
            others = (senders - 1) * seen.all / seen.frames
            unfelt = others if state.step else senders * self._BUFFERS
            state.unfelt = sums.all + unfelt if unfelt else 0.0
        steady = state.step == before and not state.unfelt
        first = self.FIRST_PERIOD if state.step else self._PLAIN_PERIOD
        # Two that decide at the same instant may leave a period of 0, which doubling does not end.
        state.period = min(self.PERIOD, max(first, 2 * state.period)) if steady else first

    def _join(self, senders: int, sent: float) -> None:
        """Takes in that more senders have begun, whose buffers are empty."""
        state = self._state
        # Where compression sent more, the link was full without it, and more senders change nothing
        # about that. Else what is remembered is no longer true.
        if not self._sends_more(1):
            state.costs[:] = [0.0] * _MOST_STEPS
        state.unfelt = max(state.unfelt, sent) + (senders - state.senders) * self._BUFFERS
        state.senders = senders

    def _sends_more(self, step: int, share: float = 1.0) -> bool:
        """Returns whether a byte took less than this share of its time with the step below."""
        costs = self._state.costs
        return 0 < costs[step] < share * costs[step - 1]

    def _pays(self, seen: _Counts) -> bool:
        """Returns whether the lowest compression saves clearly more waiting than it takes time."""
        state = self._state
        saves = seen.waited / seen.all * (1 - state.shrinks)
        return saves > self._MUST_SAVE * state.price

    def _choose(self, seen: _Counts, lasted: float, cpus: Load) -> None:
        """Goes one step down where the CPUs limit, unless that step sent less. Goes one up where
        the link limits, if that step sent more; where this is not known, if the CPUs have the time.
        """
        state, step = self._state, self._state.step
        if not state.unfelt:
            # Of content: what was tried, and the rest, which travels as it is.
            cost = lasted / (seen.raw + seen.all - seen.wire)
            # In a step's first periods, what is remembered is from long ago, or nothing.
            if state.period > self._PLAIN_PERIOD and state.costs[step]:
                cost = min(cost, self._GROWS * state.costs[step])
            state.costs[step] = cost
        if step == 1:
            state.shrinks, state.price = seen.wire / seen.raw, seen.worked / seen.raw
            if not state.period:  # See `skip_lowest`.
                state.step = 0
                return
        waits, works = seen.waited / seen.lasted, seen.worked / seen.lasted
        used_up = cpus.idle < self._USED_UP * cpus.all
        if step and works > self._LITTLE and (used_up or waits < self._LITTLE):
            stays = self._sends_more(step)
            # A step above the lowest one must not use the CPUs up: other work needs them, too.
            if (stays and not used_up) if step > 1 else (stays or self._pays(seen)):
                state.costs[step - 1] *= self._FADES
            elif not state.unfelt:
                state.step -= 1
        elif step + 1 < state.steps and waits > self._MUCH:
            if state.costs[step] and state.costs[step + 1]:
                climbs = self._sends_more(step + 1, self._CLEARLY) and not (step and used_up)
                state.costs[step + 1] *= self._FADES
            else:
                price = self._ADDS[step] * (seen.worked if step else state.price * seen.raw)
                fits = price < min(seen.waited, cpus.idle)
                climbs = fits or (step == 0 and self._pays(seen))
                if step == 0:
                    # The price may be that of a single frame, which other work held up.
                    state.price *= self._FADES
            state.step += climbs


class Sender:
    """One sender's part in the effort of all."""

    def __init__(
        self, effort: Effort, state: _State, counts: _Counts, clock: Callable[[], float]
    ) -> None:
        self._effort = effort
        self._state = state
        self._counts = counts
        self._clock = clock
        self._noted = clock()

    def set_steps(self, steps: int) -> None:
        """Says how many steps there are, which is the same for all senders."""
        self._state.steps = steps

    def set_near(self) -> None:
        """Says that the remote answers at once: the link is probably as fast as this machine."""
        self._effort.skip_lowest()

    @property
    def step(self) -> int:
        return self._state.step

    def note(self, worked: float, waited: float, raw: int, wire: int) -> None:
        """Notes the cost of a frame: seconds of compressing, seconds until the link had it, and its
        bytes of content and on the wire. raw: 0 where compressing it was not tried.
        """
        now, counts = self._clock(), self._counts
        counts.lasted += min(now - self._noted, worked + waited + _LONGEST_GAP)
        self._noted = now
        counts.worked += worked
        counts.waited += waited
        counts.all += wire
        if raw:
            counts.raw += raw
            counts.wire += wire
            counts.frames += 1
        self._effort.judge(now)
