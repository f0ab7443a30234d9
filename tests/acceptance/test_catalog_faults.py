"""The catalog goes away, comes back, or says no: no blob is to blame, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psycopg
import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE
from tests.postgres import Postgres


def test_a_restart_of_the_database_is_waited_out(site: Site, postgres: Postgres) -> None:
    *_, last = site.fill_slowly()
    with site.held(last), site.running("run") as run:
        site.await_event("batch_complete")
        postgres.stop()
        site.await_event("outage", 2)
        postgres.start()
        assert run.wait(PATIENCE) == 0, site.output()
    assert {line["what"] for line in site.events("outage")} == {"catalog"}
    assert site.events("worker_restart") == []
    assert site.failures() == {}
    assert site.events("run_stop")[0]["outcome"] == "done"
    site.assert_complete()
    assert site.status()["last_run"]["outcome"] == "done"


def test_a_receipt_outlives_an_outage_of_the_catalog(site: Site, link: Link) -> None:
    """What the remote has answered for is recorded later, not sent again."""
    site.through(site.sshd.through(link.port))
    blobids = site.fill(20, size=lambda chance: 20_000)
    site.write_config(run={"workers": 1})
    with site.locked_catalog() as release, site.running("run") as run:
        wait_until(lambda: len(site.on_remote()) == len(blobids), "the blobs to arrive")
        wait_until(lambda: _held_up(site), "the receipt to wait for the catalog")
        before = link.sent
        site.query("select pg_terminate_backend(%s)", _held_up(site)[0][0])
        site.await_event("outage")
        release()
        assert run.wait(PATIENCE) == 0, site.output()
    assert link.sent - before < 200_000
    assert site.events("batch_retry") == []
    assert sum(line["copied"] for line in site.events("batch_complete")) == len(blobids)
    site.assert_complete()


def _held_up(site: Site) -> list[tuple[int]]:
    return site.query(
        "select pid from pg_stat_activity where wait_event_type = 'Lock'"
        " and application_name like 'ntt-backup-remote/%'"
    )


@pytest.mark.long
def test_every_command_ends_with_4_without_a_database(site: Site, postgres: Postgres) -> None:
    site.fill(3)
    postgres.stop()
    for command in ("run", "check", "status", "requeue", "init-db", "scan"):
        result = site.run(command)
        assert result.returncode == 4, (command, result.stdout, result.stderr)
        assert "the catalog is not available" in result.stdout + result.stderr
        assert "Traceback" not in result.stderr
    assert site.events("worker_start") == []
    assert [line["exit_code"] for line in site.events("run_stop")] == [4]
    postgres.start()
    assert site.copied() == set()


@pytest.mark.long
def test_an_outage_that_lasts_too_long_ends_the_run(site: Site, postgres: Postgres) -> None:
    blobids = site.fill_slowly(600)
    site.write_config(run={"outage_timeout": 0.5})
    with site.running("run") as run:
        site.await_event("batch_complete")
        postgres.stop()
        assert run.wait(PATIENCE) == 4, site.output()
    assert site.processes() == {}
    assert site.events("run_stop")[0]["outcome"] == "error"
    assert "the catalog is not available" in site.events("error")[0]["message"]
    postgres.start()
    assert site.failures() == {}
    assert len(site.copied()) < len(blobids)
    site.assert_nothing_half()
    site.finish()


def test_a_privilege_that_is_revoked_ends_the_run(site: Site, role: Callable[[], str]) -> None:
    name = role()
    site.query(f"grant select, insert, update on blobs to {name}")
    site.query(f"grant usage on schema ntt_backup to {name}")
    site.query(f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}")
    site.write_config(catalog={"url": psycopg.conninfo.make_conninfo(site.url, user=name)})
    site.fill_slowly(600)
    with site.running("run") as run:
        site.await_event("batch_complete")
        site.query(f"revoke update on blobs from {name}")
        assert run.wait(PATIENCE) == 4, site.output()
    (error,) = site.events("error")
    assert error["detail"] == "permission denied for table blobs"
    assert "init-db --print-sql" in error["hint"]
    assert site.failures() == {}
    site.assert_nothing_half()
    site.query(f"grant update on blobs to {name}")
    site.finish()


def test_a_trigger_that_undoes_what_is_recorded_ends_the_run(site: Site) -> None:
    """What cannot be marked would be sent again for ever."""
    stubborn, *others = site.fill(20)
    site.query(
        "create function undo() returns trigger language plpgsql as 'begin return null; end'"
    )
    site.query(
        "create trigger undo before update on blobs for each row"
        f" when (new.blobid = '{stubborn}') execute function undo()"
    )
    result = site.run("run")
    assert result.returncode == 4, site.output()
    (error,) = site.events("error")
    assert error["message"] == "an update of blobs changes nothing"
    assert stubborn in error["detail"]
    assert "triggers" in error["hint"]
    assert stubborn not in site.copied()
    site.query("drop trigger undo on blobs")
    assert site.run("run").returncode == 0
    assert site.copied() == {stubborn, *others}
    site.assert_complete()


def test_a_blob_larger_than_the_column_size_can_say_is_backed_up(site: Site) -> None:
    site.query("alter table blobs alter column size type smallint")
    large = site.put_in_store(b"x" * 40_000)
    small = site.put_in_store(b"x" * 4_000)
    scan = site.run("scan")
    assert scan.returncode == 0, scan.stderr
    site.query("update blobs set size = null")
    assert site.run("run").returncode == 0, site.output()
    assert dict(site.query("select blobid, size from blobs")) == {large: None, small: 4_000}
    assert "smallint" in site.events("warning")[0]["reason"]
    site.assert_complete()


def test_limits_of_the_role_do_not_end_a_run(site: Site, role: Callable[[], str]) -> None:
    """A batch that waits longer for a lock than the role's statements may take is recorded."""
    name = role()
    site.query(f"alter role {name} superuser")
    site.query(f"alter role {name} set statement_timeout = '1s'")
    site.write_config(
        catalog={"url": psycopg.conninfo.make_conninfo(site.url, user=name)}, run={"workers": 1}
    )
    site.fill(5)
    with site.locked_catalog() as release, site.running("run") as run:
        waits = "select 1 from pg_locks where waitstart < now() - interval '2 s'"
        wait_until(lambda: site.query(waits), "a wait longer than the role's limit")
        release()
        assert run.wait(PATIENCE) == 0, site.output()
    assert site.events("outage") == []
    site.assert_complete()


@pytest.mark.long
def test_a_stop_while_the_database_is_away_loses_nothing(site: Site, postgres: Postgres) -> None:
    site.fill_slowly(600)
    with site.running("run") as run:
        site.await_event("batch_complete")
        postgres.stop()
        site.await_event("outage", 2)
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, site.output()
    assert site.processes() == {}
    postgres.start()
    assert site.failures() == {}
    assert site.run("run", "--bwlimit", "1GB/s").returncode == 0
    site.assert_complete()
