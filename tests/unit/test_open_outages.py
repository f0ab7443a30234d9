"""Begin and end of an outage are judged once for all workers and side jobs of a run."""

from __future__ import annotations

from typing import Any

from ntt_backup import events
from ntt_backup.daemon.progress import OpenOutages


def away(worker: int | None, what: str = "remote") -> events.Outage:
    return events.Outage(worker=worker, what=what, reason="gone", detail="", attempt=1, wait_s=1.0)


def test_an_outage_lasts_from_the_first_failure_of_any_worker() -> None:
    outages = OpenOutages()
    assert outages.lasted("remote", 1.0) is None
    outages.take(away(1), 10.0)
    outages.take(away(0), 12.0)
    outages.take(away(None, "catalog"), 13.0)
    outages.take(away(1), 14.0)
    assert outages.sides == {"remote", "catalog"}
    assert outages.waiting("remote") == {0, 1}
    assert outages.lasted("remote", 20.0) == 10.0
    assert [one.since for one in outages.all] == [10.0, 12.0, 13.0]


def test_one_end_is_the_end_for_all_workers() -> None:
    outages = OpenOutages()
    for worker in (0, 1, None):
        outages.take(away(worker), 10.0)
    outages.take(events.OutageEnd(worker=2, what="remote", duration_s=1.0), 20.0)
    assert (outages.sides, outages.waiting("remote"), outages.all) == (set(), set(), [])


def test_a_connection_hides_an_outage_and_the_next_failure_shows_it_again() -> None:
    """A remote that lets everybody in and then breaks every batch is unreachable all the time."""
    outages = OpenOutages()
    assert not outages.connect("remote", 5.0)
    outages.take(away(0), 10.0)
    assert outages.connect("remote", 15.0)
    assert not outages.connect("remote", 16.0)
    assert outages.all == []
    assert outages.lasted("remote", 99.0) == 5.0
    outages.take(away(0), 20.0)
    assert len(outages.all) == 1
    assert outages.lasted("remote", 30.0) == 20.0


def test_an_outage_that_no_process_waits_for_any_longer_is_dropped() -> None:
    outages = OpenOutages()
    outages.take(away(0), 10.0)
    outages.take(away(1), 11.0)
    died: dict[str, Any] = {"status": -9, "detail": "", "attempt": 1, "wait_s": 1.0}
    outages.take(events.WorkerRestart(worker=0, **died), 12.0)
    assert outages.lasted("remote", 12.0) == 2.0
    outages.take(events.WorkerRestart(worker=1, **died), 13.0)
    assert outages.sides == set()
    outages.take(away(0), 20.0)
    assert outages.lasted("remote", 21.0) == 1.0
