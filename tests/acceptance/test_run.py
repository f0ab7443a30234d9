"""`run` through the installed program: everything pending arrives, and is recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.waiting import PATIENCE, wait_until


def test_once_sends_everything_and_then_nothing(env: Environment) -> None:
    blobids = env.fill(300)
    env.run("run", "--once", expect=0)
    env.assert_complete()
    env.run("run", "--once", expect=0)
    assert env.events("run_stop")[-1]["copied"] == 0
    listed = json.loads(env.call("runs", "--json").stdout)["runs"]
    assert [(one["copied"], one["exit_code"]) for one in listed] == [(0, 0), (len(blobids), 0)]
    (line,) = env.call("runs", "--limit", "1").stdout.splitlines()
    assert "done (exit code 0), 0 copied" in line


@pytest.fixture
def logins(env: Environment) -> Path:
    """A file that has a line for each ssh that the environment has started."""
    ssh, tools, found = shutil.which("ssh"), env.root / "tools", env.root / "logins"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\necho >>{found}\nexec {ssh} "$@"\n')
    (tools / "ssh").chmod(0o755)
    env.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    return found


def test_a_run_of_few_blobs_logs_in_once(env: Environment, logins: Path) -> None:
    env.write_config(run={"workers": 4, "skip_pgdump": True})
    env.fill(20)
    for name, content in env.in_store().items():
        known = (len(content), Path(name).name)
        env.query("update blobs set size = %s where blobid = %s", *known)
    for nth in (1, 2):
        env.run("run", expect=0)
        assert len(logins.read_text().splitlines()) == nth
        env.assert_complete()
    assert len(env.events("worker_start")) == 1


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_while_it_looks_round_is_started_again(
    env: Environment, link: Link, fate: signal.Signals
) -> None:
    env.through(env.sshd.through(link.port))
    env.fill(20)
    env.write_config(run={"workers": 1, "backoff_base": 0.01})
    link.stall()
    with env.running("run") as run:
        wait_until(lambda: "ssh" in env.processes().values(), "its ssh")
        (worker,) = env.children(run.pid)
        os.kill(worker, fate)
        env.await_event("worker_restart")
        link.resume()
        assert run.wait(PATIENCE) == 0, env.output()
    (restart,) = env.events("worker_restart")
    assert (restart["pid"], restart["worker"], restart["attempt"]) == (worker, 0, 1)
    env.assert_complete()
