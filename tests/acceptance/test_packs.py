"""The layout `packs` on every transport: few files, and every command works as elsewhere."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.cli.commands.install import RECEIVER, key_line
from ntt_backup.config import RemoteSettings
from ntt_backup.mount import kernel
from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.mounts import mount_point
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir, Sshd, receiver_on

LONG = pytest.mark.long
# Each way, plain or sealed, in the short tier once; by sftp in the contract of file stores.
EACH = pytest.mark.parametrize(
    ("packed", "sealed"),
    [
        ("ssh", True),
        pytest.param("file", False, marks=LONG),
        pytest.param("sftp", False, marks=LONG),
        pytest.param("file", True, marks=LONG),
        pytest.param("ssh", False, marks=LONG),
        pytest.param("sftp", True, marks=LONG),
    ],
    indirect=["packed"],
)
# The same, in the short tier on a disk alone.
ON_DISK = pytest.mark.parametrize(
    ("packed", "sealed"),
    [
        ("file", True),
        *(
            pytest.param(way, sealed, marks=LONG)
            for way in ("file", "ssh", "sftp")
            for sealed in (False, True)
            if (way, sealed) != ("file", True)
        ),
    ],
    indirect=["packed"],
)


@pytest.fixture(params=["file", *(pytest.param(way, marks=LONG) for way in ("ssh", "sftp"))])
def packed(request: pytest.FixtureRequest, env: Environment) -> Environment:
    """An environment whose target has packs: a directory of this machine, by ssh, or by sftp."""
    if request.param == "file":
        on_this_machine(env)
    if request.param == "sftp":
        by_sftp(env)
    env.write_config(remote={"layout": "packs"})
    return env


def on_this_machine(env: Environment) -> None:
    place = env.root / "disk"
    place.mkdir()
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{place}"}


def by_sftp(env: Environment) -> None:
    config = str(env.sshd.by_sftp().ssh_config)
    url = f"sftp://{env.sshd.alias}{env.remote.path}"
    env.settings["remote"] = {"url": url, "ssh_config": config}


@pytest.fixture
def forced(env: Environment, remote: Sshd, tmp_path: Path) -> Iterator[None]:
    """The environment's only key is one that a receiver for packs stands behind."""
    identity = tmp_path / "id_forced"
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "forced", "-f", str(identity)]
    subprocess.run(argv, check=True)
    place = RemoteSettings(host="x", path=env.remote.path, identity_file=identity, layout="packs")
    line = key_line(place).replace("--allow packs", "--allow packs,get")
    authorized = remote.work / "keys" / "authorized_keys"
    before = authorized.read_text()
    authorized.write_text(before + line.replace(RECEIVER, receiver_on(remote, "none")) + "\n")
    config = tmp_path / "ssh_config"
    config.write_text(
        remote.ssh_config.read_text().replace(str(remote.identity_file), str(identity))
    )
    env.write_config(remote={"ssh_config": str(config)})
    yield
    authorized.write_text(before)


def files_on(env: Environment) -> set[str]:
    """The files on the target, but the marker."""
    place = env.remote.local
    found = {str(one.relative_to(place)) for one in place.rglob("*") if one.is_file()}
    return found - {"format.json"}


def well(env: Environment, *command: str) -> str:
    """Runs a command that must end with 0; returns what it printed."""
    way = env.run if command == ("run",) else env.call
    return way(*command, expect=0).stdout


def flip(env: Environment, name: str, place: int) -> None:
    """Flips a bit of a file on the target."""
    path = env.remote.local / name
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_the_ledger_has_the_packs_of_blobs_that_are_adopted(packed: Environment) -> None:
    blobids = packed.fill(20)
    packed.run("run", expect=0)
    before = packed.query("select pack_id, key, size from ntt_backup.packs")
    packed.query("delete from ntt_backup.packs")
    packed.query("update blobs set remote_copied = false")
    packed.call("reconcile", "--adopt", expect=0)
    assert packed.copied() == set(blobids)
    assert packed.query("select pack_id, key, size from ntt_backup.packs") == before != []


@EACH
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


@ON_DISK
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
    if "by the size" in found.stdout:  # By SFTP nothing is hashed.
        found = env.call("verify", "--download")
    assert found.returncode == 7, found.stdout
    well(env, "run")
    assert env.status()["pending"] == 0
    # The damaged pack stays where it is, and its blobs that are right are not sent again.
    well(env, "verify")
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


@ON_DISK
def test_a_drill_proves_that_everything_comes_back_from_packs(
    packed: Environment, postgres: Postgres, database_url: str, tmp_path: Path, sealed: bool
) -> None:
    env, owner = packed, Person.new()
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    if sealed:
        identity = str(owner.file(tmp_path / "key"))
        env.write_config(pack={"recipients": [owner.public], "identity_file": identity})
    env.fill(50)
    well(env, "run")
    assert {one.endswith(".age") for one in files_on(env) if not one.endswith(".json")} == {sealed}
    scratch = str(tmp_path / "scratch")
    said = well(env, "drill", "--scratch", scratch, "--json", "--database", database_url)
    assert json.loads(said)["proved"] is True


def test_dumps_and_snapshots_lie_beside_packs_on_an_account_that_runs_no_command(
    env: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    by_sftp(env)
    env.write_config(dump={"bin": str(postgres.programs)})
    env.fill(5)
    well(env, "run")
    well(env, "dump")
    assert json.loads(well(env, "dumps", "--json"))["dumps"]
    data = tmp_path / "data"
    data.mkdir()
    for number in range(2):
        (data / "file").write_text("content" * number)
        well(env, "snapshot", "take", "data", str(data))
    # In a process of its own, which gives up its rights.
    env.run("snapshot", "restore", "data", "--to", str(tmp_path / "back"), expect=0)
    assert (tmp_path / "back" / str(data)[1:] / "file").read_text() == "content"
    well(env, "reconcile")
    refused = env.call("bench", "link", expect=2)
    assert "cannot use a target by sftp" in refused.stderr


def test_a_target_keeps_its_layout(packed: Environment) -> None:
    env = packed
    env.fill(5)
    well(env, "run")
    env.write_config(remote={"layout": "files"})
    for way, command in ((env.call, "check"), (env.run, "run")):
        done = way(command, expect=2)
        said = done.stdout + done.stderr
        assert "has packs, and remote.layout is files" in said or "by sftp has packs" in said
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


@pytest.mark.long
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("way", ["file", "ssh", "forced", "s3", "sftp"])
def test_twenty_thousand_small_blobs_are_ten_files_and_come_back_without_a_database(
    request: pytest.FixtureRequest, tmp_path: Path, way: str, sealed: bool
) -> None:
    env: Environment = request.getfixturevalue("bucket_env" if way == "s3" else "env")
    if way == "forced":
        request.getfixturevalue("forced")
    elif way == "file":
        on_this_machine(env)
    elif way == "sftp":
        by_sftp(env)
    env.settings["run"].pop("batch_size", None)
    env.write_config(remote={"layout": "packs"})
    owner = Person.new()
    if sealed:
        identity = str(owner.file(tmp_path / "key"))
        env.write_config(pack={"recipients": [owner.public], "identity_file": identity})
    env.fill(20_000, size=lambda chance: chance.randrange(1, 10_000))
    began = time.monotonic()
    well(env, "run")
    print(f"{way}, sealed {sealed}: {time.monotonic() - began:.1f} s")
    if isinstance(env, BucketEnvironment):
        files = {one.key for one in env.bucket.list("")} - {"format.json"}
    else:
        files = files_on(env)
    assert len(files) <= 10
    env.write_config(catalog={"url": "postgresql://nobody@127.0.0.1:1/none"})
    well(env, "restore", "--to", str(tmp_path / "back"))
    assert tree(tmp_path / "back") == env.in_store()
