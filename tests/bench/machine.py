"""The machine and the programs: figures without them cannot be compared with any others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ntt_backup.bench.results import describe_machine as describe
from ntt_backup.bench.results import now
from tests.bench.contender import Contender


def describe_machine(contenders: Iterable[Contender], directory: Path) -> dict[str, Any]:
    """Versions, kernel, CPU, memory, load, and the file system that everything lies on."""
    machine = describe()
    theirs = {one.name: one.version() for one in contenders if one.version()}
    return {
        "started": now(),
        **machine,
        "directory": str(directory),
        "file_system": _file_system(directory),
        "versions": {**machine["versions"], **theirs},
    }


def _file_system(directory: Path) -> str:
    argv = ["stat", "--file-system", "--format=%T", str(directory)]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
