"""The history of runs, as `status` shows it."""

from __future__ import annotations

from uuid import UUID, uuid4

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import latest_runs, start_run, update_run

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


def start(conn: Connection, run_id: UUID) -> None:
    start_run(conn, run_id, TARGET, host="here", pid=42, strategy="tar", workers=4)
