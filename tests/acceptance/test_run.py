"""`run` through the installed program: everything pending arrives, and is recorded."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE


def test_once_sends_everything_and_then_nothing(site: Site) -> None:
    site.fill(300)
    first = site.run("run", "--once")
    assert first.returncode == 0, first.stderr + first.stdout
    site.assert_complete()
    second = site.run("run", "--once")
    assert second.returncode == 0
    assert site.events("run_stop")[-1]["copied"] == 0


@pytest.fixture
def logins(site: Site) -> Path:
    """A file that has a line for each ssh that the site has started."""
    ssh, tools, found = shutil.which("ssh"), site.root / "tools", site.root / "logins"
    tools.mkdir()
    (tools / "ssh").write_text(f'#!/bin/sh\necho >>{found}\nexec {ssh} "$@"\n')
    (tools / "ssh").chmod(0o755)
    site.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    return found


def test_a_run_of_few_blobs_logs_in_once(site: Site, logins: Path) -> None:
    site.write_config(run={"workers": 4, "skip_pgdump": True})
    site.fill(20)
    for name, content in site.in_store().items():
        known = (len(content), Path(name).name)
        site.query("update blobs set size = %s where blobid = %s", *known)
    for nth in (1, 2):
        done = site.run("run")
        assert done.returncode == 0, done.stdout
        assert len(logins.read_text().splitlines()) == nth
        site.assert_complete()
    assert len(site.events("worker_start")) == 1


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_while_it_looks_round_is_started_again(
    site: Site, link: Link, fate: signal.Signals
) -> None:
    site.through(site.sshd.through(link.port))
    site.fill(20)
    site.write_config(run={"workers": 1, "backoff_base": 0.01})
    link.stall()
    with site.running("run") as run:
        wait_until(lambda: "ssh" in site.processes().values(), "its ssh")
        (worker,) = site.children(run.pid)
        os.kill(worker, fate)
        site.await_event("worker_restart")
        link.resume()
        assert run.wait(PATIENCE) == 0, site.output()
    (restart,) = site.events("worker_restart")
    assert (restart["pid"], restart["worker"], restart["attempt"]) == (worker, 0, 1)
    site.assert_complete()
