"""`bench`, as an operator runs it: what it says, what it writes, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.helpers.blobs import Person
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.s3_proxy import S3Proxy, status
from tests.helpers.sshd import FULL_SIZE, Sshd
from tests.helpers.waiting import PATIENCE, wait_until

SHORT = ("--seconds", "0.2")
RESTORED = ("back", "restore-pipe-zst", 2)


def report(env: Environment, *args: str) -> dict[str, Any]:
    """What a bench wrote, once it has ended well."""
    file = env.root / "report.json"
    result = env.run("bench", *args, "--json", str(file), expect=0)
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


@pytest.mark.parametrize("streams", [(2,), pytest.param((1, 2), marks=pytest.mark.long)])
@pytest.mark.long
def test_link_reports_every_figure_and_leaves_nothing(
    env: Environment, streams: tuple[int, ...]
) -> None:
    short = ("--streams", ",".join(map(str, streams)), "--round-trips", "60")
    found = report(env, "link", *SHORT, *short, "-q")
    figures = {one["name"]: one for one in found["figures"]}
    assert {"round trip", "ssh session"} < figures.keys()
    assert len(figures["round trip"]["runs"]) == 60
    rates = [one for one in found["figures"] if one["unit"] == "bytes/s"]
    assert all(len(one["runs"]) == 3 and one["low"] > 0 for one in rates)
    seen = {(one["direction"], one["streams"]) for one in rates}
    assert seen == {(way, count) for way in ("up", "down") for count in streams}
    assert_untouched(env)


@pytest.mark.long
def test_strategies_beside_a_backup_leave_it_as_it_was(env: Environment) -> None:
    env.write_config(run={"workers": 2})
    blobs = env.fill(30, size=lambda chance: chance.randrange(900))
    env.run("run", "--once", expect=0)
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


@pytest.mark.long
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
    result = env.call("bench", "strategies", *SHORT, "--sample", "1GB", expect=6)
    assert "the remote has no room for the sample" in result.stderr
    assert_untouched(env)


def in_bucket(env: BucketEnvironment) -> list[str]:
    """What the bucket has, with the uploads that were begun."""
    return [*(one.key for one in env.bucket.list("")), *env.litter()]


@pytest.mark.long
def test_strategies_of_a_bucket_compares_ways_out_and_back_and_leaves_it_empty(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    env.write_config(run={"workers": 2})
    blobs = env.fill(60, size=lambda chance: chance.choice([0, 900, 20_000, 300_000]))
    some = "put-each,packs-none,restore-ranges,restore-pipe-zst"
    found = report(env, "strategies", *SHORT, "--workers", "1", "--only", some)
    assert found["sample"]["blobs"] == len(blobs)
    figures = {(one["direction"], one["way"], one["workers"]): one for one in found["figures"]}
    assert figures.keys() == {
        ("out", "put-each", 2),
        ("out", "packs-none", 1),
        ("out", "packs-none", 2),
        # What the ways back read.
        ("out", "packs-zst", 1),
        ("out", "packs-zst", 2),
        ("out", "pipe-zst", 2),
        ("back", "restore-ranges", 2),
        ("back", "restore-pipe-zst", 2),
    }
    # Each run that came back was compared, blob by blob, before it was counted.
    assert all(len(one["runs"]) == 3 and one["files"] == len(blobs) for one in found["figures"])
    assert figures["out", "put-each", 2]["objects"]["low"] == len(blobs)
    assert figures["out", "packs-none", 2]["writes"]["high"] < 10
    sent, back = (figures[key]["wire_bytes"] for key in (("out", "pipe-zst", 2), RESTORED))
    assert sent["high"] == back["high"] > 0
    assert found["link"]["ceiling_bytes_per_s"] > 0
    assert found["link_back"]["ceiling_bytes_per_s"] > 0
    assert found["left"] == ""
    told = f"One request a blob takes {len(blobs)} requests where packs take"
    assert any(line.startswith(told) for line in found["verdict"])
    assert in_bucket(env) == []
    assert env.copied() == set()
    assert env.processes() == {}


def test_ctrl_c_ends_a_bench_of_a_bucket_and_leaves_it_empty(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    env.fill(10)
    with env.running("bench", "strategies", *SHORT, "--only", "put-each,packs-zst") as process:
        wait_until(lambda: "round 1 of 3: put-each" in env.output(), "a first run")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert in_bucket(env) == []


@pytest.mark.long
def test_bucket_that_refuses_to_delete_is_filled_only_where_that_is_accepted(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    env.fill(10)
    few = ("strategies", *SHORT, "--only", "packs-none", "--workers", "1")
    with S3Proxy(env.server) as proxy:
        proxy.trouble("delete", status(403, "AccessDenied"), times=1000)
        env.through_endpoint(proxy.endpoint)
        refused = env.run("bench", *few, expect=2)
        assert (
            "what a bench sends would stay in this bucket: it refuses to delete" in refused.stderr
        )
        assert "--yes accepts that" in refused.stderr
        (trial,) = in_bucket(env)
        assert trial.startswith("bench/trial-")
        found = report(env, *few, "--yes")
    left = [key for key in in_bucket(env) if key != trial]
    assert len(left) >= 3
    assert all(key.startswith("bench/") for key in left)
    assert found["left"].startswith(
        f"Left in the bucket, because it refuses to delete: {len(left)} objects, "
    )
    assert found["verdict"][-1] == found["left"]


def test_sample_does_not_go_unsealed_where_all_is_to_be_sealed(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    env.fill(3)
    env.write_config(pack={"recipients": [Person.new().public]})
    refused = env.run("bench", "strategies", *SHORT, "--only", "packs-none", expect=2)
    assert "what a bench sends is not sealed" in refused.stderr
    assert in_bucket(env) == []


def test_empty_catalog_is_an_error(env: Environment) -> None:
    env.put_in_store(b"unknown to the catalog")
    result = env.call("bench", "strategies", *SHORT, expect=2)
    assert "there is nothing to draw a sample from" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("strategies", "--only", "carrier-pigeon"), "carrier-pigeon: none of stream, tar, "),
        (("strategies", "--sample", "much"), "not a size such as 500MB"),
        (("strategies", "--json", "/nowhere/report.json"), "does not exist"),
        (("link", "--rounds", "2"), "2 is not in the range x>=3"),
        (("link", "--streams", "0"), "numbers from 1 to 64"),
        (("link", "--streams", "one"), "not a list of numbers"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_done(
    env: Environment, args: tuple[str, ...], words: str
) -> None:
    result = env.call("bench", *args, expect=2)
    assert words in result.stderr
