"""What a running daemon tells of itself: bounded, and of this moment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ntt_backup import events
from ntt_backup.daemon.control_socket import DaemonReport, RunReport
from ntt_backup.daemon.progress import RunProgress, RunState


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def report(clock: Clock) -> RunReport:
    return RunReport("run-1", 2, clock)


def outage(worker: int | None, what: str = "remote") -> events.Outage:
    return events.Outage(worker=worker, what=what, reason="gone", detail="", attempt=1, wait_s=1.0)


def said(report: RunReport) -> dict[str, Any]:
    """The report, as a program reads it."""
    made = report.report("vault", paused=False, bwlimit=None, jobs={"dump": False})
    fields: dict[str, Any] = json.loads(json.dumps(made.fields))
    assert DaemonReport.of(fields).fields == made.fields
    return fields


def sent(count: int) -> RunState:
    fields: dict[str, Any] = {**RunProgress(0.0, 2).state(0.0).fields, "sent": count}
    return RunState.of(fields)


def test_before_the_workers_start_there_is_a_state_already(report: RunReport) -> None:
    found = said(report)
    assert found["run_id"] == "run-1"
    assert found["started_at"] == "2027-01-15T08:00:00Z"
    assert [one["state"] for one in found["state"]["workers"]] == ["starting", "starting"]


def test_who_is_away_is_known_since_the_first_word_of_it(report: RunReport, clock: Clock) -> None:
    report.event(outage(1))
    clock.now += 60
    report.event(outage(1))
    report.event(outage(None, "preflight"))
    first, second = said(report)["outages"]
    since = "2027-01-15T08:00:00Z"
    assert first == {"what": "remote", "worker": 1, "since": since, "reason": "gone"}
    assert (second["worker"], second["since"]) == (None, "2027-01-15T08:01:00Z")
    report.event(events.OutageEnd(what="preflight", duration_s=1.0))
    report.event(events.WorkerRestart(worker=1, status=-9, detail="", attempt=1, wait_s=0.0))
    assert said(report)["outages"] == []


def test_the_last_lines_are_kept_and_no_progress(report: RunReport) -> None:
    for number in range(30):
        report.event(events.Warning(reason=f"no {number} " + "x" * 1000))
        report.event(sent(0).event())
    recent = said(report)["recent"]
    assert len(recent) == 20
    assert recent[-1][:2] == ["2027-01-15T08:00:00Z", "warning"]
    assert recent[-1][2].startswith("warning: no 29 x")
    assert len(recent[-1][2]) == 500


def test_each_minute_has_its_bytes_and_the_last_hour_is_kept(
    report: RunReport, clock: Clock
) -> None:
    for total in (10, 30, 25, 27):  # 25: five bytes have to be sent again.
        report.refresh(sent(total))
        clock.now += 15
    assert said(report)["minutes"] == [[1_800_000_000, 32]]
    for _ in range(100):
        report.refresh(sent(27))
        clock.now += 60
    minutes = said(report)["minutes"]
    assert len(minutes) == 60
    assert minutes[-1] == [1_800_000_060 + 99 * 60, 0]
