"""CPU time of both ends, by a cgroup: noise that doubles a wall time hardly moves it.

The runner enters a cgroup of its own before it starts PostgreSQL and sshd, so that all they start,
and all that a contender starts, is counted: also what has ended meanwhile and whatever left its
parent. The runner's own time is taken off.
"""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_SAMPLE_SECONDS = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


class NoCgroup(Exception):
    """CPU time cannot be counted; the text says why."""


class Share(NamedTuple):
    """What processes of one name took, in seconds of CPU."""

    user: float
    system: float


class Cpu:
    """A cgroup, and the time of all that is in it but this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def seconds(self) -> float:
        """All that was used until now."""
        with suppress(FileNotFoundError):
            used = int((self._directory / "cpuacct.usage").read_text()) / 1e9
            return used - _own()
        used = int((self._directory / "cpu.stat").read_text().split()[1]) / 1e6
        return used - _own()

    @contextmanager
    def shares(self) -> Iterator[dict[str, Share]]:
        """Gives what is filled, in the end, with the shares of the processes, by their names.

        They are looked at again and again, so what a process does in its last milliseconds is not
        seen: the sum is a little less than `seconds`.
        """
        found: dict[str, Share] = {}
        first = self._processes()
        last = dict(first)
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_SAMPLE_SECONDS):
                last.update(self._processes())

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield found
        finally:
            ended.set()
            watcher.join()
            last.update(self._processes())
            for pid, (name, used) in last.items():
                before, so_far = Share(0, 0), found.get(name, Share(0, 0))
                if pid in first:
                    _, before = first[pid]
                found[name] = Share(
                    so_far.user + used.user - before.user,
                    so_far.system + used.system - before.system,
                )

    def _processes(self) -> dict[int, tuple[str, Share]]:
        """Each process by its pid: its name, without a number as in `ntt-worker 0`."""
        found = {}
        for pid in map(int, (self._directory / "cgroup.procs").read_text().split()):
            with suppress(OSError):
                head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                user, system = (int(word) / _TICKS for word in rest.split()[11:13])
                name = re.sub(r" \d+$", "", head.partition("(")[2])
                found[pid] = name, Share(user, system)
        found.pop(os.getpid(), None)
        return found


@contextmanager
def counted() -> Iterator[Cpu]:
    """Puts this process, and all that it starts, into a cgroup that goes in the end. Raises
    NoCgroup.
    """
    why = "no hierarchy of cgroups that counts CPU time is mounted"
    for parent in _groups():
        directory = parent / f"ntt-bench-{os.getpid()}"
        try:
            directory.mkdir()
            cpu = Cpu(directory)
            cpu.seconds()
            _move(os.getpid(), directory)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}"
            with suppress(OSError):
                directory.rmdir()
            continue
        try:
            yield cpu
        finally:
            _move(os.getpid(), parent)
            with suppress(OSError):  # Something that was started has not ended.
                directory.rmdir()
        return
    raise NoCgroup(why)


def _groups() -> Iterator[Path]:
    """The groups that this process is in, of hierarchies that count CPU time."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for _, point, kind, options, *_ in mounts:
            if (kind == "cgroup2" and not controllers) or (
                kind == "cgroup"
                and "cpuacct" in options.split(",")
                and "cpuacct" in controllers.split(",")
            ):
                yield Path(point) / path.lstrip("/")


def _move(pid: int, directory: Path) -> None:
    (directory / "cgroup.procs").write_text(str(pid))


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
