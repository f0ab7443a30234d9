"""Stores with other paths than `aa/bb/<blobid>`, `source.layout`, or other names, `source.hash`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from ntt_backup.blobdir.layout import Layout, relative_path
from ntt_backup.name_hash import NEW_HASHER
from tests.helpers.blobs import noise, tree
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import Sshd, by_python_alone
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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("layout", "strategy", "hashed"),
    [
        (LFS, "stream", "sha256"),
        pytest.param(LFS, "tar", "blake3", marks=pytest.mark.long),
        (PULP, "tar", "sha256"),
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
