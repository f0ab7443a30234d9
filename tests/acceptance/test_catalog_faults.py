"""The catalog goes away, comes back, or says no: no blob is to blame, and nothing is lost."""

from __future__ import annotations

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
