"""What the page may ask for, and what must stay flat: decided by what was done from outside.

`Expectations` knows what was broken, and what shows that it is over. Whatever else the page asks
for is a false alarm; a fault that the page should name and did not is a silence. No judgement goes
by a time that is planned: trouble lasts until it was undone, and what it has left on the page (a
check that found something, a dump that failed) until the log tells that the same work was begun
anew after that and went well. So a slow machine makes nothing false.

`Flatness` says of a series of figures whether it grows.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

# What a point that asks for action may say for each kind of trouble.
KINDS: Mapping[str, str] = {
    "catalog": r"catalog|figures are older",
    "unreachable": r"^(The (remote|catalog|local store)|Something that .*) has been unreach",
    "ended": r"^The last run,? .*ended|not copied yet, and (the last run was|there never was)",
    "failed": r"could not be copied$",
    "found": r"^The last (scan|reconcile|verify|drill), .* (found|failed)",
    "verify": r"^The last (verify|drill), .* (found|failed)",
    "dump": r"^The catalog could not be dumped|^The last dump of the catalog is old",
    "snapshot": r"^The last snapshot of|^The snapshot of \w+ is late",
    "missed": r"^The target lacks the",
}
# These are found by checks, and by nobody before.
_BY_CHECKS = ("found", "verify")
_CHECK = re.compile(r"^The last (scan|reconcile|verify|drill),")
# Events of work that went well, by the kind of trouble that they end.
_ENDED_BY = {
    "dump_complete": ("dump", "missed"),
    "dump_skipped": ("dump", "missed"),
    "snapshot_complete": ("snapshot", "missed"),
}
# These points go by themselves when a connection, a query or a start has come to its end, which
# takes real time at any pace. They are false if they stay. The others stay until somebody acts, or
# a day later; only the page may be older than the log by as long as it takes to draw it.
_OF_PACE = ("catalog", "unreachable", "ended")
_WHILE_IT_LASTS = (*_OF_PACE, "failed")
_PATIENCE, _OF_A_PAGE = 60.0, 4.0
_LOOKS = 20
ALL = "*"
IDLE_LINES = 1.5


@dataclass
class Expectation:
    """Trouble of a kind that may be told for a target. must: it must be told; told: it was.

    since: the hour; begun: how many events were heard then; ended: when its cause was gone, None
    before that. over: of what nothing can be left: pairs of a target, and a check or the kind.
    due: somebody has looked who should have found it.
    """

    kind: str
    target: str
    since: float
    what: str
    begun: int = 0
    must: bool = False
    due: bool = True
    told: bool = False
    ended: int | None = None
    over: set[tuple[str, str]] = field(default_factory=set)

    def explains(self, target: str, said: str) -> bool:
        """Returns whether this trouble may make the page say so of a target."""
        if self.target not in (ALL, target) or not re.search(KINDS[self.kind], said):
            return False
        if self.kind in _WHILE_IT_LASTS and self.ended is not None:
            return False
        check = _CHECK.match(said)
        return (target, check[1] if check else self.kind) not in self.over

    def hear(self, target: str, begun: int, of: Sequence[str], *, well: bool) -> None:
        """Takes in that work for a target is done. begun: at which number of events."""
        if self.target in (ALL, target) and begun > self.begun:
            self.due |= "verify" in of
        if well and self.ended is not None and self.ended <= begun:
            self.over |= {(target, one) for one in of}


@dataclass
class Expectations:
    """The troubles, and what the page has told.

    excuses: whether what the page says of a target is so for a reason that the model knows.
    passed: how long in seconds each point was on the page that nothing explained, and that went by
    itself.
    """

    excuses: Callable[[str, str], bool] = lambda target, said: False
    troubles: list[Expectation] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    pages: int = 0
    alarmed: int = 0
    passed: list[float] = field(default_factory=list)
    _events: int = 0
    _begun: dict[tuple[str, str], int] = field(default_factory=dict)
    _ending: list[Expectation] = field(default_factory=list)
    # Unexplained points: since when each is there, when it was seen last, and whether it was told.
    _doubts: dict[str, tuple[float, float, bool]] = field(default_factory=dict)
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    def expect(self, kinds: str, target: str, since: float, what: str, *, must: str = "") -> None:
        """Has trouble of these kinds be no false alarm. must: the kind among them that must be
        told.
        """
        for kind in kinds.split():
            one = Expectation(kind, target, since, what, self._events, must=kind == must)
            one.due = kind not in _BY_CHECKS
            self.troubles.append(one)

    def require(self, what: str, kind: str) -> None:
        """Has this trouble be told, as it turned out."""
        for one in self.troubles:
            one.must |= one.what == what and one.kind == kind and one.ended is None

    def end(self, what: str) -> None:
        """Notes that the cause of trouble is gone. What is heard next may still be of before."""
        self._ending += [one for one in self.troubles if one.what == what and one.ended is None]

    def take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes in lines of the log."""
        for line in lines:
            self._events += 1
            target, event = line.get("target", ""), line["event"]
            if event == "check_start":
                self._begun[target, line["command"]] = self._events
            elif event == "check_complete":
                begun = self._begun.get((target, line["command"]), 0)
                self._work(target, begun, [line["command"]], well=not line["exit_code"])
            elif event in _ENDED_BY:
                self._work(target, self._events, _ENDED_BY[event], well=True)
        for one in self._ending:
            one.ended = self._events
        self._ending.clear()

    def _work(self, target: str, begun: int, of: Sequence[str], *, well: bool) -> None:
        for one in self.troubles:
            one.hear(target, begun, of, well=well)

    def hear(
        self, hour: float, asked: Mapping[str, Sequence[str]], now: float, took: float = 0.0
    ) -> list[str]:
        """Takes in what the page asks for, by target. Returns the new false alarms.

        now: the monotonic clock. took: how long it took to read the page.
        """
        self.pages += 1
        self.alarmed += any(asked.values())
        self._took.append(took)
        new, here = [], set()
        for target, points in asked.items():
            for said in points:
                if self._is_explained(target, said):
                    continue
                key = f"{target}: {re.sub(r'([0-9.]+ ?(min|ms|s|h|d)? ?)+', 'n', said)}"
                here.add(key)
                since, _, told = self._doubts.get(key, (now, now, False))
                false = not told and now - since >= self._patience(said)
                self._doubts[key] = since, now, told or false
                if false:
                    new.append(f"hour {hour:.0f}: {target}: {said}")
        for key in self._doubts.keys() - here:
            since, seen, told = self._doubts.pop(key)
            self.passed += [] if told else [seen - since]
        self.false_alarms += new
        return new

    def _is_explained(self, target: str, said: str) -> bool:
        fitting = [one for one in self.troubles if one.explains(target, said)]
        for one in fitting:
            one.told = True
        return bool(fitting) or self.excuses(target, said)

    def _patience(self, said: str) -> float:
        """How many seconds a point may stand that nothing explains."""
        slow = max(self._took)
        if any(re.search(KINDS[kind], said) for kind in _OF_PACE):
            return _PATIENCE + 20 * slow
        return _OF_A_PAGE + 4 * slow

    def silences(self) -> list[str]:
        """Returns the troubles that nobody was told of."""
        return [
            f"hour {one.since:.0f}: {one.target}: nobody was told of {one.what} ({one.kind})"
            for one in self.troubles
            if one.must and one.due and not one.told
        ]


@dataclass(frozen=True)
class Flatness:
    """A series of figures: at its start, in the mean of its first and last quarter, and at most.

    tolerance: what may be added. bound: what it must never exceed, None for no bound.
    """

    start: float
    first: float
    last: float
    highest: float
    bound: float | None
    verdict: str

    @classmethod
    def of(cls, values: Sequence[float], tolerance: float, bound: float | None = None) -> Flatness:
        """Judges a series. What is high in some states of a process, and low in others, is not
        growth: what grows is higher in each quarter, at its lowest, than in the one before, and at
        the end by not much less than at the beginning.
        """
        parts = list(_quarters(values))
        first, last, highest = fmean(parts[0]), fmean(parts[-1]), max(values)
        lows = [_low(part) for part in parts]
        rise = lows[-1] - lows[0]
        steady = all(later - before > rise / 6 for before, later in pairwise(lows))
        grows = len(values) >= _ENOUGH and rise > tolerance and steady
        if grows or (bound is not None and highest > bound):
            verdict = "GROWS" if grows else "TOO HIGH"
        else:
            verdict = "flat" if last - first <= tolerance else "bounded"
            if verdict == "bounded" and bound is None:
                verdict = "higher"
        return cls(values[0], first, last, highest, bound, verdict)

    @property
    def wrong(self) -> bool:
        return self.verdict in ("GROWS", "TOO HIGH")


def _quarters(values: Sequence[float]) -> Iterator[Sequence[float]]:
    """Yields four parts of a series without the beginning, in which all is loaded."""
    warm = values[int(len(values) * _WARM_UP) :]
    size = max(1, len(warm) // 4)
    yield warm[:size]
    for end in (2, 1):
        yield warm[-(end + 1) * size : -end * size] or warm[:size]
    yield warm[-size:]


def _low(values: Sequence[float]) -> float:
    """Returns what a tenth of the values is below."""
    return sorted(values)[len(values) // 10]


_WARM_UP = 0.1
# Fewer figures show states, and no growth.
_ENOUGH = 40


@dataclass(frozen=True)
class Use:
    """What a process has at a moment. memory: bytes that it shares with no file."""

    hour: float
    pid: int
    role: str
    name: str
    memory: int
    files: int
    threads: int


def idle_lines(
    lines: Mapping[int, Sequence[str]], busy: set[int], hours: int
) -> tuple[int, float, int, Counter[str]]:
    """Returns the number of idle hours, the mean and the greatest number of lines of the log in
    one, and the events of all of them.

    lines: the events of each hour; busy: the hours in which something was done, each of which makes
    the next hour busy, too.
    """
    idle = [hour for hour in range(1, hours) if hour not in busy and hour - 1 not in busy]
    counts = [len(lines.get(hour, ())) for hour in idle]
    events = Counter(event for hour in idle for event in lines.get(hour, ()))
    return len(idle), sum(counts) / max(1, len(counts)), max(counts, default=0), events
