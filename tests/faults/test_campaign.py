"""A short campaign in the suite; a long one by `tests/faults/run`, through the environment.

NTT_FAULTS_ROUNDS, NTT_FAULTS_SEED, NTT_FAULTS_STRATEGY say how long, which, and by which strategy.
`packs` has a bucket, `packs-ssh` and `packs-disk` have the layout `packs` by a receiver; `sealed`,
`sealed-ssh` and `sealed-disk` are the same with what is sealed in most of the rounds.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from unittest.mock import MagicMock

import pytest

from tests.faults.campaign import ENOUGH_ROUNDS, Tally, campaign
from tests.faults.environment import FaultEnvironment

ROUNDS = int(os.environ.get("NTT_FAULTS_ROUNDS", "1"))
SEED = int(os.environ.get("NTT_FAULTS_SEED", "11"))
# A few rounds of `sealed` meet packs that are not sealed, too.
STRATEGY = os.environ.get("NTT_FAULTS_STRATEGY", "stream,tar,sealed,sealed-ssh")
ALL = "stream,tar,packs,sealed,packs-ssh,sealed-ssh,packs-disk,sealed-disk"
STRATEGIES = (ALL if STRATEGY == "all" else STRATEGY).split(",")


def _told(strategy: str) -> object:
    """Of those that are not chosen, most are for the long tests."""
    by_default = "NTT_FAULTS_STRATEGY" not in os.environ
    long = by_default and strategy != "stream"
    return pytest.param(strategy, marks=pytest.mark.long if long else ())


@pytest.mark.parametrize("environment", [_told(one) for one in STRATEGIES], indirect=True)
def test_no_fault_breaks_an_invariant(environment: FaultEnvironment) -> None:
    tally = Tally()
    campaign(environment, SEED, ROUNDS, tally, partial(print, flush=True))
    assert tally.problems() == [], (
        f"to see it again: tests/faults/run --rounds {tally.rounds} --seed {SEED}"
        f" --strategy {environment.strategy}"
    )


def test_a_campaign_in_which_something_never_happened_says_so() -> None:
    tally = Tally(rounds=ENOUGH_ROUNDS, faults=Counter({"kill worker": 9}), moved=240)
    tally.possible = ["kill worker", "cut link"]
    tally.snapshots.update({"take": 3, "take killed": 2})
    assert tally.problems() == [
        "no blob was moved under fire",
        "no snapshot was restored",
        "no dump was an increment of a series",
    ]
    never = tally.lines()[-1]
    assert never.startswith("  never: cut link, snapshot take struck, snapshot forget, ")
    assert never.endswith(" dump plain, dump full of a series, dump increment")


def test_a_campaign_that_is_interrupted_says_what_it_did() -> None:
    environment, said = MagicMock(strategy="packs", target="bucket"), list[str]()
    environment.begin_round.side_effect = KeyboardInterrupt
    environment.events.return_value = []
    with pytest.raises(KeyboardInterrupt):
        campaign(environment, 1, 3, Tally(), said.append)
    assert said[-1].startswith("0 rounds in ")
