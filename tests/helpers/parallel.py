"""Tests side by side: how many processes, where their files lie, and what they do in turn.

Most of what a test does is to start programs and to wait for the disk. So the whole suite is spread
over processes (pytest-xdist), each with a PostgreSQL and an sshd of its own, and its files lie in
memory where there is room: every batch ends with a sync, and a machine's disk may be slow or busy.
What pytest and its plugins say themselves wins: -n 0, --basetemp, PYTEST_DEBUG_TEMPROOT.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_ROOM = 4 * 1024**3
# Two of these keep a processor busy; each takes a few hundred megabytes.
_PER_PROCESSOR = 2
_MOST = 8
# Below the range the kernel gives to outgoing connections, see `ports`.
_PORTS = range(20_000, 32_000)


def processes(config: pytest.Config) -> int:
    """What -n auto means; 0, in this process, for a few tests and where nothing is captured."""
    few = config.option.keyword or not any(Path(place).is_dir() for place in config.args)
    if few or config.option.capture == "no":
        return 0
    return min(_MOST, _PER_PROCESSOR * len(os.sched_getaffinity(0)))


def memory() -> Path | None:
    """A directory in memory with room for all the tests' files, where programs may be run."""
    try:
        system = os.statvfs(_MEMORY)
        available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    free = min(system.f_bavail * system.f_frsize, int(available[1]) * 1024 if available else 0)
    usable = os.access(_MEMORY, os.W_OK | os.X_OK) and not system.f_flag & os.ST_NOEXEC
    return _MEMORY if usable and free >= _ROOM else None


def ports() -> range:
    """Ports of 127.0.0.1 for this process alone: a server may leave one and take it again."""
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = max(ours + 1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    size = len(_PORTS) // count
    return _PORTS[ours * size : (ours + 1) * size]


@contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """One process of all at a time; file is any that is there."""
    with file.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
