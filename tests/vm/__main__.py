"""Plays faults of virtual machines: `python -m tests.vm --rounds 200 --seed 1`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from tests.helpers.parallel import memory
from tests.vm.campaign import FAULTS, ROUNDS_AN_ERA, Campaign, default_work
from tests.vm.image import image, lacking
from tests.vm.pair import Pair


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vm")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="also the first file system and layout")
    parser.add_argument("--era", type=int, default=ROUNDS_AN_ERA, help="rounds with the same disks")
    parser.add_argument(
        "--work", type=Path, default=default_work(), help="where images are kept, 3 GB"
    )
    parser.add_argument(
        "--faults", default="power", help=f"in turns: all, or of {','.join(FAULTS)} (power)"
    )
    parser.add_argument("--lying", action="store_true", help="disks ignore flushes: must be found")
    chosen = parser.parse_args()
    faults = FAULTS if chosen.faults == "all" else tuple(chosen.faults.split(","))
    if unknown := {*faults} - {*FAULTS}:
        parser.error(f"no fault: {', '.join(sorted(unknown))}")
    if missing := lacking():
        sys.exit(f"guests cannot run: {missing}")
    made = image(chosen.work)
    with (
        tempfile.TemporaryDirectory(prefix="ntt-vm-", dir=memory()) as directory,
        closing(Pair(made, Path(directory), chosen.work)) as pair,
    ):
        say = partial(print, flush=True)
        campaign = Campaign(pair, chosen.seed, say, faults=faults, lying=chosen.lying)
        try:
            campaign.play(chosen.rounds, chosen.era)
        finally:
            print("\n".join(campaign.tally.lines()), flush=True)
    sys.exit(bool(campaign.tally.violations) != chosen.lying)


if __name__ == "__main__":
    main()
