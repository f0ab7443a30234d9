"""The run's row in the catalog: whatever happens there, the run goes on."""

from __future__ import annotations

import gc
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import (
    hours,
    last_end,
    latest_runs,
    recent_runs,
    start_run,
    update_run,
)
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.config import Settings
from ntt_backup.daemon import run_history
from ntt_backup.daemon.progress import RunProgress
from ntt_backup.daemon.run_history import RunHistory
from ntt_backup.process.messages import Tick
from ntt_backup.report.status import run_line
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE

# Where nothing gives up, a test would wait for ever.
pytestmark = pytest.mark.timeout(PATIENCE)

SENDING = Tick(state="sending")


def history_of(catalog_url: str, tmp_path: Path) -> RunHistory:
    """The history of a run, over a connection that would wait for ever."""
    url = make_conninfo(catalog_url, options="-c lock_timeout=0 -c statement_timeout=0")
    settings = Settings.model_validate(
        {
            "catalog": {"url": url},
            "source": {"root": str(tmp_path)},
            "remote": {"host": "nowhere", "path": "/nowhere"},
        }
    )
    return RunHistory(settings, str(uuid.uuid4()))


@pytest.fixture
def history(catalog_url: str, tmp_path: Path) -> Iterator[RunHistory]:
    """The history of a run that has begun."""
    made = history_of(catalog_url, tmp_path)
    made.start("tar")
    yield made
    made.end(RunProgress(0.0, 1).state(1.0), "done", 0, "")


def assert_noted(history: RunHistory, catalog: Connection) -> None:
    """What a run has copied arrives in its row."""
    progress = RunProgress(0.0, 1)
    progress.copied = 7
    history.update(progress.state(3.0))
    (noted,) = latest_runs(catalog, "remote")
    assert noted.copied == 7


def test_a_catalog_that_hangs_costs_no_descriptor(
    history: RunHistory, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_history, "_PATIENCE_SECONDS", 0.05)
    state = RunProgress(0.0, 1).state(1.0)
    gc.disable()
    try:
        with postgres.frozen():
            open_now = []
            for _ in range(4):
                history.update(state)  # The first one loses the connection.
                open_now.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert len({*open_now}) == 1


def test_a_run_whose_row_a_promoted_standby_lacks_notes_itself_again(
    history: RunHistory, catalog: Connection
) -> None:
    catalog.execute("delete from ntt_backup.runs")
    assert_noted(history, catalog)
    (noted,) = latest_runs(catalog, "remote")
    assert (noted.strategy, noted.pid, noted.ended_at) == ("tar", os.getpid(), None)


FULL = "the remote cannot store: No space left on device"


@pytest.mark.parametrize(("outcome", "rows"), [("error", [("error", 6, FULL)]), ("stopped", [])])
def test_a_run_that_fails_before_it_begins_is_in_the_history(
    catalog: Connection, catalog_url: str, tmp_path: Path, outcome: str, rows: list[object]
) -> None:
    history_of(catalog_url, tmp_path).end(RunProgress(0.0, 1).state(1.0), outcome, 6, FULL)
    found = latest_runs(catalog, "remote")
    assert [(one.outcome, one.exit_code, one.reason) for one in found] == rows
    assert all(run_line(one).endswith(f": {FULL}") for one in found)
    end = last_end(catalog, "remote")
    assert (end.reason if end is not None else None) == (FULL if rows else None)


def test_an_older_catalog_without_a_place_for_reasons_keeps_the_rest_of_the_history(
    catalog: Connection, catalog_url: str, tmp_path: Path
) -> None:
    catalog.execute("alter table ntt_backup.runs drop column reason")
    history_of(catalog_url, tmp_path).end(RunProgress(0.0, 1).state(1.0), "error", 6, FULL)
    (run,) = recent_runs(catalog, "remote", 9)
    assert (run.outcome, run.exit_code, run.reason) == ("error", 6, "")
    end = last_end(catalog, "remote")
    assert end is not None
    assert (end.exit_code, end.reason) == (6, "")


def test_a_run_that_was_killed_is_closed_by_the_next_one_of_this_host(
    catalog: Connection, catalog_url: str, tmp_path: Path
) -> None:
    """As of when it was last heard of. A PID is ours, or nobody's, or another process has it."""
    ours, nobody, another = os.getpid(), 2**22 + 1, os.getppid()
    host = socket.gethostname()
    begun = {(host, ours), (host, nobody), (host, another), ("elsewhere", nobody)}
    runs = {one: uuid.uuid4() for one in begun}
    for (where, pid), run_id in runs.items():
        start_run(catalog, run_id, "remote", host=where, pid=pid, strategy="tar", workers=1)
        update_run(catalog, run_id, copied=7, failed=0, bytes=70)
    assert last_end(catalog, "remote") is None

    made = history_of(catalog_url, tmp_path)
    made.start("tar")

    rows = recent_runs(catalog, "remote", 9)
    found = {one.run_id: one for one in rows if one.run_id in runs.values()}
    closed = {one for one, run_id in runs.items() if found[run_id].ended_at is not None}
    assert closed == {(host, ours), (host, nobody)}
    for one in closed:
        run = found[runs[one]]
        assert (run.outcome, run.exit_code, run.ended_at) == ("killed", None, run.updated_at)
        assert f"PID {one[1]}: killed" in run_line(run)
    end = last_end(catalog, "remote")
    assert end is not None
    assert end.exit_code == 1

    # Where two machines have one name, one may be taken for dead that is not.
    update_run(catalog, runs[host, nobody], copied=8, failed=0, bytes=80)
    (lives,) = (one for one in recent_runs(catalog, "remote", 9) if one.copied == 8)
    assert (lives.outcome, lives.ended_at) == (None, None)
    made.end(RunProgress(0.0, 1).state(1.0), "done", 0, "")


@pytest.mark.parametrize("known", [True, False, None])
def test_what_is_not_known_in_a_moment_is_left_to_the_workers(
    history: RunHistory, monkeypatch: pytest.MonkeyPatch, known: bool | None
) -> None:
    monkeypatch.setattr(Claims, "any_pending", lambda _: known)
    assert history.any_pending() is (known is not False)


@pytest.mark.parametrize("table", ["blobs", "ntt_backup.runs"])
def test_a_locked_table_is_not_waited_for(
    history: RunHistory, catalog: Connection, catalog_url: str, table: str
) -> None:
    progress = RunProgress(0.0, 1)
    with psycopg.connect(catalog_url) as other:
        other.execute(f"lock table {table} in access exclusive mode".encode())
        if table == "blobs":
            history.count_pending(progress, 1.0)
        else:
            history.update(progress.state(1.0))
        assert progress.pending is None
    assert_noted(history, catalog)


def test_a_server_that_stands_still_is_not_waited_for(
    history: RunHistory, catalog: Connection, postgres: Postgres
) -> None:
    """Neither by a query nor by a new connection."""
    with postgres.frozen():
        for now in (1.0, 2.0):
            history.update(RunProgress(0.0, 1).state(now))
    assert_noted(history, catalog)


def test_what_is_lost_with_the_connection_is_noted_over_the_next(
    history: RunHistory, catalog: Connection
) -> None:
    end = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
    catalog.execute(end + " and datname = current_database()")
    history.update(RunProgress(0.0, 1).state(1.0))
    assert_noted(history, catalog)


def test_what_is_pending_is_looked_at_soon_where_the_last_look_tells_little(
    history: RunHistory, catalog: Connection
) -> None:
    """And not at once, since a daemon may be fed blob by blob."""
    progress, now = RunProgress(0.0, 1), 1000.0
    history.count_pending(progress, now)
    assert progress.pending == 0
    catalog.execute("insert into blobs (blobid) values (repeat('ab', 32))")
    history.count_pending(progress, now + 60)
    assert progress.pending == 0
    progress.take(0, SENDING, now + 61)
    history.count_pending(progress, now + 100)
    assert progress.pending == 1
    catalog.execute("insert into blobs (blobid) values (repeat('cd', 32))")
    history.count_pending(progress, now + 100.5)
    assert progress.pending == 1
    history.count_pending(progress, now + 200)
    assert progress.pending == 2


def test_what_takes_too_long_to_count_is_estimated(
    history: RunHistory, catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.execute(
        "insert into blobs (blobid, size)"
        " select encode(sha256(n::text::bytea), 'hex'), 1000 from generate_series(1, 50000) as n"
    )
    # Counted in so many milliseconds, or given up; a quick machine counts 2,000 in one.
    monkeypatch.setattr(run_history, "_COUNT_MILLISECONDS", 1)
    catalog.execute("analyze blobs")
    progress = RunProgress(0.0, 1)
    history.count_pending(progress, 1000.0)
    shown = progress.state(1.0)
    assert shown.estimated
    assert shown.pending == pytest.approx(50_000, rel=0.5)


def test_the_seconds_of_an_outage_are_noted_with_the_hour(
    history: RunHistory, catalog: Connection
) -> None:
    progress = RunProgress(0.0, 2)
    for now, state in ((5.0, "sending"), (25.0, "outage"), (25.5, "sending"), (40.0, "sending")):
        progress.take(0, Tick(state=state), now)
        history.refresh(progress.state(now))
    history.update(progress.state(60.0))
    history.update(progress.state(60.0))
    assert sum(one.outage_s for one in hours(catalog, "remote", 1)) == pytest.approx(20.0)


def test_a_run_goes_on_where_nobody_made_the_table_of_hours(
    history: RunHistory, catalog: Connection
) -> None:
    catalog.execute("drop table ntt_backup.hours")
    catalog.execute("delete from ntt_backup.runs")
    history.start("tar")
    assert_noted(history, catalog)
