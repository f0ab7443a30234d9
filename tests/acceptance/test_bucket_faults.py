"""A bucket in trouble: outages are waited out, what is not sure is never taken for stored."""

from __future__ import annotations

import os
import signal

import pytest

from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.s3_proxy import S3Proxy, Trouble, closed, damage, lose_answer, status
from tests.helpers.waiting import PATIENCE, wait_until

PARTS = {"part_size": "5MiB"}


def is_pack(key: str) -> bool:
    """Whether a request is for a pack."""
    return key.endswith(".tar")


def fill(env: BucketEnvironment) -> None:
    """Content of one pack in two parts."""
    env.write_config(remote=PARTS)
    env.fill(14, size=lambda chance: chance.randrange(400_000, 600_000))


@pytest.mark.parametrize(
    ("kind", "trouble", "times"),
    [
        ("complete", lose_answer, 1),
        ("create", lose_answer, 1),
        pytest.param("any", status(503, "SlowDown"), 5, marks=pytest.mark.long),
    ],
    ids=["lost-complete", "lost-create", "busy"],
)
def test_trouble_that_passes_is_waited_out(
    bucket_env: BucketEnvironment, kind: str, trouble: Trouble, times: int
) -> None:
    env = bucket_env
    fill(env)
    with S3Proxy(env.server) as proxy:
        env.through_endpoint(proxy.endpoint)
        proxy.trouble(kind, trouble, times=times, when=is_pack)
        env.run("run", expect=0)
        sent = proxy.requests
    assert env.failures() == {}
    if kind == "complete":
        assert sent["part"] == 2
    if kind == "create":  # Of the upload that nobody knows of the next run gets rid.
        env.assert_nothing_half()
        env.through_endpoint(str(env.place.endpoint))
        env.put(b"more")
        env.run("run", expect=0)
    env.assert_complete()


@pytest.mark.parametrize(
    ("kind", "trouble", "code", "words"),
    [
        ("part", damage, 6, "something else than was sent"),
        ("complete", status(403, "AccessDenied"), 5, "refuses"),
    ],
    ids=["damaged", "denied"],
)
def test_trouble_that_stays_ends_the_run_and_fails_no_blob(
    bucket_env: BucketEnvironment, kind: str, trouble: Trouble, code: int, words: str
) -> None:
    env = bucket_env
    fill(env)
    with S3Proxy(env.server) as proxy:
        env.through_endpoint(proxy.endpoint)
        proxy.trouble(kind, trouble, times=1000, when=is_pack)
        done = env.run("run")
        assert (done.returncode, words in done.stdout) == (code, True), done.stdout
        assert env.copied() == set()
        assert env.failures() == {}
        proxy.peace()
        env.run("run", expect=0)
    env.assert_complete()


@pytest.mark.long
def test_a_store_that_is_away_for_a_while_is_an_outage(bucket_env: BucketEnvironment) -> None:
    env = bucket_env
    fill(env)
    with S3Proxy(env.server) as proxy:
        env.through_endpoint(proxy.endpoint)
        proxy.trouble("part", closed, times=10**6, when=is_pack)
        with env.running("run") as run:
            env.await_event("outage")
            proxy.peace()
            assert run.wait(PATIENCE) == 0, env.output()
    assert env.events("outage_end")
    assert env.failures() == {}
    env.assert_nothing_half()


def test_a_killed_run_after_its_last_request_sends_nothing_again(
    bucket_env: BucketEnvironment,
) -> None:
    """The pack is in the bucket, and the ledger does not know it."""
    env = bucket_env
    fill(env)
    with env.locked_catalog(), env.running("run") as run:
        wait_until(lambda: any(is_pack(one.key) for one in env.bucket.list("packs/")), "the pack")
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        wait_until(lambda: not env.processes(), "the end of all")
    assert env.copied() == set()
    with S3Proxy(env.server) as proxy:
        env.through_endpoint(proxy.endpoint)
        env.run("run", expect=0)
        sent = [key for kind, key in proxy.seen if kind in ("part", "put")]
        assert [key for key in sent if is_pack(key)] == []
    env.assert_complete()
