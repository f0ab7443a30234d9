"""Decisions on batches: nothing is left out or taken twice, and every loop comes to an end."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.client.backoff import Backoff
from ntt_backup.model import Batch, Blob, Failure, Reason
from ntt_backup.upload.batch_outcomes import ENOUGH_TRIED, Suspicion
from ntt_backup.upload.batching import (
    GiveUp,
    Retry,
    Split,
    after_link_loss,
    after_rejection,
    cut,
    fitting,
    split,
)
from ntt_backup.upload.queue import FIRST_STEP, STEP, SendQueue

AT_ONCE = Backoff(base=1, cap=60)


def half() -> float:
    return 0.5


# --- cutting --------------------------------------------------------------------------------------

blob_lists = st.lists(st.none() | st.integers(0, 300), max_size=60).map(
    lambda sizes: [Blob(f"{number:064x}", size) for number, size in enumerate(sizes)]
)


def cut_all(blobs: list[Blob], max_blobs: int, max_bytes: int) -> list[list[Blob]]:
    batches = []
    while blobs:
        count = cut((blob.expected for blob in blobs), max_blobs, max_bytes)
        assert count > 0, "cutting must go on"
        batches.append(blobs[:count])
        blobs = blobs[count:]
    return batches


@given(blob_lists, st.integers(1, 20), st.integers(1, 500))
def test_batches_have_every_blob_once_in_order_and_are_as_full_as_both_limits_allow(
    blobs: list[Blob], max_blobs: int, max_bytes: int
) -> None:
    batches = cut_all(blobs, max_blobs, max_bytes)
    assert [blob for batch in batches for blob in batch] == blobs
    for batch in batches:
        assert len(batch) <= max_blobs
        # Blobs without a size weigh nothing, so they may travel with a big one that came first.
        heavy = [blob for blob in batch if blob.size]
        assert sum(blob.size or 0 for blob in batch) <= max_bytes or len(heavy) == 1
    for batch, following in itertools.pairwise(batches):
        size = sum(blob.size or 0 for blob in batch) + (following[0].size or 0)
        assert len(batch) == max_blobs or size > max_bytes


def test_a_large_batch_is_claimed_in_steps_until_it_is_full() -> None:
    queue = SendQueue("0", 65_536, 1000)

    assert queue.missing == FIRST_STEP
    queue.add((Blob(f"{number:064x}", 10), 0) for number in range(60))
    assert queue.missing == 41  # As many of that size are about what is left.
    queue.add((Blob(f"{number:064x}", 10), 0) for number in range(60, 101))
    assert queue.missing == 0
    first = queue.pop_new()
    assert first is not None
    assert len(first.blobs) == 100
    assert queue.missing == 100


def test_no_claim_has_more_blobs_than_all_before_or_than_a_step() -> None:
    """The first ones may be the small ones: what is claimed, no other worker can send."""
    queue = SendQueue("0", 65_536, 1000)
    claimed, steps = 0, []
    while missing := queue.missing:
        steps.append(missing)
        queue.add((Blob(f"{claimed + number:064x}", 0), 0) for number in range(missing))
        claimed += missing
    assert steps[:6] == [FIRST_STEP, *(FIRST_STEP * 2**number for number in range(5))]
    assert max(steps) == STEP
    assert claimed == 65_536


# --- growing --------------------------------------------------------------------------------------


def answered(queue: SendQueue, stored: int, seconds: float) -> int:
    """Returns the size of the next batch, after one of which so many blobs were stored."""
    queue.fit(stored, 0, seconds)
    queue.forget()
    queue.add((Blob(f"{number:064x}", 10), 0) for number in range(10_000))
    following = queue.pop_new()
    assert following is not None
    return len(following.blobs)


def test_a_batch_has_what_is_stored_in_half_a_second_between_its_limits() -> None:
    queue = SendQueue("0", 1000, 10**9, 4000)

    assert answered(queue, 1000, 0.2) == 2500
    assert answered(queue, 2500, 0.1) == 4000
    queue.forget()
    assert queue.missing == 4000  # In one step.
    assert answered(queue, 4000, 0.5) == 4000
    assert answered(queue, 4000, 1.0) == 2000
    assert answered(queue, 2000, 60.0) == 1000
    assert answered(queue, 4, 0.001) == 2000
    assert answered(queue, 0, 0.0) == 1000  # Nothing was stored, as where a store is away.


def test_a_batch_has_the_bytes_that_are_stored_in_half_a_second_between_its_limits() -> None:
    queue = SendQueue("0", 1000, 100, most_bytes=300)

    def limit(size: int, seconds: float) -> int:
        queue.fit(size, size, seconds)
        queue.forget()
        queue.add((Blob(f"{number:064x}", 1), 0) for number in range(1000))
        following = queue.pop_new()
        return following.size if following is not None else 0

    assert [limit(100, 0.25), limit(200, 0.1), limit(300, 2.0), limit(0, 0.0)] == [
        200,
        300,
        100,
        100,
    ]


def test_a_batch_whose_size_was_set_keeps_it() -> None:
    queue = SendQueue("0", 300, 10**9, 300)
    assert [answered(queue, 300, seconds) for seconds in (0.001, 0.2, 60.0)] == [300, 300, 300]


@given(st.integers(0, 100_000), st.floats(0, 10**6))
def test_what_fits_takes_half_a_second_at_the_same_pace(stored: int, seconds: float) -> None:
    fits = fitting(stored, seconds)
    assert fits >= 0
    assert fits * seconds <= stored / 2 + 1e-6


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


def test_a_single_blob_is_given_up_only_after_all_its_attempts() -> None:
    for refusals in (0, 1):
        batch = a_batch(1, refusals=refusals)
        assert isinstance(after_rejection(batch, "no", 3, AT_ONCE, half), Retry)
    assert isinstance(after_rejection(a_batch(1, refusals=2), "no", 3, AT_ONCE, half), GiveUp)


def test_lost_links_do_not_count_against_a_blob() -> None:
    batches: tuple[Batch, ...] = (a_batch(1),)
    for _ in range(20):
        (lost,) = batches
        batches = after_link_loss(lost, 3)
    (batch,) = batches
    assert batch.attempt == 21
    assert isinstance(after_rejection(batch, "no", 3, AT_ONCE, half), Retry)


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


# --- suspicion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 1000, 5000])
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


# --- what waits -----------------------------------------------------------------------------------


def some(name: str, *ranges: int) -> Batch:
    return Batch(name, (Blob("0" * 64, 1),), frozenset(ranges))


def test_a_batch_waits_until_it_is_due_and_no_longer() -> None:
    queue = SendQueue("0", 10, 100)
    assert queue.next_due is None
    queue.delay([some("late", 1)], 9.0)
    queue.delay([some("soon", 2), some("as soon", 3)], 5.0)
    assert queue.next_due == 5.0
    assert queue.pop_due(4.9) is None
    assert [one.name for _ in "ab" if (one := queue.pop_due(5.0))] == ["soon", "as soon"]
    assert queue.pop_due(8.9) is None
    queue.hurry()
    assert queue.next_due == 0.0
    assert (hurried := queue.pop_due(0.0)) is not None
    assert hurried.name == "late"
    assert queue.next_due is None


def test_ranges_are_kept_as_long_as_anything_of_them_waits() -> None:
    queue = SendQueue("0", 10, 100)
    queue.add([(Blob("0" * 64, 1), 1), (Blob("1" * 64, 1), 2)])
    queue.delay([some("a", 3, 4)])
    queue.put_off([5, 6], 7.0)
    queue.put_off([6], 8.0)
    assert queue.ranges(6.9) == {1, 2, 3, 4, 5, 6}
    assert queue.next_due == 0.0
    assert queue.ranges(7.0) == {1, 2, 3, 4, 6}
    assert queue.pop_due(0.0) is not None
    assert queue.next_due == 8.0
    assert queue.ranges(7.9) == {1, 2, 6}
    queue.recall()
    assert queue.ranges(0.0) == {1, 2}
    assert queue.next_due is None
    queue.put_off([5], 7.0)
    queue.hurry()
    assert queue.ranges(0.0) == {1, 2}
    assert queue.pop_new() is not None
    assert queue.ranges(0.0) == frozenset()
    queue.put_off([5], 7.0)
    queue.delay([some("a", 3)])
    queue.add([(Blob("0" * 64, 1), 1)])
    queue.forget()
    assert (queue.ranges(0.0), queue.next_due, queue.pop_new()) == (frozenset(), None, None)


def test_batches_are_numbered_sorted_and_cut_by_their_bytes() -> None:
    queue = SendQueue("0", 3, 100)
    blobs = [Blob(f"{9 - number}" * 64, 40) for number in range(6)]
    queue.add((blob, number) for number, blob in enumerate(blobs))
    assert queue.missing == 0
    assert [*queue.front()] == blobs[:2]
    first, second = queue.pop_new(), queue.pop_new()
    assert first is not None
    assert second is not None
    assert [one.name for one in (first, second)] == ["0.1", "0.2"]
    assert [*first.blobs] == [blobs[1], blobs[0]]
    assert [*second.blobs] == [blobs[3], blobs[2]]
    assert (first.ranges, second.ranges) == (frozenset([0, 1]), frozenset([2, 3]))
    assert queue.missing == 1
    assert [*queue.front()] == blobs[4:]
