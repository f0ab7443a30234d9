"""What was measured: samples, medians, and the report that JSON, tables and words are made of.

A median says little without the least and the greatest, and a figure says little without the
machine, the programs and the link that it was taken on; so neither is ever handed on without.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MEGA: Final = 1e6
SCHEMA: Final = 1
LEAST_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, least and greatest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there are no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


@dataclass(slots=True)
class Figure:
    """One thing that was measured: what it is called, and its values, one a run.

    unit: of the values. labels: what tells it from the others of its report, for machines.
    """

    name: str
    unit: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.values)

    def json(self) -> dict[str, Any]:
        """As plain values."""
        spread = self.spread
        return {
            "name": self.name,
            "unit": self.unit,
            **self.labels,
            **(asdict(spread) if spread else {}),
            "runs": list(self.values),
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """Where it was measured: the machine and its programs, the remote, and how it was asked."""

    started: str
    machine: Mapping[str, Any]
    remote: Mapping[str, Any]
    options: Mapping[str, Any]


def report_json(
    bench: str,
    setting: Setting,
    *,
    took_s: float,
    figures: Sequence[Mapping[str, Any]],
    verdict: Sequence[str],
    skipped: Mapping[str, str],
    **more: Mapping[str, Any],
) -> dict[str, Any]:
    """A whole report as plain JSON values. Rates are in bytes a second, times in seconds.

    skipped: what was not measured, and why not. more: what only this bench has.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        **asdict(setting),
        "took_s": round(took_s, 3),
        **{key: _plain(value) for key, value in more.items()},
        "figures": [_plain(figure) for figure in figures],
        "skipped": dict(skipped),
        "verdict": list(verdict),
    }


def _plain(value: Any) -> Any:
    """Floats with as many digits as mean something."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
