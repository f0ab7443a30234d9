"""What the remote's disk does to a run, and what a run finds there already."""

from __future__ import annotations

import subprocess

import pytest

from tests.environment import Site
from tests.sshd import FULL_SIZE, RemoteDir, Sshd


def store_at(site: Site, directory: RemoteDir) -> None:
    site.remote = directory
    site.write_config(remote={"path": directory.path})


def on_the_remote(site: Site, command: str) -> None:
    """Run a command as the remote's account, in the remote's directory."""
    done = site.sshd.run(f"cd {site.remote.path} && {command}")
    assert done.returncode == 0, done.stderr


def assert_cannot_store(site: Site, done: subprocess.CompletedProcess[str], word: str) -> None:
    """Exit 6 with a hint; nothing is failed, and what is recorded is there to its last byte."""
    assert done.returncode == 6, done.stdout
    (error,) = site.events("error")
    assert word in f"{error['message']} {error['detail']}".lower()
    assert error["hint"]
    assert site.failures() == {}
    there = site.on_remote()
    for blobid in site.copied():
        name = f"{blobid[:2]}/{blobid[2:4]}/{blobid}"
        assert there[name] == site.path(blobid).read_bytes()


# --- no room, no permission


@pytest.mark.docker
def test_a_run_ends_with_6_when_the_remote_disk_is_too_small_from_the_start(
    site: Site, remote: Sshd
) -> None:
    store_at(site, remote.full_directory())
    content = bytes(1000)
    blobid = site.put_in_store(content)
    site.register([blobid], [len(content)])
    on_the_remote(site, f"head -c {FULL_SIZE} /dev/zero >ballast || true")

    done = site.run("run", "--once")

    assert_cannot_store(site, done, "full")
    assert site.litter() == ["ballast"]


@pytest.mark.docker
def test_a_run_ends_with_6_when_the_remote_disk_is_read_only(site: Site, remote: Sshd) -> None:
    store_at(site, remote.read_only_directory())
    site.fill(20)

    done = site.run("run", "--once")

    assert_cannot_store(site, done, "read-only")
    assert site.copied() == set()


@pytest.mark.docker
def test_check_and_run_end_with_6_when_by_hash_belongs_to_somebody_else(site: Site) -> None:
    site.fill(20)
    on_the_remote(site, "mkdir -m 555 by-hash")

    for command in ("check", "run"):
        done = site.run(command)
        assert done.returncode == 6, done.stdout
        assert "may not write below remote.path" in done.stdout
        assert "by-hash" in done.stdout
    assert (site.copied(), site.failures()) == (set(), {})
    assert site.on_remote() == {}
    assert site.litter() == []


# --- what is there already


@pytest.mark.long
def test_a_disk_that_is_not_mounted_stops_the_run_and_nothing_is_written_below_it(
    site: Site,
) -> None:
    site.fill(20)
    assert site.run("check").returncode == 0
    assert not (site.remote.local / "by-hash").exists()
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()
    site.fill(20)

    on_the_remote(site, "mv by-hash ../elsewhere")
    for command in (["check"], ["run", "--once"]):
        done = site.run(*command)
        assert done.returncode == 5, done.stdout
        assert "remote.path is gone" in done.stdout + done.stderr
        assert list(site.remote.local.iterdir()) == []
    assert site.failures() == {}

    on_the_remote(site, "mv ../elsewhere by-hash")
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()
