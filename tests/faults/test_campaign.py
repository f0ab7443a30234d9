"""A short campaign in the suite; a long one by `tests/faults/run`, through the environment.

NTT_FAULTS_ROUNDS, NTT_FAULTS_SEED, NTT_FAULTS_STRATEGY say how long, which, and by which strategy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults.campaign import Tally, campaign
from tests.faults.environment import FaultEnvironment

ROUNDS = int(os.environ.get("NTT_FAULTS_ROUNDS", "2"))
SEED = int(os.environ.get("NTT_FAULTS_SEED", "11"))
STRATEGY = os.environ.get("NTT_FAULTS_STRATEGY", "both")
REPORT = os.environ.get("NTT_FAULTS_REPORT", "")
STRATEGIES = ["stream", "tar"] if STRATEGY == "both" else [STRATEGY]


@pytest.mark.parametrize("environment", STRATEGIES, indirect=True)
def test_no_fault_breaks_an_invariant(
    environment: FaultEnvironment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def say(line: str) -> None:
        if REPORT:
            with capsys.disabled():
                print(line, flush=True)

    tally = campaign(environment, SEED, ROUNDS, say)
    if REPORT:
        _report(environment.strategy, tally)
    assert sum(tally.faults.values()) > 0, "no fault was injected"
    assert tally.moved > 0
    assert tally.violations == [], (
        f"to see it again: tests/faults/run --rounds {tally.rounds} --seed {SEED}"
        f" --strategy {environment.strategy}"
    )


def _report(strategy: str, tally: Tally) -> None:
    path = Path(REPORT)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, strategy: {"seed": SEED, **vars(tally)}}, indent=1))
