"""Two disks in rotation under one mount point: a run fills the one that is there."""

from __future__ import annotations

import itertools
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_identity import Disks, disks
from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

__all__ = ["disks"]


@pytest.fixture
def rotation(env: Environment, disks: Disks) -> Disks:
    """The target `usb` with the media `a` and `b`, both new."""
    del env.settings["remote"]
    place = {"url": f"file://{disks.at}", "media": ["a", "b"]}
    env.write_config(
        **{"targets.usb": place},
        lock={"file": str(env.root / "lock-{target}")},
        run={"poll_interval": 0.1, "batch_size": 2},
    )
    for name in ("usb_a", "usb_b"):
        env.call("--target", name, "init-db", expect=0)
    return disks


def marked(env: Environment, medium: str) -> set[str]:
    return {one for (one,) in env.query(f"select blobid from blobs where usb_{medium}_copied")}


def has(env: Environment, medium: str, count: int) -> bool:
    return len(marked(env, medium)) >= count


def on(disks: Disks, name: str) -> set[str]:
    found = disks.content(name)
    return {path.rpartition("/")[2] for path in found if path.startswith("by-hash/")}


def test_a_run_fills_the_disk_that_is_there(env: Environment, rotation: Disks) -> None:
    shown = json.loads(env.call("--target", "usb_a", "config", "show", "--json").stdout)
    assert shown["settings"]["media"]["value"] == ["usb_a", "usb_b"]
    first = set(env.fill(6, seed=1))
    env.run("--target", "usb", "run", expect=0)
    assert (marked(env, "a") | marked(env, "b"), on(rotation, "a")) == (first, first)
    mine, other = ("a", "b") if marked(env, "a") else ("b", "a")
    assert marked(env, other) == set()

    second = first | set(env.fill(6, seed=2))
    rotation.mount("b")
    env.run("--target", "usb", "run", expect=0)
    assert (marked(env, mine), marked(env, other)) == (first, second)
    assert on(rotation, "b") == second

    rotation.mount("a")
    done = env.run("--target", "usb", "run", expect=0)
    assert f"usb_{other}: error: the target usb_{mine} is in the place of this one" in done.stdout
    assert marked(env, mine) == on(rotation, "a") == second
    ids = dict(env.query("select target, id from ntt_backup.targets"))
    assert ids == {
        f"usb_{mine}": rotation.identity("a"),
        f"usb_{other}": rotation.identity("b"),
    }

    rotation.mount("none")
    env.run("--target", "usb", "run", expect=5)
    assert rotation.content("none") == {}
    said = json.loads(env.call("--target", "usb", "status", "--json").stdout)["targets"]
    assert {name: one["identity"]["id"] for name, one in said.items()} == ids
    rotation.mount("a")
    env.call("--target", f"usb_{mine}", "verify", expect=0)
    env.call("--target", f"usb_{other}", "verify", expect=5)


def test_a_daemon_serves_disks_that_are_swapped(env: Environment, rotation: Disks) -> None:
    for name in ("a", "b"):
        rotation.mount(name)
        env.fill(4, seed=ord(name))
        env.run("--target", "usb", "run", expect=0)
    mine = "a" if marked(env, "a") == on(rotation, "a") else "b"
    other = "b" if mine == "a" else "a"
    everything = marked(env, "a") | marked(env, "b")
    env.write_config(**{"checks.reconcile": {"every": 1}})
    with env.running("--target", "usb", "run", "--watch") as run:
        for turn in range(20):
            everything |= set(env.fill(6, seed=turn))
            rotation.mount("a" if turn % 2 else "b")
            medium = mine if turn % 2 else other
            wait_until(partial(has, env, medium, 4), f"turn {turn}")
        for name, medium in (("a", mine), ("b", other)):
            rotation.mount(name)
            wait_until(partial(has, env, medium, len(everything)), f"all on {name}")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    assert on(rotation, "a") >= marked(env, mine) == everything
    assert on(rotation, "b") >= marked(env, other) == everything
    assert env.events("blob_failed") == []
    # A medium whose disk is away waits for its turn; the moment of a swap may be one.
    away = "another target is in the place of this one"
    assert [one for one in env.events("outage") if one["reason"] == away] == []
    assert len(env.events("run_start")) == len(env.events("run_stop"))


def test_a_daemon_takes_no_mount_point_without_its_disk_for_a_new_medium(
    env: Environment, rotation: Disks
) -> None:
    first = set(env.fill(6, seed=1))
    env.run("--target", "usb", "run", expect=0)
    mine, other = ("a", "b") if marked(env, "a") else ("b", "a")
    with env.running("--target", "usb", "run", "--watch") as run:
        wait_until(lambda: len(env.events("worker_start")) >= 2, "the daemon to begin")
        rotation.mount("none")
        gone = "is on a file system of this machine"
        wait_until(lambda: any(gone in str(one) for one in env.events("outage")), "an outage")
        rotation.mount("a")
        first |= set(env.fill(6, seed=2))
        wait_until(partial(has, env, mine, len(first)), "all on the disk")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    assert rotation.content("none") == {}
    assert marked(env, other) == set()
    # A person who calls a run says that the disk is there.
    rotation.mount("b")
    env.run("--target", "usb", "run", expect=0)
    assert marked(env, other) == on(rotation, "b") == first


def test_a_medium_that_waits_for_its_turn_starts_no_process(
    env: Environment, rotation: Disks
) -> None:
    for name in ("a", "b"):
        rotation.mount(name)
        env.fill(2, seed=ord(name))
        env.run("--target", "usb", "run", expect=0)
    mine, other = ("b", "a") if marked(env, "b") == on(rotation, "b") else ("a", "b")

    lock = env.root / f"lock-usb_{other}"

    def reaped() -> int:
        """Counts page faults of all processes that the waiting coordinator has started."""
        wait_until(lambda: lock.exists() and lock.read_text(), "the coordinator")
        pid = int(lock.read_text().split()[0])
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[8])

    everything = marked(env, mine)
    seeds = itertools.count()

    def rests() -> bool:
        """Whether it starts none while blobs come, and the other medium gets them."""
        before = reaped()
        for seed in itertools.islice(seeds, 6):
            everything.update(env.fill(2, seed=seed))
            wait_until(partial(has, env, mine, len(everything)), f"blobs {seed}")
        return reaped() == before > 0

    with env.running("--target", "usb", "run", "--watch") as run:
        wait_until(rests, "a wait without processes")
        rotation.mount("a")
        wait_until(partial(has, env, other, len(everything)), "the other medium")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()


@pytest.mark.parametrize("media", [[], ["a"], ["a", "a"], ["A", "b"], "a", [1, 2], ["a", "b c"]])
def test_media_are_names_that_differ(env: Environment, rotation: Disks, media: Any) -> None:
    env.write_config(**{"targets.usb": {"media": media}, "targets.other": {"url": "file:///x"}})
    done = env.call("--target", "other", "config", "check")
    assert done.returncode == 2
    assert "targets.usb.media in" in done.stdout + done.stderr
