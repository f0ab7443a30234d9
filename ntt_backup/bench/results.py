"""Figures: values with their median, least and greatest, and what JSON says of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MEGA: Final = 1e6
SCHEMA: Final = 1
LEAST_ROUNDS: Final = 3
MARGIN: Final = 0.03


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, least and greatest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Returns None where there are no values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    def above(self, other: Spread) -> bool:
        """Tells whether this is more for certain: by a margin, and the runs do not overlap."""
        return self.median > other.median * (1 + MARGIN) and self.low > other.high

    @property
    def mb_per_s(self) -> str:
        """The median for people, where the values are bytes a second."""
        return f"{self.median / MEGA:.1f} MB/s"


@dataclass(slots=True)
class Figure:
    """A quantity that was measured: its name, and a value for each run.

    labels: what tells it from the other figures, for machines.
    """

    name: str
    unit: str
    labels: Mapping[str, Any] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)

    @property
    def spread(self) -> Spread | None:
        return Spread.of(self.values)

    def json(self) -> dict[str, Any]:
        """Returns it as plain values."""
        spread = asdict(self.spread) if self.spread else {}
        return {"name": self.name, "unit": self.unit, **self.labels, **spread, "runs": self.values}


def rounded(value: Any) -> Any:
    """Returns a JSON value with as many digits of its floats as mean something."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value
