"""The fault campaign as a command: `tests/faults/run --rounds 200 --seed 7 --strategy both`.

It plays the test of the suite with other figures, and prints what was done. Exit status: 0 where
nothing that must hold was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/faults/run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each strategy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", choices=("stream", "tar", "both"), default="both")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        environ = {
            **os.environ,
            "NTT_FAULTS_ROUNDS": str(wanted.rounds),
            "NTT_FAULTS_SEED": str(wanted.seed),
            "NTT_FAULTS_STRATEGY": wanted.strategy,
            "NTT_FAULTS_REPORT": str(report),
        }
        test = Path(__file__).with_name("test_campaign.py")
        argv = [sys.executable, "-m", "pytest", str(test), "-n0", "-q", "--timeout=0"]
        status = subprocess.run(argv, env=environ, check=False).returncode
        figures: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(figures, indent=1) + "\n")
    for strategy, tally in figures.items():
        print("\n".join(_lines(strategy, tally)))
    return status


def _lines(strategy: str, tally: dict[str, Any]) -> list[str]:
    kinds = sorted({*tally["faults"], *tally["missed"]})
    return [
        f"\n{strategy}, seed {tally['seed']}: {tally['rounds']} rounds in"
        f" {tally['duration_s']:.0f} s, {sum(tally['faults'].values())} faults",
        *(f"  {tally['faults'].get(kind, 0):5} {kind}" for kind in kinds),
        *(f"      - {kind}: {why}" for kind, why in tally["unavailable"].items()),
        f"  runs: {', '.join(f'{count} {how}' for how, count in tally['endings'].items())}",
        f"  blobs: {tally['blobs']}, moved {tally['moved']} ({tally['bytes'] / 1e6:.1f} MB),"
        f" {tally['moved_under_fire']} of them under fire",
        f"  violations: {len(tally['violations'])}",
        *(f"    {one}" for one in tally["violations"]),
    ]


if __name__ == "__main__":
    sys.exit(main())
