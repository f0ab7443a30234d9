"""Two disks take turns under one mount point: no blob is marked for a disk that lacks the blob."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir
from tests.helpers.waiting import PATIENCE, wait_until

MARKERS = {"stream": ".ntt-target.json", "tar": ".ntt-target.json", "packs": "format.json"}
EACH = [
    "stream",
    pytest.param("packs", marks=pytest.mark.long),
    pytest.param("tar", marks=pytest.mark.long),
]


class Disks:
    """Disks `a` and `b`, one of which is at the mount point `at`, or neither."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.at = root / "mnt"
        for name in ("a", "b", "none"):
            (root / name).mkdir(parents=True)
        self.mount("a")

    def mount(self, name: str) -> None:
        """Puts a disk in the place of the one that is there, in one step."""
        new = self.root / "new"
        new.symlink_to(self.root / name)
        new.replace(self.at)

    def content(self, name: str) -> dict[str, bytes]:
        """All files of a disk, but those on their way."""
        found = tree(self.root / name)
        return {path: data for path, data in found.items() if not path.startswith(".ntt-incoming")}

    def identity(self, name: str, strategy: str = "stream") -> str:
        marker = json.loads((self.root / name / MARKERS[strategy]).read_text())
        assert marker["format"] == 1
        return str(marker["store"])


@pytest.fixture
def disks(env: Environment) -> Disks:
    disks = Disks(env.root / "disks")
    env.remote = RemoteDir(str(disks.at), disks.at)
    env.settings["remote"] = {"url": f"file://{disks.at}"}
    env.write_config()
    return disks


def by(env: Environment, strategy: str) -> None:
    if strategy == "packs":
        env.write_config(remote={"layout": "packs"})
        env.call("init-db", expect=0)
    else:
        env.write_config(run={"strategy": strategy})


def told(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def known(env: Environment, target: str = "remote") -> list[tuple[str]]:
    return env.query(f"select id from ntt_backup.targets where target = '{target}'")


@pytest.mark.parametrize("strategy", EACH)
def test_the_first_run_gives_an_identity_and_another_disk_gets_nothing(
    env: Environment, disks: Disks, strategy: str
) -> None:
    by(env, strategy)
    first = env.fill(5, seed=1)
    assert "the first run gives the target one" in env.call("check", expect=0).stdout
    env.run("run", expect=0)
    ours = disks.identity("a", strategy)
    assert known(env) == [(ours,)]
    assert ours in env.call("check", expect=0).stdout

    env.fill(5, seed=2)
    before = disks.content("a")
    disks.mount("none")
    done = env.run("run", expect=5)
    assert "is missing, but the catalog has blobs copied to it" in told(done)
    # As a disk of another target has it.
    shutil.copytree(disks.root / "a", disks.root / "b", dirs_exist_ok=True)
    marker = disks.root / "b" / MARKERS[strategy]
    other = "0123456789abcdef" * 2
    marker.write_text(marker.read_text().replace(ours, other))
    disks.mount("b")
    done = env.run("run", expect=5)
    assert "another target is in the place of this one" in told(done)
    assert f"the catalog knows it as {ours}, and {other} is there" in told(done)
    assert "'Another disk is in its place' in docs/first-aid.md" in told(done)
    assert env.copied() == set(first)
    assert disks.content("none") == {}
    disks.mount("a")
    env.run("run", expect=0)
    assert disks.content("a").items() >= before.items()
    assert known(env) == [(ours,)]


@pytest.mark.parametrize("strategy", ["stream", "packs"])
def test_nothing_is_restored_from_another_disk_but_where_no_catalog_knows_which_is_ours(
    env: Environment, disks: Disks, strategy: str, database_url: str
) -> None:
    by(env, strategy)
    blobids = env.fill(5)
    env.run("run", expect=0)
    shutil.copytree(disks.root / "a", disks.root / "b", dirs_exist_ok=True)
    marker = disks.root / "b" / MARKERS[strategy]
    ours = disks.identity("a", strategy)
    marker.write_text(marker.read_text().replace(ours, "5" * 32))
    disks.mount("b")
    back, scratch = env.root / "back", env.root / "scratch"
    calls = [
        ("restore", "--to", str(back)),
        ("drill", "--scratch", str(scratch), "--database", database_url),
    ]
    if strategy == "packs":
        calls.append(("mount", str(env.root / "view")))
        (env.root / "view").mkdir()
    for call in calls:
        done = env.call(*call, expect=5)
        assert f"the catalog knows it as {ours}, and {'5' * 32} is there" in told(done)
    assert tree(back) == tree(scratch) == {}

    env.write_config(catalog={"url": "postgresql://nobody@127.0.0.1:1/lost"})
    env.call("restore", "--to", str(back), expect=0)
    assert len(tree(back)) == len(blobids)


def changed(env: Environment, copied: int, outages: int) -> bool:
    return len(env.copied()) > copied or len(env.events("outage")) > outages


@pytest.mark.parametrize("strategy", EACH)
def test_disks_that_are_swapped_while_a_run_sends_get_no_marks_of_each_other(
    env: Environment, disks: Disks, strategy: str
) -> None:
    by(env, strategy)
    chance = random.Random(7)
    env.fill(20, seed=100)
    env.run("run", expect=0)
    ours = disks.content("a")
    # A disk with a place for blobs, and an identity of its own: the worst that may be there.
    shutil.copytree(disks.root / "a", disks.root / "b", dirs_exist_ok=True)
    marker = disks.root / "b" / MARKERS[strategy]
    marker.write_text(marker.read_text().replace(disks.identity("a", strategy), "5" * 32))
    for path in tree(disks.root / "b"):
        if path != MARKERS[strategy]:
            (disks.root / "b" / path).unlink()
    env.write_config(run={"poll_interval": 0.1, "batch_size": 2, "workers": 2})
    with env.running("run", "--watch") as run:
        env.await_event("run_start")
        in_store = env.copied()
        for turn in range(20):
            in_store |= set(env.fill(8, seed=turn))
            disks.mount("b" if turn % 2 == 0 else "a")
            copied, outages = len(env.copied()), len(env.events("outage"))
            if chance.random() < 0.7:  # Else the next disk comes while the run looks at this one.
                wait_until(partial(changed, env, copied, outages), f"turn {turn}")
        wait_until(lambda: env.copied() == in_store, "the last blobs")
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
    on_a, on_b = disks.content("a"), disks.content("b")
    assert on_a.items() >= ours.items()
    # The shell names files by their path, and finds out before it answers: none is marked.
    assert on_b.keys() == {MARKERS[strategy]} or strategy == "tar"
    assert {path.rpartition("/")[2] for path in on_a} >= in_store or strategy == "packs"
    assert any("in the place of this one" in one["reason"] for one in env.events("outage"))
    assert env.events("blob_failed") == []
    env.call("verify", expect=0)
    env.call("reconcile", expect=0)


def test_no_command_records_anything_of_another_disk(
    env: Environment, disks: Disks, postgres: Postgres
) -> None:
    env.write_config(dump={"bin": str(postgres.programs)}, run={"skip_pgdump": False})
    env.write_config(**{"snapshots.etc": {"paths": [str(env.store)]}})
    first = env.fill(5, seed=1)
    env.run("run", expect=0)
    env.call("snapshot", "take", "etc", expect=0)
    shutil.copytree(disks.root / "a", disks.root / "b", dirs_exist_ok=True)
    other = "ab" * 16
    (disks.root / "b" / ".ntt-target.json").write_text(f'{{"format": 1, "store": "{other}"}}')
    for path in tree(disks.root / "b" / "by-hash"):
        (disks.root / "b" / "by-hash" / path).unlink()
    before = disks.content("b")
    disks.mount("b")
    ours = disks.identity("a")
    for words in (
        ["verify"],
        ["verify", "--download"],
        ["reconcile"],
        ["reconcile", "--apply"],
        ["reconcile", "--adopt"],
        ["dump", "--force"],
        ["snapshot", "take", "etc"],
        ["run"],
    ):
        done = env.run(*words, expect=5)
        assert f"knows it as {ours}, and {other} is there" in told(done), words
    assert env.copied() == set(first)
    assert env.query("select count(*) from ntt_backup.failures") == [(0,)]
    assert disks.content("b") == before
    disks.mount("a")
    for words in (["verify"], ["reconcile"], ["dump", "--force"], ["snapshot", "take", "etc"]):
        env.run(*words, expect=0)


def test_an_older_target_gets_its_identity_and_a_marker_that_is_gone_is_an_outage(
    env: Environment, disks: Disks
) -> None:
    env.fill(5, seed=1)
    env.run("run", expect=0)
    marker = disks.root / "a" / ".ntt-target.json"
    former = marker.read_text()
    # As a run of an earlier version left both.
    marker.unlink()
    env.query("delete from ntt_backup.targets returning 1")
    env.run("run", expect=0)
    assert marker.read_text() != former
    assert known(env) == [(disks.identity("a"),)]

    marker.unlink()
    done = env.run("run", expect=5)
    assert "and a place without an identity is there" in told(done)
    assert not marker.exists()
    marker.write_text("{}")
    assert "the identity of the target cannot be read" in told(env.run("run", expect=5))
    assert marker.read_text() == "{}"


def test_an_empty_directory_is_no_first_contact_with_a_target_that_has_blobs(
    env: Environment, disks: Disks
) -> None:
    env.fill(5, seed=1)
    env.run("run", expect=0)
    env.query("delete from ntt_backup.targets returning 1")
    (disks.root / "b" / "by-hash").mkdir()
    disks.mount("b")
    assert "remote.path is gone" in told(env.run("run", expect=5))
    assert disks.content("b") == {}
    assert known(env) == []


def test_a_disk_that_was_replaced_is_taken_once_nothing_is_marked(
    env: Environment, disks: Disks
) -> None:
    env.fill(5, seed=1)
    env.run("run", expect=0)
    former = disks.identity("a")
    disks.mount("b")
    env.run("run", expect=5)
    env.query("update blobs set remote_copied = false returning 1")
    env.run("run", expect=0)
    env.assert_complete()
    assert known(env) == [(disks.identity("b"),)] != [(former,)]


def test_the_disk_of_another_target_is_told_by_its_name(env: Environment, disks: Disks) -> None:
    env.write_config(**{"targets.usb": {"url": f"file://{env.root}/usb"}})
    (env.root / "usb").symlink_to(disks.root / "b")
    env.call("--target", "usb", "init-db", expect=0)
    env.fill(5, seed=1)
    env.run("--target", "usb", "run", expect=0)
    disks.mount("b")
    done = env.run("run", expect=5)
    assert "the target usb is in the place of this one" in told(done)
    assert env.copied() == set()
    assert known(env, "usb") == [(disks.identity("b"),)]
