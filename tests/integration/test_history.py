"""The history of runs as `status` shows it, and of checks."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import (
    hours,
    last_checks,
    last_end,
    latest_runs,
    note_check,
    start_run,
    update_run,
)

TARGET = "remote"


def test_runs_under_way_on_other_hosts_are_told_beside_the_last_one(catalog: Connection) -> None:
    ended, dead, other, last = (uuid4() for _ in range(4))
    for one in (ended, dead, other, last):
        start(catalog, one)
    update_run(catalog, ended, outcome="done", exit_code=0, copied=5, failed=1, bytes=5)
    catalog.execute(
        "update ntt_backup.runs set updated_at = now() - interval '1 h' where run_id = %s", [dead]
    )
    assert [run.run_id for run in latest_runs(catalog, TARGET)] == [last, other]


def test_a_note_that_arrives_late_takes_nothing_back(catalog: Connection) -> None:
    """A statement that was given up, because a lock held it, is still carried out afterwards."""
    run_id = uuid4()
    start(catalog, run_id)
    update_run(catalog, run_id, copied=7, failed=2, bytes=70)
    update_run(catalog, run_id, copied=5, failed=1, bytes=50)

    (run,) = latest_runs(catalog, TARGET)
    assert (run.copied, run.failed, run.bytes) == (7, 2, 70)

    update_run(catalog, run_id, outcome="done", exit_code=0, copied=9, failed=3, bytes=90)
    ended = latest_runs(catalog, TARGET)
    update_run(catalog, run_id, copied=7, failed=2, bytes=70)

    assert latest_runs(catalog, TARGET) == ended


def test_an_hour_gets_what_came_since_the_last_note(catalog: Connection) -> None:
    """Also where a note arrives late, or a second run works in the same hour."""
    for run_id in (uuid4(), uuid4()):
        start(catalog, run_id)
        update_run(catalog, run_id, copied=7, failed=2, bytes=70, outage_s=1.5)
        update_run(catalog, run_id, copied=5, failed=1, bytes=50, outage_s=0.0)
        last = {"copied": 9, "failed": 3, "bytes": 90}
        update_run(catalog, run_id, **last, outage_s=0.5, outcome="done", exit_code=0)
        update_run(catalog, run_id, copied=11, failed=3, bytes=95, outage_s=0.5)

    found = hours(catalog, TARGET, 1)  # Two, where the clock struck meanwhile.
    assert sum(one.copied for one in found) == 18
    assert sum(one.failed for one in found) == 6
    assert sum(one.bytes for one in found) == 180
    assert sum(one.outage_s for one in found) == 4.0
    assert hours(catalog, "other", 1) == []


def start(conn: Connection, run_id: UUID) -> None:
    start_run(conn, run_id, TARGET, host="here", pid=42, strategy="tar", workers=4)


def test_the_last_end_is_told_with_the_last_success(catalog: Connection) -> None:
    assert last_end(catalog, TARGET) is None
    good, bad, under_way = (uuid4() for _ in range(3))
    for one, exit_code in ((good, 0), (bad, 7)):
        start(catalog, one)
        update_run(catalog, one, outcome="done", exit_code=exit_code, copied=0, failed=0, bytes=0)
    start(catalog, under_way)

    end = last_end(catalog, TARGET)

    assert end is not None
    assert end.succeeded_at is not None
    assert end.exit_code == 7
    assert end.succeeded_at < end.ended_at


def note(conn: Connection, command: str, exit_code: int, target: str = TARGET) -> None:
    note_check(conn, target, command, lasted=60, exit_code=exit_code, blobs=5, bytes=50, wrong=0)


def test_the_last_call_and_the_last_good_one_of_each_command_are_told(catalog: Connection) -> None:
    for code in (0, 0, 5, 7):
        note(catalog, "verify", code)
    note(catalog, "drill", 0)
    note(catalog, "verify", 0, "other")

    found = last_checks(catalog, TARGET)

    assert [(one.command, one.exit_code) for one in found] == [
        ("drill", 0),
        ("verify", 7),
        ("verify", 0),
    ]
    assert found[0].ended_at - found[0].started_at >= timedelta(seconds=60)


def test_a_catalog_without_the_table_has_no_history(catalog: Connection) -> None:
    catalog.execute("drop table ntt_backup.checks")

    assert last_checks(catalog, TARGET) == []
