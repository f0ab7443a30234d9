"""The machine and the programs: figures without them cannot be compared with any others.

Called by the runner.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.bench.contender import Contender


def describe_machine(contenders: Iterable[Contender], directory: Path) -> dict[str, Any]:
    """Versions, kernel, CPU, memory, load, and the file system that everything lies on."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "load": list(os.getloadavg()),
        "directory": str(directory),
        "file_system": _file_system(directory),
        "python": platform.python_version(),
        "versions": {one.name: one.version() for one in contenders if one.version()},
    }


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _file_system(directory: Path) -> str:
    argv = ["stat", "--file-system", "--format=%T", str(directory)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
