"""Waits between attempts: how long they are, and when patience ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.client.backoff import Backoff, OutageClock

BACKOFF = Backoff(base=1, cap=60)
fractions = st.floats(0, 1, exclude_max=True)


def half() -> float:
    return 0.5


@given(st.floats(0.01, 60), st.floats(0.01, 3600), st.integers(1, 10_000), fractions)
def test_a_wait_is_above_zero_and_not_above_the_ceiling(
    base: float, cap: float, attempt: int, draw: float
) -> None:
    backoff = Backoff(base, max(base, cap))
    wait = backoff.wait(attempt, lambda: draw)
    assert 0 < wait <= min(backoff.cap, base * 2.0 ** min(attempt - 1, 1000))


@given(fractions)
def test_waits_double_until_the_cap(draw: float) -> None:
    waits = [BACKOFF.wait(attempt, lambda: draw) for attempt in range(1, 12)]
    assert waits[1] == pytest.approx(2 * waits[0])
    assert waits[5] == pytest.approx(32 * waits[0])
    assert waits[6:] == [waits[6]] * 5


def test_waits_differ_by_chance_so_that_workers_do_not_come_back_together() -> None:
    assert BACKOFF.wait(3, lambda: 0.1) != BACKOFF.wait(3, lambda: 0.9)


def test_an_outage_is_waited_out_up_to_the_limit() -> None:
    clock = OutageClock(BACKOFF, limit=100, random=half)
    assert clock.next_wait(1000.0) is not None
    assert clock.next_wait(1099.9) is not None
    assert clock.next_wait(1100.0) is None
    assert OutageClock(BACKOFF, limit=0, random=half).next_wait(5.0) is None


def test_an_outage_without_a_limit_is_waited_out_for_ever() -> None:
    clock = OutageClock(BACKOFF, limit=None, random=half)
    assert all(clock.next_wait(now) is not None for now in range(0, 10**9, 10**7))


def test_an_outage_after_an_answer_counts_from_its_own_start() -> None:
    clock = OutageClock(BACKOFF, limit=100, random=half)
    first = clock.next_wait(0.0)
    clock.next_wait(99.0)
    assert clock.attempt == 2
    clock.over()
    assert clock.attempt == 0
    assert clock.next_wait(150.0) == first
    assert clock.next_wait(249.0) is not None
