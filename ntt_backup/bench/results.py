"""Figures are values with their median, least and greatest, and the machine they are from."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ntt_backup import __version__
from ntt_backup.process.spawn import version_of

MEGA: Final = 1e6
SCHEMA: Final = 2
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
        """Returns the median for people, where the values are bytes a second."""
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


def describe_machine() -> dict[str, Any]:
    """Returns kernel, CPU, memory, load, and versions of what takes part, as JSON values."""
    return {
        "kernel": platform.release(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {
            "ntt_backup": __version__,
            "python": platform.python_version(),
            "ssh": version_of(["ssh", "-V"]),
            "tar": version_of(["tar", "--version"]),
        },
    }


def now() -> str:
    """Returns the moment, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _field(file: str, name: str) -> str:
    """Returns a value of one of the kernel's `name: value` files; "" where there is none."""
    for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
