"""`bench`, as an operator runs it: what it says, what it writes, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.environment import Environment, wait_until
from tests.patience import PATIENCE
from tests.sshd import FULL_SIZE, Sshd

SHORT = ("--seconds", "0.2")


def report(env: Environment, *args: str) -> dict[str, Any]:
    """What a bench wrote, once it has ended well."""
    file = env.root / "report.json"
    result = env.run("bench", *args, "--json", str(file))
    assert result.returncode == 0, result.stderr + result.stdout
    answer: dict[str, Any] = json.loads(file.read_text())
    assert answer["verdict"] == [
        line[2:] for line in result.stdout.splitlines() if line.startswith("* ")
    ]
    assert {"schema", "bench", "started", "machine", "remote", "options"} < answer.keys()
    assert answer["machine"]["versions"].keys() == {"ntt_backup", "python", "ssh", "tar"}
    return answer


def assert_untouched(env: Environment) -> None:
    """Nothing is on the remote, nothing is marked, nothing runs."""
    assert list(env.remote.local.iterdir()) == []
    assert env.copied() == set()
    assert env.status()["pending"] == len(env.in_store())
    assert env.processes() == {}


def test_link_reports_every_figure_and_leaves_nothing(env: Environment) -> None:
    short = ("--streams", "1,2", "--round-trips", "60")
    found = report(env, "link", *SHORT, *short, "-q")
    figures = {one["name"]: one for one in found["figures"]}
    assert {"round trip", "ssh session"} < figures.keys()
    assert len(figures["round trip"]["runs"]) == 60
    rates = [one for one in found["figures"] if one["unit"] == "bytes/s"]
    assert all(len(one["runs"]) == 3 and one["low"] > 0 for one in rates)
    seen = {(one["direction"], one["streams"]) for one in rates}
    assert seen == {("up", 1), ("up", 2), ("down", 1), ("down", 2)}
    assert_untouched(env)


@pytest.mark.long
def test_strategies_beside_a_backup_leave_it_as_it_was(env: Environment) -> None:
    env.write_config(run={"workers": 2})
    blobs = env.fill(30, size=lambda chance: chance.randrange(900))
    assert env.run("run", "--once").returncode == 0
    before = env.on_remote()
    few = ("--only", "tar,tar-pipe", "--workers", "1")
    found = report(env, "strategies", *SHORT, *few)
    ways = {one["way"] for one in found["figures"]}
    assert ways == {"tar", "tar-pipe"}
    assert found["sample"]["blobs"] == len(blobs)
    assert found["link"]["ceiling_bytes_per_s"] > 0
    for one in found["figures"]:
        assert len(one["runs"]) == 3
        assert one["seconds"]["low"] <= one["seconds"]["median"] <= one["seconds"]["high"]
        assert one["wire_bytes"]["low"] > one["files"] * 64
        assert one["cpu_s"]["low"] > 0
    assert {one["workers"] for one in found["figures"] if one["way"] == "tar"} == {1, 2}
    assert env.on_remote() == before
    env.assert_complete()


def test_ctrl_c_ends_it_and_leaves_the_remote_empty(env: Environment) -> None:
    env.fill(10)
    with env.running("bench", "strategies", "--seconds", "0.2") as process:
        wait_until(lambda: "round 1 of 3: tar, 2 workers" in env.output(), "a first run")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert_untouched(env)


def test_remote_without_room_is_an_error_before_anything_is_sent(
    env: Environment, remote: Sshd
) -> None:
    env.put(os.urandom(FULL_SIZE))
    env.remote = remote.full_directory()
    env.write_config(remote={"path": env.remote.path})
    result = env.call("bench", "strategies", *SHORT, "--sample", "1GB")
    assert result.returncode == 6
    assert "the remote has no room for the sample" in result.stderr
    assert_untouched(env)


def test_empty_catalog_is_an_error(env: Environment) -> None:
    env.put_in_store(b"unknown to the catalog")
    result = env.call("bench", "strategies", *SHORT)
    assert result.returncode == 2
    assert "there is nothing to draw a sample from" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("strategies", "--only", "carrier-pigeon"), "carrier-pigeon: none of stream, tar, "),
        (("strategies", "--sample", "much"), "not a size such as 200MB"),
        (("strategies", "--json", "/nowhere/report.json"), "does not exist"),
        (("link", "--rounds", "2"), "2 is not in the range x>=3"),
        (("link", "--streams", "0"), "numbers from 1 to 64"),
        (("link", "--streams", "one"), "not a list of numbers"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_done(
    env: Environment, args: tuple[str, ...], words: str
) -> None:
    result = env.call("bench", *args)
    assert result.returncode == 2
    assert words in result.stderr
