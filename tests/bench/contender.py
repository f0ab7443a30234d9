"""What every contender is given, and what it must show: a job, its clock, and the comparison.

A job is: the store's blobs are not at the remote; get them there. The clock covers one command from
its start to its end, so whoever is slow to start pays for it. Afterwards the result is compared:
whoever is fast because something is missing gets no figure.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.bench.lab import SHAPES, Lab, Link
from tests.bench.stores import Store
from tests.helpers.postgres_server import Postgres
from tests.helpers.processes import descendants, kill

PROJECT = Path(__file__).resolve().parents[2]
_SAID = 2000
_CHUNK = 1 << 20


class Failed(Exception):
    """The contender ended with an error, did not end, or left something out."""


@dataclass
class Job:
    """One run. scratch is an empty local directory, destination an empty one of the remote.

    limit: seconds until it is given up. thorough: read back what keeps files in a form of its own.
    local: the remote is the destination as a directory of this machine, without ssh.
    watch: what is done with the pid of a command while it runs. server: the pid of one that each
    command needs.
    """

    store: Store
    lab: Lab
    scratch: Path
    destination: Path
    postgres: Postgres
    limit: float
    thorough: bool
    workers: int | None = None
    local: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    watch: Callable[[int], AbstractContextManager[None]] | None = None
    server: int | None = None

    def call(self, argv: Sequence[str], *, cwd: Path | None = None) -> float:
        """Run a command to its end; the seconds it took. Raises Failed."""
        return self._run(argv, cwd, self.scratch / "stdout")

    def ask(self, argv: Sequence[str], *, cwd: Path | None = None) -> str:
        """What a command prints. Raises Failed."""
        answer = self.scratch / "answer"
        self._run(argv, cwd, answer)
        return answer.read_text()

    def _run(self, argv: Sequence[str], cwd: Path | None, stdout: Path) -> float:
        complaints = self.scratch / "stderr"
        with stdout.open("wb") as output, complaints.open("wb") as errors:
            started = time.perf_counter()
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=_environment(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            watch = self.watch(process.pid) if self.watch is not None else nullcontext()
            try:
                with watch:
                    ends = _ends(process.pid, self.limit, self.server)
                seconds = time.perf_counter() - started
                if not ends:
                    raise Failed(f"not done after {seconds:.0f} s")
                code = process.wait()
            finally:
                if process.poll() is None:
                    for pid in [process.pid, *descendants(process.pid)]:
                        kill(pid, signal.SIGKILL)
                    process.wait()
        if code != 0:
            said = complaints.read_text(errors="replace").strip()[-_SAID:]
            raise Failed(f"{argv[0]} ended with {code}: {said}")
        return seconds


def _ends(pid: int, limit: float, server: int | None) -> bool:
    """Wait for the end of a child of ours, at most limit seconds, and no longer than the server
    lives; whether it came.

    Popen.wait with a limit looks every 50 ms only, which is a tenth of some figures.
    """
    with ExitStack() as stack:
        descriptors = []
        for one in (pid, server):
            if one is not None:
                descriptors.append(os.pidfd_open(one))
                stack.callback(os.close, descriptors[-1])
        return descriptors[0] in select.select(descriptors, [], [], limit)[0]


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would change a contender behind our back, and with own. A program that is
    installed has its bytecode, so ours may keep it.
    """
    foreign = (
        "PYTHONDONTWRITEBYTECODE",
        "NTT_",
        "AWS_",
        "PG",
        "RESTIC_",
        "BORG_",
        "KOPIA_",
        "RCLONE_",
        "RSYNC_",
        "TAR_OPTIONS",
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    return {**kept, **own}


class Contender(ABC):
    """One way to do a job. For each: `prepare`, `run`, `check`, and `finish` whatever happened."""

    name: str
    tools: tuple[str, ...] = ()
    version_argv: tuple[str, ...] = ()
    links: ClassVar[tuple[Link, ...]] = tuple(SHAPES)  # over which it is measured
    local: ClassVar[bool] = False  # whether it also stores in a directory of this machine

    def available(self) -> bool:
        """Whether this machine has what it needs."""
        return all(shutil.which(tool) for tool in self.tools)

    def version(self) -> str:
        """The first line of what it says about itself; "" where it says nothing."""
        if not self.version_argv:
            return ""
        argv = self.version_argv
        done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).partition("\n")[0].strip()

    def prepare(self, job: Job) -> None:  # noqa: B027  most have nothing to prepare
        """What a user has done long before. Not timed."""

    @abstractmethod
    def run(self, job: Job) -> float:
        """Do the job; seconds. Raises Failed."""

    def check(self, job: Job) -> None:
        """Raise Failed unless all of the store is at the remote, bit by bit the same."""
        compare(job.store, job.destination)

    def finish(self, job: Job) -> None:  # noqa: B027  nor to give back
        """Give back what is not in the job's directories. Called however the job ended."""


def compare(store: Store, copy: Path) -> None:
    """Raise Failed unless copy holds the files of the store, no others, and all are identical."""
    wanted, found = _files(store.root), _files(copy)
    if wanted != found:
        missing, extra = wanted - found, found - wanted
        raise Failed(f"{len(missing)} files are missing, {len(extra)} are too many")
    different = [name for name in wanted if not _same(f"{store.root}/{name}", f"{copy}/{name}")]
    if different:
        raise Failed(f"{len(different)} files differ, {min(different)} among them")


def _files(top: Path) -> set[str]:
    found: set[str] = set()
    todo = [""]
    while todo:
        prefix = todo.pop()
        with os.scandir(top / prefix) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    todo.append(f"{name}/")
                else:
                    found.add(name)
    return found


def _same(one: str, other: str) -> bool:
    with open(one, "rb", buffering=0) as first, open(other, "rb", buffering=0) as second:
        while (data := first.read(_CHUNK)) == second.read(_CHUNK):
            if not data:
                return True
        return False
