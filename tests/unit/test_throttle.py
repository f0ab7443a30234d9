"""A limit is kept by several processes together, and one that is killed blocks nobody."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.client.throttle import Limit, Pace
from ntt_backup.config.bandwidth_timetable import parse_timetable
from ntt_backup.process.spawn import die_with_parent
from tests.helpers.waiting import wait_until

RATE = 2e6
SECONDS = 1.0
SENDERS = 4
# How far a clock goes on at once; how long its copies sleep between two looks at it.
STEP = 0.01
TURN = 0.0005
fractions = st.floats(0, 1, exclude_max=True)


def limited(rate: float, senders: int, clock: Callable[[], float]) -> Limit:
    made = Limit(None, senders, clock)
    made.set(rate)
    return made


class Bucket:
    """One of several senders under a limit, by a clock that is set."""

    def __init__(self, rate: float, senders: int) -> None:
        self.now = 0.0
        self.limit = limited(rate, senders, lambda: self.now)
        self.pace = self.limit.sender(0)

    def take(self, fraction: float = 1.0) -> int:
        """Send this fraction of what may be sent now."""
        amount = int(self.pace.allowance() * fraction)
        self.pace.spend(amount)
        return amount


@given(st.floats(4, 1e9), st.lists(st.tuples(st.floats(0, 3), fractions), min_size=1, max_size=60))
def test_a_limit_lets_through_at_most_the_rate_and_one_burst_in_any_window(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    bucket = Bucket(rate, 4)
    sent: list[tuple[float, int]] = []
    for pause, fraction in steps:
        bucket.now += pause
        sent.append((bucket.now, bucket.take(1 - fraction)))
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            passed = sum(amount for _, amount in sent[first : last + 1])
            most = bucket.pace.burst + (sent[last][0] - start) * rate
            assert passed <= most * (1 + 1e-9) + 1e-6


@given(st.floats(4, 1e9), st.integers(1, 256))
def test_something_may_be_sent_after_the_delay(rate: float, senders: int) -> None:
    bucket = Bucket(rate, senders)
    while bucket.take():
        pass
    began = bucket.now
    while not bucket.take():
        delay = bucket.pace.delay()
        assert 0 < delay <= 0.5
        bucket.now += delay * (1 + 1e-6)
    assert bucket.now - began <= 2.5


def test_a_limit_is_used_up_in_packets_worth_sending() -> None:
    packets, bucket = 0, Bucket(12e6, 1)
    while bucket.now < 100:
        packets += bucket.take() > 0
        bucket.now += bucket.pace.delay()
    assert bucket.limit.sent / bucket.now == pytest.approx(12e6, rel=0.02)
    assert bucket.limit.sent / packets > 100_000


@pytest.mark.parametrize("rate", [1024, 20_000, 100e6])
def test_no_share_is_smaller_than_an_ssh_packet_is_worth(rate: float) -> None:
    bucket = Bucket(rate, 4)
    while bucket.now < 10:
        amount = bucket.take()
        assert amount == 0 or amount >= min(rate, 4096)
        bucket.now += 1e-3


class Clock:
    """A clock that copies of this process share. It goes on when none of them may send any more, so
    that a busy machine makes them no slower.
    """

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 8 * (1 + SENDERS))).cast("d")
        self._shared[0] = 1000.0

    def __call__(self) -> float:
        return self._shared[0]

    def wait(self, copy: int) -> None:
        """Return, in a copy, once the clock has gone on."""
        now = self._shared[1 + copy] = self()
        while self() == now:
            time.sleep(TURN)

    def go_on(self, copies: int, seconds: float) -> None:
        """Return once so many copies have sent what they may in so many seconds."""
        self._await(copies)
        for _ in range(round(seconds / STEP)):
            self._shared[0] += STEP
            self._await(copies)

    def _await(self, copies: int) -> None:
        for copy in range(copies):
            while self._shared[1 + copy] != self():
                time.sleep(TURN)


@contextmanager
def in_copies(limit: Limit, clock: Clock, copies: int) -> Iterator[None]:
    """Copies of this process, each of which sends as much as it may until it is killed."""
    pids = []
    for index in range(copies):
        die_with_us = die_with_parent()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_us()
                os.closerange(3, 256)
                send(limit.sender(index), clock, index)
            finally:
                os._exit(1)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def send(pace: Pace, clock: Clock, copy: int) -> None:
    while True:
        amount = pace.allowance()
        pace.spend(amount)
        if not amount:
            clock.wait(copy)


def test_copies_of_a_process_share_a_limit_and_hear_of_a_pause() -> None:
    """Also where one was killed before, whose successor counts on."""
    clock = Clock()
    limit = limited(RATE, SENDERS, clock)
    with in_copies(limit, clock, 1):
        wait_until(lambda: limit.sent, "something from the one that is killed")
    with in_copies(limit, clock, SENDERS):
        clock.go_on(SENDERS, SECONDS)
        assert RATE * (SECONDS + 0.2) <= limit.sent <= RATE * (SECONDS + 0.3)
        limit.held = True
        before = limit.sent
        clock.go_on(SENDERS, SECONDS)
        assert limit.sent == before
        limit.held = False
        clock.go_on(SENDERS, SECONDS)
        assert limit.sent >= before + RATE * SECONDS


def test_all_senders_of_a_limit_are_allowed_the_same() -> None:
    """Else the one that sees more goes on sending while the others wait."""
    now = 1000.0
    chance = random.Random(7)
    limit = limited(RATE, 3, lambda: now)
    senders = [limit.sender(index) for index in range(3)]
    for _ in range(1000):
        now += chance.choice([0.0, 0.001, 0.01, 1.0])
        one = chance.choice(senders)
        one.spend(one.allowance())
        assert len({sender.allowance() for sender in senders}) == 1


# --- what changes while they send -----------------------------------------------------------------


def gone_by(bucket: Bucket, seconds: float) -> int:
    """What one sender sends in so many seconds that go by."""
    before, until = 0, bucket.now + seconds
    while bucket.now < until:
        while amount := bucket.take():
            before += amount
        bucket.now += 0.05
    return before


@settings(max_examples=30)
@given(st.lists(st.integers(10_000, 10**8), min_size=1, max_size=4))
def test_a_limit_that_is_set_anew_holds_at_once(rates: list[int]) -> None:
    bucket = Bucket(1e6, 4)
    gone_by(bucket, 5)
    for rate in rates:
        bucket.limit.set(rate)
        assert bucket.limit.rate == rate
        assert gone_by(bucket, 5) == pytest.approx(rate * 5, rel=0.2, abs=40_000)
    bucket.limit.set(None)
    assert bucket.take() > 10**9
    bucket.limit.set(rates[0])
    assert gone_by(bucket, 5) == pytest.approx(rates[0] * 5, rel=0.2, abs=40_000)


def test_while_all_is_held_only_what_has_begun_goes_on() -> None:
    bucket = Bucket(1e6, 4)
    bucket.limit.held = True
    assert gone_by(bucket, 5) == 0
    assert 0 < bucket.pace.delay() <= 0.5
    assert bucket.pace.allowance(begun=True) > 0
    bucket.limit.held = False
    assert gone_by(bucket, 5) == pytest.approx(5e6, rel=0.2)


def test_a_timetable_holds_unless_something_else_was_set() -> None:
    now = 7 * 3600.0
    limit = Limit(
        parse_timetable("08:00 4MB, 19:00 off"),
        1,
        lambda: now,
        lambda: datetime.fromtimestamp(now, UTC),
    )
    rates = [limit.rate]
    now += 3600
    rates.append(limit.rate)
    limit.set(10_000)
    rates.append(limit.rate)
    limit.follow()
    rates.append(limit.rate)
    limit.follow(parse_timetable("08:00 5MB, 19:00 off"))
    rates.append(limit.rate)
    assert rates == [None, 4_000_000, 10_000, 4_000_000, 5_000_000]
