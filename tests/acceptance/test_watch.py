"""`run --watch`, the daemon: it waits for blobs, the remote and the catalog; ends on request."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.config import Settings, load
from ntt_backup.daemon.checks import check_due
from ntt_backup.events import Event
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE, wait_until

CHANGED = ["log.progress_interval", "run.poll_interval"]


@pytest.fixture
def watching(env: Environment) -> Environment:
    """Two workers, a store that is not empty, a catalog in which nothing is pending."""
    env.put_in_store(b"not in the catalog")
    env.write_config(run={"workers": 2})
    return env


@pytest.mark.parametrize("how", ["notification", "polling"])
def test_blobs_that_come_later_are_sent(watching: Environment, how: str) -> None:
    env = watching
    env.write_config(run={"poll_interval": 0.1 if how == "polling" else 86_400})
    if how == "notification":
        env.run("init-db", "--notify", expect=0)
    with env.running("run", "--watch") as run:
        wait_until(lambda: len(env.events("worker_start")) == 2, "the workers")
        assert "the catalog knows no blob" in env.await_event("warning")["reason"]
        for seed in (1, 2):
            env.await_copied(set(env.fill(30, seed=seed)))
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    env.assert_nothing_half()
    assert env.events("run_stop")[-1]["copied"] == len(env.copied())
    assert env.processes() == {}
    assert env.litter() == []


def test_a_daemon_waits_for_a_remote_that_is_away_at_the_start(
    watching: Environment, link: Link
) -> None:
    env = watching
    env.through(env.sshd.through(link.port))
    link.cut()
    blobid = env.put(b"patience")
    with env.running("run", "--watch") as run:
        assert env.await_event("outage", 2)["what"] == "preflight"
        link.restore()
        env.await_copied({blobid})
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143
    assert env.failures() == {}


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_daemon_waits_for_a_store_that_is_not_mounted_at_the_start(
    env: Environment, kind: str
) -> None:
    """For longer than a run would wait; a run ends as before."""
    env.write_config(run={"outage_timeout": 0, "backoff_cap": 0.1})
    blobid = env.put(b"patience")
    mounted, aside = env.store, env.root / "aside"
    mounted.rename(aside)
    if kind == "empty":
        mounted.mkdir()
    if kind == "missing":
        env.run("run", expect=2)
    before = len(env.events("outage"))
    with env.running("run", "--watch") as run:
        said = env.await_event("outage", before + 3)
        assert said["what"] == "preflight"
        assert str(env.store) in said["reason"]
        if kind == "empty":
            mounted.rmdir()
        aside.rename(mounted)
        env.await_copied({blobid})
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143
    assert env.failures() == {}


def test_a_daemon_waits_for_a_catalog_that_is_away(
    watching: Environment, postgres: Postgres
) -> None:
    """At the start, and again later, for longer than a run would wait."""
    env = watching
    env.write_config(run={"outage_timeout": 0, "poll_interval": 0.1})
    first = env.put(b"before")
    postgres.stop()
    with env.running("run", "--watch") as run:
        assert env.await_event("outage", 2)["what"] == "preflight"
        postgres.start()
        env.await_copied({first})
        postgres.stop()
        wait_until(lambda: len(_outages(env, "catalog")) > 3, "the workers to miss it")
        postgres.start()
        second = env.put(b"after")
        env.await_copied({first, second})
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143
    assert env.failures() == {}
    assert env.events("worker_restart") == []


def _outages(env: Environment, what: str) -> list[object]:
    return [line for line in env.events("outage") if line["what"] == what]


@pytest.fixture
def systemd(env: Environment) -> Iterator[socket.socket]:
    """The socket on which a service says how it is."""
    path = f"\0ntt-backup-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(path)
        service.settimeout(PATIENCE)
        env.environ["NOTIFY_SOCKET"] = "@" + path[1:]
        yield service


def test_systemd_is_told_that_the_daemon_is_ready_alive_reloading_and_stopping(
    watching: Environment, systemd: socket.socket
) -> None:
    """A reload takes over what is safe, names what is not, and refuses settings that are wrong."""
    env = watching
    env.write_config(run={"poll_interval": 86_400})
    with env.running("run", "--watch") as run:
        _hear_until(systemd, "READY=1")
        _hear_until(systemd, "WATCHDOG=1")
        assert "0 copied" in _hear_until(systemd, "STATUS=")
        env.write_config(run={"workers": 3, "poll_interval": 0.1}, log={"progress_interval": 0.1})
        run.send_signal(signal.SIGHUP)
        _hear_until(systemd, "RELOADING=1")
        _hear_until(systemd, "READY=1")
        assert env.await_event("settings_read")["changed"] == CHANGED
        assert env.await_event("warning", 2)["reason"].endswith("has changed: run.workers")
        env.config.write_text("[run]\nworkers = 0\n")
        run.send_signal(signal.SIGHUP)
        _hear_until(systemd, "READY=1")
        assert "run.workers" in env.await_event("settings_refused")["message"]
        # The workers wait for as long as was said last.
        env.await_copied({env.put(b"after the reload")})
        run.send_signal(signal.SIGTERM)
        _hear_until(systemd, "STOPPING=1")
        assert run.wait(PATIENCE) == 143


@pytest.mark.long
def test_systemd_is_told_that_the_daemon_waits_for_the_remote(
    watching: Environment, link: Link, systemd: socket.socket
) -> None:
    """A remote that is away must not look like a service that hangs."""
    watching.through(watching.sshd.through(link.port))
    watching.write_config(run={"backoff_base": 60, "backoff_cap": 3600})
    link.cut()
    with watching.running("run", "--watch") as run:
        _hear_until(systemd, "READY=1")
        assert "waiting: the remote" in _hear_until(systemd, "STATUS")
        for _ in range(2):  # the wait is longer than the watchdog's patience may be
            _hear_until(systemd, "WATCHDOG=1")
        assert watching.events("outage")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143


@pytest.mark.long
def test_systemd_is_told_of_several_targets_as_of_one(
    watching: Environment, systemd: socket.socket
) -> None:
    env = watching
    (env.root / "usb").mkdir()
    env.write_config(lock={"file": str(env.root / "lock-{target}")})
    env.write_config(**{"targets.usb": {"url": f"file://{env.root}/usb"}})
    env.call("--target", "usb", "init-db", expect=0)
    with env.running("--target", "all", "run", "--watch") as run:
        _hear_until(systemd, "READY=1")
        _hear_until(systemd, "WATCHDOG=1")
        status = _hear_until(systemd, "STATUS=remote: ")
        assert "; usb: " in status
        env.await_event("worker_start", 4)
        env.write_config(**{"targets.late": {"url": f"file://{env.root}/late"}})
        run.send_signal(signal.SIGHUP)
        _hear_until(systemd, "RELOADING=1")
        _hear_until(systemd, "READY=1")
        env.await_event("settings_read", 2)
        reasons = [line["reason"] for line in env.events("warning")]
        assert [one for one in reasons if one.endswith("has changed: target late (new)")]
        run.send_signal(signal.SIGTERM)
        _hear_until(systemd, "STOPPING=1")
        assert run.wait(PATIENCE) == 143


@pytest.mark.long
def test_a_frozen_catalog_does_not_keep_a_daemon_from_ending(
    watching: Environment, postgres: Postgres, systemd: socket.socket
) -> None:
    """Nothing breaks and nothing answers, as when the server's disk hangs."""
    env = watching
    env.write_config(log={"progress_interval": 1})
    with env.running("run", "--watch") as run:
        env.await_event("worker_start", 2)
        with postgres.frozen():
            _forget_what_was_said(systemd)
            for _ in range(2):
                _hear_until(systemd, "WATCHDOG=1")
            run.send_signal(signal.SIGTERM)
            env.await_event("stopping")
            run.send_signal(signal.SIGTERM)
            assert run.wait(PATIENCE) == 143
    assert env.processes() == {}
    assert [line["outcome"] for line in env.events("run_stop")] == ["stopped"]


def _forget_what_was_said(service: socket.socket) -> None:
    patience = service.gettimeout()
    service.setblocking(False)
    with suppress(BlockingIOError):
        while service.recv(4096):
            pass
    service.settimeout(patience)


def _hear_until(service: socket.socket, word: str) -> str:
    while True:
        for line in service.recv(4096).decode().splitlines():
            if line.startswith(word):
                return line


def test_a_daemon_finds_lost_rows_and_copies_by_itself(env: Environment) -> None:
    blobids = env.fill_both(200)
    gone, cut, flipped = blobids[:3]
    env.query("delete from blobs where blobid = any(%s)", blobids[10:12])
    env.remote_path(gone).unlink()
    env.remote_path(cut).write_bytes(b"")
    content = bytearray(env.remote_path(flipped).read_bytes() or b"x")
    content[0] ^= 1
    env.remote_path(flipped).write_bytes(content)
    checks = ("scan", "reconcile", "verify")
    env.write_config(run={"poll_interval": 0.1})
    env.write_config(**{f"checks.{name}": {"every": "1s"} for name in checks})

    def all_right() -> bool:
        done = env.events("check_complete")
        return {one["command"] for one in done if not one["exit_code"]} == {*checks}

    with env.running("run", "--watch") as run:
        wait_until(all_right, "each check finds all right")
        env.await_copied(set(blobids))
        run.send_signal(signal.SIGTERM)
        run.wait()

    env.assert_complete()
    assert env.copied() == set(blobids)
    found = {one["command"]: one for one in reversed(env.events("check_complete"))}
    assert found["scan"]["changed"] == 2
    assert found["reconcile"]["wrong"] >= 1
    noted = env.query("select distinct command from ntt_backup.checks where exit_code = 0")
    assert {name for (name,) in noted} >= {"scan", "reconcile", "verify"}


def test_a_check_does_not_take_the_remotes_word_while_the_store_is_away(env: Environment) -> None:
    blobids = env.fill_both(3)
    env.write_config(**{"checks.verify": {"every": "1h"}})
    settings = load(Settings, file=env.config, environ={})
    aside = env.store.rename(env.root / "aside")
    told: list[Event] = []
    assert check_due(settings, told.append, patient=True).failed
    assert [one.kind for one in told] == ["check_start", "check_failed"]
    assert env.query("select count(*) from ntt_backup.checks") == [(0,)]

    aside.rename(env.store)
    env.path(blobids[0]).unlink()
    told.clear()
    assert not check_due(settings, told.append, patient=True).failed
    *_, done = told
    assert (done.fields["by_remote_hash"], done.fields["unchecked"]) in {(1, 0), (0, 1)}
    ((detail,),) = env.query("select detail from ntt_backup.checks")
    assert detail.startswith("1 blob ")
    assert "did not prove all" in env.call("status").stdout


def test_checks_of_several_hosts_take_turns(env: Environment) -> None:
    env.fill_both(20)
    env.write_config(run={"poll_interval": 0.1})
    env.write_config(**{"checks.verify": {"every": "1s"}})
    with psycopg.connect(env.url, autocommit=True) as other:
        key = lock_class("checks of remote")
        other.execute("select pg_advisory_lock(%s, -1)", [key])
        with env.running("run", "--watch"):
            for seed in (2, 3):
                env.await_copied(set(env.fill(5, seed=seed)))
            assert env.events("check_start") == []
    assert env.query("select count(*) from ntt_backup.checks") == [(0,)]


def test_a_check_that_fails_is_told_and_blobs_go_on(env: Environment) -> None:
    env.fill_both(3)
    env.write_config(run={"poll_interval": 0.1})
    nobody = "postgresql://nobody@127.0.0.1:1/x"
    env.write_config(**{"checks.drill": {"every": "1s", "database": nobody}})
    with env.running("run", "--watch"):
        failed = env.await_event("check_failed")
        blobids = set(env.fill(5, seed=2))
        env.await_copied(blobids)
    assert failed["command"] == "drill"
    assert "checks.drill.database" in failed["hint"]
