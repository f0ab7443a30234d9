"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def has_ended(pid: int) -> bool:
    """Returns whether a process has ended, though perhaps nobody has reaped it."""
    try:
        return state(pid) == "Z"
    except OSError:
        return True


def state(pid: int) -> str:
    """Returns the letter of the state of a process, such as T for a stopped one. Raises OSError."""
    return _stat(Path(f"/proc/{pid}"))[0]


def name(pid: int) -> str:
    """Returns the name of a process; nothing where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def children(pid: int) -> list[int]:
    """Returns the processes that pid has started itself."""
    return _by_parent().get(pid, [])


def descendants(pid: int) -> list[int]:
    """Returns the processes that pid has started, and those that they have."""
    return [*parents(pid)]


def parents(pid: int) -> dict[int, int]:
    """Returns the processes of `descendants`, each with the process that has started it."""
    by_parent = _by_parent()
    found: dict[int, int] = {}
    todo = [pid]
    while todo:
        above = todo.pop()
        below = by_parent.get(above, [])
        found |= dict.fromkeys(below, above)
        todo += below
    return found


def kill(pid: int, signum: signal.Signals) -> None:
    """Sends a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.setdefault(int(_stat(entry)[1]), []).append(int(entry.name))
    return found


def _stat(entry: Path) -> list[str]:
    """Returns what /proc says of a process behind its name, which may hold anything."""
    return (entry / "stat").read_text().rpartition(")")[2].split()
