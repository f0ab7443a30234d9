"""Stores with other paths than `aa/bb/<blobid>`, `source.layout`, or other names, `source.hash`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ntt_backup.blobdir.layout import Layout, relative_path
from ntt_backup.mount import kernel
from ntt_backup.name_hash import NEW_HASHER
from tests.helpers.blobs import Person, files_with_looks, noise, tree
from tests.helpers.environment import Environment
from tests.helpers.mounts import mount_point
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir, Sshd, by_python_alone
from tests.helpers.waiting import wait_until

LFS, PULP = "0:2/2:4/4:", "0:2/2:"
CONTENTS = [b"", b"x", b"one pointer\n" * 40, *(noise(number * 97, number) for number in range(60))]
LARGE = noise(3_000_000)


def lay(
    env: Environment,
    layout: str,
    hashed: str = "blake3",
    contents: Iterable[bytes] = (*CONTENTS, LARGE),
) -> Path:
    """Makes a store of that layout, and the settings for it; returns its root."""
    root = env.root / "lfs-objects"
    for content in contents:
        path = path_in(root, layout, content, hashed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "tmp" / "upload").mkdir(parents=True)
    env.write_config(source={"root": str(root), "layout": layout, "hash": hashed})
    return root


def name_of(content: bytes, hashed: str = "blake3") -> str:
    return NEW_HASHER[hashed](content).hexdigest()


def path_in(root: Path, layout: str, content: bytes, hashed: str = "blake3") -> Path:
    return root / Layout(layout).path_of(name_of(content, hashed))


def on_targets(root: Path, hashed: str = "blake3") -> dict[str, bytes]:
    """The files of a store as a target must have them."""
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {relative_path(name_of(content, hashed)): content for content in files.values()}


def flip(path: Path, place: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("layout", "strategy", "hashed"),
    [
        (LFS, "stream", "sha256"),
        pytest.param(LFS, "tar", "blake3", marks=pytest.mark.long),
        pytest.param(PULP, "tar", "sha256", marks=pytest.mark.long),
        pytest.param(PULP, "stream", "blake3", marks=pytest.mark.long),
    ],
)
def test_files_are_found_and_sent_checked_and_restored_as_they_lay(
    env: Environment, layout: str, strategy: str, hashed: str
) -> None:
    root = lay(env, layout, hashed)
    env.write_config(run={"strategy": strategy, "batch_size": 20})
    env.call("scan", expect=0)
    env.run("run", expect=0)
    assert env.on_remote() == on_targets(root, hashed)
    assert json.loads(env.call("verify", "--local", "--json", expect=0).stdout)["checked"] == 63
    env.call("verify", expect=0)
    env.call("reconcile", expect=0)
    env.call("restore", "--to", str(env.root / "back"), expect=0)
    assert tree(env.root / "back") == tree(root)


def test_packs_have_them_and_a_damaged_store_is_healed(env: Environment) -> None:
    root = lay(env, LFS, "sha256")
    before = tree(root)
    env.write_config(remote={"layout": "packs"}, source={"read_order": "inode"})
    env.call("scan", expect=0)
    env.run("run", expect=0)
    env.call("verify", "--download", expect=0)
    lost, rotten = (path_in(root, LFS, content, "sha256") for content in (LARGE, CONTENTS[5]))
    shutil.rmtree(lost.parent)
    os.truncate(rotten, 3)
    assert env.call("verify", "--local").returncode == 7
    assert json.loads(env.call("heal", "--all", "--json", expect=0).stdout)["healed"] == 2
    assert tree(root) == before
    packed = env.root / "one.tar"
    env.call("pack", str(packed), "--from", str(root), expect=0)
    env.call("unpack", str(packed), "--to", str(env.root / "unpacked"), expect=0)
    assert tree(env.root / "unpacked") == on_targets(root, "sha256")
    image = ("--image", str(env.root / "image"), "--json")
    assert json.loads(env.call("pack", str(packed), *image, expect=0).stdout)["blobs"] == 63
    os.truncate(packed, packed.stat().st_size - 700)
    salvaged = env.root / "salvaged"
    env.call("unpack", str(packed), "--to", str(salvaged), expect=7)
    assert (salvaged / relative_path(name_of(LARGE, "sha256"))).read_bytes() == LARGE
    # Without catalog and store it is the target that says how its blobs are named.
    alone = ("--config", os.devnull, "restore", "--to", str(env.root / "back"))
    env.environ = {"NTT_REMOTE_URL": f"ssh://{env.sshd.alias}{env.remote.path}"}
    env.environ |= {"NTT_SSH_CONFIG": str(env.sshd.ssh_config), "NTT_REMOTE_LAYOUT": "packs"}
    env.call(*alone, expect=0)
    assert tree(env.root / "back") == on_targets(root, "sha256")


def test_a_store_of_another_layout_is_refused_before_anything_is_marked(env: Environment) -> None:
    root = lay(env, LFS)
    env.write_config(source={"layout": "0:2/2:4/0:"})
    assert "correct source.layout" in env.call("scan", expect=2).stderr
    env.register([name_of(content) for content in CONTENTS])
    assert "correct source.layout" in env.run("run", expect=2).stdout
    assert not env.copied()
    assert not env.failures()
    assert tree(root)


@pytest.mark.long
def test_a_remote_without_blake3_checks_names_of_sha256(
    env: Environment, remote: Sshd, startup: Path, postgres: Postgres, database_url: str
) -> None:
    by_python_alone(remote, startup)
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    root = lay(env, LFS, "sha256")
    env.call("scan", expect=0)
    assert "checks by SHA-256, " not in (said := env.run("check", expect=0).stdout)
    assert "checks by SHA-256" in said
    assert "no BLAKE3 on the remote)" not in said
    env.run("run", expect=0)
    assert env.on_remote() == on_targets(root, "sha256")

    flip(env.remote.local / "by-hash" / relative_path(name_of(LARGE, "sha256")))
    assert env.call("verify").returncode == 7
    assert env.failures() == {}
    env.run("run", expect=0)
    assert env.on_remote() == on_targets(root, "sha256")
    env.query("update blobs set remote_copied = false")
    env.call("reconcile", "--adopt", expect=0)
    assert env.copied() == {name_of(one, "sha256") for one in (*CONTENTS, LARGE)}

    rotten = noise(700, 99)
    flip(path := _put(root, rotten))
    env.register([name_of(rotten, "sha256")])
    env.run("run", expect=7)
    assert env.failures() == {name_of(rotten, "sha256"): "corrupt-source"}
    env.query("delete from blobs where blobid = %s", name_of(rotten, "sha256"))
    path.unlink()
    drill = ("drill", "--scratch", str(env.root / "scratch"), "--database", database_url)
    assert "PROVED" in env.run(*drill, expect=0).stdout
    assert tree(env.root / "scratch") == tree(root)


def _put(root: Path, content: bytes) -> Path:
    path = path_in(root, LFS, content, "sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("strategy", ["stream", "tar", "packs"])
def test_another_hash_is_refused_by_store_and_target(env: Environment, strategy: str) -> None:
    packs = strategy == "packs"
    env.write_config(remote={"layout": "packs" if packs else "files"}, run={"strategy": strategy})
    root = lay(env, LFS, "sha256", CONTENTS)
    env.call("scan", expect=0)
    env.write_config(source={"hash": "blake3"})
    for command in ("run", "verify --local"):
        done = env.run(*command.split(), expect=2)
        assert 'set source.hash = "sha256"' in done.stdout + done.stderr
    assert not env.copied()
    assert not env.failures()
    env.write_config(source={"hash": "sha256"})
    env.run("run", expect=0)
    before = tree(env.remote.local)
    other = name_of(b"by another hash")
    path = root / Layout(LFS).path_of(other)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"by another hash")
    env.register([other])
    env.write_config(source={"hash": "blake3"})
    done = env.run("run", expect=2)
    assert "on the target are SHA-256, and source.hash is blake3" in done.stdout + done.stderr
    # A session that has ended removes its directory a moment later.
    wait_until(lambda: tree(env.remote.local) == before, "the target is as it was")


LONG = pytest.mark.long
# Each target, with all commands, once in each form that it has; plain files have a test below.
WAYS = pytest.mark.parametrize(
    ("way", "layout", "sealed"),
    [
        pytest.param("file", "files", False, marks=LONG),
        ("file", "packs", True),
        pytest.param("file", "packs", False, marks=LONG),
        *(
            pytest.param(way, layout, sealed, marks=LONG)
            for way, layout in (
                ("ssh", "files"),
                ("ssh", "packs"),
                ("sftp", "packs"),
                ("s3", "packs"),
            )
            for sealed in ((False, True) if layout == "packs" else (False,))
        ),
    ],
)


@pytest.fixture
def target(
    request: pytest.FixtureRequest, way: str, layout: str, sealed: bool, postgres: Postgres
) -> Environment:
    """An environment with such a target, and with dumps."""
    env: Environment = request.getfixturevalue("bucket_env" if way == "s3" else "env")
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    if way == "file":
        place = env.root / "disk"
        place.mkdir()
        env.remote = RemoteDir(str(place), place)
        env.settings["remote"] = {"url": f"file://{place}"}
    elif way == "sftp":
        config = str(env.sshd.by_sftp().ssh_config)
        url = f"sftp://{env.sshd.alias}{env.remote.path}"
        env.settings["remote"] = {"url": url, "ssh_config": config}
    env.write_config(remote={"layout": layout}, dump={"bin": str(postgres.programs)})
    if sealed:
        owner = Person.new()
        key = owner.file(env.root / "backup.key")
        env.write_config(pack={"recipients": [owner.public], "identity_file": str(key)})
    return env


@WAYS
def test_every_command_works_where_names_are_sha256(
    target: Environment, way: str, layout: str, sealed: bool, database_url: str
) -> None:
    env, packs = target, layout == "packs"
    root = lay(env, LFS, "sha256")
    before, names = tree(root), {name_of(one, "sha256") for one in (*CONTENTS, LARGE)}
    env.call("scan", expect=0)
    env.call("check", expect=0)
    env.run("run", expect=0)
    assert env.copied() == names
    for command in ("verify", "verify --download", "verify --local", "reconcile"):
        assert "WRONG" not in env.call(*command.split(), expect=0).stdout
    env.call("show", name_of(LARGE, "sha256"), expect=0)

    env.query("update blobs set remote_copied = false")
    env.query("delete from ntt_backup.packs")
    env.call("reconcile", "--adopt", expect=0)
    assert env.copied() == names
    path_in(root, LFS, LARGE, "sha256").unlink()
    flip(path_in(root, LFS, CONTENTS[5], "sha256"))
    assert json.loads(env.call("heal", "--all", "--json", expect=0).stdout)["healed"] == 2
    assert tree(root) == before

    env.call("dump", expect=0)
    drill = ("drill", "--scratch", str(env.root / "scratch"), "--database", database_url)
    assert "PROVED" in env.call(*drill, expect=0).stdout
    assert tree(env.root / "scratch") == before
    if packs and not sealed:
        with mount_point(lambda: kernel.require_erofs(kernel.BLOCKS_SINCE)) as place:
            env.call("mount", str(place), expect=0)
            assert tree(place) == on_targets(root, "sha256")
            subprocess.run(["umount", place], check=True)
    if packs and not sealed and way == "file":
        with mount_point() as place:
            env.call("mount", str(place), "--packs", str(env.remote.local), expect=0)
            assert tree(place) == on_targets(root, "sha256")
            subprocess.run(["umount", place], check=True)

    # What rots on a target is found, and sent again. Of packs that were adopted no sum is known.
    if way in ("file", "ssh"):
        look = ("verify", *(["--download"] if packs else []))
        files = (env.remote.local / ("packs" if packs else "by-hash")).rglob("*")
        rotten = max((one for one in files if one.is_file()), key=lambda one: one.stat().st_size)
        rotten.chmod(0o600)
        flip(rotten, rotten.stat().st_size // 3)
        env.call(*look, expect=7)
        env.run("run", expect=0)
        env.call("verify", expect=0)


@pytest.mark.long
@WAYS
def test_files_that_go_by_their_paths_may_have_names_of_sha256(
    target: Environment, way: str, layout: str, sealed: bool, database_url: str
) -> None:
    env = target
    root = env.root / "files"
    contents = {f"{number % 7}/{number}": one for number, one in enumerate((*CONTENTS, LARGE))}
    for name, content in (*contents.items(), ("again", LARGE)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        os.utime(root / name, ns=(0, 1_500_000_000_123_456_789 + len(content)))
    env.write_config(
        source={"root": str(root), "hash": "sha256"}, **{"files.all": {"paths": [str(root)]}}
    )
    env.call("check", expect=0)
    env.run("run", expect=0)
    assert env.copied() == {name_of(one, "sha256") for one in contents.values()}
    for command in ("verify", "verify --download", "verify --local", "reconcile", "dump"):
        env.call(*command.split(), expect=0)
    restore = ("restore", "--as-paths", "--json", "--to")
    done = json.loads(env.call(*restore, str(env.root / "back"), expect=0).stdout)
    assert (done["files"], done["kept"]) == (len(contents) + 1, 0)
    done = json.loads(env.call(*restore, str(env.root / "back"), expect=0).stdout)
    assert (done["files"], done["kept"], done["restored"]) == (0, len(contents) + 1, 0)
    assert files_with_looks(env.root / "back") == files_with_looks(root)
    drill = ("drill", "--scratch", str(env.root / "scratch"), "--database", database_url)
    assert "PROVED" in env.call(*drill, expect=0).stdout

    # Nothing is left but the target, which says how its blobs are named.
    for table in ("source", "files.all"):
        del env.settings[table]
    env.write_config(catalog={"url": "postgresql:///no_such_database?host=/nonexistent"})
    env.call(*restore, str(env.root / "alone"), "--places", "latest", expect=0)
    assert files_with_looks(env.root / "alone") == files_with_looks(root)
