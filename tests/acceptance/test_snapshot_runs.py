"""Snapshots that a run takes: when, what log and `status` say, and what becomes of a failure."""

from __future__ import annotations

import os
import signal

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import RemoteDir
from tests.helpers.waiting import PATIENCE, wait_until


@pytest.fixture
def etc(env: Environment) -> Environment:
    """The environment with a set and a directory of this machine as its target."""
    place = env.root / "usb"
    place.mkdir()
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{place}"}
    files = env.root / "etc"
    files.mkdir()
    (files / "hosts").write_bytes(b"127.0.0.1 localhost\n")
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(**{"snapshots.etc": {"paths": [str(files)], "every": "1h"}})
    env.fill(5)
    return env


def versions(env: Environment) -> list[str]:
    """The versions on the target that exist, the oldest first."""
    return sorted(path.parent.name for path in env.remote.local.glob("snapshots/etc/*/manifest"))


def test_a_run_takes_what_is_due_after_its_blobs_and_status_says_so(etc: Environment) -> None:
    env = etc
    done = env.run("run", expect=0)
    (version,) = versions(env)
    names = [event["event"] for event in env.events()]
    assert names.index("batch_complete") < names.index("snapshot_start")
    (complete,) = env.events("snapshot_complete")
    assert (complete["set"], complete["version"], complete["parent"]) == ("etc", version, "")
    assert f"snapshot of etc: {version}" in done.stdout
    (known,) = env.status()["snapshots"]
    assert (known["set"], known["version"], known["error"]) == ("etc", version, "")
    assert known["bytes"] == complete["bytes"] == 20
    assert known["next_due"] > known["taken_at"]

    assert env.run("run").returncode == 0  # not due yet, by the target
    assert versions(env) == [version]
    assert len(env.events("snapshot_start")) == 1


def test_a_daemon_takes_the_next_when_it_is_due(etc: Environment) -> None:
    env = etc
    env.write_config(**{"snapshots.etc": {"every": "1s"}})
    with env.running("run", "--watch") as run:
        env.await_event("snapshot_complete", 2)
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    first, second, *_ = env.events("snapshot_complete")
    assert second["parent"] == first["version"]
    assert env.processes() == {}


def test_a_failure_is_told_and_counted_and_no_blob_waits(etc: Environment) -> None:
    env = etc
    (env.root / "etc/hosts").unlink()
    (env.root / "etc").rmdir()
    env.run("run", expect=7)
    env.assert_complete()
    (failed,) = env.events("snapshot_failed")
    assert (failed["set"], failed["exit_code"]) == ("etc", 2)
    assert env.events("run_stop")[-1]["outcome"] == "snapshot_failed"
    (known,) = env.status()["snapshots"]
    assert failed["message"] in known["error"]
    assert (known["version"], versions(env)) == ("", [])


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_take_that_is_killed_or_stopped_leaves_no_version(etc: Environment, kill: bool) -> None:
    env = etc
    env.write_config(run={"bwlimit": "1MB"}, log={"progress_interval": 0.1})
    with (env.root / "etc/large").open("wb") as file:
        for _ in range(32):
            file.write(os.urandom(1 << 20))
    with env.running("run") as run:
        env.await_event("snapshot_progress")
        (child,) = (pid for pid, name in env.processes().items() if name == "ntt-snapshot")
        if kill:
            os.kill(child, signal.SIGKILL)
        else:
            run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == (7 if kill else 143), env.output()
    assert versions(env) == []
    assert len(env.events("snapshot_failed")) == kill
    if kill:
        assert env.events("snapshot_failed")[0]["set"] == "etc"
        assert "died" in env.status()["snapshots"][0]["error"]
    wait_until(lambda: env.processes() == {}, "the end of all processes")
    env.write_config(run={"bwlimit": "1GB"})
    env.run("run", expect=0)
    assert len(versions(env)) == 1


def test_check_tells_of_a_set_that_cannot_be_taken_and_leaves_no_trace(etc: Environment) -> None:
    env = etc
    done = env.run("check", expect=0)
    assert "1 set, 0 versions on the target" in done.stdout
    assert not (env.remote.local / "snapshots").exists()
    paths = [str(env.root / "none")]
    env.write_config(**{"snapshots.etc": {"paths": paths}})
    done = env.run("check", expect=7)
    assert f"{paths[0]} of the snapshot set etc is missing" in done.stdout + done.stderr
