"""What was measured, and what may be said about it: medians, ratios, shares of the ceiling.

A machine is never quiet, so contenders are run in turns, and a ratio is taken within a round, where
both met the same weather; the ratio shown is the median of those, not the ratio of two medians. A
contender that failed once has no figure at all: it would be one of its good runs only.

Nothing here measures or prints on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from ntt_backup.bench.results import MEGA, Spread
from tests.bench.cpu import Share
from tests.bench.lab import describe
from tests.bench.measure import Measured
from tests.bench.plan import Case
from tests.bench.stores import Store


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contender: seconds, or else what went wrong. load: the machine's, before.

    cpu: seconds of CPU at both ends, None where they are not counted. shares: those of the
    processes by name, user's and system's, where they were asked for.
    """

    contender: str
    round: int
    seconds: float | None
    error: str | None
    load: float
    cpu: float | None = None
    shares: dict[str, Share] = field(default_factory=dict)


@dataclass
class Outcome:
    """All runs of one case. link: what was measured of it just before, None where it was not."""

    case: Case
    store: Store
    link: Measured | None
    samples: list[Sample]

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(sample.contender for sample in self.samples))

    def error(self, contender: str) -> str | None:
        """What went wrong first, if anything did."""
        mine = (one for one in self.samples if one.contender == contender)
        return next((one.error for one in mine if one.error), None)

    def seconds(self, contender: str) -> Spread | None:
        """None for a contender that failed, or did not run."""
        return Spread.of(list(self._by_round(contender).values()))

    def spent(self, contender: str) -> float:
        """The seconds of all its runs together."""
        return sum(self._by_round(contender).values())

    def cpu_us(self, contender: str) -> Spread | None:
        """Microseconds of CPU a blob, at both ends together."""
        mine = [one.cpu for one in self.samples if one.contender == contender]
        if self.error(contender):
            return None
        return Spread.of([cpu / self.store.blobs * 1e6 for cpu in mine if cpu is not None])

    def shares(self, contender: str) -> dict[str, Share]:
        """Microseconds of CPU a blob by process, user's and system's: the means of all rounds."""
        mine = [one.shares for one in self.samples if one.contender == contender and one.shares]
        whole = len(mine) * self.store.blobs / 1e6
        found = {}
        for name in sorted({name for one in mine for name in one}):
            users, systems = zip(*(one[name] for one in mine if name in one), strict=True)
            found[name] = Share(sum(users) / whole, sum(systems) / whole)
        return found

    def ratio(self, one: str, other: str) -> Spread | None:
        """one's time by other's, round by round; None where a round of both is missing."""
        mine, theirs = self._by_round(one), self._by_round(other)
        return Spread.of([mine[number] / theirs[number] for number in mine if number in theirs])

    def _by_round(self, contender: str) -> dict[int, float]:
        if self.error(contender):
            return {}
        mine = [one for one in self.samples if one.contender == contender]
        return {one.round: one.seconds for one in mine if one.seconds is not None}

    def report(self, ours: str, ceiling: str) -> dict[str, Any]:
        """For JSON: the case, every sample, and all that the tables show."""
        figures = []
        for name in self.contenders:
            seconds, ratio = self.seconds(name), self.ratio(ours, name)
            share = self.ratio(ceiling, name)
            figures.append(
                {
                    "contender": name,
                    "error": self.error(name),
                    "ours_by_peer": asdict(ratio) if ratio else None,
                    "seconds": asdict(seconds) if seconds else None,
                    "mb_per_s": self.store.bytes / MEGA / seconds.median if seconds else None,
                    "files_per_s": self.store.blobs / seconds.median if seconds else None,
                    "cpu_us_per_blob": asdict(cpu) if (cpu := self.cpu_us(name)) else None,
                    "cpu_us_by_process": {
                        process: share._asdict() for process, share in self.shares(name).items()
                    },
                    "share_of_ceiling": share.median if share else None,
                }
            )
        return {
            "store": {**asdict(self.store.recipe), "blobs": self.store.blobs}
            | {"bytes": self.store.bytes, "directories": self.store.directories},
            "link": {"name": self.case.link, "description": describe(self.case.link)}
            | {"measured": asdict(self.link) if self.link else None},
            "figures": figures,
            "samples": [
                {key: value for key, value in asdict(sample).items() if key != "shares"}
                for sample in self.samples
            ],
        }


def ratio_table(outcomes: Sequence[Outcome], ours: str, contenders: Iterable[str]) -> Table:
    """Our time by each peer's, a column a case."""
    table = Table(title=f"{ours}'s time / the peer's (below 1: we are faster)", box=SIMPLE)
    table.add_column("peer")
    for outcome in outcomes:
        table.add_column(f"{outcome.case.recipe.kind}\n{outcome.case.link}", justify="right")
    for name in contenders:
        if name != ours and any(name in outcome.contenders for outcome in outcomes):
            table.add_row(name, *(_ratio_cell(outcome, ours, name) for outcome in outcomes))
    return table


def _ratio_cell(outcome: Outcome, ours: str, name: str) -> str:
    if name not in outcome.contenders:
        return ""
    if outcome.error(name) or outcome.error(ours):
        return "error"
    ratio = outcome.ratio(ours, name)
    return f"{ratio.median:.2f}" if ratio else ""


def figure_table(outcome: Outcome, ours: str, ceiling: str) -> Table:
    """All figures of one case."""
    store = outcome.store
    table = Table(title=title(outcome), box=SIMPLE, title_justify="left")
    table.add_column("contender")
    heads = ("ours / it", "seconds", "min - max", "CPU us/blob", "MB/s", "files/s", "% of ceiling")
    for head in (*heads, "rounds"):
        table.add_column(head, justify="right")
    for name in outcome.contenders:
        seconds = outcome.seconds(name)
        if seconds is None:
            table.add_row(name, "", f"ERROR: {outcome.error(name)}"[:200])
            continue
        ratio, share = outcome.ratio(ours, name), outcome.ratio(ceiling, name)
        cpu = outcome.cpu_us(name)
        table.add_row(
            name,
            f"{ratio.median:.2f}" if ratio else "",
            f"{seconds.median:.2f}",
            f"{seconds.low:.2f} - {seconds.high:.2f}",
            f"{cpu.median:,.0f}" if cpu else "",
            f"{store.bytes / MEGA / seconds.median:.1f}",
            f"{store.blobs / seconds.median:,.0f}",
            f"{share.median:.0%}" if share else "",
            str(sum(sample.contender == name for sample in outcome.samples)),
        )
    return table


def share_table(outcome: Outcome) -> Table:
    """Which process takes how much CPU, of each contender."""
    table = Table(title=f"{title(outcome)}; CPU us/blob", box=SIMPLE, title_justify="left")
    for head in ("contender", "process"):
        table.add_column(head)
    for head in ("user", "system"):
        table.add_column(head, justify="right")
    for name in outcome.contenders:
        shares = outcome.shares(name)
        for process, share in sorted(shares.items(), key=lambda one: -sum(one[1])):
            table.add_row(name, process, f"{share.user:.1f}", f"{share.system:.1f}")
    return table


def title(outcome: Outcome) -> str:
    """The case and its link as measured."""
    store, measured = outcome.store, outcome.link
    text = f"{store.kind}: {store.blobs:,} blobs, {store.bytes / MEGA:,.1f} MB; "
    text += f"{outcome.case.link}: {describe(outcome.case.link)}"
    if measured is not None:
        text += (
            f" (measured {measured.one_mb_s:.1f} MB/s one stream, {measured.four_mb_s:.1f} four"
            f" together, {measured.round_trip_ms:.1f} ms)"
        )
    return text
