"""What a killed benchmark leaves behind, and how the next one removes it.

A run fills memory with stores, starts servers and makes network namespaces. Whoever is stopped
cleans up himself; `kill -9` leaves all of it. So everything belongs to a numbered *slot*: a lock
that ends with the process that holds it, and a file that says where its directory is. A slot that
is free, yet not empty, was left by somebody killed, and whoever comes next empties it.

Processes are known for ours by the slot's directory in their command line: a pid alone may be
somebody else's by now.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.processes import descendants, has_ended, kill

_SLOTS = 32
_PREFIX = "ntt-bench-"
_TERM_SECONDS = 5.0
_NAMESPACES = Path("/run/netns")


class NoSlot(Exception):
    """No slot can be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A number that nobody else on this machine has now, and an empty directory of our own.

    Other users may pass through home, not list it.
    """

    number: int
    home: Path

    @property
    def namespace(self) -> str:
        """A network namespace of this name is removed with the slot."""
        return f"{_PREFIX}{self.number}"

    @property
    def network(self) -> Path:
        """A file that is there once the namespace and the interface may be."""
        return self.home / "network"

    @property
    def veth(self) -> str:
        """A network interface of this name is removed with the slot."""
        return f"nttbench{self.number}"


@contextmanager
def slot(directory: Path) -> Iterator[Slot]:
    """Take a slot whose home lies below directory; empty it, and all that is left, at the end.

    First sweeps all that killed ones have left. Raises NoSlot.
    """
    with ExitStack() as stack:
        record = _take(stack)
        number = int(record.suffix.removeprefix("."))
        stack.callback(_sweep, record)
        home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory)).resolve()
        record.write_text(str(home))
        home.chmod(0o711)
        yield Slot(number, home)


def _take(stack: ExitStack) -> Path:
    """The record of a slot that is ours until stack is closed; all free ones are swept."""
    taken = None
    for number in range(_SLOTS):
        record = _records() / f"slot.{number}"
        lock = os.open(record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _sweep(record)
        if taken is None:
            stack.callback(os.close, lock)
            taken = record
        else:
            os.close(lock)
    if taken is None:
        raise NoSlot(f"all {_SLOTS} slots for benchmarks are in use")
    return taken


def _records() -> Path:
    """The directory of the locks: one a user, wherever the slots' homes are."""
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise NoSlot(f"{path} belongs to somebody else")
    return path


def _sweep(record: Path) -> None:
    """Remove what belongs to the slot. The caller holds its lock."""
    text = record.read_text()
    if not text:
        return
    home, owner = Path(text), Slot(int(record.suffix.removeprefix(".")), Path(text))
    for signum in (signal.SIGTERM, signal.SIGKILL):
        _end(_of(home), signum)
    # Who has another TMPDIR has other records, and the same numbers.
    if owner.network.exists() and (_NAMESPACES / owner.namespace).exists():
        for argv in (
            ["ip", "link", "delete", owner.veth],
            ["ip", "netns", "delete", owner.namespace],
        ):
            subprocess.run(argv, capture_output=True, check=False)
    shutil.rmtree(home, ignore_errors=True)
    record.write_text("")


def _end(pids: list[int], signum: signal.Signals) -> None:
    """Send the signal, and wait a while for those that take it as an end."""
    for pid in pids:
        kill(pid, signum)
    deadline = time.monotonic() + _TERM_SECONDS
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _of(home: Path) -> list[int]:
    """Our processes with home, or something below it, in their command line."""
    mark = os.fsencode(home)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # sshd makes one word of its whole command line, and of more.
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").split()
            ours = any(word == mark or word.startswith(mark + b"/") for word in words)
            if ours and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and all that it has started, at once."""
    for pid in [process.pid, *descendants(process.pid)]:
        kill(pid, signal.SIGKILL)
    process.wait()
