"""Back from a bucket of a real object store: restore, verify, reconcile, drill, by the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.pack.names import LARGE_BLOB
from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.postgres import Postgres

LARGE = LARGE_BLOB + 1


@pytest.fixture
def backup(bucket_env: BucketEnvironment) -> BucketEnvironment:
    """Two runs have sent all that the store has."""
    env = bucket_env
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    for seed in (1, 2):
        env.fill(100, seed=seed)
        env.run("run", expect=0)
    return env


def call(env: BucketEnvironment, *words: str, code: int = 0) -> dict[str, Any]:
    done = env.call(*words, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def damage(env: BucketEnvironment, key: str, place: int) -> None:
    """Has an object with another byte."""
    content = bytearray(env.bucket.get_range(key, 0, 1 << 30))
    content[place] ^= 1
    client, name = env.server.client(), f"{env.place.prefix}/{key}"
    client.put_object(Bucket=env.place.bucket, Key=name, Body=bytes(content))


def test_all_comes_back_from_the_bucket_alone(backup: BucketEnvironment) -> None:
    env = backup
    env.fill(1, size=lambda _: LARGE)
    env.run("run", expect=0)
    status = env.status()
    assert status["copied"] == len(env.in_store())
    (row,) = env.query("select sum(size)::bigint from ntt_backup.packs")
    counted = {"packs": 2, "pack_bytes": row[0], "large_blobs": 1, "large_bytes": LARGE}
    assert status["objects"] == counted
    # What another target's batches travel by concerns no command that sends nothing.
    env.write_config(run={"strategy": "tar"})
    shown = env.call("status").stdout
    assert re.search(r"on the target +2 packs, .*; 1 large blob as files of their own", shown)
    env.call("requeue", expect=0)

    expected, back = env.in_store(), env.root / "back"
    env.write_config(catalog={"url": "postgresql://nobody@127.0.0.1:1/none"})
    env.store.rename(env.root / "lost")

    prefix = min(expected)[:2]
    call(env, "restore", str(back), "--prefix", prefix)
    assert tree(back) == {name: one for name, one in expected.items() if name.startswith(prefix)}
    found = call(env, "restore", str(back))
    assert (found["wrong"], found["archived"]) == ({}, 0)
    assert tree(back) == expected
    assert call(env, "restore", str(back))["bytes"] == 0
    found = call(env, "restore", str(back), "--blobid", "0" * 64, code=7)
    assert found["wrong"] == {"remote-missing": 1}


@pytest.mark.parametrize(
    "place",
    [pytest.param(-1400, marks=pytest.mark.long), 3000, pytest.param(None, marks=pytest.mark.long)],
    ids=["table", "content", "gone"],
)
def test_what_is_damaged_is_found_and_mended_by_the_next_run(
    backup: BucketEnvironment, place: int | None
) -> None:
    env = backup
    key = min(env.packs())
    if place is None:
        env.server.client().delete_object(Bucket=env.place.bucket, Key=f"{env.place.prefix}/{key}")
    else:
        damage(env, key, place)

    way = ["--download"] if place else []
    found = call(env, "verify", *way, code=7)
    assert found["requeued"] == len(env.in_store()) - len(env.copied()) > 0
    env.run("run", expect=0)

    assert call(env, "verify", "--download")["wrong"] == {}
    # A pack whose table is damaged lies there for ever, and others have its blobs now.
    found = call(env, "restore", str(env.root / "back"))
    assert found["not_needed"] == ([key] if place == -1400 else [])
    assert tree(env.root / "back") == env.in_store()
    done = env.call("verify", "--download", "--max-bytes", "1KB")
    assert "not all were checked" in done.stdout


@pytest.mark.long
def test_what_is_sealed_comes_back_by_the_identity_alone(
    bucket_env: BucketEnvironment, postgres: Postgres, scratch_url: str
) -> None:
    env, owner = bucket_env, Person.new()
    key = owner.file(env.root / "backup.key")
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(pack={"recipients": [owner.public]}, dump={"bin": str(postgres.programs)})
    env.fill(100)
    env.fill(1, seed=2, size=lambda _: LARGE)
    checked = env.call("check")
    assert re.search(r"^ok +sealing +.* for 1 recipient$", checked.stdout, re.MULTILINE)
    env.environ["NTT_PACK_IDENTITY_FILE"] = str(key)
    assert re.search(
        r"^warning +sealing .*who has this machine can open", env.call("check").stdout, re.MULTILINE
    )
    del env.environ["NTT_PACK_IDENTITY_FILE"]

    env.run("run", expect=0)
    env.call("dump", expect=0)

    names = [one.key for one in env.bucket.list("")]
    assert {name.rpartition(".")[2] for name in names} == {"json", "age"}
    assert not [name for name in names if any(Path(one).name in name for one in env.in_store())]
    count = len(env.in_store())
    assert call(env, "verify")["checked"] == count
    back = str(env.root / "back")
    for words in (("restore", "--to", back), ("verify", "--download"), ("reconcile",)):
        refused = env.call(*words, expect=2)
        assert "no identity is given" in refused.stderr
        assert len(refused.stderr.strip().splitlines()) <= 2
    identity = ("--identity", str(key))
    assert call(env, "restore", "--to", back, *identity)["restored"] == count
    assert tree(env.root / "back") == env.in_store()
    assert call(env, "verify", "--download", *identity)["checked"] == count
    scratch = env.root / "scratch"
    drill = ("drill", "--scratch", str(scratch), "--database", scratch_url)
    assert call(env, *drill, *identity)["proved"]
    assert tree(scratch) == env.in_store()
    for name in ("log", "config"):
        assert owner.secret not in getattr(env, name).read_text()
