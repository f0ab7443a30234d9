"""Several targets in one daemon: each has its own run, and what befalls one befalls no other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import RemoteDir
from tests.helpers.waiting import PATIENCE, wait_until


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port at which nobody answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def three(env: Environment, nobody: int) -> Environment:
    """The environment with two directories as targets, `remote` and `usb`, and `away`, which never
    answers.
    """
    for name in ("disk", "usb"):
        (env.root / name).mkdir()
    env.remote = RemoteDir(str(env.root / "disk"), env.root / "disk")
    env.settings["remote"] = {"url": f"file://{env.root}/disk"}
    away: dict[str, Any] = {"url": f"ssh://127.0.0.1:{nobody}/away", "connect_timeout": 5}
    env.write_config(**{"targets.usb": {"url": f"file://{env.root}/usb"}, "targets.away": away})
    env.write_config(lock={"file": str(env.root / "lock-{target}")})
    for name in ("usb", "away"):
        env.call("--target", name, "init-db", expect=0)
    return env


def of(env: Environment, target: str, name: str) -> list[dict[str, Any]]:
    """The events of that name that the log has of a target."""
    return [line for line in env.events(name) if line["target"] == target]


def has(env: Environment, target: str) -> set[str]:
    """The blobs that the catalog has as copied to a target."""
    return {blobid for (blobid,) in env.query(f"select blobid from blobs where {target}_copied")}


def await_copied(env: Environment, target: str, blobids: set[str]) -> None:
    wait_until(lambda: has(env, target) == blobids, f"the blobs on {target}")


def test_a_target_that_is_down_for_the_whole_run_holds_up_no_other(three: Environment) -> None:
    env = three
    blobids = set(env.fill(40))
    done = env.run("--target", "all", "run", expect=5)
    env.assert_complete()
    assert (has(env, "usb"), has(env, "away")) == (blobids, set())
    ends = {line["target"]: (line["outcome"], line["exit_code"]) for line in env.events("run_stop")}
    assert ends == {"remote": ("done", 0), "usb": ("done", 0), "away": ("error", 5)}
    said = done.stdout.splitlines()
    assert {line.split(": ")[0] for line in said} == {"remote", "usb", "away"}
    assert any(line.startswith("away: error: ") for line in said)
    assert env.events("target_restart") == []
    assert env.processes() == {}


def test_a_coordinator_that_is_killed_comes_back_and_disturbs_no_other(three: Environment) -> None:
    env = three
    env.write_config(run={"poll_interval": 0.1})
    first = set(env.fill(20, seed=1))
    with env.running("--target", "all", "run", "--watch") as run:
        for name in ("remote", "usb"):
            await_copied(env, name, first)
        wait_until(lambda: len(of(env, "away", "outage")) > 1, "the outage")
        (start,) = of(env, "usb", "run_start")
        os.kill(start["pid"], signal.SIGKILL)
        again = env.await_event("target_restart")
        assert (again["target"], again["status"], again["pid"]) == ("usb", -9, start["pid"])
        second = first | set(env.fill(20, seed=2))
        for name in ("remote", "usb"):
            await_copied(env, name, second)
        steered_one_by_one_and_together(env, second)
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    starts = [line["target"] for line in env.events("run_start")]
    assert sorted(starts) == ["away", "remote", "usb", "usb"]
    assert {line["outcome"] for line in env.events("run_stop")} == {"stopped"}
    assert has(env, "away") == set()
    assert env.processes() == {}
    env.assert_complete()


def steered_one_by_one_and_together(env: Environment, copied: set[str]) -> None:
    """`away` is stopped for good; the others are paused, and go on one after the other."""
    assert env.call("--target", "away", "stop").stdout.startswith("target away: it stops")
    wait_until(lambda: of(env, "away", "run_stop"), "the end of away")
    paused = env.call("--target", "all", "pause", "--json", expect=8)
    found = json.loads(paused.stdout)["targets"]
    assert (found["remote"]["paused"], found["usb"]["paused"]) == (True, True)
    assert found["away"]["error"]["message"].startswith("no daemon runs for target away")
    assert "target away: error: no daemon runs" in paused.stderr
    third = copied | {env.put(b"third")}
    assert env.call("--target", "usb", "resume").stdout == "target usb: resumed\n"
    await_copied(env, "usb", third)
    assert has(env, "remote") == copied
    both = env.call("--target", "usb,remote", "resume")
    said = ["target usb: it was not paused", "target remote: resumed"]
    assert (both.returncode, both.stdout.splitlines()) == (0, said)
    await_copied(env, "remote", third)


def test_a_mistake_in_one_target_starts_none(three: Environment) -> None:
    env = three
    lock = str(env.root / "lock")
    for change, said in (
        ({"lock": {"file": lock}}, f"lock.file is {lock} for the targets remote and usb"),
        ({"targets.away": {"connect_timeout": 0}}, "targets.away.connect_timeout"),
    ):
        env.write_config(**change)
        done = env.call("--target", "all", "run", expect=2)
        assert said in done.stderr
    assert env.events() == []


def test_status_shows_each_target_and_what_is_wrong_with_one_hides_no_other(
    three: Environment,
) -> None:
    env = three
    env.fill(3)
    shown = env.call("--target", "all", "status").stdout
    assert re.findall(r"^target (\w+)", shown, re.MULTILINE) == ["remote", "usb", "away"]
    env.query("alter table blobs drop column away_copied")
    for said in ("all", "away,usb"):
        done = env.call("--target", said, "status", "--json")
        found = json.loads(done.stdout)["targets"]
        assert done.returncode == 4
        assert "away_copied" in found["away"]["error"]["message"]
        assert (found["usb"]["target"], found["usb"]["pending"]) == ("usb", 3)
        assert "target away: error: " in done.stderr
    asked = json.loads(env.call("--target", "all", "pause", "--json").stdout)["targets"]
    assert [one["exit_code"] for one in (found["away"], *asked.values())] == [4, 8, 8, 8]


@pytest.mark.long
def test_two_stops_end_all_at_once(three: Environment) -> None:
    env = three
    blobid = env.fill(20)[0]
    with env.held(blobid), env.running("--target", "remote,usb", "run") as run:
        env.await_event("worker_start", 2)
        run.send_signal(signal.SIGINT)
        wait_until(lambda: len(env.events("stopping")) == 2, "both to hear of it")
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 130, env.output()
    assert [line["exit_code"] for line in env.events("run_stop")] == [130, 130]
    assert env.processes() == {}


@pytest.mark.long
def test_nothing_outlives_a_daemon_that_is_killed(three: Environment) -> None:
    env = three
    blobid = env.fill(20)[0]
    with env.held(blobid), env.running("--target", "all", "run", "--watch") as run:
        env.await_event("worker_start", 2)
        run.kill()
        assert run.wait(PATIENCE) == -signal.SIGKILL
        wait_until(lambda: env.processes() == {}, "the end of all")
    env.finish()
