"""The planner's decisions: nothing is left out or taken twice, and every loop comes to an end."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.model import Batch, Blob, BlobRange, Failure, Reason
from ntt_backup.planner import (
    ENOUGH_TRIED,
    PARTS,
    RANGES,
    Backoff,
    OutageClock,
    RateWindow,
    Retry,
    Split,
    Suspicion,
    Throttle,
    after_link_loss,
    after_rejection,
    claim_order,
    cut,
    eta_seconds,
    part,
    parts,
    prefix_ranges,
    range_name,
    split,
    whole_of,
)

AT_ONCE = Backoff(base=1, cap=60)


def half() -> float:
    return 0.5


# --- ranges ---------------------------------------------------------------------------------------


def holds(one: BlobRange, text: str) -> bool:
    """Whether text is in the range, in the order of code points, which is one collation of many."""
    return one.lo <= text and (one.hi is None or text < one.hi)


@given(st.text() | st.text(alphabet="0123456789abcdef", max_size=64))
def test_any_text_lies_in_exactly_one_range(text: str) -> None:
    assert sum(holds(one, text) for one in prefix_ranges()) == 1


@given(st.text(alphabet="0123456789abcdef", min_size=64, max_size=64))
def test_a_blobid_lies_in_the_range_of_its_first_two_digits(blobid: str) -> None:
    (found,) = [one.index for one in prefix_ranges() if holds(one, blobid)]
    assert found == int(blobid[:2], 16)


@given(st.text() | st.text(alphabet="0123456789abcdef", max_size=64))
def test_the_parts_of_a_range_are_the_range(text: str) -> None:
    for whole in prefix_ranges():
        within = [one for one in parts(whole) if holds(one, text)]
        assert len(within) == holds(whole, text)
        assert len(parts(whole)) == PARTS


def test_every_range_and_part_has_an_index_and_a_name_of_its_own() -> None:
    wholes = prefix_ranges()
    pieces = [one for whole in wholes for one in parts(whole)]
    everything = [one.index for one in (*wholes, *pieces)]
    assert everything == list(range(RANGES + RANGES * PARTS))
    assert len({range_name(index) for index in everything}) == len(everything)
    assert [whole_of(one.index) for one in wholes] == list(range(RANGES))
    for whole in wholes:
        assert {whole_of(one.index) for one in parts(whole)} == {whole.index}
        assert [part(one.index) for one in parts(whole)] == list(parts(whole))
        assert all(range_name(one.index)[:2] == range_name(whole.index) for one in parts(whole))


@pytest.mark.parametrize("workers", [1, 3, 7, 64, 256])
def test_workers_start_evenly_spread_and_try_every_range_once(workers: int) -> None:
    orders = [claim_order(worker, workers) for worker in range(workers)]
    assert all(sorted(order) == list(range(RANGES)) for order in orders)
    starts = [order[0] for order in orders]
    gaps = [later - earlier for earlier, later in itertools.pairwise([*starts, RANGES])]
    assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


# --- cutting --------------------------------------------------------------------------------------

blob_lists = st.lists(st.none() | st.integers(0, 300), max_size=60).map(
    lambda sizes: [Blob(f"{number:064x}", size) for number, size in enumerate(sizes)]
)


def cut_all(blobs: list[Blob], max_blobs: int, max_bytes: int) -> list[list[Blob]]:
    batches = []
    while blobs:
        count = cut(blobs, max_blobs, max_bytes)
        assert count > 0, "cutting must go on"
        batches.append(blobs[:count])
        blobs = blobs[count:]
    return batches


@given(blob_lists, st.integers(1, 20), st.integers(1, 500))
def test_batches_keep_to_both_limits_and_only_a_big_blob_alone_is_above(
    blobs: list[Blob], max_blobs: int, max_bytes: int
) -> None:
    for batch in cut_all(blobs, max_blobs, max_bytes):
        assert len(batch) <= max_blobs
        # Blobs without a size weigh nothing, so they may travel with a big one that came first.
        heavy = [blob for blob in batch if blob.size]
        assert sum(blob.size or 0 for blob in batch) <= max_bytes or len(heavy) == 1


@given(blob_lists, st.integers(1, 20), st.integers(1, 500))
def test_no_batch_ends_early(blobs: list[Blob], max_blobs: int, max_bytes: int) -> None:
    for batch, following in itertools.pairwise(cut_all(blobs, max_blobs, max_bytes)):
        size = sum(blob.size or 0 for blob in batch) + (following[0].size or 0)
        assert len(batch) == max_blobs or size > max_bytes


# --- retries and splits ---------------------------------------------------------------------------


def a_batch(count: int, attempt: int = 1, refusals: int = 0) -> Batch:
    blobs = tuple(Blob(f"{number:064x}", 1) for number in range(count))
    return Batch("b", blobs, frozenset({7}), attempt, refusals)


@given(
    st.integers(1, 200).flatmap(
        lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=4))
    ),
    st.integers(1, 5),
)
def test_bad_blobs_end_alone_and_failed_and_no_other_is(
    case: tuple[int, set[int]], attempts: int
) -> None:
    count, bad_numbers = case
    batch = a_batch(count)
    bad = {batch.blobs[number] for number in bad_numbers}
    todo, sends = deque([batch]), 0
    stored: list[Blob] = []
    failed: list[Failure] = []
    while todo:
        sent = todo.popleft()
        sends += 1
        assert sent.ranges == batch.ranges
        if not bad.intersection(sent.blobs):
            stored += sent.blobs
            continue
        decision = after_rejection(sent, "no", attempts, AT_ONCE, half)
        if isinstance(decision, Retry):
            again = replace(sent, attempt=sent.attempt + 1, refusals=sent.refusals + 1)
            assert decision.batch == again
            todo.append(decision.batch)
        elif isinstance(decision, Split):
            todo.extend(decision.parts)
        else:
            failed.append(decision.failure)
    assert {one.blobid for one in failed} == {blob.blobid for blob in bad}
    assert len(failed) == len(bad)
    assert all(one.reason is Reason.REMOTE_REJECTED and one.detail == "no" for one in failed)
    assert sorted(stored, key=lambda blob: blob.blobid) == [b for b in batch.blobs if b not in bad]
    # A bad blob costs two sends a halving, and the whole batch `attempts`.
    halvings = max(1, (count - 1).bit_length())
    assert sends <= attempts + 2 * halvings * len(bad)


@given(st.integers(2, 300), st.integers(1, 9))
def test_halves_hold_the_whole_in_order_and_have_names_of_their_own(
    count: int, refusals: int
) -> None:
    whole = a_batch(count)
    first, second = split(whole, refusals)
    assert first.blobs + second.blobs == whole.blobs
    assert first.blobs
    assert second.blobs
    assert len({whole.name, first.name, second.name}) == 3
    assert first.refusals == second.refusals == refusals


@given(st.integers(1, 100), st.integers(1, 5), st.integers(0, 60))
def test_a_lost_link_gives_up_nothing_however_often_it_is_lost(
    count: int, attempts: int, losses: int
) -> None:
    batches = [a_batch(count)]
    for _ in range(losses):
        batches = [part for batch in batches for part in after_link_loss(batch, attempts)]
        assert all(batch.blobs for batch in batches)
    assert [blob for batch in batches for blob in batch.blobs] == list(a_batch(count).blobs)


# --- waiting --------------------------------------------------------------------------------------

fractions = st.floats(0, 1, exclude_max=True)


@given(
    st.floats(0.01, 60),
    st.floats(0.01, 3600),
    st.integers(1, 10_000),
    st.lists(fractions, min_size=2),
)
def test_a_wait_is_never_none_and_never_above_the_ceiling(
    base: float, cap: float, attempt: int, draws: list[float]
) -> None:
    backoff = Backoff(base, max(base, cap))
    for draw in draws:
        wait = backoff.wait(attempt, itertools.repeat(draw).__next__)
        assert 0 < wait <= min(backoff.cap, base * 2.0 ** min(attempt - 1, 1000))


def test_an_outage_ends_the_patience_after_its_limit_and_not_before() -> None:
    clock = OutageClock(AT_ONCE, limit=100, random=half)
    assert clock.next_wait(1000.0) is not None
    assert clock.next_wait(1099.9) is not None
    assert clock.next_wait(1100.0) is None


def test_an_answer_ends_the_outage_so_the_next_one_counts_from_its_own_start() -> None:
    clock = OutageClock(AT_ONCE, limit=100, random=half)
    first = clock.next_wait(0.0)
    clock.next_wait(99.0)
    assert clock.attempt == 2
    clock.over()
    assert clock.attempt == 0
    assert clock.next_wait(150.0) == first
    assert clock.next_wait(249.0) is not None


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 5000])
def test_a_store_that_was_whole_for_long_is_suspected_within_a_thousand_blobs(size: int) -> None:
    suspicion = Suspicion(0.5)
    assert not any(suspicion.falls(size, size // 3) for _ in range(20_000 // size))
    judged = [suspicion.falls(size, size) for _ in range(2000 // size + 1)]
    assert judged[-1]
    assert judged.index(True) * size <= ENOUGH_TRIED


def test_few_blobs_or_a_share_of_one_make_no_suspect() -> None:
    assert not Suspicion(0.5).falls(999, 999)
    assert Suspicion(0.5).falls(1000, 501)
    assert not Suspicion(0.5).falls(1000, 500)
    assert not Suspicion(1).falls(5000, 5000)


# --- rates ----------------------------------------------------------------------------------------


class Bucket:
    """What several senders see of one throttle, as they ask in turn."""

    def __init__(self, rate: float, senders: int) -> None:
        self.throttle = Throttle(rate, senders)
        self.since = -math.inf
        self.sent = 0

    def take(self, now: float, fraction: float = 1.0) -> int:
        """Ask at a time, and send so much of what may be sent."""
        self.since = self.throttle.since(self.since, now, self.sent)
        amount = int(self.throttle.allowance(self.since, now, self.sent) * fraction)
        self.sent += amount
        return amount

    def delay(self, now: float) -> float:
        return self.throttle.delay(self.since, now, self.sent)


@given(st.floats(4, 1e9), st.lists(st.tuples(st.floats(0, 3), fractions), min_size=1, max_size=60))
def test_a_throttle_never_lets_more_through_in_any_window_than_the_rate_and_one_burst(
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
def test_after_the_delay_of_a_throttle_something_may_be_sent(rate: float, senders: int) -> None:
    bucket = Bucket(rate, senders)
    while bucket.take(0.0):
        pass
    delay = bucket.delay(0.0)
    assert delay > 0
    assert bucket.take(delay * (1 + 1e-6)) >= 1


def test_a_throttle_is_used_up_and_no_more_in_packets_worth_sending() -> None:
    now, packets, bucket = 0.0, 0, Bucket(12e6, 4)
    while now < 100:
        packets += bucket.take(now) > 0
        now += bucket.delay(now)
    assert bucket.sent / now == pytest.approx(12e6, rel=0.02)
    assert bucket.sent / packets > 100_000


@pytest.mark.parametrize("rate", [1024, 20_000, 1e6, 100e6])
def test_nothing_is_sent_in_crumbs(rate: float) -> None:
    """ssh makes a packet of each, which costs some forty bytes more."""
    now, bucket = 0.0, Bucket(rate, 4)
    while now < 10:
        amount = bucket.take(now)
        assert amount == 0 or amount >= min(rate, 4096)
        now += 1e-3


def test_a_rate_is_that_of_the_last_minute() -> None:
    window = RateWindow(60)
    for second in range(600):
        window.add(float(second), 5.0)
    assert window.rate(599.0) == pytest.approx(5.0, rel=0.05)
    assert window.rate(630.0) == pytest.approx(2.5, rel=0.1)
    assert window.rate(1000.0) == 0


@pytest.mark.parametrize(
    ("left", "done", "elapsed", "expected"),
    [
        (100, 0, 10.0, None),
        (100, 10, 0.2, None),
        (0, 0, 10.0, 0.0),
        (100, 10, 10.0, 100.0),
        (42_000_000, 1_000_000, 3600.0, 151_200.0),
    ],
)
def test_the_eta_is_the_runs_own_pace_or_nothing(
    left: int, done: int, elapsed: float, expected: float | None
) -> None:
    assert eta_seconds(left, done, elapsed) == expected
