"""Processes that die without a word, at any moment: nothing is lost, nothing is left running."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE

RESTARTS = 5


def test_a_killed_worker_takes_its_children_along_and_is_started_again(site: Site) -> None:
    *_, last = site.fill_slowly()
    with site.held(last) as release, site.running("run") as run:
        victim = site.await_event("batch_complete")["pid"]
        wait_until(lambda: "ssh" in site.children(victim).values(), "the worker's ssh")
        family = {victim, *site.children(victim)}
        os.kill(victim, signal.SIGKILL)
        site.await_event("worker_start", 3)
        release()
        wait_until(lambda: family.isdisjoint(site.processes()), "the end of the worker's children")
        assert run.wait(PATIENCE) == 0, site.output()
    (restart,) = site.events("worker_restart")
    assert (restart["pid"], restart["status"], restart["attempt"]) == (victim, -9, 1)
    assert len(site.events("worker_start")) == 3
    assert site.failures() == {}
    site.assert_complete()


@pytest.mark.long
def test_a_worker_that_dies_again_and_again_ends_the_run(site: Site) -> None:
    site.fill(5)
    site.write_config(run={"workers": 1})
    with site.locked_catalog(), site.running("run") as run:
        for nth in range(1, RESTARTS + 2):
            os.kill(site.await_event("worker_start", nth)["pid"], signal.SIGKILL)
        assert run.wait(PATIENCE) == 1, site.output()
    assert len(site.events("worker_restart")) == RESTARTS
    (error,) = site.events("error")
    assert error["message"] == "worker 0 died 6 times"
    assert error["hint"]
    assert site.events("run_stop")[0]["outcome"] == "error"
    assert site.processes() == {}
    assert site.run("run").returncode == 0
    site.assert_complete()


def test_a_worker_that_hangs_is_named_until_it_goes_on(site: Site) -> None:
    site.fill_slowly()
    site.write_config(run={"stall_timeout": 1})
    with site.running("run") as run:
        site.await_event("batch_complete")
        worker = site.events("worker_start")[0]

        def said(event: str) -> list[dict[str, Any]]:
            return [one for one in site.events(event) if one["pid"] == worker["pid"]]

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
        assert run.wait(PATIENCE) == 0, site.output()
    assert f"PID {worker['pid']}" in site.output()
    assert site.events("worker_restart") == []
    assert site.failures() == {}
    site.assert_complete()


def test_nothing_outlives_a_killed_coordinator(site: Site, link: Link) -> None:
    """Not even a worker that cannot notice it, and an ssh whose link has stalled."""
    site.through(site.sshd.through(link.port))
    blobids = site.fill(6, size=lambda chance: 3_000_000)
    site.write_config(run={"strategy": "tar", "workers": 1, "batch_size": 1, "bwlimit": "3MB/s"})
    with site.running("run") as run:
        site.await_event("batch_complete")
        wait_until(lambda: {"ssh", "tar"} <= set(site.processes().values()), "its children at work")
        link.stall()
        os.kill(site.events("worker_start")[0]["pid"], signal.SIGSTOP)
        run.kill()
        run.wait()
        wait_until(lambda: not site.processes(), "the end of workers, tar and ssh")
        link.resume()
    site.assert_nothing_half()
    assert 0 < len(site.copied()) < len(blobids)
    site.finish()


def test_a_run_killed_at_random_moments_is_completed_by_the_next(site: Site, link: Link) -> None:
    """The moments are counted in bytes on the link, from the first handshake to the last batch.

    The blobs are large enough for most moments to lie in the middle of one.
    """
    site.through(site.sshd.through(link.port))
    blobids = site.fill(40, size=lambda chance: chance.randrange(100_000, 300_000))
    site.write_config(run={"batch_size": 1, "bwlimit": "6MB/s"})
    chance = random.Random(9)
    for _ in range(4):
        link.stall_after(chance.randrange(1, 2_200_000))
        with site.running("run") as run:
            wait_until(lambda: link.stalled or run.poll() is not None, "the moment")
            assert run.poll() is None, site.output()
            site.kill_all(chance)
        link.resume()
        site.assert_nothing_half()
    assert 0 < len(site.copied()) < len(blobids)
    # What a killed preflight left is removed by a later one, once it is an hour old.
    for left in site.remote.local.glob(".ntt-check-*"):
        os.utime(left, (0, 0))
    assert site.run("run").returncode == 0
    assert site.failures() == {}
    site.assert_complete()
