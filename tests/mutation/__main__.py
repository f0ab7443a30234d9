"""Changes modules of the program at random, and tells which changes no test notices."""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.reach import REPORTS, Reach, add_notes, load, reach_of, save, tests_for

ROOT: Final = Path(__file__).parents[2]
ACCEPTED: Final = Path(__file__).parent / "accepted.txt"
PACKAGES: Final = "receiver blobdir wire pack dump snapshot upload catalog"
REACH: Final = ROOT / ".mutation/reach.json"
_TESTS: Final = ("tests/unit", "tests/integration", "tests/contract", "tests/acceptance")
# Seconds that a test waits for a condition, which it does in vain where a mutant is.
_PATIENCE: Final = "20"
_COPIED: Final = ("ntt_backup", "tests", "docs", "systemd", "bin", "pyproject.toml", "README.md")
# Without parameters, whose text may be anything.
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", re.MULTILINE)


class Copy:
    """A copy of the tree, in which one mutant lives at a time."""

    def __init__(self, root: Path, seconds: float) -> None:
        self._root = root
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
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
        argv = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
        argv += [f"--timeout={self._seconds:.0f}", "--tb=no", *tests]
        argv += [f"--deselect={one}" for one in deselected]
        # Bytecode is kept by second and size: two mutants in one second may have one size.
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NTT_TEST_PATIENCE": _PATIENCE,
        }
        with subprocess.Popen(
            argv,
            cwd=self._root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            self._process = process
            try:
                said, _ = process.communicate(timeout=self._seconds)
            except subprocess.TimeoutExpired:
                said = ""
            finally:
                self.end()
        if not said:
            return None
        if process.returncode in (0, 5):
            return []
        if not (failed := _FAILED.findall(said)):
            raise RuntimeError(f"pytest has ended with {process.returncode}:\n{said[-2000:]}")
        return failed

    def has(self, test: str) -> bool:
        """Returns whether there is still a test of that name."""
        module, *_, name = test.split("::")
        path = self._root / module
        return path.exists() and f"def {name}(" in path.read_text()

    def end(self) -> None:
        """Ends the tests that run, and what they have started."""
        if self._process is not None:
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
        return reach_of(sites, hits, reports)


class Judge:
    """Tells what became of mutants. A test that fails without any change proves nothing."""

    def __init__(self, seconds: float, most: float, reach: Reach) -> None:
        self._seconds = seconds
        self._most = most
        self._reach = reach
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        self._sound: dict[str, bool] = {}

    @contextmanager
    def copies(self, count: int) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="ntt-mutation-") as scratch:
            copies = [Copy(Path(scratch) / str(number), self._seconds) for number in range(count)]
            for copy in copies:
                self._copies.put(copy)
            try:
                yield
            finally:
                for copy in copies:
                    copy.end()

    def verdict(self, mutant: Mutant) -> str:
        """Returns "killed by TEST", "too slow" or "survived"."""
        copy = self._copies.get()
        try:
            tests = [one for one in tests_for(mutant, self._reach, self._most) if copy.has(one)]
            if not tests:
                return "survived, and no test reaches it"
            while True:
                unsound = [one for one, sound in self._sound.items() if not sound]
                with copy.changed(mutant):
                    found = copy.failures(tests, unsound)
                if found is None:
                    return "too slow"
                if not found:
                    return "survived"
                (test, *_) = found
                if test not in self._sound:
                    self._sound[test] = copy.failures([test]) == []
                if self._sound.get(test, True):
                    return f"killed by {test}"
        finally:
            self._copies.put(copy)


def drawn(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Returns mutants of the packages, as many of each kind as there are."""
    by_kind = defaultdict[str, list[Mutant]](list)
    for package in packages:
        for file in sorted((ROOT / "ntt_backup" / package).rglob("*.py")):
            for one in mutants(file.relative_to(ROOT), file.read_text()):
                by_kind[one.kind].append(one)
    chance = random.Random(seed)
    for some in by_kind.values():
        chance.shuffle(some)
    found: list[Mutant] = []
    while len(found) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            found += [by_kind[kind].pop()] if by_kind[kind] else []
    return found[:count]


def accepted() -> dict[tuple[str, str, str], str]:
    """Returns the reasons of mutants that no test can or need notice."""
    lines = ACCEPTED.read_text().splitlines()
    parts = (line.split(" | ", 3) for line in lines if line and not line.startswith("#"))
    return {(path, kind, text): reason for path, kind, reason, text in parts}


def stale(reasons: Iterable[tuple[str, str, str]]) -> list[str]:
    """Returns the accepted mutants that the program no longer has."""
    modules = {path for path, *_ in reasons}
    there = {
        one.key
        for path in modules
        if (ROOT / path).exists()
        for one in mutants(Path(path), (ROOT / path).read_text())
    }
    return [" | ".join(key) for key in reasons if key not in there]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/mutation/run", description=__doc__)
    parser.add_argument("packages", nargs="*", help=f"packages of ntt_backup; default: {PACKAGES}")
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants at a time (1)")
    parser.add_argument("--seconds", type=float, default=180, help="for one mutant's tests (180)")
    parser.add_argument("--most", type=float, default=60, help="seconds of tests a mutant (60)")
    parser.add_argument("--renew", action="store_true", help="look again which tests reach what")
    parser.add_argument("--list", action="store_true", help="only show what was drawn")
    given = parser.parse_args()
    some = drawn(given.packages or PACKAGES.split(), given.count, given.seed)
    if given.list:
        print(*some, sep="\n")
        return 0
    reasons, figures, kinds = accepted(), Counter[str](), defaultdict[str, Counter[str]](Counter)
    survivors = list[Mutant]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # The copies are removed.
    if given.renew or not REACH.exists():
        with tempfile.TemporaryDirectory(prefix="ntt-mutation-") as scratch:
            save(Copy(Path(scratch) / "0", 0).reach(PACKAGES.split(), given.jobs), REACH)
    judge = Judge(given.seconds, given.most, load(REACH))
    with ThreadPoolExecutor(given.jobs) as pool, judge.copies(given.jobs):
        new = [one for one in some if one.key not in reasons]
        for one, said in zip(new, pool.map(judge.verdict, new), strict=True):
            outcome = said.split()[0].rstrip(",")
            figures[outcome] += 1
            kinds[one.kind][outcome] += 1
            survivors += [one] if outcome == "survived" else []
            print(time.strftime("%H:%M:%S"), one, f"-> {said}", flush=True)
    known = sum(one.key in reasons for one in some)
    shown = map(str, survivors) if survivors else ["none"]
    print("\nsurvived, and nobody has given a reason:", *shown, sep="\n  ")
    print("\naccepted, and not there any more:", *stale(reasons) or ["none"], sep="\n  ")
    print(f"\n{'kind':20} {'killed':>6} {'slow':>6} {'survived':>8}")
    for kind, counted in sorted(kinds.items()):
        print(f"{kind:20} {counted['killed']:6} {counted['too']:6} {counted['survived']:8}")
    total = sum(figures.values())
    share = 100 * (total - figures["survived"]) / max(total, 1)
    print(f"{share:.0f} % of {total} noticed; {known} more are accepted as they are")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
