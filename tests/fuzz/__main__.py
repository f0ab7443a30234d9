"""Plays one kind of mutated input: `python -m tests.fuzz WHAT --rounds N --seed S`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.fuzz import manifests, packs, receiver_sessions
from tests.fuzz.bounded import MOST_BYTES, memory

# Each takes a directory of its own, a seed and a number of rounds, and yields what was found.
KINDS: Mapping[str, Callable[[Path, int, int], Iterator[str]]] = {
    "manifests": manifests.play,
    "packs": packs.play,
    "receiver": receiver_sessions.play,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as directory:
        for finding in KINDS[asked.what](Path(directory), asked.seed, asked.rounds):
            print(finding, flush=True)
            found += 1
    peak = memory("VmHWM") // 1_000_000
    print(f"{asked.what}: {asked.rounds} rounds, seed {asked.seed}: {found} found, {peak} MB")
    return int(found > 0 or peak > MOST_BYTES // 1_000_000)


if __name__ == "__main__":
    sys.exit(main())
