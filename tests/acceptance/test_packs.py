"""The layout `packs` on every transport: few files, and every command works as elsewhere."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.mount import kernel
from tests.helpers.blobs import Person, tree
from tests.helpers.environment import Environment
from tests.helpers.mounts import mount_point
from tests.helpers.sshd import RemoteDir

WAYS = ["file", "ssh"]


@pytest.fixture(params=WAYS)
def packed(request: pytest.FixtureRequest, env: Environment) -> Environment:
    """An environment whose target has packs: a directory of this machine, or by ssh."""
    if request.param == "file":
        place = env.root / "disk"
        place.mkdir()
        env.remote = RemoteDir(str(place), place)
        env.settings["remote"] = {"url": f"file://{place}"}
    env.write_config(remote={"layout": "packs"})
    return env


def files_on(env: Environment) -> set[str]:
    """The files on the target, but the marker."""
    place = env.remote.local
    found = {str(one.relative_to(place)) for one in place.rglob("*") if one.is_file()}
    return found - {"format.json"}


def well(env: Environment, *command: str) -> str:
    """Runs a command that must end with 0; returns what it printed."""
    done = env.run("run") if command == ("run",) else env.call(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def flip(env: Environment, name: str, place: int) -> None:
    """Flips a bit of a file on the target."""
    path = env.remote.local / name
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("sealed", [False, True])
def test_every_command_works_on_packs(packed: Environment, tmp_path: Path, sealed: bool) -> None:
    env, owner = packed, Person.new()
    if sealed:
        env.write_config(pack={"recipients": [owner.public]})
    blobids = env.fill(500)

    assert "format.json will be made" in well(env, "check")
    well(env, "run")
    assert env.copied() == set(blobids)
    assert env.events("worker_start")[0]["strategy"] == "packs"
    files = files_on(env)
    assert len(files) <= 10
    assert {one.endswith(".age") for one in files} == {sealed}
    if sealed:
        identity = str(owner.file(tmp_path / "key"))
        env.write_config(pack={"recipients": [owner.public], "identity_file": identity})

    for command in (["check"], ["verify"], ["verify", "--download"], ["reconcile"], ["run"]):
        assert "WRONG" not in well(env, *command)
    status = env.status()
    assert (status["pending"], status["objects"]["packs"]) == (0, len(files))
    well(env, "show", blobids[0])
    well(env, "restore", "--to", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == env.in_store()
    assert files_on(env) == files


@pytest.mark.parametrize("sealed", [False, True])
def test_a_flipped_bit_is_found_where_it_lies_and_the_next_run_mends_it(
    packed: Environment, tmp_path: Path, sealed: bool
) -> None:
    env, owner = packed, Person.new()
    if sealed:
        identity = str(owner.file(tmp_path / "key"))
        env.write_config(pack={"recipients": [owner.public], "identity_file": identity})
    env.fill(200)
    well(env, "run")
    chance = random.Random(1)
    name = max(files_on(env), key=lambda one: (env.remote.local / one).stat().st_size)
    size = (env.remote.local / name).stat().st_size
    flip(env, name, chance.randrange(size // 4, size // 2))

    found = env.call("verify")
    assert found.returncode == 7, found.stdout
    well(env, "run")
    assert env.status()["pending"] == 0
    well(env, "restore", "--to", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == env.in_store()


def test_large_blobs_are_files_of_their_own_and_are_hashed_where_they_lie(
    packed: Environment, tmp_path: Path
) -> None:
    env = packed
    large = env.put(random.Random(5).randbytes(65 << 20))
    env.fill(5)
    well(env, "run")
    name = f"blobs/{large[:2]}/{large[2:4]}/{large}"
    assert name in files_on(env)
    well(env, "verify")
    flip(env, name, 1 << 20)
    found = env.call("verify")
    if "by the size" in found.stdout:  # The remote has no BLAKE3.
        found = env.call("verify", "--download")
    assert (found.returncode, large in found.stdout) == (7, True)
    well(env, "run")  # Another name is found for it: nothing is overwritten.
    well(env, "restore", "--to", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == env.in_store()


def test_a_target_keeps_its_layout(packed: Environment) -> None:
    env = packed
    env.fill(5)
    well(env, "run")
    env.write_config(remote={"layout": "files"})
    for command in (["check"], ["run"]):
        done = env.run("run") if command == ["run"] else env.call(*command)
        assert done.returncode == 2, done.stdout
        assert "has packs, and remote.layout is files" in done.stdout
    assert not (env.remote.local / "by-hash").exists()


def test_a_target_without_its_marker_gets_nothing(packed: Environment) -> None:
    """A disk that is not mounted."""
    env = packed
    env.fill(5)
    well(env, "run")
    kept = env.remote.local.with_name("kept")
    env.remote.local.rename(kept)
    env.remote.local.mkdir()
    env.put(b"one more")
    for command in (["check"], ["run"], ["verify"], ["reconcile"]):
        done = env.run("run") if command == ["run"] else env.call(*command)
        assert done.returncode != 0, done.stdout
    assert not files_on(env)
    env.remote.local.rmdir()
    kept.rename(env.remote.local)
    well(env, "run")


@pytest.fixture
def place() -> Iterator[Path]:
    with mount_point(lambda: kernel.require_erofs(kernel.BLOCKS_SINCE)) as place:
        yield place


def test_packs_of_a_target_are_mounted(packed: Environment, place: Path) -> None:
    env = packed
    env.fill(100)
    well(env, "run")
    well(env, "mount", str(place))
    assert tree(place) == env.in_store()
    subprocess.run(["umount", place], check=True)
