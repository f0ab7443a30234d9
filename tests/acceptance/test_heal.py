"""`heal`: what the store lost or what rotted in it comes back from a target, or is reported."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.waiting import wait_until

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def healed(env: Environment, *options: str, code: int = 0) -> dict[str, Any]:
    done = env.call("heal", "--json", *options)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def outcomes(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Blobid to what came of it, and from which target."""
    return {one["blobid"]: (one["outcome"], one["target"]) for one in found["outcomes"]}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def add_disk(env: Environment, **settings: Any) -> Path:
    """Adds a directory of this machine as the target `disk`; returns it."""
    place = env.root / "disk"
    place.mkdir()
    env.write_config(**{"targets.disk": {"url": f"file://{place}", **settings}})
    env.call("--target", "disk", "init-db", expect=0)
    return place


def looks(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Path to inode, mode, owner and group, of everything below."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        owner = (status.st_uid, status.st_gid)
        found[str(path.relative_to(root))] = (status.st_ino, stat.S_IMODE(status.st_mode), *owner)
    return found


def test_what_failed_comes_back_and_is_sent_by_the_next_run(env: Environment) -> None:
    blobids = env.fill_both(60, size=lambda chance: chance.randrange(10, 5000))
    (large,) = env.fill_both(1, seed=2, size=lambda _: 3 * MIB)
    before, good = env.in_store(), looks(env.store)
    missing, rotten, cut = blobids[:3]
    gone = env.path(missing).parent  # Its directories go, too.
    shutil.rmtree(gone.parent if not [*gone.parent.glob("*/*")][1:] else gone)
    env.path(large).unlink()
    flip(env.path(rotten))
    os.truncate(env.path(cut), 5)
    wrong = {missing: "missing", large: "missing", rotten: "corrupt-source", cut: "wrong-size"}
    env.query("update blobs set remote_copied = false where blobid = any(%s)", [*wrong])
    env.write_config(run={"max_failed_share": 1})
    env.run("run", expect=7)
    assert env.failures() == wrong

    tried = env.call("heal", "--dry-run", expect=0).stdout
    assert f"would heal    {rotten}" in tried
    assert "nothing was changed" in tried
    assert env.failures() == wrong
    assert not env.path(missing).exists()

    # Nothing says that the target has them, and it has.
    found = healed(env)
    assert outcomes(found) == dict.fromkeys(wrong, ("healed", "remote"))
    assert (found["examined"], found["healed"], found["requeued"]) == (4, 4, 4)
    assert env.in_store() == before
    assert env.failures() == {}
    assert env.query("select count(*) from ntt_backup.failures") == [(0,)]
    for name, look in looks(env.store).items():
        assert look[1:] == good.get(name, look)[1:]
        if not any(one in name or name in str(env.path(one)) for one in wrong):
            assert look == good[name]  # The same file as before.
    env.run("run", expect=0)
    env.assert_complete()
    assert "no failed blob has to be healed" in env.call("heal", expect=0).stdout

    # Damage that was found later has no failed mark, and the command for it is told.
    flip(env.path(rotten))
    env.call("verify", "--local", expect=7)
    assert " heal --all` examines all" in env.call("heal", expect=0).stdout


@pytest.mark.long
def test_blobs_are_looked_for_as_asked_and_told_line_by_line(env: Environment) -> None:
    blobids = env.fill_both(40, size=lambda chance: chance.randrange(10, 5000))
    before = env.in_store()
    first, second = blobids[0], next(one for one in blobids if one[0] != blobids[0][0])
    flip(env.path(first))
    env.path(second).unlink()

    done = env.call("heal", "--blobid", first, "--blobid", blobids[-1], expect=0)
    lines = done.stdout.splitlines()
    assert f"healed        {first}  from remote  corrupt-source" in lines
    assert f"right already {blobids[-1]}" in lines
    assert not env.path(second).exists()
    flip(env.path(first))
    assert outcomes(healed(env, "--prefix", second[:1])) == {second: ("healed", "remote")}
    found = healed(env, "--all")
    assert (found["examined"], found["total"]) == (len(blobids), len(blobids))
    assert outcomes(found) == {first: ("healed", "remote")}
    assert env.in_store() == before

    # Nothing of it fits another call.
    assert "only one of" in env.call("heal", "--all", "--prefix", "0", expect=2).stderr
    assert "is no whole blobid" in env.call("heal", "--blobid", "xyz", expect=2).stderr


@pytest.mark.parametrize("layout", ["files", pytest.param("packs", marks=pytest.mark.long)])
def test_the_nearest_target_that_has_it_right_is_taken(
    env: Environment, tmp_path: Path, layout: str
) -> None:
    owner = Person.new()
    identity = str(owner.file(tmp_path / "key"))
    env.write_config(pack={"recipients": [owner.public]} if layout == "packs" else {})
    place = add_disk(env, layout=layout)
    blobids = env.fill_both(20, size=lambda chance: chance.randrange(10, 5000))
    env.run("--target", "disk", "run", expect=0)
    later = env.fill_both(5, seed=3)  # The disk lacks these.
    near, far = blobids[0], later[0]
    before = env.in_store()
    nowhere = env.put(b"in no backup")
    for one in (near, far, nowhere):
        env.path(one).unlink()
    asked = ["--blobid", near, "--blobid", far, "--blobid", nowhere]

    if layout == "packs":
        found = healed(env, *asked, "--dry-run")
        assert outcomes(found)[near] == ("would-heal", "disk")
        assert not env.path(near).exists()
        # Without the key the other target is asked.
        found = healed(env, "--blobid", near)
        assert outcomes(found) == {near: ("healed", "remote")}
        env.path(near).unlink()
    found = healed(env, *asked, "--identity", identity, code=7)
    assert outcomes(found) == {
        near: ("healed", "disk"),
        far: ("healed", "remote"),
        nowhere: ("wrong", ""),
    }
    assert found["sources"] == {"disk": 1, "remote": 1}
    assert found["wrong"] == {"missing": 1}
    assert "disk: remote-missing" in found["failures"][0]["detail"]
    assert "remote: remote-missing" in found["failures"][0]["detail"]
    assert env.in_store() == before

    # What --target names is asked, and nothing else.
    env.path(near).unlink()
    done = env.call("--target", "remote", "heal", "--json", "--blobid", near, expect=0)
    assert outcomes(json.loads(done.stdout)) == {near: ("healed", "remote")}
    # One that cannot be reached is passed over.
    env.path(near).unlink()
    shutil.rmtree(place)
    found = healed(env, "--blobid", near, "--identity", identity)
    assert outcomes(found) == {near: ("healed", "remote")}
    assert list(found["troubles"]) == ["disk"]
    env.path(near).unlink()
    done = env.call("--target", "disk", "heal", "--blobid", near, expect=6)
    assert "No such file" in done.stderr
    assert not env.path(near).exists()


def test_a_store_that_is_not_mounted_heals_nothing(env: Environment) -> None:
    (blobid, *_) = env.fill_both(5)
    env.store.rename(env.root / "unmounted")
    env.store.mkdir()

    for asked in (["--blobid", blobid], ["--all"], []):
        assert "is empty" in env.call("heal", *asked, expect=2).stderr
    assert [*env.store.iterdir()] == []


def test_the_size_of_the_catalog_may_be_wrong_and_the_store_right(env: Environment) -> None:
    blobid = env.put(b"as it should be")
    env.fill_both(3)
    env.query("update blobs set size = 3, remote_copied = false where blobid = %s", blobid)
    env.run("run", expect=7)
    assert env.failures() == {blobid: "wrong-size"}

    found = healed(env, code=7)
    assert "the catalog says 3; correct the row" in found["failures"][0]["detail"]
    assert env.failures() == {blobid: "wrong-size"}
    env.query("update blobs set size = 15 where blobid = %s", blobid)
    assert outcomes(healed(env)) == {blobid: ("right", "")}
    assert env.failures() == {}


@needs_root
def test_healed_files_look_like_their_neighbours(env: Environment) -> None:
    contents = [number.to_bytes(4, "big") for number in range(3000)]
    names = sorted((blake3(one).hexdigest(), one) for one in contents)
    pairs = pairwise(names[100:-100])
    first, second = next(pair for pair in pairs if pair[0][0][:4] == pair[1][0][:4])
    alone, _ = names[-1]
    for _, content in (names[0], first, second, names[-1]):
        env.put(content)
    env.send_all()
    for path in [env.store, *env.store.rglob("*")]:
        os.chown(path, 3333, 4444)
        path.chmod(0o2751 if path.is_dir() else 0o440)
    os.chown(env.path(second[0]), 5555, 4444)
    before = looks(env.store)
    env.path(first[0]).unlink()
    shutil.rmtree(env.path(alone).parents[1])

    assert healed(env, "--all")["healed"] == 2

    after = looks(env.store)
    assert {name: look[1:] for name, look in after.items()} == {
        name: look[1:] for name, look in before.items()
    } | {str(env.path(first[0]).relative_to(env.store)): (0o440, 5555, 4444)}


def test_a_bucket_heals_blobs_of_packs_and_blobs_that_are_objects_of_their_own(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    blobids = env.fill(20, size=lambda chance: chance.randrange(10, 5000))
    (large,) = env.fill(1, seed=2, size=lambda _: 65 * MIB)
    env.run("run", expect=0)
    before = env.in_store()
    env.path(large).unlink()
    flip(env.path(blobids[0]))

    found = healed(env, "--all")

    assert (found["healed"], found["wrong"]) == (2, {})
    assert env.in_store() == before


# --- attacks --------------------------------------------------------------------------------------


def test_content_of_a_hostile_target_never_gets_a_name(env: Environment) -> None:
    blobids = env.fill(6, size=lambda chance: chance.randrange(10, 5000))
    place = add_disk(env)
    small, long, huge, linked, lost, _ = blobids
    env.query("update blobs set size = 5000")
    by_hash = place / "by-hash"
    shutil.copytree(env.store, by_hash)

    def on_disk(one: str) -> Path:
        return by_hash / env.path(one).relative_to(env.store)

    on_disk(small).write_bytes(b"not it")
    on_disk(long).write_bytes(env.path(long).read_bytes() + bytes(2 * MIB))
    with on_disk(huge).open("r+b") as file:
        file.truncate(1 << 40)  # Nothing of it may be kept.
    on_disk(linked).unlink()
    on_disk(linked).symlink_to("/etc/passwd")
    on_disk(lost).unlink()
    rotten = b"what rotted"
    env.path(long).write_bytes(rotten)
    for one in (small, huge, linked, lost):
        env.path(one).unlink()
    before = looks(env.store)
    held = env.in_store()

    found = healed(env, *(f"--blobid={one}" for one in (small, long, huge, linked, lost)), code=7)

    assert {name for name, _ in outcomes(found).values()} == {"wrong"}
    assert found["wrong"] == {"missing": 4, "corrupt-source": 1}
    assert (env.in_store(), looks(env.store)) == (held, before)


def test_links_in_the_store_are_not_followed(env: Environment) -> None:
    blobids = env.fill_both(50, size=lambda chance: chance.randrange(10, 500))
    outside = env.root / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("of somebody else")
    at_blob, at_directory, in_directory, missing = blobids[:4]
    env.path(missing).unlink()
    env.path(at_blob).unlink()
    env.path(at_blob).symlink_to(secret)
    shutil.rmtree(env.path(at_directory).parent)
    env.path(at_directory).parent.symlink_to(outside)
    env.path(in_directory).unlink()
    env.path(in_directory).mkdir()
    (env.store / ".ntt-restore").symlink_to(outside)

    done = env.call("heal", "--all", expect=6)
    assert ".ntt-restore is a symlink" in done.stderr
    (env.store / ".ntt-restore").unlink()
    found = healed(env, "--all", code=7)

    assert (found["healed"], found["wrong"]) == (1, {"not-a-file": 3})
    assert [*outside.iterdir()] == [secret]
    assert secret.read_text() == "of somebody else"
    assert env.path(at_blob).is_symlink()


@pytest.mark.long
def test_killed_at_any_moment_nothing_half_has_a_name(env: Environment) -> None:
    chance = random.Random(5)
    env.fill_both(120, size=lambda chance: chance.randrange(10, 30_000))
    env.fill_both(3, seed=2, size=lambda _: 3 * MIB)
    before = env.in_store()
    paths = [env.store / name for name in before]
    scratch = env.store / ".ntt-restore"

    def staged() -> int:
        return len([*scratch.rglob("*")])

    for number in range(6):
        for path in chance.sample(paths, 40):
            if number % 2:
                path.unlink(missing_ok=True)
            elif path.exists():
                flip(path)
        spoilt = {
            str(one.relative_to(env.store)): one.read_bytes() for one in paths if one.exists()
        }
        slowly = ["--bwlimit", "1MB"] if number < 5 else []
        with env.running("heal", "--all", "--workers", "2", *slowly) as process:
            if number < 5:
                files = chance.randrange(1, 40)
                wait_until(lambda: process.poll() is not None or staged() >= files, "files")  # noqa: B023
                process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            process.wait()
        for name, content in tree(env.store).items():
            if not name.startswith(".ntt-restore/"):
                assert content in (before[name], spoilt.get(name))
    assert env.in_store() == before
