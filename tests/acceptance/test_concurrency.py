"""Several at once: workers, coordinators, hosts. Every blob goes once."""

from __future__ import annotations

import pytest

from tests.helpers.environment import Environment
from tests.helpers.postgres import CONNECTIONS
from tests.helpers.waiting import PATIENCE, wait_until


def test_a_second_coordinator_is_turned_away(env: Environment) -> None:
    env.fill(5)
    with env.locked_catalog() as release, env.running("run") as run:
        env.await_event("run_start")
        second = env.run("run", expect=3)
        assert f"PID {run.pid}" in second.stderr
        assert "hint: " in second.stderr
        check = env.run("check", expect=3)
        assert f"PID {run.pid}" in check.stdout
        release()
        assert run.wait(PATIENCE) == 0, env.output()
    assert len(env.events("run_start")) == 1
    env.assert_complete()


def test_two_targets_run_at_the_same_time(env: Environment) -> None:
    blobids = env.fill(60)
    elsewhere = env.sshd.directory()
    beside = env.beside("other")
    beside.write_config(**{"targets.other": {"host": env.sshd.alias, "path": elsewhere.path}})
    beside.run("--target", "other", "init-db", expect=0)
    with (
        env.locked_catalog() as release,
        env.running("run") as run,
        beside.running("--target", "other", "run") as other,
    ):
        env.await_event("worker_start")
        beside.await_event("worker_start")
        assert (run.poll(), other.poll()) == (None, None)
        release()
        assert other.wait(PATIENCE) == 0, beside.output()
        assert run.wait(PATIENCE) == 0, env.output()
    env.assert_complete()
    there = {path.name for path in (elsewhere.local / "by-hash").rglob("*") if path.is_file()}
    assert there == set(blobids)
    assert env.query("select count(*) from blobs where other_copied") == [(len(blobids),)]


def test_two_hosts_share_one_catalog(env: Environment) -> None:
    blobids = env.fill_slowly(150)
    other = env.beside("other-host")
    with (
        env.locked_catalog() as release,
        env.running("run") as run,
        other.running("run") as run_there,
    ):
        env.await_event("worker_start", 2)
        other.await_event("worker_start", 2)
        release()
        assert run.wait(PATIENCE) == 0, env.output()
        assert run_there.wait(PATIENCE) == 0, other.output()
    shares = [_copied(one) for one in (env, other)]
    assert sum(shares) == len(blobids)
    assert min(shares) > 0
    env.assert_complete()


@pytest.mark.long
def test_more_workers_than_the_database_has_room_for(env: Environment) -> None:
    """Those that find no connection wait for one; it is nobody's failure."""
    blobids = env.fill(250)
    workers = CONNECTIONS + 4
    env.write_config(run={"workers": workers, "batch_size": 20})
    env.run("run", expect=0)
    assert _copied(env) == len(blobids)
    assert len(env.events("worker_stop")) == workers
    assert env.failures() == {}
    env.assert_complete()


def test_a_batch_is_told_after_its_commit(env: Environment) -> None:
    """While nothing can be committed no batch is told, though the blobs have arrived."""
    blobids = env.fill(60)
    env.write_config(run={"workers": 1, "batch_size": 20})
    with env.locked_catalog() as release, env.running("run") as run:
        wait_until(lambda: _waits_for_a_lock(env), "a worker that cannot commit")
        assert env.on_remote() != {}
        assert env.events("batch_complete") == []
        assert env.copied() == set()
        release()
        while run.poll() is None:
            told = _copied(env)
            assert told <= len(env.copied())
        assert run.wait(PATIENCE) == 0, env.output()
    assert _copied(env) == len(blobids)


def _copied(env: Environment) -> int:
    """Blobs sent, as told batch by batch."""
    return sum(line["copied"] for line in env.events("batch_complete"))


def _waits_for_a_lock(env: Environment) -> bool:
    return bool(
        env.query(
            "select pid from pg_stat_activity where wait_event_type = 'Lock'"
            " and application_name like 'ntt-backup-remote/%'"
        )
    )
