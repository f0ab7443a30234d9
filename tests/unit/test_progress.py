"""A run's figures: sums of what workers tell, what is pending, and how long that will take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup import events
from ntt_backup.daemon.progress import Progress
from ntt_backup.messages import BatchStart, Drained, Fatal, Message, Tick, WorkerDied
from ntt_backup.model import Batch, Blob, Failure, Reason, Receipt

DRAINED = Drained()
START = events.WorkerStart(strategy="tar")
STOP = events.WorkerStop()
DIED = WorkerDied(status=1, detail="")
FATAL = Fatal(exit_code=1, message="", detail="", hint="")
STALL = events.WorkerStall(silent_s=61.0, hint="")
STALL_END = events.WorkerStallEnd(duration_s=70.0)


def tick(state: str, sent: int = 0, content: int = 0) -> Tick:
    return Tick(state=state, sent=sent, content=content)


def begin(blobs: int, size: int = 0, batch: str = "0.1") -> BatchStart:
    return BatchStart(batch=batch, blobs=blobs, bytes=size)


def complete(copied: int, failed: int = 0, size: int = 0) -> events.BatchComplete:
    stored = tuple(Blob(f"{number:064x}", 0) for number in range(copied))
    lost = tuple(Failure(f"{number:064x}", Reason.MISSING) for number in range(failed))
    receipt = Receipt(Batch("0.1", ()), stored, lost, 0, 1.0)
    return replace(events.BatchComplete.of(receipt), bytes=size)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 9)), max_size=40))
def test_sums_are_those_of_all_batches(batches: list[tuple[int, int, int]]) -> None:
    progress = Progress(0.0, workers=4)
    for nth, (worker, copied, failed) in enumerate(batches):
        progress.take(worker, complete(copied, failed, size=copied * 10), float(nth))
    shown = progress.snapshot(100.0)
    assert shown.copied == sum(copied for _, copied, _ in batches)
    assert shown.failed == sum(failed for _, _, failed in batches)
    assert shown.bytes == shown.copied * 10
    assert sum(worker.copied for worker in shown.workers) == shown.copied


def test_workers_are_active_while_they_send_or_wait_for_answers() -> None:
    progress = Progress(0.0, workers=5)
    assert progress.snapshot(1.0).active_workers == 0
    for index, state in enumerate(("sending", "waiting", "idle", "outage", "sending")):
        progress.take(index, tick(state), 1.0)
    progress.take(4, STOP, 2.0)
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
    progress.take(0, begin(5, batch="0.3"), 1.0)
    progress.take(0, complete(5), 1.0)
    progress.take(0, START, 2.0)
    (worker,) = progress.snapshot(3.0).workers
    assert (worker.state, worker.copied, worker.batch) == ("starting", 5, "0.3")


@pytest.mark.parametrize(
    ("end", "state"),
    [(STALL_END, "waiting"), (DIED, "stopped"), (START, "starting")],
)
def test_a_stalled_worker_shows_as_that_and_is_not_active(end: Message, state: str) -> None:
    progress = Progress(0.0, workers=1)
    progress.take(0, tick("waiting"), 1.0)
    progress.take(0, STALL, 70.0)
    shown = progress.snapshot(70.0)
    assert (shown.workers[0].state, shown.active_workers) == ("stalled", 0)
    progress.take(0, end, 80.0)
    assert progress.snapshot(80.0).workers[0].state == state


def test_speeds_are_in_megabytes_and_blobs_a_second() -> None:
    progress = Progress(0.0, workers=2)
    for second in range(30):
        progress.take(0, tick("sending", 3_000_000), float(second))
        progress.take(1, tick("sending", 1_000_000), float(second))
        progress.take(0, complete(50), float(second))
    shown = progress.snapshot(29.0)
    assert shown.mb_per_s == pytest.approx(4.0, rel=0.1)
    assert shown.blobs_per_s == pytest.approx(50, rel=0.1)
    assert shown.workers[0].mb_per_s == pytest.approx(3.0, rel=0.15)


def test_nothing_is_said_of_pending_and_eta_before_they_are_known() -> None:
    progress = Progress(0.0, workers=1)
    progress.take(0, tick("sending", content=10), 1.0)
    progress.take(0, complete(10), 1.0)
    shown = progress.snapshot(10.0)
    assert (shown.pending, shown.eta_s, shown.share, shown.estimated) == (None, None, None, False)
    progress.found(1000, 0, 1000, exact=True)
    assert progress.snapshot(10.0).pending == 1000


def test_pending_falls_with_what_is_settled_after_it_was_found() -> None:
    progress = Progress(0.0, workers=1)
    progress.take(0, complete(copied=7, failed=1), 1.0)
    progress.found(100, 0, 0, exact=True)
    assert progress.pending == 100
    progress.take(0, complete(copied=30, failed=10), 2.0)
    assert progress.pending == 60
    progress.take(0, complete(copied=1000), 3.0)
    assert progress.pending == 0


def test_a_new_count_takes_the_place_of_the_old_one() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 0, 0, exact=True)
    progress.take(0, complete(copied=40), 2.0)
    progress.found(5000, 0, 0, exact=True)
    assert progress.pending == 5000


# --- share and time left --------------------------------------------------------------------------


def test_share_and_time_left_go_by_content_that_no_receipt_speaks_of_yet() -> None:
    progress = Progress(0.0, workers=2)
    progress.found(200, 40_000, 0, exact=True)
    assert progress.snapshot(5.0).share == 0.0
    progress.take(0, tick("waiting"), 100.0)
    for worker, now in ((0, 101.0), (1, 102.0)):
        progress.take(worker, begin(100, 20_000), now)
        progress.take(worker, tick("sending", 4_000, content=5_000), now)
    shown = progress.snapshot(102.0)
    assert (shown.copied, shown.bytes, shown.sent, shown.pending) == (0, 0, 10_000, 200)
    assert shown.share == pytest.approx(0.25)
    assert shown.eta_s == pytest.approx(6.0)


def test_a_receipt_moves_nothing_that_was_sent() -> None:
    """Whether the last of its bytes were told of before or after."""
    progress = Progress(0.0, workers=1)
    progress.found(100, 10_000, 0, exact=True)
    progress.take(0, begin(50, 5_000), 1.0)
    progress.take(0, tick("sending", content=4_000), 1.0)
    progress.take(0, complete(50, size=5_000), 2.0)
    progress.take(0, tick("sending", content=1_000), 3.0)
    shown = progress.snapshot(3.0)
    assert (shown.bytes, shown.sent, shown.share) == (5_000, 5_000, 0.5)


@pytest.mark.parametrize("end", [START, DIED, FATAL])
def test_what_was_in_flight_when_a_worker_died_was_not_sent(end: Message) -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 10_000, 0, exact=True)
    progress.take(0, tick("sending", content=4_000), 1.0)
    progress.take(0, end, 2.0)
    shown = progress.snapshot(3.0)
    assert (shown.sent, shown.share) == (0, 0.0)


def test_not_all_is_done_before_the_last_answer() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 10_000, 0, exact=True)
    progress.take(0, tick("waiting", content=10_000), 1.0)
    assert (progress.snapshot(2.0).share or 0) < 1
    progress.take(0, complete(100, size=10_000), 3.0)
    assert progress.snapshot(3.0).share == 1.0


def test_sizes_that_the_catalog_does_not_know_are_taken_to_be_like_those_begun() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(1_000, 0, 1_000, exact=True)
    progress.take(0, begin(100, 50_000), 1.0)
    progress.take(0, tick("sending", content=25_000), 1.0)
    assert progress.snapshot(1.0).share == pytest.approx(0.05)


def test_blobs_count_where_they_have_no_content() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 0, 0, exact=True)
    progress.take(0, tick("sending"), 0.0)
    progress.take(0, complete(25), 10.0)
    shown = progress.snapshot(10.0)
    assert (shown.share, shown.eta_s) == (0.25, 30.0)


def test_no_time_left_is_told_while_nothing_moves() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 10_000, 0, exact=True)
    progress.take(0, tick("sending", 5_000, content=5_000), 1.0)
    assert progress.snapshot(10.0).eta_s is not None
    progress.take(0, tick("waiting"), 70.0)
    shown = progress.snapshot(100.0)
    assert (shown.mb_per_s, shown.eta_s, shown.share) == (0.0, None, 0.5)
    progress.take(0, tick("sending", 100, content=100), 101.0)
    assert progress.snapshot(101.0).eta_s is not None


def test_failed_blobs_are_done_with() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(100, 10_000, 0, exact=True)
    progress.take(0, begin(100, 10_000), 1.0)
    progress.take(0, tick("sending"), 1.0)
    progress.take(0, complete(0, failed=50), 2.0)
    assert progress.snapshot(2.0).share == 0.5


def test_the_time_left_of_new_work_leaves_out_the_time_without_any() -> None:
    """A daemon that waited for a night is as quick as before, and begins a new bar."""
    progress = Progress(0.0, workers=2)
    progress.take(0, tick("sending"), 0.0)
    progress.take(0, complete(copied=100), 10.0)
    progress.take(0, DRAINED, 11.0)
    for worker in (0, 1):
        progress.take(worker, tick("idle"), 11.0)
    assert progress.snapshot(20_000.0).done == 100
    progress.take(1, tick("sending"), 30_000.0)
    assert progress.snapshot(30_000.0).pending is None
    progress.found(150, 0, 0, exact=True)
    assert progress.snapshot(30_005.0).eta_s is None
    progress.take(1, complete(copied=50), 30_010.0)
    shown = progress.snapshot(30_010.0)
    assert (shown.eta_s, shown.done, shown.share) == (20.0, 50, pytest.approx(1 / 3))


def test_when_a_worker_sees_nothing_pending_that_is_so_whatever_was_counted() -> None:
    """A count may have seen what was settled meanwhile."""
    progress = Progress(0.0, workers=2)
    progress.take(0, tick("sending"), 0.0)
    progress.take(1, tick("sending"), 0.0)
    progress.found(409, 0, 0, exact=True)
    progress.take(0, complete(copied=300), 10.0)
    progress.take(0, DRAINED, 20.0)
    progress.take(1, complete(copied=20), 20.1)  # It was recorded before, and is told of later.
    shown = progress.snapshot(40.0)
    assert (shown.pending, shown.share, shown.eta_s, shown.done) == (0, 1.0, 0.0, 320)


def test_without_work_there_is_no_share() -> None:
    progress = Progress(0.0, workers=1)
    progress.take(0, DRAINED, 1.0)
    progress.take(0, tick("idle"), 1.0)
    shown = progress.snapshot(2.0)
    assert (shown.pending, shown.share) == (0, None)


# --- estimates ------------------------------------------------------------------------------------


def test_an_estimate_is_marked_until_a_count_takes_its_place() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(42_000_000, 17 * 10**12, 0, exact=False)
    shown = progress.snapshot(1.0)
    assert (shown.pending, shown.estimated) == (42_000_000, True)
    progress.take(0, complete(1_000_000), 2.0)
    progress.found(30_000_000, 16 * 10**12, 0, exact=False)
    assert progress.snapshot(2.0).pending == 41_000_000
    progress.found(40_999_000, 16 * 10**12, 0, exact=True)
    shown = progress.snapshot(2.0)
    assert (shown.pending, shown.estimated) == (40_999_000, False)
    progress.found(40_000_000, 16 * 10**12, 0, exact=False)
    assert progress.snapshot(2.0).pending == 40_999_000


def test_an_estimate_that_was_too_low_says_nothing_any_more() -> None:
    progress = Progress(0.0, workers=1)
    progress.take(0, tick("sending"), 0.0)
    progress.found(10, 0, 0, exact=False)
    progress.take(0, complete(10), 2.0)
    shown = progress.snapshot(2.0)
    assert (shown.pending, shown.eta_s, shown.share, shown.estimated) == (None, None, None, False)
    progress.found(30, 0, 0, exact=False)
    assert progress.snapshot(2.0).pending == 30


# --- when to look again ---------------------------------------------------------------------------


def test_what_was_found_is_out_of_date_when_work_begins_that_it_knows_nothing_of() -> None:
    progress = Progress(0.0, workers=2)
    progress.take(0, DRAINED, 1.0)
    for worker in (0, 1):
        progress.take(worker, tick("idle"), 1.0)
    assert not progress.out_of_date
    assert not progress.at_work
    progress.take(0, tick("sending"), 2.0)
    assert progress.at_work
    assert progress.out_of_date
    progress.found(8, 0, 0, exact=True)
    assert not progress.out_of_date
    progress.take(0, begin(8), 3.0)
    progress.take(0, complete(8), 3.0)
    assert not progress.out_of_date
    progress.take(0, begin(5), 4.0)
    assert progress.out_of_date


def test_work_that_others_hold_is_looked_at_again_when_ours_ends() -> None:
    progress = Progress(0.0, workers=1)
    progress.found(8, 0, 0, exact=True)
    progress.take(0, tick("sending"), 2.0)
    progress.take(0, tick("idle"), 3.0)
    assert progress.out_of_date


# --- what is worth a line -------------------------------------------------------------------------


def test_a_line_is_worth_its_while_as_long_as_there_is_work_or_something_new() -> None:
    progress = Progress(0.0, workers=2)
    first = progress.snapshot(1.0)
    assert first.says_more_than(None)
    progress.take(0, tick("idle"), 1.0)
    progress.take(1, tick("sending", 100), 1.0)
    working = progress.snapshot(2.0)
    assert working.says_more_than(working)
    progress.take(0, DRAINED, 3.0)
    progress.take(1, tick("idle"), 3.0)
    idle = progress.snapshot(3.0)
    assert idle.says_more_than(working)
    later = progress.snapshot(3600.0)
    assert later.mb_per_s < idle.mb_per_s
    assert not later.says_more_than(idle)
    progress.take(1, complete(1), 3601.0)
    assert progress.snapshot(3601.0).says_more_than(idle)
