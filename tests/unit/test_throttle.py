"""A limit is kept by several processes together, and one that is killed blocks nobody."""

from __future__ import annotations

import math
import os
import random
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.client.throttle import Limit, Pace, Throttle
from tests.environment import wait_until

RATE = 2e6
SECONDS = 1.0
fractions = st.floats(0, 1, exclude_max=True)


class Bucket:
    """The state that several senders see of one throttle, as they ask in turn."""

    def __init__(self, rate: float, senders: int) -> None:
        self.throttle = Throttle(rate, senders)
        self.since = -math.inf
        self.sent = 0

    def take(self, now: float, fraction: float = 1.0) -> int:
        """Send this fraction of what may be sent at a time."""
        self.since = self.throttle.since(self.since, now, self.sent)
        amount = int(self.throttle.allowance(self.since, now, self.sent) * fraction)
        self.sent += amount
        return amount

    def delay(self, now: float) -> float:
        return self.throttle.delay(self.since, now, self.sent)


@given(st.floats(4, 1e9), st.lists(st.tuples(st.floats(0, 3), fractions), min_size=1, max_size=60))
def test_a_throttle_lets_through_at_most_the_rate_and_one_burst_in_any_window(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    now, bucket = 0.0, Bucket(rate, 4)
    sent: list[tuple[float, int]] = []
    for pause, fraction in steps:
        now += pause
        sent.append((now, bucket.take(now, 1 - fraction)))
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            passed = sum(amount for _, amount in sent[first : last + 1])
            most = bucket.throttle.burst + (sent[last][0] - start) * rate
            assert passed <= most * (1 + 1e-9) + 1e-6


@given(st.floats(4, 1e9), st.integers(1, 256))
def test_something_may_be_sent_after_the_delay(rate: float, senders: int) -> None:
    bucket = Bucket(rate, senders)
    while bucket.take(0.0):
        pass
    delay = bucket.delay(0.0)
    assert delay > 0
    assert bucket.take(delay * (1 + 1e-6)) >= 1


def test_a_throttle_is_used_up_in_packets_worth_sending() -> None:
    now, packets, bucket = 0.0, 0, Bucket(12e6, 4)
    while now < 100:
        packets += bucket.take(now) > 0
        now += bucket.delay(now)
    assert bucket.sent / now == pytest.approx(12e6, rel=0.02)
    assert bucket.sent / packets > 100_000


@pytest.mark.parametrize("rate", [1024, 20_000, 100e6])
def test_no_share_is_smaller_than_an_ssh_packet_is_worth(rate: float) -> None:
    now, bucket = 0.0, Bucket(rate, 4)
    while now < 10:
        amount = bucket.take(now)
        assert amount == 0 or amount >= min(rate, 4096)
        now += 1e-3


def send(pace: Pace, until: float) -> None:
    while time.monotonic() < until:
        amount = pace.allowance()
        pace.spend(amount)
        if not amount:
            time.sleep(pace.delay())


def in_copies(limit: Limit, senders: int, until: float) -> list[int]:
    """Return the PIDs of copies of this process that send as much as they may until then."""
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


def test_all_senders_of_a_limit_are_allowed_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_sender_that_is_killed_blocks_nobody_and_its_successor_counts_on() -> None:
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
