"""How hard all workers of a run compress: one verdict, which follows the link and the CPUs.

A worker that tried another level alone would see the link that the others leave free, and the CPU
that they take. So all count in shared memory, and who finds that a period has passed decides for
all. There is no lock: each writes its own counts; two that decide at the same instant are rare,
and their step is put right by the next period. A process that is killed blocks nobody.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

_MOST_STEPS: Final = 16
# Seconds between two frames that count: what is longer is no time of sending.
_LONGEST_GAP: Final = 0.2
# By how many the busy senders differ where rates cannot be compared.
_ANOTHER: Final = 0.5
# Of what a sender counts: seconds that it was at work, that it compressed, and that it waited for
# the link; frames that compressing was tried for, their bytes of content and on the wire; and the
# bytes of all frames on the wire.
_NAMES: Final = ("lasted", "worked", "waited", "frames", "raw", "wire", "all")
# What the senders share; see _State.
_OF_PERIOD: Final = (
    "since",
    "idle",
    "cpus",
    "period",
    "unfelt",
    "shrinks",
    "price",
    "plain",
    "packed",
    "busy",
)


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
    user, nice, system, idle, waiting, *rest = map(int, words)
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

    since, idle, cpus, before: the clock, the load and the sum of all counts when the period began.
    unfelt: buffers take in what is sent until so many bytes were sent in all. shrinks, price: what
    the lowest compression makes of a byte, and its seconds for one. plain, packed: the seconds for
    a byte without compression, and with the lowest, while so many were busy; 0 where that was not
    seen. until, pause: when a step that was too high may be tried again, and for how long it then
    rests.
    """

    step: int
    steps: int
    since: float
    idle: float
    cpus: float
    period: float
    unfelt: float
    shrinks: float
    price: float
    plain: float
    packed: float
    busy: float
    _fields_ = [
        ("step", ctypes.c_int),
        ("steps", ctypes.c_int),
        *((name, ctypes.c_double) for name in _OF_PERIOD),
        ("before", _Counts),
        ("until", ctypes.c_double * _MOST_STEPS),
        ("pause", ctypes.c_double * _MOST_STEPS),
    ]


class Effort:
    """Chooses a step of compression, 0 for none: higher while the link is the bottleneck, lower
    while the CPUs are. Copies of this process share it.

    It begins with the lowest, and goes one step at a time, after `FRAMES` frames at least and a
    period of `FIRST_PERIOD`, which doubles up to `PERIOD` while nothing changes. A step that was
    too high is not tried again for a while, which doubles each time.
    """

    FIRST_PERIOD: Final = 0.15
    PERIOD: Final = 0.5
    FRAMES: Final = 2
    # Shares of the time that were spent waiting for the link, or compressing.
    _MUCH: Final = 0.3
    _LITTLE: Final = 0.1
    # Shares of the CPU that are idle; the first where the link is waited for less than 0.6.
    _SPARE: Final = 0.25
    _USED_UP: Final = 0.05
    # Seconds of waiting that a second of the lowest compression must save where no CPU is idle:
    # what is waited for then may be the CPU, so the saving looks larger than it is.
    _MUST_SAVE: Final = 1.25
    # Of the time for a byte without compression: one period may err by more than a tenth.
    _CLEARLY: Final = 0.85
    # Bytes of a sender that the pipe and ssh's window take in before a slow link is felt.
    _BUFFERS: Final = 3 << 20
    # Seconds.
    _FIRST_PAUSE: Final = 1.0

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
        self._state.unfelt = self._BUFFERS

    def sender(self, index: int) -> Sender:
        """Returns the sender with this number, counted from 0."""
        return Sender(self, self._state, self._counts[index], self._clock)

    def _begin(self, sums: _Counts) -> None:
        state = self._state
        state.idle, state.cpus = self._load()
        state.before = sums
        state.since = self._clock()

    def judge(self, now: float) -> None:
        """Chooses the step, if a period has passed."""
        state = self._state
        if not state.since:
            self._begin(_Counts())
        lasted = now - state.since
        if lasted < state.period and not state.unfelt:
            return
        sums, seen = _Counts(), _Counts()
        for name in _NAMES:
            value = sum(getattr(one, name) for one in self._counts)
            setattr(sums, name, value)
            setattr(seen, name, value - getattr(state.before, name))
        busy = max(1.0, seen.lasted / lasted) if lasted else 1.0
        if state.unfelt and sums.all >= state.unfelt:
            state.unfelt = 0.0
            self._begin(sums)
            return
        if lasted < state.period or seen.frames < self.FRAMES or (state.unfelt and not state.step):
            return
        before, idle, cpus = state.step, state.idle, state.cpus
        self._begin(sums)
        everything = state.cpus - cpus
        spare = (state.idle - idle) / everything if everything else 0.0
        # Where compression sent more, the link was full without it, whoever sends.
        moved = state.busy and abs(busy - state.busy) > _ANOTHER
        if moved and not self._sends_more:
            state.plain = state.packed = 0.0
            state.unfelt = sums.all + busy * self._BUFFERS
        state.busy = busy
        self._choose(seen, lasted, spare, now)
        if state.step != before:
            state.unfelt = 0.0 if state.step else sums.all + busy * self._BUFFERS
        steady = state.step == before and not state.unfelt
        state.period = min(self.PERIOD, 2 * state.period) if steady else self.FIRST_PERIOD

    @property
    def _sends_more(self) -> bool:
        """Whether the lowest compression sent clearly more than none."""
        return 0 < self._state.packed < self._CLEARLY * self._state.plain

    def _choose(self, seen: _Counts, lasted: float, spare: float, now: float) -> None:
        state, step = self._state, self._state.step
        waits, works = seen.waited / seen.lasted, seen.worked / seen.lasted
        # What a byte waits for the link, and what compressing makes of a byte.
        wait = seen.waited / seen.all
        rate = 0.0 if state.unfelt else lasted / seen.raw
        if step == 0:
            state.plain = rate
            pays = wait * (1 - state.shrinks) > state.price
        else:
            if step == 1:
                state.packed = rate
                state.shrinks, state.price = seen.wire / seen.raw, seen.worked / seen.raw
            pays = wait * (seen.raw - seen.wire) > self._MUST_SAVE * seen.worked
        sends_more = self._sends_more
        # The lowest step can save no more than is waited for.
        full = step == 1 or works > 1 - self._MUCH
        cpu_limits = spare < self._USED_UP or (full and waits < self._LITTLE)
        if step and cpu_limits and works > self._LITTLE:
            if step > 1 or not (state.unfelt or pays or sends_more):
                # No pause before it is known what is sent without compression.
                if step > 1 or state.plain:
                    pause = 2 * state.pause[step] or self._FIRST_PAUSE
                    state.pause[step], state.until[step] = pause, now + pause
                state.step -= 1
        elif step == 0 and state.plain and state.packed:
            state.step = int(sends_more)
        elif step + 1 < state.steps and now >= state.until[step + 1] and waits > self._MUCH:
            enough = self._SPARE if waits < 2 * self._MUCH else self._USED_UP
            if spare > enough or (pays and step == 0):
                state.step += 1


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
