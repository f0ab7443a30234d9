"""What the page may ask for, and what must stay flat: decided by what was done from outside.

`Expectations` knows what was broken, and for how long somebody has to be asked for that. Whatever
else the page asks for is a false alarm; a fault that the page should name and did not is a silence.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

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
ALL = "*"
# Median of the last part of a life of a process, beside the first: so much more is growth.
GROWTH_SHARE, GROWTH_BYTES = 0.10, 3_000_000
IDLE_LINES = 10
_WARM_UP = 0.1
_SHORTEST_LIFE = 20


@dataclass
class Expectation:
    """Trouble that may be told for a target from one hour to another. must: a kind that must be
    told in that time, or None. told: whether it was.
    """

    kind: str
    target: str
    since: float
    until: float
    what: str
    must: bool = False
    told: bool = False


@dataclass
class Expectations:
    """The troubles, and what the page has told."""

    troubles: list[Expectation] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    pages: int = 0
    alarmed: int = 0
    _said: set[str] = field(default_factory=set)

    def expect(
        self,
        kinds: str,
        target: str,
        since: float,
        until: float,
        what: str,
        *,
        must: str = "",
    ) -> None:
        """Has trouble of these kinds be no false alarm. must: the kind among them that must be
        told.
        """
        for kind in kinds.split():
            one = Expectation(kind, target, since, until, what, must=kind == must)
            self.troubles.append(one)

    def extend(self, what: str, until: float) -> None:
        """Lets trouble end later."""
        for one in self.troubles:
            if one.what == what:
                one.until = max(one.until, until)

    def end(self, what: str, until: float) -> None:
        """Lets trouble end at an hour."""
        for one in self.troubles:
            if one.what == what:
                one.until = until

    def hear(self, hour: float, asked: Mapping[str, Sequence[str]]) -> list[str]:
        """Takes in what the page asks for, by target. Returns the new false alarms."""
        self.pages += 1
        self.alarmed += any(asked.values())
        new = []
        for target, points in asked.items():
            for said in points:
                fitting = [
                    one
                    for one in self.troubles
                    if one.since <= hour <= one.until
                    and one.target in (ALL, target)
                    and re.search(KINDS[one.kind], said)
                ]
                for one in fitting:
                    one.told = True
                key = f"{target}: {re.sub(r'[0-9]+', 'n', said)}"
                if fitting:
                    self._said.discard(key)
                elif key not in self._said:
                    self._said.add(key)
                    new.append(f"hour {hour:.0f}: {target}: {said}")
        self.false_alarms += new
        return new

    def silences(self) -> list[str]:
        """Returns the troubles that nobody was told of."""
        return [
            f"hour {one.since:.0f}: {one.target}: nobody was told of {one.what} ({one.kind})"
            for one in self.troubles
            if one.must and not one.told
        ]


@dataclass(frozen=True)
class Use:
    """What a process has at a moment. memory: bytes that it shares with no file."""

    hour: float
    pid: int
    role: str
    memory: int
    files: int
    threads: int


@dataclass
class Growth:
    """The figures of a role: at most at any moment, and at most more at the end of a life than at
    its beginning.
    """

    role: str
    lives: int
    memory: int
    files: int
    threads: int
    grown: dict[str, float]

    def problems(self) -> list[str]:
        memory = self.grown.get("memory", 0)
        found = []
        if memory > GROWTH_BYTES and memory > GROWTH_SHARE * self.memory:
            found.append(f"the memory of a {self.role} has grown by {memory / 1e6:.1f} MB")
        found += [
            f"the {what} of a {self.role} have grown by {self.grown[what]:.0f}"
            for what in ("files", "threads")
            if self.grown.get(what, 0) >= 2
        ]
        return found


def growths(uses: Iterable[Use], roles: Sequence[str]) -> list[Growth]:
    """Returns what the roles had. Those that live long are compared with themselves."""
    by_role: defaultdict[str, defaultdict[int, list[Use]]] = defaultdict(lambda: defaultdict(list))
    for use in uses:
        by_role[use.role][use.pid].append(use)
    found = []
    for role, lives in sorted(by_role.items()):
        flat = [use for life in lives.values() for use in life]
        grown: dict[str, float] = {}
        for life in lives.values():
            if role in roles and len(life) >= _SHORTEST_LIFE:
                for what in ("memory", "files", "threads"):
                    values = [getattr(use, what) for use in life[int(len(life) * _WARM_UP) :]]
                    quarter = max(1, len(values) // 4)
                    more = median(values[-quarter:]) - median(values[:quarter])
                    grown[what] = max(grown.get(what, more), more)
        most = {what: max(getattr(use, what) for use in flat) for what in ("memory", "files")}
        threads = max(use.threads for use in flat)
        found.append(Growth(role, len(lives), most["memory"], most["files"], threads, grown))
    return found


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
