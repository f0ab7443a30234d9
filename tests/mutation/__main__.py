"""Changes modules of the program at random, and tells which changes no test notices."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutation.copies import ROOT, Copy
from tests.mutation.mutants import Mutant, mutants
from tests.mutation.reach import Reach, load, save, tests_for

ACCEPTED: Final = Path(__file__).parent / "accepted.txt"
PACKAGES: Final = "receiver blobdir wire pack dump snapshot upload catalog"
REACH: Final = ROOT / ".mutation/reach.json"


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
