"""Plays one kind of mutated input: `python -m tests.fuzz WHAT --rounds N --seed S`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.fuzz import receiver_sessions

# Each takes a directory of its own, a seed and a number of rounds, and yields what was found.
KINDS: Mapping[str, Callable[[Path, int, int], Iterator[str]]] = {
    "receiver": receiver_sessions.play,
}
# What a process may take, its Python and the libraries included.
MOST_MEGABYTES = 100


def _peak_megabytes() -> int:
    """Returns the most memory that this process has used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(peak) // 1024


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
    peak = _peak_megabytes()
    print(f"{asked.what}: {asked.rounds} rounds, seed {asked.seed}: {found} found, {peak} MB")
    return int(found > 0 or peak > MOST_MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
