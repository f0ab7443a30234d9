"""Processes that die without a word, at any moment: nothing is lost, nothing is left running."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.waiting import PATIENCE, wait_until

RESTARTS = 5


def test_a_killed_worker_takes_its_children_along_and_is_started_again(env: Environment) -> None:
    *_, last = env.fill_slowly()
    with env.held(last) as release, env.running("run") as run:
        victim = env.await_event("batch_complete")["pid"]
        wait_until(lambda: "ssh" in env.children(victim).values(), "the worker's ssh")
        family = {victim, *env.children(victim)}
        os.kill(victim, signal.SIGKILL)
        env.await_event("worker_start", 3)
        release()
        wait_until(lambda: family.isdisjoint(env.processes()), "the end of the worker's children")
        assert run.wait(PATIENCE) == 0, env.output()
    (restart,) = env.events("worker_restart")
    assert (restart["pid"], restart["status"], restart["attempt"]) == (victim, -9, 1)
    assert len(env.events("worker_start")) == 3
    assert env.failures() == {}
    env.assert_complete()


@pytest.mark.long
def test_a_worker_that_dies_again_and_again_ends_the_run(env: Environment) -> None:
    env.fill(5)
    env.write_config(run={"workers": 1})
    with env.locked_catalog(), env.running("run") as run:
        for nth in range(1, RESTARTS + 2):
            os.kill(env.await_event("worker_start", nth)["pid"], signal.SIGKILL)
        assert run.wait(PATIENCE) == 1, env.output()
    assert len(env.events("worker_restart")) == RESTARTS
    (error,) = env.events("error")
    assert error["message"] == "worker 0 died 6 times"
    assert error["hint"]
    assert env.events("run_stop")[0]["outcome"] == "error"
    assert env.processes() == {}
    env.run("run", expect=0)
    env.assert_complete()


def test_a_worker_that_hangs_is_named_until_it_goes_on(env: Environment) -> None:
    env.fill_slowly()
    env.write_config(run={"stall_timeout": 1})
    with env.running("run") as run:
        env.await_event("batch_complete")
        worker = env.events("worker_start")[0]

        def said(event: str) -> list[dict[str, Any]]:
            return [one for one in env.events(event) if one["pid"] == worker["pid"]]

        def told(event: str) -> int:
            return len(said(event))

        os.kill(worker["pid"], signal.SIGSTOP)
        # A busy machine may have it, or the other one, say nothing for a second anyway.
        wait_until(lambda: told("worker_stall") > told("worker_stall_end"), "its silence be told")
        stall = said("worker_stall")[-1]
        assert (stall["level"], stall["worker"]) == ("warning", worker["worker"])
        assert f"kill -CONT {worker['pid']}" in stall["hint"]
        assert run.poll() is None
        os.kill(worker["pid"], signal.SIGCONT)
        wait_until(lambda: told("worker_stall") == told("worker_stall_end"), "its word")
        assert run.wait(PATIENCE) == 0, env.output()
    assert f"PID {worker['pid']}" in env.output()
    assert env.events("worker_restart") == []
    assert env.failures() == {}
    env.assert_complete()


def test_nothing_outlives_a_killed_coordinator(env: Environment, link: Link) -> None:
    """Not even a worker that cannot notice it, and an ssh whose link has stalled."""
    env.through(env.sshd.through(link.port))
    blobids = env.fill(6, size=lambda chance: 3_000_000)
    env.write_config(run={"strategy": "tar", "workers": 1, "batch_size": 1, "bwlimit": "3MB/s"})
    with env.running("run") as run:
        env.await_event("batch_complete")
        wait_until(lambda: {"ssh", "tar"} <= set(env.processes().values()), "its children at work")
        link.stall()
        os.kill(env.events("worker_start")[0]["pid"], signal.SIGSTOP)
        run.kill()
        run.wait()
        wait_until(lambda: not env.processes(), "the end of workers, tar and ssh")
        link.resume()
    env.assert_nothing_half()
    assert 0 < len(env.copied()) < len(blobids)
    env.finish()


def test_a_run_killed_at_random_moments_is_completed_by_the_next(
    env: Environment, link: Link
) -> None:
    """The moments are counted in bytes on the link, from the first handshake to the last batch.

    The blobs are large enough for most moments to lie in the middle of one.
    """
    env.through(env.sshd.through(link.port))
    blobids = env.fill(40, size=lambda chance: chance.randrange(100_000, 300_000))
    env.write_config(run={"batch_size": 1, "bwlimit": "6MB/s"})
    chance = random.Random(9)
    for _ in range(4):
        link.stall_after(chance.randrange(1, 2_200_000))
        with env.running("run") as run:
            wait_until(lambda: link.stalled or run.poll() is not None, "the moment")
            assert run.poll() is None, env.output()
            env.kill_all(chance)
        link.resume()
        env.assert_nothing_half()
    assert 0 < len(env.copied()) < len(blobids)
    # What a killed preflight left is removed by a later one, once it is an hour old.
    for left in env.remote.local.glob(".ntt-check-*"):
        os.utime(left, (0, 0))
    env.run("run", expect=0)
    assert env.failures() == {}
    env.assert_complete()
