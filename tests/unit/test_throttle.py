"""A limit is kept by several processes together, and whoever is killed takes nothing with him."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from ntt_backup.client.throttle import Limit, Pace, alone
from tests.environment import wait_until

RATE = 2e6
SECONDS = 1.0


def send(pace: Pace, until: float) -> None:
    while time.monotonic() < until:
        amount = pace.allowance()
        pace.spend(amount)
        if not amount:
            time.sleep(pace.delay())


def in_copies(limit: Limit, senders: int, until: float) -> list[int]:
    """PIDs of copies of this process that send as much as they may until then."""
    pids = []
    for index in range(senders):
        pid = os.fork()
        if pid == 0:
            try:
                os.closerange(3, 256)
                send(limit.sender(index), until)
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def sent(limit: Limit) -> int:
    return limit.sender(0)._sent


@pytest.mark.parametrize("senders", [1, 4])
def test_copies_of_a_process_share_a_limit(senders: int) -> None:
    limit = Limit(RATE, 4)
    began = time.monotonic()
    for pid in in_copies(limit, senders, began + SECONDS):
        os.waitpid(pid, 0)
    assert sent(limit) <= RATE * (time.monotonic() - began) + RATE
    assert sent(limit) > RATE * SECONDS / 2


def test_all_senders_see_the_same_whatever_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one that sees more goes on sending while the others wait."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    chance = random.Random(7)
    limit = Limit(RATE, 3)
    senders = [limit.sender(index) for index in range(3)]
    for _ in range(1000):
        now += chance.choice([0.0, 0.001, 0.01, 1.0])
        one = chance.choice(senders)
        one.spend(one.allowance())
        assert len({sender.allowance() for sender in senders}) == 1


def test_one_that_is_killed_holds_nobody_up_and_its_successor_counts_on() -> None:
    limit = Limit(RATE, 2)
    (victim,) = in_copies(limit, 1, time.monotonic() + 60)
    wait_until(lambda: sent(limit), "something from it")
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    before = sent(limit)
    began = time.monotonic()
    for pid in in_copies(limit, 2, began + SECONDS):
        os.waitpid(pid, 0)
    assert sent(limit) > before + RATE * SECONDS / 2
    assert sent(limit) - before <= RATE * (time.monotonic() - began) + RATE


def test_no_limit_is_no_pace() -> None:
    assert alone(None) is None
