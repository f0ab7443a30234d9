"""Signals: the first asks for the end, the second insists, SIGHUP and logrotate change the log."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.blobs import noise
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.waiting import PATIENCE, wait_until


def await_both_at_work(env: Environment) -> None:
    """The second worker follows the first one after two seconds."""
    wait_until(lambda: len(env.events("worker_start")) == 2, "the second worker")
    env.await_event("batch_complete")


@pytest.mark.parametrize("by_terminal", [False, True])
def test_the_first_signal_ends_the_run_after_what_is_in_flight(
    env: Environment, by_terminal: bool
) -> None:
    """A terminal sends SIGINT to a whole process group, which does not hit the workers."""
    signum = signal.SIGINT if by_terminal else signal.SIGTERM
    env.wrapper = ["setsid"]
    blobids = env.fill_slowly(600)
    with env.running("run") as run:
        await_both_at_work(env)
        (os.killpg if by_terminal else os.kill)(run.pid, signum)
        assert run.wait(PATIENCE) == 128 + signum, env.output()
    assert 0 < len(env.copied()) < len(blobids)
    assert {Path(name).name for name in env.on_remote()} == env.copied()
    env.assert_nothing_half()
    assert env.failures() == {}
    assert env.litter() == []
    assert env.processes() == {}
    stop = env.events("run_stop")[-1]
    assert (stop["outcome"], stop["exit_code"]) == ("stopped", 128 + signum)
    assert stop["copied"] == len(env.copied())
    assert env.events("stopping")[0]["signal"] == signum
    assert len(env.events("worker_stop")) == 2
    assert env.events("batch_retry") == env.events("outage") == []


def test_a_stop_does_not_wait_for_the_rest_of_a_batch(env: Environment, link: Link) -> None:
    """30 MB make one batch, of which two or three are sent; the blob under way is finished."""
    env.through(env.sshd.through(link.port))
    env.write_config(run={"bwlimit": "2MB/s", "codec": "none"})
    blobids = env.fill(60, size=lambda _: 500_000)
    with env.running("run") as run:
        wait_until(lambda: link.sent > 2_500_000, "the first blobs")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    assert link.sent < 12_000_000
    assert 0 < len(env.copied()) < len(blobids)
    assert {Path(name).name for name in env.on_remote()} == env.copied()
    env.assert_nothing_half()
    (batch,) = env.events("batch_complete")
    assert batch["blobs"] == batch["copied"] == len(env.copied())
    assert env.events("batch_retry") == env.events("outage") == []
    assert env.failures() == {}
    assert env.litter() == []
    (stopping,) = env.events("stopping")
    assert 0 < stopping["within_s"] < 30
    assert "loses nothing" in env.output()
    env.finish()


@pytest.mark.parametrize("command", [["restore", "--to", "{root}/back"], ["reconcile"]])
def test_ctrl_c_is_no_outage_for_what_reads_the_remote(
    env: Environment, link: Link, command: list[str]
) -> None:
    """The terminal sends it to a whole process group, with every ssh that is in it."""
    env.fill_both(60)
    env.through(env.sshd.through(link.port))
    env.wrapper = ["setsid"]
    link.stall_after(60_000)
    with env.running(*(word.format(root=env.root) for word in command)) as reader:
        wait_until(lambda: link.stalled or reader.poll() is not None, "the middle of it")
        assert reader.poll() is None, env.output()
        os.killpg(reader.pid, signal.SIGINT)
        assert reader.wait(PATIENCE) == 130, env.output()
    assert "away" not in env.output()
    assert env.output().strip().endswith("interrupted")
    assert env.processes() == {}


@pytest.mark.long
def test_the_second_signal_ends_the_run_at_once(env: Environment, link: Link) -> None:
    env.through(env.sshd.through(link.port))
    env.fill_slowly(600)
    with env.running("run") as run:
        env.await_event("batch_complete")
        link.stall()
        run.send_signal(signal.SIGTERM)
        env.await_event("stopping")
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        # Nothing goes over the link: it could not end by itself before the stall time-out.
        assert run.wait(PATIENCE) == 143, env.output()
        # ssh is killed with its worker, and takes a moment to be gone.
        wait_until(lambda: not env.processes(), "the end of all processes")
        link.resume()
    env.assert_nothing_half()
    assert env.failures() == {}
    env.finish()


def test_a_signal_ends_the_preflight_of_a_remote_that_hangs(env: Environment, link: Link) -> None:
    env.through(env.sshd.through(link.port))
    env.fill(5)
    env.write_config(remote={"connect_timeout": 300})
    link.stall()
    with env.running("run") as run:
        wait_until(lambda: "ssh" in env.processes().values(), "the preflight's ssh")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    assert env.processes() == {}
    assert env.events("run_stop")[-1]["outcome"] == "stopped"
    assert env.copied() == set()


def test_hangup_lets_the_log_be_rotated_and_the_limit_be_changed(env: Environment) -> None:
    slow, large = 150_000, 15_000_000
    *_, last = env.fill_slowly(30, rate=f"{slow}B/s")
    env.put(noise(large))
    with env.held(last) as release, env.running("run") as run:
        env.await_event("batch_complete")
        old = env.log.rename(env.log.with_suffix(".1"))
        env.write_config(run={"bwlimit": "100MB/s"})
        began = time.monotonic()
        run.send_signal(signal.SIGHUP)
        limit = env.await_event("bandwidth_limit")
        assert (limit["bytes_per_s"], limit["uid"]) == (100_000_000, None)
        assert env.status()["daemon"]["bwlimit"] == 100_000_000
        release()
        env.await_event("batch_complete")
        before = old.read_bytes()
        assert run.wait(PATIENCE) == 0, env.output()
        # The workers have heard of it, too: else the large one alone would take twice as long.
        assert time.monotonic() - began < large / slow / 2
    assert old.read_bytes() == before
    assert env.events("settings_read")[0]["changed"] == ["run.bwlimit"]
    assert env.events("run_stop")[0]["outcome"] == "done"
    env.assert_complete()


# --- other commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_check_that_is_stopped_takes_its_trial_blobs_along(
    env: Environment, signum: signal.Signals
) -> None:
    scratch, tools = env.root / "scratch", env.root / "tools"
    scratch.mkdir()
    tools.mkdir()
    (tools / "tar").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tools / "tar").chmod(0o755)
    env.write_config(run={"strategy": "tar"})
    env.environ.update({"TMPDIR": str(scratch), "PATH": f"{tools}:{os.environ['PATH']}"})
    with env.running("check") as check:
        wait_until(lambda: list(scratch.glob("ntt-check-*/*")), "the trial blobs")
        check.send_signal(signum)
        assert check.wait(PATIENCE) == 128 + signum
        assert list(scratch.iterdir()) == []
        assert "Traceback" not in env.output()
        assert "unforeseen" not in env.output()


def test_a_hangup_does_not_shorten_the_wait_for_a_remote(env: Environment, link: Link) -> None:
    env.through(env.sshd.through(link.port))
    env.write_config(run={"backoff_base": 1, "backoff_cap": 1})
    env.store.joinpath("00").mkdir()
    link.cut()
    with env.running("run", "--watch") as run:
        env.await_event("outage")
        run.send_signal(signal.SIGHUP)
        env.await_event("outage", 4)
        run.terminate()
        assert run.wait(PATIENCE) == 143, env.output()
    waits = [line["wait_s"] for line in env.events("outage")]
    moments = [
        datetime.fromisoformat(line["timestamp"]).timestamp() for line in env.events("outage")
    ]
    gaps = [after - before for before, after in pairwise(moments)]
    assert [gap for gap, wait in zip(gaps, waits, strict=False) if gap < wait - 0.01] == []
