"""Stores that have their files elsewhere than at `aa/bb/<blobid>`: `source.layout`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import Layout, relative_path
from tests.helpers.blobs import noise, tree
from tests.helpers.environment import Environment

LFS, PULP = "0:2/2:4/4:", "0:2/2:"
CONTENTS = [b"", b"x", b"one pointer\n" * 40, *(noise(number * 97, number) for number in range(60))]
LARGE = noise(3_000_000)


def lay(env: Environment, layout: str, contents: Iterable[bytes] = (*CONTENTS, LARGE)) -> Path:
    """Makes a store of that layout, and the settings for it; returns its root."""
    root = env.root / "lfs-objects"
    for content in contents:
        path = root / Layout(layout).path_of(blake3(content).hexdigest())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "tmp" / "upload").mkdir(parents=True)
    env.write_config(source={"root": str(root), "layout": layout})
    return root


def path_in(root: Path, layout: str, content: bytes) -> Path:
    return root / Layout(layout).path_of(blake3(content).hexdigest())


def on_targets(root: Path) -> dict[str, bytes]:
    """The files of a store as a target must have them."""
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {relative_path(blake3(content).hexdigest()): content for content in files.values()}


@pytest.mark.parametrize(
    ("layout", "strategy"), [(LFS, "stream"), (LFS, "tar"), (PULP, "tar"), (PULP, "stream")]
)
def test_files_are_found_and_sent_checked_and_restored_as_they_lay(
    env: Environment, layout: str, strategy: str
) -> None:
    root = lay(env, layout)
    env.write_config(run={"strategy": strategy, "batch_size": 20})
    env.call("scan", expect=0)
    env.run("run", expect=0)
    assert env.on_remote() == on_targets(root)
    assert json.loads(env.call("verify", "--local", "--json", expect=0).stdout)["checked"] == 63
    env.call("verify", expect=0)
    env.call("reconcile", expect=0)
    env.call("restore", "--to", str(env.root / "back"), expect=0)
    assert tree(env.root / "back") == tree(root)


def test_packs_have_them_and_a_damaged_store_is_healed(env: Environment) -> None:
    root = lay(env, LFS)
    before = tree(root)
    env.write_config(remote={"layout": "packs"}, source={"read_order": "inode"})
    env.call("scan", expect=0)
    env.run("run", expect=0)
    env.call("verify", "--download", expect=0)
    lost, rotten = (path_in(root, LFS, content) for content in (LARGE, CONTENTS[5]))
    shutil.rmtree(lost.parent)
    os.truncate(rotten, 3)
    assert env.call("verify", "--local").returncode == 7
    assert json.loads(env.call("heal", "--all", "--json", expect=0).stdout)["healed"] == 2
    assert tree(root) == before
    packed = env.root / "one.tar"
    env.call("pack", str(packed), "--from", str(root), expect=0)
    env.call("unpack", str(packed), "--to", str(env.root / "unpacked"), expect=0)
    assert tree(env.root / "unpacked") == on_targets(root)


def test_a_store_of_another_layout_is_refused_before_anything_is_marked(env: Environment) -> None:
    root = lay(env, LFS)
    env.write_config(source={"layout": "0:2/2:4/0:"})
    assert "correct source.layout" in env.call("scan", expect=2).stderr
    env.register([blake3(content).hexdigest() for content in CONTENTS])
    assert "correct source.layout" in env.run("run", expect=2).stdout
    assert not env.copied()
    assert not env.failures()
    assert tree(root)
