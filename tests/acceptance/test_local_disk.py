"""A disk of this machine as the target, by file://: every command, and what such a disk does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir
from tests.helpers.waiting import PATIENCE, wait_until

MIB = 1 << 20


@pytest.fixture
def usb(env: Environment, postgres: Postgres) -> Environment:
    """The environment with a directory as its target, where no ssh is to be found."""
    place = env.root / "mnt" / "usb disk"
    place.mkdir(parents=True)
    tools = env.root / "tools"
    tools.mkdir()
    (tools / "ssh").write_text("#!/bin/sh\necho ssh was started >&2\nexit 255\n")
    (tools / "ssh").chmod(0o755)
    env.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{str(place).replace(' ', '%20')}/"}
    env.write_config(dump={"bin": str(postgres.programs)})
    return env


@pytest.fixture
def mount(usb: Environment) -> Iterator[Callable[[str], None]]:
    """Mounts, or remounts, a small file system where the target is."""
    place = usb.remote.path

    def with_options(options: str) -> None:
        argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")

    yield with_options
    while subprocess.run(["umount", "-l", place], capture_output=True).returncode == 0:
        pass


def receivers(env: Environment) -> list[int]:
    """The PIDs of the local receivers at work."""
    found = []
    for pid in env.processes():
        with suppress(OSError):
            if b"NTT-LOADER" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:]:
                found.append(pid)
    return found


@pytest.mark.long
def test_every_command_works_on_a_directory(usb: Environment, database_url: str) -> None:
    env = usb
    env.write_config(run={"skip_pgdump": False, "workers": 2, "batch_size": 10})
    blobids = env.fill(60)

    checked = env.call("check", expect=0)
    (target,) = (line for line in checked.stdout.splitlines() if " target " in line)
    url = env.settings["remote"]["url"].rstrip("/")
    assert f"remote is {url} (a directory of this machine)" in target
    assert "on one file system" in target
    assert f"to {url}/by-hash" in env.call("run", "--dry-run").stdout

    env.run("run", expect=0)
    assert env.events("run_start")[0]["remote"] == url
    assert env.on_remote() == env.in_store()
    assert env.copied() == set(blobids)
    assert env.litter() == ["pgdump"]

    assert env.status()["url"] == url
    assert url in env.call("status").stdout
    for command in (["verify"], ["reconcile"], ["dump", "--force"], ["requeue"]):
        env.call(*command, expect=0)

    back = env.root / "back"
    env.call("restore", "--to", str(back), expect=0)
    assert tree(back) == env.in_store()
    argv = ["--scratch", str(env.root / "scratch"), "--json"]
    drilled = env.call("drill", *argv, "--database", database_url)
    assert json.loads(drilled.stdout)["proved"] is True, drilled.stderr

    env.remote_path(blobids[0]).write_bytes(b"rot")
    env.call("verify", expect=7)
    env.run("run", expect=0)
    assert env.on_remote() == env.in_store()


@pytest.mark.long
def test_bench_measures_a_directory_and_leaves_nothing(usb: Environment) -> None:
    usb.fill(20)
    quick = ["--rounds", "3", "--seconds", "0.2"]
    usb.call("bench", "link", *quick, "--streams", "1", "--round-trips", "3", "-q", expect=0)
    only = ["--sample", "100kB", "--workers", "1", "--only", "stream-none,tar-pipe", "-q"]
    usb.call("bench", "strategies", *quick, *only, expect=0)
    assert usb.litter() == []


def test_the_strategy_tar_stores_in_a_directory(usb: Environment) -> None:
    usb.write_config(run={"strategy": "tar", "skip_pgdump": False})
    usb.fill(30)
    usb.run("run", expect=0)
    assert usb.on_remote() == usb.in_store()
    assert usb.litter() == ["pgdump"]


def test_the_bandwidth_limit_holds_for_a_directory(usb: Environment) -> None:
    usb.write_config(run={"bwlimit": "1MB/s"})
    usb.fill(2, size=lambda _: MIB)
    usb.run("run", expect=0)
    usb.assert_complete()
    assert usb.events("run_stop")[0]["duration_s"] > 1.5


# --- what happens to a disk


def test_a_disk_that_is_not_mounted_gets_nothing(
    usb: Environment, mount: Callable[[str], None]
) -> None:
    mount("size=32m")
    usb.fill(20)
    assert "on one file system" not in usb.call("check").stdout
    usb.run("run", expect=0)
    usb.assert_complete()
    subprocess.run(["umount", usb.remote.path], check=True)
    usb.put(b"one more")

    for command in (["check"], ["run"], ["verify"], ["reconcile"], ["dump"]):
        done = usb.call(*command) if command != ["run"] else usb.run("run")
        said = done.stdout + done.stderr
        assert done.returncode == 5, said
        assert usb.remote.path in said
        assert "is its disk mounted?" in said
        assert "ssh" not in said.replace("ssh was", "")
        wait_until(lambda: not [*usb.remote.local.iterdir()], "the receiver to clear up")


def test_a_place_that_is_missing_is_never_made(usb: Environment) -> None:
    usb.fill(5)
    usb.remote.local.rmdir()
    for command in ("check", "run"):
        done = usb.run(command, expect=6)
        assert "remote.path cannot be used" in done.stdout
        assert "a disk that is not mounted" in done.stdout
        assert not usb.remote.local.exists()


def test_a_disk_that_is_read_only_ends_a_run_with_6(
    usb: Environment, mount: Callable[[str], None]
) -> None:
    mount("size=32m")
    usb.fill(20)
    usb.run("run", expect=0)
    mount("remount,ro")
    usb.put(b"one more")
    done = usb.run("run", expect=6)
    assert "file system is read-only" in done.stdout
    assert "ReadWritePaths" in done.stdout
    assert usb.failures() == {}


def test_a_disk_that_is_unplugged_is_waited_for_and_the_run_completes(
    usb: Environment, mount: Callable[[str], None]
) -> None:
    mount("size=64m")
    disk = usb.root / "disk"
    disk.mkdir()
    plug = ["mount", "--bind", str(disk), usb.remote.path]
    subprocess.run(plug, check=True)
    usb.fill_slowly(60, rate="300kB/s")
    with usb.running("run") as process:
        usb.await_event("batch_complete")
        subprocess.run(["umount", "-l", usb.remote.path], check=True)
        kept = tree(disk / "by-hash")
        for receiver in receivers(usb):
            os.kill(receiver, signal.SIGKILL)
        outage = usb.await_event("outage")
        wait_until(lambda: "remote.path is gone" in usb.output(), "the disk to be missed")
        wait_until(lambda: not [*usb.remote.local.iterdir()], "the receivers to clear up")
        subprocess.run(plug, check=True)
        assert process.wait(PATIENCE) == 0, usb.output()
    assert outage["what"] == "remote"
    assert kept.items() <= usb.on_remote().items()
    usb.assert_complete()


def test_a_disk_that_fills_up_ends_a_run_with_6_and_completes_later(
    usb: Environment, mount: Callable[[str], None]
) -> None:
    mount("size=8m")
    usb.write_config(run={"batch_size": 10, "workers": 2})
    usb.fill(100, size=lambda _: 100_000)
    done = usb.run("run")  # The catalog does not tell the sizes: nobody sees it coming.
    assert done.returncode == 6, done.stdout
    (error,) = usb.events("error")
    assert error["message"] == "the remote is full"
    assert usb.failures() == {}
    usb.assert_nothing_half()

    mount("remount,size=64m")
    usb.run("run", expect=0)
    wait_until(lambda: usb.litter() == [], "the receivers to clear up")
    usb.assert_complete()


# --- what a kind cannot do


def test_what_a_kind_cannot_do_is_one_clear_line(usb: Environment) -> None:
    usb.fill(1)
    done = usb.call("install-receiver", "--print")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    assert "file://" in done.stderr

    usb.environ["NTT_SSH_KEY"] = "/root/.ssh/id"
    assert "without effect for file: remote.identity_file" in usb.call("check").stdout

    usb.settings["remote"] = {"url": "s3://bucket/prefix"}
    usb.write_config()
    done = usb.call("bench", "link", expect=2)
    assert "cannot use a bucket: s3://bucket/prefix" in done.stderr
    assert usb.status()["url"] == "s3://bucket/prefix"
    usb.write_config(run={"strategy": "tar"})
    done = usb.call("check", expect=2)
    assert f"run.strategy in {usb.config} is not for this target" in done.stderr


def test_batches_grow_where_no_size_is_set(usb: Environment) -> None:
    del usb.settings["run"]["batch_size"]
    usb.write_config(run={"workers": 1})
    blobids = usb.fill(6500, size=lambda chance: 8)

    usb.run("run", expect=0)
    sizes = [one["blobs"] for one in usb.events("batch_complete")]
    assert sum(sizes) == len(blobids)
    assert sizes[0] <= 1000 < max(sizes) <= 4000
    usb.assert_complete()
