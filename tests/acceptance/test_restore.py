"""`restore`: everything comes back from the remote alone, byte for byte, or is told of."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE, wait_until

MIB = 1 << 20


def restored(env: Environment, *options: str, code: int = 0) -> dict[str, Any]:
    few = ("--json", "--workers", "1")  # Each has a session, which takes time.
    done = env.call("restore", "--to", str(env.root / "back"), *few, *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lose_everything_else(env: Environment) -> None:
    """The catalog does not answer, and the store is gone."""
    env.write_config(catalog={"url": "postgresql://nobody@127.0.0.1:1/none"})
    env.store.rename(env.root / "lost")


def test_everything_is_restored_from_the_remote_alone(env: Environment) -> None:
    env.fill(300)
    env.fill(3, seed=5, size=lambda chance: 3 * MIB + chance.randrange(1000))
    env.run("run", expect=0)
    before = env.in_store()
    lose_everything_else(env)

    found = restored(env, "--workers", "4")

    assert tree(env.root / "back") == before
    assert (found["restored"], found["right"], found["wrong"]) == (len(before), 0, {})
    assert found["bytes"] == sum(map(len, before.values()))
    again = restored(env)
    assert (again["restored"], again["right"], again["bytes"]) == (0, len(before), 0)
    done = env.call("restore", str(env.root / "back"))  # The directory may stand by itself.
    assert "restored 0 blobs" in done.stdout


def test_wrong_local_files_are_replaced_and_right_ones_kept(env: Environment) -> None:
    blobids = env.fill_both(300)
    restored(env)
    back = env.root / "back"
    paths = [back / env.path(one).relative_to(env.store) for one in blobids]
    big = max(paths, key=lambda path: path.stat().st_size)
    kept = next(path for path in paths if path != big and path.stat().st_size)
    inode = kept.stat().st_ino
    content = bytearray(big.read_bytes())
    content[5] ^= 4
    big.write_bytes(content)

    assert restored(env, "--trust-size")["restored"] == 0
    assert restored(env)["restored"] == 1

    assert tree(back) == env.in_store()
    assert kept.stat().st_ino == inode


@pytest.mark.parametrize("size", [5 * MIB + 77, pytest.param(70 * MIB + 1, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_large_wrong_file_is_fetched_whole(env: Environment, size: int) -> None:
    (blobid,) = env.fill_both(1, size=lambda _: size)
    restored(env)
    back = env.root / "back"
    path = back / env.path(blobid).relative_to(env.store)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    content[3 * MIB + 5] ^= 1
    del content[-100:]
    for wrong in (bytes(content), path.read_bytes() + b"more than there should be" * MIB):
        path.write_bytes(wrong)
        found = restored(env)
        assert (found["restored"], found["right"], found["wrong"]) == (1, 0, {})
        assert found["bytes"] == size
        assert tree(back) == env.in_store()

    path.write_bytes(bytes(content))
    rotten = bytearray(env.remote_path(blobid).read_bytes())
    rotten[MIB] ^= 1
    env.remote_path(blobid).write_bytes(rotten)
    found = restored(env, code=7)
    assert found["wrong"] == {"remote-corrupt": 1}
    assert path.read_bytes() == content
    env.remote_path(blobid).unlink()
    found = restored(env, "--blobid", blobid, code=7)
    assert found["wrong"] == {"remote-missing": 1}
    assert path.read_bytes() == content


def test_a_corrupt_remote_blob_is_reported_and_all_others_restored(env: Environment) -> None:
    blobids = env.fill_both(300)
    (large,) = env.fill_both(1, seed=2, size=lambda _: 3 * MIB)
    rotten = next(one for one in blobids if env.remote_path(one).stat().st_size > 10)
    for blobid in (rotten, large):
        content = bytearray(env.remote_path(blobid).read_bytes())
        content[3] ^= 1
        env.remote_path(blobid).write_bytes(content)

    found = restored(env, code=7)

    assert {one["blobid"]: one["reason"] for one in found["failures"]} == {
        rotten: "remote-corrupt",
        large: "remote-corrupt",
    }
    expected = env.in_store()
    for blobid in (rotten, large):
        del expected[str(env.path(blobid).relative_to(env.store))]
    assert tree(env.root / "back") == expected
    done = env.call("restore", "--to", str(env.root / "back"), expect=7)
    assert f"{rotten} remote-corrupt" in done.stdout


def test_a_remote_directory_that_cannot_be_listed_is_told_and_all_others_restored(
    env: Environment, remote: Sshd
) -> None:
    blobids = env.fill_both(100)
    directory = env.remote_path(blobids[0]).parent.parent
    directory.chmod(0)
    try:
        if remote.run(f"ls {env.remote.path}/by-hash/{directory.name}").returncode == 0:
            pytest.skip("the remote's account reads everything")
        found = restored(env, code=7)
    finally:
        directory.chmod(0o755)
    assert found["wrong"] == {"remote-unreadable": 1}
    assert found["failures"][0]["blobid"] == directory.name
    hidden = {name for name in env.in_store() if name.startswith(directory.name)}
    assert tree(env.root / "back").keys() == env.in_store().keys() - hidden
    assert restored(env)["restored"] == len(hidden) > 0


def test_a_prefix_a_list_or_single_blobs_can_be_restored(env: Environment, tmp_path: Path) -> None:
    blobids = env.fill_both(300)
    prefix = blobids[0][:1]
    names = {Path(one).name for one in tree(env.root)}
    assert blobids[0] in names
    restored(env, "--prefix", prefix)
    back = env.root / "back"
    assert {Path(one).name for one in tree(back)} == {
        one for one in blobids if one.startswith(prefix)
    }
    chosen = blobids[-20:]
    listing = tmp_path / "names"
    listing.write_text("\n".join(chosen) + "\n\n")
    restored(env, "--list", str(listing))
    absent = "0" * 64
    found = restored(env, "--blobid", blobids[100], "--blobid", absent, code=7)
    assert found["wrong"] == {"remote-missing": 1}
    expected = {one for one in blobids if one.startswith(prefix)} | {*chosen, blobids[100]}
    assert {Path(one).name for one in tree(back)} == expected
    listing.write_text("not a blobid\n")
    done = env.call("restore", "--to", str(back), "--list", str(listing), expect=2)
    assert "line 1" in done.stderr


@pytest.mark.long
def test_a_killed_restore_leaves_only_right_names_and_continues(env: Environment) -> None:
    env.fill_both(20, size=lambda chance: chance.randrange(1, 200_000))
    env.fill_both(1, seed=2, size=lambda chance: 90 * MIB)
    back = env.root / "back"
    partial = back / ".ntt-restore" / "partial"

    def some_of_it() -> bool:
        return any(path.stat().st_size > 20 * MIB for path in partial.glob("*"))

    with env.running("restore", "--to", str(back)) as process:
        wait_until(some_of_it, "a part of the large blob")
        process.send_signal(signal.SIGKILL)
        process.wait()
    expected = env.in_store()
    named = {name: data for name, data in tree(back).items() if not name.startswith(".")}
    assert named.items() <= expected.items()
    left = sum(path.stat().st_size for path in partial.glob("*"))
    assert left

    found = restored(env)

    assert found["bytes"] <= sum(map(len, expected.values())) - left
    assert tree(back) == expected


@pytest.mark.long
def test_a_wrong_partial_file_is_fetched_again(env: Environment) -> None:
    (blobid,) = env.fill_both(1, size=lambda _: 70 * MIB)
    partial = env.root / "back" / ".ntt-restore" / "partial"
    partial.mkdir(parents=True)
    (partial / blobid).write_bytes(bytes(30 * MIB))
    assert restored(env)["wrong"] == {}
    assert tree(env.root / "back") == env.in_store()


def test_a_link_that_drops_is_waited_out(env: Environment, link: Link) -> None:
    env.fill_both(60, size=lambda chance: chance.randrange(100_000, 1_000_000))
    env.through(env.sshd.through(link.port))
    link.throttle(3_000_000)
    back = env.root / "back"
    with env.running("restore", "--to", str(back), "--workers", "3") as process:
        link.drop_twice()
        link.throttle(None)
        assert process.wait(PATIENCE) == 0, env.output()
    assert "remote is unreachable" in env.output()
    assert tree(back) == env.in_store()


def stand_in_for_ssh(env: Environment, script: str) -> Path:
    """Have script run before each ssh of the program; the directory where it may leave marks."""
    tools, marks = env.root / "tools", env.root / "marks"
    tools.mkdir()
    marks.mkdir()
    real = shutil.which("ssh")
    (tools / "ssh").write_text(f'#!/bin/sh\nmarks={marks}\n{script}\nexec {real} "$@"\n')
    (tools / "ssh").chmod(0o755)
    env.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    return marks


def test_a_failed_connection_is_retried_where_another_one_works(
    env: Environment,
) -> None:
    env.fill_both(20)
    first = 'if mkdir "$marks/failed" 2>/dev/null; then'
    other_began = 'until [ -d "$marks/other" ]; do sleep 0.02; done; exit 255; fi'
    stand_in_for_ssh(env, f'{first} {other_began}; mkdir -p "$marks/other"')
    restored(env, "--workers", "2")
    assert tree(env.root / "back") == env.in_store()


def test_an_unreachable_remote_ends_the_restore_and_leaves_nothing(env: Environment) -> None:
    env.write_config(remote={"port": 1})
    done = env.call("restore", "--to", str(env.root / "back"), expect=5)
    assert "again in" not in done.stderr
    assert not (env.root / "back").exists()


def test_no_link_in_the_destination_is_followed(env: Environment) -> None:
    blobids = env.fill_both(20)
    elsewhere = env.root / "elsewhere"
    elsewhere.mkdir()
    back = env.root / "back"
    back.mkdir()
    (back / blobids[0][:2]).symlink_to(elsewhere)
    done = env.call("restore", "--to", str(back), expect=6)
    assert "links below the destination are not followed" in done.stderr
    assert list(elsewhere.iterdir()) == []


def test_an_impossible_destination_is_refused(env: Environment) -> None:
    env.fill_both(3)
    env.call("restore", "--to", str(env.root / "no" / "such"), expect=6)
    file = env.root / "file"
    file.write_text("x")
    env.call("restore", "--to", str(file), expect=6)
    assert file.read_text() == "x"


def test_a_second_restore_into_the_same_directory_is_refused(env: Environment) -> None:
    env.fill_both(5)
    back = env.root / "back"
    scratch = back / ".ntt-restore"
    scratch.mkdir(parents=True)
    fd = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        env.call("restore", "--to", str(back), expect=3)
    finally:
        os.close(fd)
    assert restored(env)["restored"] == 5


def test_a_stopped_restore_leaves_only_right_files(env: Environment) -> None:
    env.fill_both(40, size=lambda chance: MIB + chance.randrange(1000))
    back = env.root / "back"
    with env.running("restore", "--to", str(back)) as process:
        wait_until(back.exists, "the destination")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (143, 0)
    assert tree(back).items() <= env.in_store().items()
    restored(env)
    assert tree(back) == env.in_store()


def test_a_limit_holds_for_what_is_fetched(env: Environment) -> None:
    """By all connections of a command together; `verify --download` has the same one."""
    count, rate = 4, 2 * MIB
    env.fill(count, size=lambda _: MIB // 2)
    env.send_all()
    least = (count * MIB / 2 - rate / 4 - MIB / 4) / rate
    checked = env.call("verify", "--download", "--bwlimit", "2MiB", "--json")

    found = restored(env, "--bwlimit", "2MiB/s")

    assert found["restored"] == count
    assert found["duration_s"] > least
    assert json.loads(checked.stdout)["duration_s"] > least
    env.call("verify", "--bwlimit", "2MB", expect=2)
    env.call("restore", str(env.root / "back"), "--bwlimit", "5", expect=2)
