"""The progress of a run: sums of what workers say, what is pending, how long that will take, and
begin and end of its outages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup import events
from ntt_backup.daemon.progress import OpenOutages, RateWindow, RunProgress
from ntt_backup.model import PendingEstimate
from ntt_backup.process.messages import BatchStart, Drained, Fatal, Message, ProcessEnded, Tick
from tests.unit.sample_events import BATCH, DIED, OUTAGE, OUTAGE_END, STALL, STALL_END

DRAINED = Drained()
START = events.WorkerStart(strategy="tar")
ENDED = ProcessEnded(status=1, detail="")
FATAL = Fatal(exit_code=1, message="", detail="", hint="")


def tick(state: str, sent: int = 0, content: int = 0) -> Tick:
    return Tick(state=state, sent=sent, content=content)


def begin(blobs: int, size: int = 0) -> BatchStart:
    return BatchStart(batch="0.3", blobs=blobs, bytes=size)


def test_blobs_whose_marks_were_lost_count_once() -> None:
    progress = RunProgress(0.0, 1)
    progress.take(0, complete(500, size=1000), 1.0)
    progress.take(0, events.MarksLost(blobs=500, bytes=1000), 2.0)
    progress.take(0, complete(500, size=1000), 3.0)
    state = progress.state(4.0)
    assert (state.copied, state.bytes, state.workers[0].copied) == (500, 1000, 500)


def complete(copied: int, failed: int = 0, size: int = 0) -> events.BatchComplete:
    return replace(BATCH, blobs=copied + failed, copied=copied, failed=failed, bytes=size)


@pytest.fixture
def progress() -> RunProgress:
    """Of a run that began at 0 seconds, with two workers."""
    return RunProgress(0.0, workers=2)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 99), st.integers(0, 9)), max_size=40))
def test_sums_are_those_of_all_batches(batches: list[tuple[int, int, int]]) -> None:
    progress = RunProgress(0.0, workers=2)
    for nth, (worker, copied, failed) in enumerate(batches):
        progress.take(worker, complete(copied, failed, size=copied * 10), float(nth))
    shown = progress.state(100.0)
    assert shown.copied == sum(copied for _, copied, _ in batches)
    assert shown.failed == sum(failed for _, _, failed in batches)
    assert shown.bytes == shown.copied * 10
    assert sum(worker.copied for worker in shown.workers) == shown.copied


def test_workers_are_active_while_they_send_or_wait_for_answers() -> None:
    states = ("sending", "waiting", "idle", "outage", "stopped")
    progress = RunProgress(0.0, workers=5)
    assert progress.state(1.0).active_workers == 0
    for worker, state in enumerate(states[:4]):
        progress.take(worker, tick(state), 1.0)
    progress.take(4, events.WorkerStop(), 2.0)
    shown = progress.state(2.0)
    assert shown.active_workers == 2
    assert tuple(one.state for one in shown.workers) == states


@pytest.mark.parametrize(
    ("end", "state"), [(STALL_END, "waiting"), (ENDED, "stopped"), (START, "starting")]
)
def test_a_stalled_worker_is_not_active(progress: RunProgress, end: Message, state: str) -> None:
    progress.take(0, tick("waiting"), 1.0)
    progress.take(0, STALL, 70.0)
    shown = progress.state(70.0)
    assert (shown.workers[0].state, shown.active_workers) == ("stalled", 0)
    progress.take(0, end, 80.0)
    assert progress.state(80.0).workers[0].state == state


# --- what is pending ------------------------------------------------------------------------------


def test_pending_and_eta_are_unknown_until_pending_is_found(progress: RunProgress) -> None:
    progress.take(0, tick("sending", content=10), 1.0)
    progress.take(0, complete(10), 1.0)
    shown = progress.state(10.0)
    assert (shown.pending, shown.eta_s, shown.share, shown.estimated) == (None, None, None, False)


def test_pending_falls_with_what_is_settled_after_it_was_found(progress: RunProgress) -> None:
    progress.take(0, complete(copied=7, failed=1), 1.0)
    progress.found(PendingEstimate(100, 0, 0, exact=True))
    assert progress.pending == 100
    progress.take(0, complete(copied=30, failed=10), 2.0)
    assert progress.pending == 60
    progress.take(0, complete(copied=1000), 3.0)
    assert progress.pending == 0
    progress.found(PendingEstimate(5000, 0, 0, exact=True))
    assert progress.pending == 5000


def test_nothing_is_pending_once_a_worker_saw_so_whatever_was_counted(
    progress: RunProgress,
) -> None:
    """A count may have seen what was settled meanwhile."""
    progress.take(0, tick("sending"), 0.0)
    progress.take(1, tick("sending"), 0.0)
    progress.found(PendingEstimate(409, 0, 0, exact=True))
    progress.take(0, complete(copied=300), 10.0)
    progress.take(0, DRAINED, 20.0)
    progress.take(1, complete(copied=20), 20.1)  # Recorded before, received later.
    shown = progress.state(40.0)
    assert (shown.pending, shown.share, shown.eta_s, shown.done) == (0, 1.0, 0.0, 320)


def test_an_estimate_is_marked_until_a_count_replaces_it(progress: RunProgress) -> None:
    progress.found(PendingEstimate(42_000_000, 17 * 10**12, 0, exact=False))
    shown = progress.state(1.0)
    assert (shown.pending, shown.estimated) == (42_000_000, True)
    progress.take(0, complete(1_000_000), 2.0)
    progress.found(PendingEstimate(30_000_000, 16 * 10**12, 0, exact=False))
    assert progress.pending == 41_000_000
    progress.found(PendingEstimate(40_999_000, 16 * 10**12, 0, exact=True))
    progress.found(PendingEstimate(40_000_000, 16 * 10**12, 0, exact=False))
    shown = progress.state(2.0)
    assert (shown.pending, shown.estimated) == (40_999_000, False)


def test_pending_is_out_of_date_when_work_begins_that_it_knows_nothing_of(
    progress: RunProgress,
) -> None:
    progress.take(0, DRAINED, 1.0)
    for worker in (0, 1):
        progress.take(worker, tick("idle"), 1.0)
    assert (progress.out_of_date, progress.at_work) == (False, False)
    progress.take(0, tick("sending"), 2.0)
    assert (progress.out_of_date, progress.at_work) == (True, True)
    progress.found(PendingEstimate(8, 0, 0, exact=True))
    progress.take(0, begin(8), 3.0)
    progress.take(0, complete(8), 3.0)
    assert not progress.out_of_date
    progress.take(0, begin(5), 4.0)
    assert progress.out_of_date


# --- share and time left --------------------------------------------------------------------------


def test_share_and_eta_count_content_that_is_not_answered_yet(progress: RunProgress) -> None:
    progress.found(PendingEstimate(200, 40_000, 0, exact=True))
    assert progress.state(5.0).share == 0.0
    progress.take(0, tick("waiting"), 100.0)
    for worker, now in ((0, 101.0), (1, 102.0)):
        progress.take(worker, begin(100, 20_000), now)
        progress.take(worker, tick("sending", 4_000, content=5_000), now)
    shown = progress.state(102.0)
    assert (shown.copied, shown.bytes, shown.sent, shown.pending) == (0, 0, 10_000, 200)
    assert [shown.share, shown.eta_s] == pytest.approx([0.25, 6.0])


def test_an_answer_before_the_last_tick_of_its_batch_counts_nothing_twice(
    progress: RunProgress,
) -> None:
    progress.found(PendingEstimate(100, 10_000, 0, exact=True))
    progress.take(0, begin(50, 5_000), 1.0)
    progress.take(0, tick("sending", content=4_000), 1.0)
    progress.take(0, complete(50, size=5_000), 2.0)
    progress.take(0, tick("sending", content=1_000), 3.0)
    shown = progress.state(3.0)
    assert (shown.bytes, shown.sent, shown.share) == (5_000, 5_000, 0.5)


@pytest.mark.parametrize("end", [START, ENDED, FATAL])
def test_what_a_dead_worker_had_in_flight_was_not_sent(progress: RunProgress, end: Message) -> None:
    progress.found(PendingEstimate(100, 10_000, 0, exact=True))
    progress.take(0, tick("sending", content=4_000), 1.0)
    progress.take(0, end, 2.0)
    shown = progress.state(3.0)
    assert (shown.sent, shown.share) == (0, 0.0)


def test_there_is_no_eta_while_nothing_moves(progress: RunProgress) -> None:
    progress.found(PendingEstimate(100, 10_000, 0, exact=True))
    progress.take(0, tick("sending", 5_000, content=5_000), 1.0)
    assert progress.state(10.0).eta_s is not None
    progress.take(0, tick("waiting"), 70.0)
    shown = progress.state(100.0)
    assert (shown.mb_per_s, shown.eta_s, shown.share) == (0.0, None, 0.5)
    progress.take(0, tick("sending", 100, content=100), 101.0)
    assert progress.state(101.0).eta_s is not None


def test_share_and_eta_of_a_burst_leave_out_the_time_without_work(progress: RunProgress) -> None:
    progress.take(0, tick("sending"), 0.0)
    progress.take(0, complete(copied=100), 10.0)
    progress.take(0, DRAINED, 11.0)
    for worker in (0, 1):
        progress.take(worker, tick("idle"), 11.0)
    assert progress.state(20_000.0).done == 100
    progress.take(1, tick("sending"), 30_000.0)
    assert progress.state(30_000.0).pending is None
    progress.found(PendingEstimate(150, 0, 0, exact=True))
    assert progress.state(30_005.0).eta_s is None
    progress.take(1, complete(copied=50), 30_010.0)
    shown = progress.state(30_010.0)
    assert [shown.eta_s, shown.done, shown.share] == pytest.approx([20.0, 50, 1 / 3])


# --- what is worth a line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begins", "held", "eta_s"),
    [(0.0, 5.0, 10.0), (3595.0, 0.0, 5.0)],
    ids=["before the pause", "within it"],
)
def test_the_eta_of_work_leaves_out_a_pause(
    progress: RunProgress, begins: float, held: float, eta_s: float
) -> None:
    progress.found(PendingEstimate(blobs=100, bytes=1000, unsized=0, exact=True))
    for at in sorted((begins, held)):
        if at == held:
            progress.hold(held)
        else:
            progress.take(0, tick("sending"), begins)
    progress.go_on(3600.0)
    progress.take(0, begin(100, size=1000), 3600.0)
    progress.take(0, tick("sending", sent=500, content=500), 3605.0)
    assert progress.state(3605.0).eta_s == pytest.approx(eta_s)


def test_a_snapshot_says_more_while_there_is_work_or_a_sum_has_changed(
    progress: RunProgress,
) -> None:
    assert progress.state(1.0).says_more_than(None)
    progress.take(0, tick("idle"), 1.0)
    progress.take(1, tick("sending", 100), 1.0)
    working = progress.state(2.0)
    assert working.says_more_than(working)
    progress.take(0, DRAINED, 3.0)
    progress.take(1, tick("idle"), 3.0)
    idle = progress.state(3.0)
    assert idle.says_more_than(working)
    later = progress.state(3600.0)
    assert later.mb_per_s < idle.mb_per_s
    assert not later.says_more_than(idle)
    progress.take(1, complete(1), 3601.0)
    assert progress.state(3601.0).says_more_than(idle)


# --- rates ----------------------------------------------------------------------------------------


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


# --- outages --------------------------------------------------------------------------------------


def test_an_outage_lasts_from_the_first_failure_of_any_worker() -> None:
    outages = OpenOutages()
    assert outages.lasted("remote", 1.0) is None
    outages.take(replace(OUTAGE, worker=1), 10.0)
    outages.take(replace(OUTAGE, worker=0), 12.0)
    outages.take(replace(OUTAGE, what="catalog"), 13.0)
    outages.take(replace(OUTAGE, worker=1), 14.0)
    assert outages.sides == {"remote", "catalog"}
    assert outages.waiting("remote") == {0, 1}
    assert outages.lasted("remote", 20.0) == 10.0
    assert [one.since for one in outages.all] == [10.0, 12.0, 13.0]


def test_one_end_is_the_end_for_all_workers() -> None:
    outages = OpenOutages()
    for worker in (0, 1, None):
        outages.take(replace(OUTAGE, worker=worker), 10.0)
    outages.take(OUTAGE_END, 20.0)
    assert (outages.sides, outages.waiting("remote"), outages.all) == (set(), set(), [])


def test_a_connection_hides_an_outage_and_the_next_failure_shows_it_again() -> None:
    """A remote that lets everybody in and then breaks every batch is unreachable all the time."""
    outages = OpenOutages()
    assert not outages.connect("remote", 5.0)
    outages.take(replace(OUTAGE, worker=0), 10.0)
    assert outages.connect("remote", 15.0)
    assert not outages.connect("remote", 16.0)
    assert outages.all == []
    assert outages.lasted("remote", 99.0) == 5.0
    outages.take(replace(OUTAGE, worker=0), 20.0)
    assert len(outages.all) == 1
    assert outages.lasted("remote", 30.0) == 20.0


def test_an_outage_that_no_process_waits_for_any_longer_is_dropped() -> None:
    outages = OpenOutages()
    outages.take(replace(OUTAGE, worker=0), 10.0)
    outages.take(replace(OUTAGE, worker=1), 11.0)
    outages.take(DIED, 12.0)
    assert outages.lasted("remote", 12.0) == 2.0
    outages.take(replace(DIED, worker=1), 13.0)
    assert outages.sides == set()
    outages.take(replace(OUTAGE, worker=0), 20.0)
    assert outages.lasted("remote", 21.0) == 1.0
