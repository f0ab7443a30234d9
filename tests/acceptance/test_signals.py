"""Signals: the first asks for the end, the second insists, SIGHUP and logrotate change the log."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE


def test_the_first_signal_ends_the_run_after_what_is_in_flight(site: Site) -> None:
    signum = signal.SIGTERM
    blobids = site.fill_slowly(600)
    with site.running("run") as run:
        site.await_event("batch_complete")
        run.send_signal(signum)
        assert run.wait(PATIENCE) == 128 + signum, site.output()
    assert 0 < len(site.copied()) < len(blobids)
    assert {Path(name).name for name in site.on_remote()} == site.copied()
    site.assert_nothing_half()
    assert site.failures() == {}
    assert site.litter() == []
    assert site.processes() == {}
    stop = site.events("run_stop")[-1]
    assert (stop["outcome"], stop["exit_code"]) == ("stopped", 128 + signum)
    assert stop["copied"] == len(site.copied())
    assert site.events("stopping")[0]["signal"] == signum
    assert len(site.events("worker_stop")) == 2


def test_ctrl_c_on_the_terminal_does_not_hit_the_workers(site: Site) -> None:
    """A terminal sends SIGINT to a whole process group."""
    site.wrapper = ["setsid"]
    site.fill_slowly(600)
    with site.running("run") as run:
        site.await_event("batch_complete")
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(PATIENCE) == 130, site.output()
    assert site.events("batch_retry") == site.events("outage") == []
    assert len(site.events("worker_stop")) == 2
    assert {Path(name).name for name in site.on_remote()} == site.copied()


@pytest.mark.parametrize("command", [["restore", "--to", "{root}/back"], ["reconcile"]])
def test_ctrl_c_is_no_outage_for_what_reads_the_remote(
    site: Site, link: Link, command: list[str]
) -> None:
    """The terminal sends it to a whole process group, with every ssh that is in it."""
    site.fill_both(60)
    site.through(site.sshd.through(link.port))
    site.wrapper = ["setsid"]
    link.stall_after(60_000)
    with site.running(*(word.format(root=site.root) for word in command)) as reader:
        wait_until(lambda: link.stalled or reader.poll() is not None, "the middle of it")
        assert reader.poll() is None, site.output()
        os.killpg(reader.pid, signal.SIGINT)
        assert reader.wait(PATIENCE) == 130, site.output()
    assert "away" not in site.output()
    assert site.output().strip().endswith("interrupted")
    assert site.processes() == {}


def test_the_second_signal_ends_the_run_at_once(site: Site, link: Link) -> None:
    site.through(site.sshd.through(link.port))
    site.fill_slowly(600)
    with site.running("run") as run:
        site.await_event("batch_complete")
        link.stall()
        run.send_signal(signal.SIGTERM)
        site.await_event("stopping")
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        # Nothing goes over the link: it could not end by itself before the stall time-out.
        assert run.wait(PATIENCE) == 143, site.output()
        assert site.processes() == {}
        link.resume()
    site.assert_nothing_half()
    assert site.failures() == {}
    site.finish()


def test_a_signal_ends_the_preflight_of_a_remote_that_hangs(site: Site, link: Link) -> None:
    site.through(site.sshd.through(link.port))
    site.fill(5)
    site.write_config(remote={"connect_timeout": 300})
    link.stall()
    with site.running("run") as run:
        wait_until(lambda: "ssh" in site.processes().values(), "the preflight's ssh")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, site.output()
    assert site.processes() == {}
    assert site.events("run_stop")[-1]["outcome"] == "stopped"
    assert site.copied() == set()


def test_hangup_lets_the_log_be_rotated(site: Site) -> None:
    *_, last = site.fill_slowly()
    with site.held(last) as release, site.running("run") as run:
        site.await_event("batch_complete")
        old = site.log.rename(site.log.with_suffix(".1"))
        run.send_signal(signal.SIGHUP)
        release()
        site.await_event("batch_complete")
        before = old.read_bytes()
        assert run.wait(PATIENCE) == 0, site.output()
    assert old.read_bytes() == before
    assert site.events("run_stop")[0]["outcome"] == "done"
    site.assert_complete()


# --- other commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_check_that_is_stopped_takes_its_trial_blobs_along(
    site: Site, signum: signal.Signals
) -> None:
    scratch, tools = site.root / "scratch", site.root / "tools"
    scratch.mkdir()
    tools.mkdir()
    (tools / "tar").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tools / "tar").chmod(0o755)
    site.write_config(run={"strategy": "tar"})
    site.environ.update({"TMPDIR": str(scratch), "PATH": f"{tools}:{os.environ['PATH']}"})
    with site.running("check") as check:
        wait_until(lambda: list(scratch.glob("ntt-check-*/*")), "the trial blobs")
        check.send_signal(signum)
        assert check.wait(PATIENCE) == 128 + signum
        assert list(scratch.iterdir()) == []
        assert "Traceback" not in site.output()
        assert "unforeseen" not in site.output()


def test_a_hangup_does_not_shorten_the_wait_for_a_remote(site: Site, link: Link) -> None:
    site.through(site.sshd.through(link.port))
    site.write_config(run={"backoff_base": 1, "backoff_cap": 1})
    site.store.joinpath("00").mkdir()
    link.cut()
    with site.running("run", "--watch") as run:
        site.await_event("outage")
        run.send_signal(signal.SIGHUP)
        site.await_event("outage", 4)
        run.terminate()
        assert run.wait(PATIENCE) == 143, site.output()
    waits = [line["wait_s"] for line in site.events("outage")]
    moments = [
        datetime.fromisoformat(line["timestamp"]).timestamp() for line in site.events("outage")
    ]
    gaps = [after - before for before, after in pairwise(moments)]
    assert [gap for gap, wait in zip(gaps, waits, strict=False) if gap < wait - 0.01] == []
