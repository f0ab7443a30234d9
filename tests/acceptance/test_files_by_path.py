"""A store whose files go by their paths: listed by a query, read once, copied, found again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psycopg
import pytest
from blake3 import blake3

from tests.helpers.application import QUERY, Application
from tests.helpers.environment import Environment

CONTENTS = {
    "a/one.txt": b"one",
    "a/two.bin": bytes(range(256)) * 50,
    "b/ü x\n.txt": b"three",
    "b/same": b"one",
    "large": os.urandom(3_000_000),
}


def blobids() -> set[str]:
    return {blake3(content).hexdigest() for content in CONTENTS.values()}


@pytest.fixture
def listed(env: Environment, application: Application) -> Path:
    """The root of the files of CONTENTS, which the application lists."""
    root = env.root / "uploads"
    for name, content in CONTENTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        application.add(name, size=len(content))
    env.write_config(
        source={"root": str(root)},
        **{"catalog.from": {"url": application.url, "query": QUERY}},
    )
    return root


def places(env: Environment) -> dict[str, str | None]:
    """Why each file that is listed has no blob, or not that of today; None for those that have."""
    with psycopg.connect(env.url) as conn:
        rows = conn.execute(
            "select path, failed from ntt_backup.places where replaced_at is null"
        ).fetchall()
    return {os.fsdecode(path): failed for path, failed in rows}


@pytest.mark.parametrize("layout", ["files", "packs"])
def test_listed_files_are_copied_once_by_their_content(
    env: Environment, listed: Path, layout: str
) -> None:
    env.write_config(remote={"layout": layout})
    env.call("run", expect=0)
    assert set(env.copied()) == blobids()
    assert set(places(env)) == set(CONTENTS)
    if layout == "files":
        assert {Path(name).name for name in env.on_remote()} == blobids()
    env.call("run", expect=0)
    assert env.events("run_stop")[-1]["copied"] == 0
    env.call("verify", expect=0)
    env.call("verify", "--local", expect=0)
    env.call("reconcile", expect=0)
    (two,) = {one for one in blobids() if one == blake3(CONTENTS["a/two.bin"]).hexdigest()}
    shown = json.loads(env.call("show", "--json", "--verify", two, expect=0).stdout)
    assert shown["paths"] == ["a/two.bin"]
    assert shown["source"]["verified"] is True


def test_what_is_wrong_with_a_file_is_said_and_the_others_are_copied(
    env: Environment, listed: Path, application: Application
) -> None:
    outside = env.root / "secret"
    outside.write_bytes(b"secret")
    (listed / "link").symlink_to(outside)
    (listed / "up").symlink_to(env.root)
    (listed / "fifo").mkdir()
    (listed / "sum").write_bytes(b"sum")
    application.add("missing", "link", "up/secret", "../secret", "a//one.txt", "fifo", size=None)
    application.add(str(outside), size=None)
    application.add("sum", size=3, sum="0" * 32)
    (listed / "a" / "one.txt").write_bytes(b"longer than it was")
    done = env.call("run", expect=7)
    found = places(env)
    assert {name: why for name, why in found.items() if why is not None} == {
        "missing": "missing",
        "link": "not-a-file",
        "up/secret": "not-a-file",
        "../secret": "bad-path",
        "a//one.txt": "bad-path",
        str(outside): "bad-path",
        "fifo": "not-a-file",
        "sum": "wrong-checksum",
        "a/one.txt": "wrong-size",
    }
    assert set(env.copied()) == blobids()  # b/same has the content of a/one.txt.
    assert blake3(b"secret").hexdigest() not in {Path(name).name for name in env.on_remote()}
    assert len(env.events("file_failed")) == 9
    assert done.returncode == 7
