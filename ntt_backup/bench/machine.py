"""The machine and the programs: figures without them cannot be compared with any others."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ntt_backup import __version__
from ntt_backup.process.pipeline import version_of


def describe() -> dict[str, Any]:
    """Kernel, CPU, memory, load, and versions of what takes part. JSON values."""
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
    """The moment, RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _field(file: str, name: str) -> str:
    """A value of one of the kernel's `name: value` files; "" where there is none."""
    for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
