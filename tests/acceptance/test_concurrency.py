"""Several at once: workers, coordinators, hosts. Every blob goes once."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack

import psycopg
import pytest

from tests.environment import Site, wait_until
from tests.patience import PATIENCE
from tests.postgres import CONNECTIONS


def test_a_second_coordinator_is_turned_away(site: Site) -> None:
    site.fill(5)
    with site.locked_catalog() as release, site.running("run") as run:
        site.await_event("run_start")
        second = site.run("run")
        assert second.returncode == 3
        assert f"PID {run.pid}" in second.stderr
        assert "hint: " in second.stderr
        check = site.run("check")
        assert check.returncode == 3
        assert f"PID {run.pid}" in check.stdout
        release()
        assert run.wait(PATIENCE) == 0, site.output()
    assert len(site.events("run_start")) == 1
    site.assert_complete()


def test_two_targets_run_at_the_same_time(site: Site) -> None:
    blobids = site.fill(60)
    elsewhere = site.sshd.directory()
    beside = site.beside("other")
    beside.write_config(**{"targets.other": {"host": site.sshd.alias, "path": elsewhere.path}})
    assert beside.run("--target", "other", "init-db").returncode == 0
    with (
        site.locked_catalog() as release,
        site.running("run") as run,
        beside.running("--target", "other", "run") as other,
    ):
        site.await_event("worker_start")
        beside.await_event("worker_start")
        assert (run.poll(), other.poll()) == (None, None)
        release()
        assert other.wait(PATIENCE) == 0, beside.output()
        assert run.wait(PATIENCE) == 0, site.output()
    site.assert_complete()
    there = {path.name for path in (elsewhere.local / "by-hash").rglob("*") if path.is_file()}
    assert there == set(blobids)
    assert site.query("select count(*) from blobs where other_copied") == [(len(blobids),)]


def test_two_hosts_share_one_catalog(site: Site) -> None:
    blobids = site.fill_slowly(150)
    other = site.beside("other-host")
    with (
        site.locked_catalog() as release,
        site.running("run") as run,
        other.running("run") as run_there,
    ):
        site.await_event("worker_start", 2)
        other.await_event("worker_start", 2)
        release()
        assert run.wait(PATIENCE) == 0, site.output()
        assert run_there.wait(PATIENCE) == 0, other.output()
    shares = [_copied(one) for one in (site, other)]
    assert sum(shares) == len(blobids)
    assert min(shares) > 0
    site.assert_complete()


@pytest.mark.long
def test_what_a_stopped_host_has_claimed_is_free_within_a_minute(site: Site) -> None:
    """Its kernel still answers the server, so only what is said in its sessions shows that it
    lives. Once it goes on, it finds its work done.
    """
    blobids = site.fill_slowly(300, rate="300kB")
    other = site.beside("other-host")
    other.write_config(run={"bwlimit": "10MB/s"})
    with site.running("run") as run, ExitStack() as stack:
        site.await_event("batch_complete", 4)
        for pid in site.processes():
            os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        run_there = stack.enter_context(other.running("run"))
        assert run_there.wait(PATIENCE) == 0, other.output()
        assert site.copied() == set(blobids)
        assert time.monotonic() - stopped < 60 + PATIENCE / 10
        for pid in site.processes():
            os.kill(pid, signal.SIGCONT)
        assert run.wait(PATIENCE) == 0, site.output()
    # Sent twice is only what was under way when it was stopped.
    assert len(blobids) <= _copied(site) + _copied(other) <= len(blobids) + 2 * 8 * 5
    site.assert_complete()


@pytest.mark.long
def test_more_workers_than_the_database_has_room_for(site: Site) -> None:
    """Those that find no connection wait for one; it is nobody's failure."""
    blobids = site.fill(250)
    workers = CONNECTIONS + 4
    site.write_config(run={"workers": workers, "batch_size": 20})
    result = site.run("run")
    assert result.returncode == 0, result.stderr
    assert _copied(site) == len(blobids)
    assert len(site.events("worker_stop")) == workers
    assert site.failures() == {}
    site.assert_complete()


def test_a_batch_is_told_after_its_commit(site: Site) -> None:
    """While nothing can be committed no batch is told, though the blobs have arrived."""
    blobids = site.fill(60)
    site.write_config(run={"workers": 1, "batch_size": 20})
    with site.locked_catalog() as release, site.running("run") as run:
        wait_until(lambda: _waits_for_a_lock(site), "a worker that cannot commit")
        assert site.on_remote() != {}
        assert site.events("batch_complete") == []
        assert site.copied() == set()
        release()
        while run.poll() is None:
            told = _copied(site)
            assert told <= len(site.copied())
        assert run.wait(PATIENCE) == 0, site.output()
    assert _copied(site) == len(blobids)


def test_no_password_is_shown_anywhere(site: Site) -> None:
    """Not in the arguments of any process, not in the log, not in what is printed."""
    secret = "correct-horse-battery"
    url = psycopg.conninfo.make_conninfo(site.url, password=secret)
    site.write_config(catalog={"url": url})
    site.fill_slowly(12)
    said = [site.run(*command).stdout for command in (["status"], ["check"])]
    with site.running("-v", "run") as run:
        pause = threading.Event()
        while run.poll() is None:
            said += [_command_line(pid) for pid in site.processes()]
            pause.wait(0.1)
        assert run.wait() == 0
    assert any(line.startswith("ssh") for line in said)
    site.write_config(catalog={"url": url.replace("dbname=", "dbname=no_")})
    for command in (["-v", "run"], ["check"]):
        result = site.run(*command)
        assert result.returncode == 4
        said += [result.stdout, result.stderr]
    site.write_config(catalog={"url": f"postgresql://me:{secret}@x@host/db"})
    refused = site.run("-v", "run")
    assert refused.returncode == 2
    said += [refused.stdout, refused.stderr, site.output(), site.log.read_text()]
    assert [text for text in said if secret in text] == []


def _copied(site: Site) -> int:
    """Blobs sent, as told batch by batch."""
    return sum(line["copied"] for line in site.events("batch_complete"))


def _waits_for_a_lock(site: Site) -> bool:
    return bool(
        site.query(
            "select pid from pg_stat_activity where wait_event_type = 'Lock'"
            " and application_name like 'ntt-backup-remote/%'"
        )
    )


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""
