"""`bench strategies` makes its figures by these runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ntt_backup.bench.helpers import Answer
from ntt_backup.bench.results import MEGA, Spread
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.sending import Way
from ntt_backup.formatting import many


@dataclass(frozen=True, slots=True)
class Cell:
    """One way, with so many workers."""

    way: Way
    workers: int

    @property
    def name(self) -> str:
        return f"{self.way.name}, {many(self.workers, 'worker')}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds from the common start to the last receipt, of files with size bytes.

    cpu: seconds of all workers and of what they started on this machine. wire_bytes: what ssh sent
    and received, or the size of a bucket's objects. Of a bucket also objects: how many were made;
    writes: the requests that made them; first_s: until all blobs of a mount were shown. None for
    what is not known.
    """

    seconds: float
    files: int
    size: int
    wire_bytes: int | None
    cpu: float
    objects: int | None = None
    writes: int | None = None
    first_s: float | None = None

    @staticmethod
    def of(answers: Sequence[Answer], sample: Sample, wire_bytes: int | None = None) -> Run:
        """Returns the run of workers that moved a sample together."""
        return Run(
            seconds=max(one.ended for one in answers) - min(one.began for one in answers),
            files=len(sample.blobs),
            size=sample.size,
            wire_bytes=wire_bytes,
            cpu=sum(one.cpu_s for one in answers),
        )

    @property
    def rate(self) -> float:
        return self.size / self.seconds

    @property
    def files_rate(self) -> float:
        return self.files / self.seconds


class Runs(list[Run]):
    """The runs of one cell, at least one."""

    def spread(self, name: str) -> Spread:
        """Returns the spread of a value of which every run has one."""
        found = Spread.of([getattr(run, name) for run in self])
        assert found is not None
        return found

    def known(self, name: str) -> Spread | None:
        """Returns the spread of a value; None where a run lacks it."""
        return None if None in [getattr(run, name) for run in self] else self.spread(name)

    @property
    def rate(self) -> Spread:
        return self.spread("rate")


@dataclass(slots=True)
class Findings:
    """All runs. ceilings: bytes a second of random bytes, by the number of streams.

    workers: the number that all ways are compared with. unreadable: blobs of the sample that could
    not be read.
    """

    sample: Sample
    unreadable: int
    workers: int
    runs: dict[Cell, Runs] = field(default_factory=dict)
    ceilings: dict[int, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ceiling(self) -> float:
        """Returns the best median of the ceilings; 0 before any."""
        spreads = [Spread.of(values) for values in self.ceilings.values()]
        return max((spread.median for spread in spreads if spread), default=0.0)

    def note(self, cell: Cell, run: Run) -> str:
        """Adds a run; returns what it was like, in words."""
        self.runs.setdefault(cell, Runs()).append(run)
        return (
            f"{cell.name}: {run.seconds:.2f} s, {run.rate / MEGA:.1f} MB/s,"
            f" {run.files_rate:,.0f} files/s"
        )

    def compared(self) -> dict[Way, Runs]:
        """Returns the runs with the common number of workers, fastest first."""
        mine = [one for one in self.runs if one.workers == self.workers]
        mine.sort(key=lambda one: -self.runs[one].rate.median)
        return {cell.way: self.runs[cell] for cell in mine}

    def scaling(self) -> dict[Way, dict[int, Runs]]:
        """Returns the runs by number of workers, where there are several."""
        found: dict[Way, dict[int, Runs]] = {}
        for cell in sorted(self.runs, key=lambda one: one.workers):
            found.setdefault(cell.way, {})[cell.workers] = self.runs[cell]
        return {way: by_workers for way, by_workers in found.items() if len(by_workers) > 1}

    def json(self) -> dict[str, Any]:
        """Returns the sample, the link's ceilings and every figure, as plain values."""
        return {
            "sample": {
                "blobs": len(self.sample.blobs),
                "bytes": self.sample.size,
                "unreadable": self.unreadable,
                "classes_left_out": list(self.sample.missing),
            },
            "link": {
                "ceiling_bytes_per_s": self.ceiling,
                "by_streams": [
                    {"streams": streams, "runs": values}
                    for streams, values in sorted(self.ceilings.items())
                ],
            },
            "figures": [_figure(cell, runs, self.ceiling) for cell, runs in self.runs.items()],
        }


def _figure(cell: Cell, runs: Runs, ceiling: float) -> dict[str, Any]:
    way = cell.way
    return {
        "way": way.name,
        "strategy": way.strategy,
        "codec": way.codec or None,
        "workers": cell.workers,
        "files": runs[0].files,
        "bytes": runs[0].size,
        "seconds": _plain(runs.spread("seconds")),
        "bytes_per_s": _plain(runs.rate),
        "files_per_s": _plain(runs.spread("files_rate")),
        "wire_bytes": _plain(runs.known("wire_bytes")),
        "cpu_s": _plain(runs.spread("cpu")),
        "objects": _plain(runs.known("objects")),
        "writes": _plain(runs.known("writes")),
        "first_s": _plain(runs.known("first_s")),
        "share_of_ceiling": runs.rate.median / ceiling,
        "runs": [asdict(run) for run in runs],
    }


def _plain(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread else None
