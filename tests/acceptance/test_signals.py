"""Signals: the first asks for the end, the second insists, SIGHUP and logrotate change the log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.environment import IGNORING_CHILDREN, Site, wait_until
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


def test_the_log_follows_its_name_without_a_signal(site: Site) -> None:
    blobids = site.fill_slowly()
    with site.held(blobids[-1]) as release, site.running("run") as run:
        site.await_event("batch_complete")
        old = site.log.rename(site.log.with_suffix(".1"))
        release()
        assert run.wait(PATIENCE) == 0, site.output()
    counted = sum(line["copied"] for line in site.events("batch_complete"))
    assert 0 < counted < len(blobids)
    assert site.events("run_stop")
    assert old.read_text().endswith("\n")
    assert not any("run_stop" in line for line in old.read_text().splitlines())


def test_a_log_that_cannot_be_written_is_refused_at_the_start(site: Site) -> None:
    site.fill(3)
    file, fifo = site.root / "file", site.root / "fifo"
    file.touch()
    os.mkfifo(fifo)
    for log in (file / "log.jsonl", fifo):
        site.write_config(log={"jsonl": str(log)})
        result = site.run("run")
        assert result.returncode == 2
        assert f"the log {log} cannot be written" in result.stderr
        assert "hint: " in result.stderr
    assert site.copied() == set()


def test_a_full_disk_under_the_log_does_not_stop_the_backup(site: Site) -> None:
    site.fill(30)
    site.write_config(log={"jsonl": "/dev/full"}, run={"batch_size": 5})
    result = site.run("run")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot write the log /dev/full: No space left on device") == 1
    site.assert_complete()


def test_the_log_goes_on_after_its_disk_was_full(site: Site) -> None:
    *_, last = site.fill_slowly()
    site.write_config(run={"batch_size": 2})
    with (
        _small_disk(site.log.parent),
        site.held(last) as release,
        site.running("run") as run,
    ):
        wait_until(lambda: "cannot write the log" in site.output(), "the disk to be full")
        _mount(site.log.parent, "remount,size=1m")
        release()
        assert run.wait(PATIENCE) == 0, site.output()
        lines = site.log.read_text().splitlines()
    # The line that met the end of the disk may be torn, but no other line hangs on it.
    assert len([line for line in lines if line and not line.endswith("}")]) <= 1
    assert all(line.count('"timestamp"') <= 1 for line in lines)
    assert json.loads(lines[-1])["event"] == "run_stop"
    site.assert_complete()


@contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    directory.mkdir()
    if os.geteuid() != 0 or not _mount(directory, "size=8k"):
        pytest.skip("only root may mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _mount(directory: Path, options: str) -> bool:
    argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    return subprocess.run(argv, check=False).returncode == 0


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


def test_a_run_restarts_workers_when_its_starter_ignores_the_end_of_children(site: Site) -> None:
    """Such a thing is inherited, and then the kernel tells nobody how a child has ended."""
    site.wrapper = IGNORING_CHILDREN
    *_, last = site.fill_slowly()
    with site.held(last) as release, site.running("run") as run:
        site.await_event("batch_complete")
        victim = min(pid for pid, name in site.children(run.pid).items() if "worker" in name)
        os.kill(victim, signal.SIGKILL)
        site.await_event("worker_restart")
        release()
        assert run.wait(PATIENCE) == 0, site.output()
    (restart,) = site.events("worker_restart")
    assert (restart["pid"], restart["status"]) == (victim, -signal.SIGKILL)
    assert site.on_remote() == site.in_store()


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
