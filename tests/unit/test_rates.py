"""Rates over a window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.daemon.progress import RateWindow


def test_a_rate_is_that_of_the_last_minute() -> None:
    window = RateWindow(60)
    for second in range(600):
        window.add(float(second), 5.0)
    assert window.rate(599.0) == pytest.approx(5.0, rel=0.05)
    assert window.rate(630.0) == pytest.approx(2.5, rel=0.1)
    assert window.rate(1000.0) == 0


def test_a_rate_is_not_diluted_by_a_minute_that_has_not_been_yet() -> None:
    window = RateWindow(60)
    assert window.rate(0.0) == 0
    for second in range(11):
        window.add(100.0 + second, 5.0)
    assert window.rate(110.0) == pytest.approx(5.0, rel=0.15)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1e9)), max_size=80))
def test_a_rate_is_never_negative_and_never_above_what_was_added(
    steps: list[tuple[float, float]],
) -> None:
    window, now, total = RateWindow(60), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        window.add(now, amount)
        total += amount
        assert -1e-3 <= window.rate(now) <= total + 1e-3
