"""A run's figures: sums of what workers tell, and a pending count that lags but never lies low."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.planner import RANGES
from ntt_backup.progress import Progress


def tick(state: str, sent: int = 0) -> dict[str, object]:
    return {"event": "tick", "state": state, "sent": sent}


def complete(copied: int, failed: int = 0, size: int = 0, batch: str = "0.1") -> dict[str, object]:
    return {
        "event": "batch_complete",
        "batch": batch,
        "copied": copied,
        "failed": failed,
        "bytes": size,
    }


def count_all(progress: Progress, pending: int) -> None:
    """One whole count that finds so many blobs, all of them in the first range."""
    for index in range(RANGES):
        assert progress.next_range == index
        assert progress.count_range(pending if index == 0 else 0) is (index == RANGES - 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 9)), max_size=40))
def test_sums_are_those_of_all_batches(batches: list[tuple[int, int, int]]) -> None:
    progress = Progress(0.0, workers=4)
    for nth, (worker, copied, failed) in enumerate(batches):
        progress.event(worker, complete(copied, failed, size=copied * 10), float(nth))
    shown = progress.snapshot(100.0)
    assert shown.copied == sum(copied for _, copied, _ in batches)
    assert shown.failed == sum(failed for _, _, failed in batches)
    assert shown.bytes == shown.copied * 10
    assert sum(worker.copied for worker in shown.workers) == shown.copied


def test_workers_are_active_while_they_send_or_wait_for_answers() -> None:
    progress = Progress(0.0, workers=5)
    assert progress.snapshot(1.0).active_workers == 0
    for index, state in enumerate(("sending", "waiting", "idle", "outage", "sending")):
        progress.event(index, tick(state), 1.0)
    progress.event(4, {"event": "worker_stop"}, 2.0)
    shown = progress.snapshot(2.0)
    assert shown.active_workers == 2
    assert [one.state for one in shown.workers] == [
        "sending",
        "waiting",
        "idle",
        "outage",
        "stopped",
    ]


def test_a_worker_that_was_started_again_shows_as_starting_and_keeps_its_sum() -> None:
    progress = Progress(0.0, workers=1)
    progress.event(0, complete(5, batch="0.3"), 1.0)
    progress.event(0, {"event": "worker_start"}, 2.0)
    (worker,) = progress.snapshot(3.0).workers
    assert (worker.state, worker.copied, worker.batch) == ("starting", 5, "0.3")


def test_speeds_are_in_megabytes_and_blobs_a_second() -> None:
    progress = Progress(0.0, workers=2)
    for second in range(30):
        progress.event(0, tick("sending", 3_000_000), float(second))
        progress.event(1, tick("sending", 1_000_000), float(second))
        progress.event(0, complete(50), float(second))
    shown = progress.snapshot(29.0)
    assert shown.mb_per_s == pytest.approx(4.0, rel=0.1)
    assert shown.blobs_per_s == pytest.approx(50, rel=0.1)
    assert shown.workers[0].mb_per_s == pytest.approx(3.0, rel=0.15)


def test_nothing_is_said_of_pending_and_eta_before_the_first_count_is_complete() -> None:
    progress = Progress(0.0, workers=1)
    progress.event(0, complete(10), 1.0)
    for _ in range(RANGES - 1):
        progress.count_range(1000)
    shown = progress.snapshot(10.0)
    assert shown.pending is None
    assert shown.eta_s is None
    progress.count_range(1000)
    assert progress.snapshot(10.0).pending == RANGES * 1000


def test_pending_falls_with_what_is_settled_after_the_count() -> None:
    progress = Progress(0.0, workers=1)
    progress.event(0, complete(copied=7, failed=1), 1.0)
    count_all(progress, 100)
    assert progress.pending == 100
    progress.event(0, complete(copied=30, failed=10), 2.0)
    assert progress.pending == 60
    progress.event(0, complete(copied=1000), 3.0)
    assert progress.pending == 0


def test_a_new_count_takes_the_place_of_the_old_one() -> None:
    progress = Progress(0.0, workers=1)
    count_all(progress, 100)
    progress.event(0, complete(copied=40), 2.0)
    count_all(progress, 5000)
    assert progress.pending == 5000


def test_the_eta_follows_the_runs_pace() -> None:
    progress = Progress(0.0, workers=1)
    progress.event(0, complete(copied=100), 10.0)
    count_all(progress, 300)
    assert progress.snapshot(10.0).eta_s == pytest.approx(30.0)


def test_the_eta_of_new_work_leaves_out_the_time_without_any() -> None:
    """A daemon that waited for a night is as quick as before."""
    progress = Progress(0.0, workers=2)
    progress.event(0, tick("sending"), 0.0)
    progress.event(0, complete(copied=100), 10.0)
    for worker in (0, 1):
        progress.event(worker, tick("idle"), 11.0)
    progress.event(1, tick("sending"), 30_000.0)
    count_all(progress, 150)
    assert progress.snapshot(30_005.0).eta_s is None
    progress.event(1, complete(copied=50), 30_010.0)
    assert progress.snapshot(30_010.0).eta_s == pytest.approx(20.0)


def test_a_count_is_out_of_date_when_work_begins_or_ends() -> None:
    progress = Progress(0.0, workers=2)
    for worker in (0, 1):
        progress.event(worker, tick("idle"), 1.0)
    count_all(progress, 0)
    assert not progress.out_of_date
    progress.event(0, tick("sending"), 2.0)
    assert progress.out_of_date
    count_all(progress, 8)
    assert not progress.out_of_date
    progress.event(1, tick("waiting"), 3.0)
    progress.event(0, tick("idle"), 4.0)
    assert not progress.out_of_date
    progress.event(1, tick("idle"), 5.0)
    assert progress.out_of_date


def test_what_begins_during_a_count_calls_for_another() -> None:
    progress = Progress(0.0, workers=1)
    progress.event(0, tick("idle"), 1.0)
    progress.count_range(0)
    progress.event(0, tick("sending"), 2.0)
    for _ in range(RANGES - 1):
        progress.count_range(0)
    assert progress.out_of_date
