"""Back from a bucket of a real object store, by the commands: restore, verify, reconcile."""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg
import pytest

from ntt_backup.catalog.ledger import Ledger
from ntt_backup.config import RemoteSettings
from ntt_backup.model import Blob, StoredPack
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from tests.bucket_packs import by_path, put_large, put_pack
from tests.environment import Environment
from tests.files import tree
from tests.s3_servers import S3Server


class Backup:
    """A store whose blobs lie in a bucket, and a ledger that knows it."""

    def __init__(self, env: Environment, s3: S3Server) -> None:
        self.env = env
        self.s3 = s3
        self.settings: RemoteSettings = s3.bucket()
        self.bucket: Bucket = open_bucket(self.settings)
        env.settings["remote"] = {
            "url": self.settings.url,
            "endpoint": s3.endpoint,
            "addressing": "path",
        }
        env.write_config()
        env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")

    def send(self, contents: list[bytes]) -> StoredPack:
        """Has the store, the bucket and the ledger as a run would leave them."""
        rows = [Blob(self.env.put(content), len(content)) for content in set(contents)]
        pack, _ = put_pack(self.bucket, contents)
        with psycopg.connect(self.env.url, autocommit=True) as conn:
            Ledger(conn, "remote").record(rows, [], [pack])
        return pack

    def replace(self, key: str, content: bytes) -> None:
        """Has an object with other content, as a damaged disk does."""
        client = self.s3.client()
        client.put_object(
            Bucket=self.settings.bucket, Key=f"{self.settings.prefix}/{key}", Body=content
        )

    def remove(self, key: str) -> None:
        self.s3.client().delete_object(
            Bucket=self.settings.bucket, Key=f"{self.settings.prefix}/{key}"
        )

    def call(self, *words: str, code: int = 0) -> dict[str, Any]:
        done = self.env.call(*words, "--json")
        assert done.returncode == code, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def backup(env: Environment, s3: S3Server) -> Backup:
    return Backup(env, s3)


def contents(count: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(1, 40_000)) for _ in range(count)]


def test_all_comes_back_from_the_bucket_alone(backup: Backup) -> None:
    env = backup.env
    first, second = contents(300, 1), contents(300, 2)
    backup.send(first)
    backup.send([*second, *first[:20]])
    large = bytes(range(256)) * (80 * 1024)
    put_large(backup.bucket, large)
    env.write_config(catalog={"url": "postgresql://nobody@127.0.0.1:1/none"})
    env.store.rename(env.root / "lost")
    back = env.root / "back"

    prefix = next(iter(by_path(first)))[:2]
    backup.call("restore", str(back), "--prefix", prefix)
    expected = by_path([*first, *second, large])
    assert tree(back) == {name: one for name, one in expected.items() if name.startswith(prefix)}
    found = backup.call("restore", str(back))
    assert (found["wrong"], found["archived"]) == ({}, 0)
    assert tree(back) == expected
    assert backup.call("restore", str(back))["bytes"] == 0
    absent = "0" * 64
    found = backup.call("restore", str(back), "--blobid", absent, code=7)
    assert found["wrong"] == {"remote-missing": 1}


def test_what_is_lost_is_found_and_sent_again(backup: Backup) -> None:
    env = backup.env
    first, second, third = (contents(50, seed) for seed in (1, 2, 3))
    lost, bad = backup.send(first), backup.send(second)
    backup.send(third)
    whole = backup.bucket.get_range(bad.key, 0, bad.size)
    backup.remove(lost.key)
    assert backup.call("verify", code=7)["wrong"] == {"remote-missing": 50}
    backup.send(first)
    assert backup.call("verify")["complete"]

    backup.replace(bad.key, whole[:5000] + bytes(1000) + whole[6000:])
    found = backup.call("verify", "--download", code=7)

    pending = env.query("select count(*) from blobs where not remote_copied")
    assert pending == [(found["requeued"],)]
    assert 0 < found["requeued"] < 50
    done = env.call("verify", "--max-bytes", "1MB", "--download")
    assert "not all were checked" in done.stdout


def test_reconcile_refills_a_ledger_that_was_lost(backup: Backup) -> None:
    env = backup.env
    backup.send(contents(100, 1))
    backup.send(contents(100, 2))
    env.query("update blobs set remote_copied = false")
    env.query("delete from ntt_backup.packs")

    found = backup.call("reconcile", "--apply")

    assert found["marked"] == 200
    again = backup.call("reconcile")
    assert (again["agreed"], again["exit_code"]) == (200, 0)
    assert not any(again["differences"].values())
    assert backup.call("verify")["checked"] == 200
