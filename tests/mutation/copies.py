"""Copies of the tree, each with one mutant at a time, and what tests say of it."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.reach import REPORTS, Reach, add_notes, reach_of

ROOT: Final = Path(__file__).parents[2]
# Each run of tests is a fork of a process that has loaded what takes long.
_FORKS: Final = multiprocessing.get_context("forkserver")
_LOADED: Final = (
    "asyncio",
    "blake3",
    "botocore.session",
    "hypothesis.strategies",
    "psycopg",
    "pytest",
)
_TESTS: Final = ("tests/unit", "tests/integration", "tests/contract", "tests/acceptance")
# Seconds that a test waits for a condition, which it does in vain where a mutant is.
_PATIENCE: Final = "20"
_COPIED: Final = ("ntt_backup", "tests", "docs", "systemd", "bin", "pyproject.toml", "README.md")
# Without parameters, whose text may be anything.
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", re.MULTILINE)
_FORKS.set_forkserver_preload([*_LOADED])


class Copy:
    """A copy of the tree, in which one mutant lives at a time."""

    def __init__(self, root: Path, seconds: float) -> None:
        self._root = root
        self._seconds = seconds
        self._process: ForkServerProcess | None = None
        root.mkdir()
        # Some tests run what has no more rights than any other user.
        root.parent.chmod(0o755)
        for name in _COPIED:
            one = ROOT / name
            if one.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(one, root / name, ignore=ignored)
            else:
                shutil.copy2(one, root / name)
        (root / ".venv").symlink_to(ROOT / ".venv")

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self._root / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)

    def failures(self, tests: Sequence[str], deselected: Sequence[str] = ()) -> list[str] | None:
        """Returns the first test that fails; none where all pass; None where they take too long."""
        argv = ["-x", "-q", "-n0", "-p", "no:cacheprovider", f"--timeout={self._seconds:.0f}"]
        argv += ["--tb=no", *tests, *(f"--deselect={one}" for one in deselected)]
        out = self._root / "said"
        self._process = process = _FORKS.Process(target=_run_tests, args=(self._root, argv, out))
        process.start()
        try:
            process.join(self._seconds)
        finally:
            self.end()
        said = out.read_text(errors="replace")
        if process.exitcode is None or process.exitcode < 0:
            return None
        if process.exitcode in (0, 5):
            return []
        if not (failed := _FAILED.findall(said)):
            raise RuntimeError(f"pytest has ended with {process.exitcode}:\n{said[-2000:]}")
        return failed

    def has(self, test: str) -> bool:
        """Returns whether there is still a test of that name."""
        module, *_, name = test.split("::")
        path = self._root / module
        return path.exists() and f"def {name}(" in path.read_text()

    def end(self) -> None:
        """Ends the tests that run, and what they have started."""
        if self._process is not None and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process = None

    def reach(self, packages: Sequence[str], jobs: int) -> Reach:
        """Returns which tests reach which mutants. The copy is of no further use."""
        hits, reports = self._root / "hits", self._root / "reports"
        for one in hits, reports:
            one.touch()
            one.chmod(0o666)
        sites = add_notes(self._root, packages, hits)
        argv = [sys.executable, "-m", "pytest", "-q", f"-n{jobs}", "-p", "no:cacheprovider"]
        argv += ["-p", "tests.mutation.reach", "--tb=no", "--timeout=300", *_TESTS]
        environment = {**os.environ, "PYTHONPATH": str(self._root), REPORTS: str(reports)}
        # What the notes make fail is judged where it has found something.
        subprocess.run(argv, cwd=self._root, env=environment, stdin=subprocess.DEVNULL, check=False)
        if not hits.stat().st_size:
            raise SystemExit("no test reaches anything: see what pytest says above")
        return reach_of(sites, hits, reports)


def _run_tests(root: Path, argv: list[str], out: Path) -> None:
    """Runs pytest in a copy, in a process group of its own, before the program is loaded."""
    os.setsid()
    os.chdir(root)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    # Bytecode is kept by second and size: two mutants in one second may have one size.
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["NTT_TEST_PATIENCE"] = _PATIENCE
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tests", "ntt_backup"):
            del sys.modules[name]
    sys.path.insert(0, str(root))
    code = pytest.main(argv)
    sys.stdout.flush()
    os._exit(code)
