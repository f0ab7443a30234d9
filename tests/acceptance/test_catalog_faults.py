"""The catalog goes away, comes back, or says no: no blob is to blame, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE, wait_until


def test_a_restart_of_the_database_is_waited_out(env: Environment, postgres: Postgres) -> None:
    *_, last = env.fill_slowly()
    with env.held(last), env.running("run") as run:
        env.await_event("batch_complete")
        postgres.stop()
        env.await_event("outage", 2)
        postgres.start()
        assert run.wait(PATIENCE) == 0, env.output()
    assert {line["what"] for line in env.events("outage")} == {"catalog"}
    assert env.events("worker_restart") == []
    assert env.failures() == {}
    assert env.events("run_stop")[0]["outcome"] == "done"
    env.assert_complete()
    assert env.status()["last_run"]["outcome"] == "done"


def test_a_receipt_outlives_an_outage_of_the_catalog(env: Environment, link: Link) -> None:
    """What the remote has answered for is recorded later, not sent again."""
    env.through(env.sshd.through(link.port))
    blobids = env.fill(20, size=lambda chance: 20_000)
    env.write_config(run={"workers": 1})
    with env.locked_catalog() as release, env.running("run") as run:
        wait_until(lambda: len(env.on_remote()) == len(blobids), "the blobs to arrive")
        wait_until(lambda: _held_up(env), "the receipt to wait for the catalog")
        before = link.sent
        env.query("select pg_terminate_backend(%s)", _held_up(env)[0][0])
        env.await_event("outage")
        release()
        assert run.wait(PATIENCE) == 0, env.output()
    assert link.sent - before < 200_000
    assert env.events("batch_retry") == []
    assert sum(line["copied"] for line in env.events("batch_complete")) == len(blobids)
    env.assert_complete()


def _held_up(env: Environment) -> list[tuple[int]]:
    return env.query(
        "select pid from pg_stat_activity where wait_event_type = 'Lock'"
        " and application_name like 'ntt-backup-remote/%'"
    )


@pytest.mark.long
def test_every_command_ends_with_4_without_a_database(env: Environment, postgres: Postgres) -> None:
    env.fill(3)
    postgres.stop()
    for command in ("run", "check", "status", "requeue", "init-db", "scan"):
        result = env.run(command, expect=4)
        assert "the catalog is not available" in result.stdout + result.stderr
        assert "Traceback" not in result.stderr
    assert env.events("worker_start") == []
    assert [line["exit_code"] for line in env.events("run_stop")] == [4]
    postgres.start()
    assert env.copied() == set()


@pytest.mark.long
def test_a_privilege_that_is_revoked_ends_the_run(
    env: Environment, role: Callable[[], str]
) -> None:
    name = role()
    env.query(f"grant select, insert, update on blobs to {name}")
    env.query(f"grant usage on schema ntt_backup to {name}")
    env.query(f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}")
    env.write_config(catalog={"url": psycopg.conninfo.make_conninfo(env.url, user=name)})
    env.fill_slowly(600)
    with env.running("run") as run:
        env.await_event("batch_complete")
        env.query(f"revoke update on blobs from {name}")
        assert run.wait(PATIENCE) == 4, env.output()
    (error,) = env.events("error")
    assert error["detail"] == "permission denied for table blobs"
    assert "init-db --print-sql" in error["hint"]
    assert env.failures() == {}
    env.assert_nothing_half()
    env.query(f"grant update on blobs to {name}")
    env.finish()
