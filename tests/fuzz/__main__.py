"""Plays one kind of mutated input: `python -m tests.fuzz WHAT --rounds N --seed S`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.fuzz.bounded import MOST_BYTES, memory

# The module of each kind, and the command that reads such input. Memory is that of a process which
# has loaded the command, and nothing of the other kinds.
KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "manifests": ("tests.fuzz.manifests", "ntt_backup.cli.commands.snapshot"),
    "packs": ("tests.fuzz.packs", "ntt_backup.cli.commands.pack"),
    "receiver": ("tests.fuzz.receiver_sessions", "ntt_backup.receiver.dispatcher"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    module, command = KINDS[asked.what]
    import_module(command)
    play = import_module(module).play
    found = 0
    with tempfile.TemporaryDirectory() as directory:
        for finding in play(Path(directory), asked.seed, asked.rounds):
            print(finding, flush=True)
            found += 1
    peak = memory("VmHWM") // 1_000_000
    print(f"{asked.what}: {asked.rounds} rounds, seed {asked.seed}: {found} found, {peak} MB")
    return int(found > 0 or peak > MOST_BYTES // 1_000_000)


if __name__ == "__main__":
    sys.exit(main())
