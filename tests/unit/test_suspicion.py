"""The judgement on blobs that cannot be read: suspicion, its sample, and its end."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from ntt_backup.client.backoff import Backoff, Outages
from ntt_backup.config import RunSettings
from ntt_backup.errors import StoreSuspect
from ntt_backup.model import Batch, Failure, Reason, Receipt
from ntt_backup.source.store import Store
from ntt_backup.upload.batch_outcomes import Judge, Outcomes
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.queue import SendQueue
from tests.unit.fakes import blobs

MANY = 1000


def receipt(batch: Batch, away: set[str], reason: Reason = Reason.MISSING) -> Receipt:
    stored = tuple(blob for blob in batch.blobs if blob.blobid not in away)
    failed = tuple(Failure(blob.blobid, reason) for blob in batch.blobs if blob.blobid in away)
    return Receipt(batch, stored, failed, 1, 0.1)


def batches(count: int) -> list[Batch]:
    every = blobs(count * MANY)
    cuts = (every[nth * MANY : (nth + 1) * MANY] for nth in range(count))
    return [Batch(f"0.{nth}", tuple(cut), frozenset({nth})) for nth, cut in enumerate(cuts)]


def ids(batch: Batch, count: int = MANY) -> set[str]:
    return {blob.blobid for blob in batch.blobs[:count]}


def test_few_unreadable_blobs_of_a_whole_store_are_bad_themselves() -> None:
    (batch,) = batches(1)
    said = receipt(batch, ids(batch, 500))
    verdict = Judge(0.5).judge(said)
    assert (verdict.receipt, verdict.unread, verdict.error) == (said, None, None)


def test_the_first_suspect_batch_is_the_sample_and_the_next_ones_wait_quietly() -> None:
    judge = Judge(0.5)
    first, second = batches(2)
    sample = judge.judge(receipt(first, ids(first, 900)))
    assert sample.error is not None
    assert sample.unread is not None
    assert {blob.blobid for blob in sample.unread.blobs} == ids(first, 900)
    assert (len(sample.receipt.stored), sample.receipt.failed) == (100, ())
    quiet = judge.judge(receipt(second, ids(second, 1)))
    assert (quiet.error, quiet.cleared, quiet.receipt.failed) == (None, False, ())
    assert quiet.unread is not None
    assert quiet.unread.ranges == second.ranges


def test_a_suspect_store_ends_a_run_that_does_not_watch_once_all_is_taken_in() -> None:
    first, second = batches(2)
    stopping, reading = os.pipe()
    run, backoff, queue = RunSettings(max_failed_share=0.5), Backoff(1.0, 2.0), SendQueue("0", 1, 1)
    pipe = EventPipe(stopping, reading)
    outages = Outages(pipe.emit, backoff, None)
    outcomes = Outcomes(run, backoff, Store(Path("/nowhere")), queue, outages, pipe, watch=False)
    with pytest.raises(StoreSuspect):
        outcomes.accept([receipt(first, ids(first)), receipt(second, set())], connected=False)
    assert [one.batch for one in outcomes.receipts] == [second]
    os.close(stopping)
    os.close(reading)


class Young(Store):
    """A store where others write into every directory all the time."""

    def ages_of_young(self, failures: Iterable[Failure]) -> dict[str, float]:
        return {one.blobid: 0.5 for one in failures}


@pytest.mark.long
def test_a_hundred_thousand_young_blobs_are_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where few wait they are looked at soon, and what stays missing is failed at last."""
    now = 0.0
    monkeypatch.setattr("ntt_backup.upload.batch_outcomes.time.monotonic", lambda: now)
    stopping, reading = os.pipe()
    run, backoff, queue = RunSettings(max_failed_share=1.0), Backoff(1.0, 2.0), SendQueue("0", 1, 1)
    pipe = EventPipe(stopping, reading)
    store, outages = Young(Path("/nowhere"), grace=900), Outages(pipe.emit, backoff, None)
    outcomes = Outcomes(run, backoff, store, queue, outages, pipe, watch=True)
    monkeypatch.setattr(pipe, "emit", lambda event: None)
    away = {batch.ranges: batch for batch in batches(100)}
    looks = 0
    while now < 3600:
        held = queue.ranges(now).union(*(one.ranges for one in queue.delayed))
        due = [batch for ranges, batch in away.items() if not held & ranges]
        while (again := queue.pop_due(now)) is not None:
            due.append(again)
        for batch in due:
            looks += len(batch.blobs)
            missing = {blob.blobid for blob in batch.blobs}
            outcomes.accept([receipt(batch, missing)], connected=False)
        now += 1.0
    failed = [one.blobid for receipt in outcomes.receipts for one in receipt.failed]
    assert looks <= 100_000 * 3600 / 100
    assert len(failed) > 10_000
    os.close(stopping)
    os.close(reading)


def test_what_is_not_the_stores_fault_is_failed_in_a_suspect_store_too() -> None:
    judge = Judge(0.5)
    first, second = batches(2)
    judge.judge(receipt(first, ids(first)))
    said = receipt(second, ids(second, 3), Reason.BAD_BLOBID)
    assert judge.judge(said).receipt == said


def test_healthy_batches_end_no_suspicion_but_the_sample_does() -> None:
    judge = Judge(0.5)
    first, second = batches(2)
    sample = judge.judge(receipt(first, ids(first))).unread
    assert sample is not None
    assert not judge.judge(receipt(second, set())).cleared
    again = judge.judge(receipt(sample, ids(first)))
    assert again.error is not None
    assert not again.cleared
    end = judge.judge(receipt(sample, ids(first, 5)))
    assert end.cleared
    assert (end.error, end.receipt.failed) == (None, ())
    assert end.unread is not None
    later = judge.judge(receipt(end.unread, ids(first, 1)))
    assert len(later.receipt.failed) == 1


def test_a_sample_that_is_gone_gives_way_to_any_batch() -> None:
    judge = Judge(0.5)
    first, second = batches(2)
    judge.judge(receipt(first, ids(first)))
    judge.forget()
    assert judge.judge(receipt(second, set())).cleared
