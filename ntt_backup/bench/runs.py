"""What came of sending a sample in many ways: runs, and the figures that they make.

Pure. Filled by `strategies`; read by `verdict`, `table` and `plot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ntt_backup.bench.results import Spread
from ntt_backup.bench.sample import CLASSES, Sample, counts
from ntt_backup.bench.ways import Way

MIX: Final = "mix"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way, with so many workers, on the whole sample (MIX) or one class of sizes."""

    way: Way
    workers: int
    load: str = MIX

    @property
    def name(self) -> str:
        load = "" if self.load == MIX else f", {self.load}"
        return f"{self.way.name}, {self.workers} worker{'s' if self.workers > 1 else ''}{load}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds from the word to go to the last receipt, of files with size bytes.

    wire_bytes: what ssh sent and received. CPU seconds of all workers and what they started here,
    and of their commands and sshds there. None for what is not known.
    """

    seconds: float
    files: int
    size: int
    wire_bytes: int | None
    cpu_here: float
    cpu_there: float | None

    @property
    def rate(self) -> float:
        return self.size / self.seconds

    @property
    def files_rate(self) -> float:
        return self.files / self.seconds


@dataclass(slots=True)
class Findings:
    """All runs. ceilings: bytes a second that random bytes reach, by the number of streams.

    workers: those that all ways were compared with. gone: blobs of the sample that could not be
    read. returning: the cell whose files were brought back; back has those runs.
    """

    sample: Sample
    gone: int
    workers: int
    returning: Cell | None = None
    runs: dict[Cell, list[Run]] = field(default_factory=dict)
    back: list[Run] = field(default_factory=list)
    ceilings: dict[int, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ceiling(self) -> float:
        """The best median of them, in bytes a second; 0 before any."""
        spreads = [Spread.of(values) for values in self.ceilings.values()]
        return max((spread.median for spread in spreads if spread), default=0.0)

    def compared(self) -> dict[Way, list[Run]]:
        """The whole sample with the same number of workers, by way."""
        found = {
            cell.way: runs
            for cell, runs in self.runs.items()
            if cell.load == MIX and cell.workers == self.workers
        }
        return dict(sorted(found.items(), key=lambda one: -median(one[1], lambda run: run.rate)))

    def scaling(self) -> dict[Way, dict[int, list[Run]]]:
        """The whole sample by way and number of workers, where there were several."""
        found: dict[Way, dict[int, list[Run]]] = {}
        for cell, runs in self.runs.items():
            if cell.load == MIX:
                found.setdefault(cell.way, {})[cell.workers] = runs
        return {way: dict(sorted(by.items())) for way, by in found.items() if len(by) > 1}

    def classes(self) -> dict[Way, dict[str, list[Run]]]:
        """Each class of sizes alone, by way; small classes first."""
        found: dict[Way, dict[str, list[Run]]] = {}
        for name, _ in CLASSES:
            for cell, runs in self.runs.items():
                if cell.load == name:
                    found.setdefault(cell.way, {})[name] = runs
        return found

    def json(self) -> dict[str, Any]:
        """The sample, the link's ceilings and every figure, as plain values."""
        figures = [
            {**_labels(cell), **_measured(runs, self.ceiling)} for cell, runs in self.runs.items()
        ]
        if self.returning is not None and self.back:
            labels = {**_labels(self.returning), "way": "tar-back", "direction": "down"}
            figures.append({**labels, **_measured(self.back, None)})
        return {
            "sample": {
                "blobs": len(self.sample.blobs),
                "bytes": self.sample.size,
                "unreadable": self.gone,
                "classes": counts(self.sample.blobs),
                "classes_left_out": list(self.sample.missing),
            },
            "link": {
                "ceiling_bytes_per_s": self.ceiling,
                "by_streams": [
                    {"streams": streams, **_spread(values), "runs": values}
                    for streams, values in sorted(self.ceilings.items())
                ],
            },
            "figures": figures,
        }


def median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """The median of a value over runs, of which there is at least one."""
    spread = Spread.of([value(run) for run in runs])
    assert spread is not None
    return spread.median


def known(runs: Sequence[Run], value: Callable[[Run], float | None]) -> Spread | None:
    """The spread of a value where all runs have it."""
    values = [one for one in map(value, runs) if one is not None]
    return Spread.of(values) if len(values) == len(runs) else None


def _labels(cell: Cell) -> dict[str, Any]:
    way = cell.way
    return {
        "way": way.name,
        "strategy": way.strategy,
        "codec": way.codec or ("ssh" if way.compressed else "none"),
        "workers": cell.workers,
        "load": cell.load,
        "direction": "up",
    }


def _measured(runs: Sequence[Run], ceiling: float | None) -> dict[str, Any]:
    rate = known(runs, lambda run: run.rate)
    return {
        "files": runs[0].files,
        "bytes": runs[0].size,
        "seconds": _spread([run.seconds for run in runs]),
        "bytes_per_s": _spread([run.rate for run in runs]),
        "files_per_s": _spread([run.files_rate for run in runs]),
        "wire_bytes": _or_null(known(runs, lambda run: run.wire_bytes)),
        "cpu_here_s": _spread([run.cpu_here for run in runs]),
        "cpu_there_s": _or_null(known(runs, lambda run: run.cpu_there)),
        "share_of_ceiling": rate.median / ceiling if rate and ceiling else None,
        "runs": [asdict(run) for run in runs],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return _or_null(Spread.of(values)) or {}


def _or_null(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread else None
