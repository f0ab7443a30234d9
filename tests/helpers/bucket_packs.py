"""Packs and blobs put into a bucket as a run would, for tests of what reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.config import RemoteConfig
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.open import PACK_AREA
from ntt_backup.model import StoredPack
from ntt_backup.objects import s3
from ntt_backup.objects.bucket import Bucket
from ntt_backup.pack.age_encryption import no_identity
from ntt_backup.pack.format import ID_BYTES, Entry, Sign, unsigned
from ntt_backup.pack.names import PackKey, blob_key
from tests.helpers.blobs import Person, key_of, pack, pack_as, reader, seal
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeBucket:
    """A bucket in memory, which every command opens; the local cache is empty."""
    fake = FakeBucket()
    monkeypatch.setattr(s3, "open_bucket", lambda *_, **__: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def packs_in(bucket: Bucket) -> FileStoreByBucket:
    """The store of packs in a bucket."""
    return FileStoreByBucket(bucket, SMALLEST_PART, PACK_AREA)


def flip(bucket: FakeBucket, key: str, place: int) -> None:
    content = bytearray(bucket.objects[key])
    content[place] ^= 1
    bucket.objects[key] = bytes(content)


def blobid_of(content: bytes) -> str:
    return blake3(content).hexdigest()


def put_pack(
    bucket: Bucket,
    contents: Iterable[bytes],
    seal_for: Person | None = None,
    sign: Sign = unsigned,
) -> tuple[StoredPack, tuple[Entry, ...]]:
    """Stores a pack of these blobs; returns it as the ledger knows it, and what is in it."""
    identity = None if seal_for is None else os.urandom(ID_BYTES)
    data = pack(set(contents), sign=sign, identity=identity)
    if seal_for is not None:
        data = seal(data, [seal_for.public])
    made = reader(data, no_identity if seal_for is None else seal_for.opens)
    name, entries = key_of(made), tuple(made.table)
    info = bucket.put(name.key, data, sha256(data).digest())
    low, high = entries[0].digest.hex(), entries[-1].digest.hex()
    count, size = len(entries), len(data)
    return StoredPack(name.pack_id, name.key, low, high, count, size, info.checksum), entries


def plant_pack(
    bucket: Bucket,
    contents: Iterable[bytes],
    says: bytes | None = b"x",
    seal_for: Person | None = None,
    name: PackKey | None = None,
) -> str:
    """Stores a pack of somebody who knows the names of these blobs and has them say something else;
    None: garbage of the right size. Returns its key. name: the key that it has instead of its own.
    """
    data = pack_as(
        {blake3(one).digest(): bytes(len(one)) if says is None else says for one in contents}
    )
    if seal_for is not None:
        data = seal(data, [seal_for.public])
    key = (name or key_of(reader(data, no_identity if seal_for is None else seal_for.opens))).key
    bucket.put(key, data, sha256(data).digest())
    return key


def put_large(bucket: Bucket, content: bytes) -> str:
    """Stores a blob as an object of its own; returns its blobid."""
    blobid = blobid_of(content)
    bucket.put(blob_key(blobid), content, sha256(content).digest())
    return blobid


def bucket_settings(
    url: str = "s3://bucket/backup",
    identity: Path | None = None,
    host: Path | None = None,
    **pack: object,
) -> RemoteConfig:
    """Settings of a target that is a bucket, without a store; waits are short. host: the file of
    the host key. pack: settings of sealing.
    """
    return RemoteConfig.model_validate(
        {
            "remote": {"url": url, "endpoint": "http://127.0.0.1:1"},
            "pack": {"identity_file": identity, **pack},
            "host": {"key_file": host},
            "run": {"backoff_base": 0.01, "backoff_cap": 0.05, "outage_timeout": 5},
        }
    )


def by_path(contents: Iterable[bytes]) -> dict[str, bytes]:
    """The files that a restore of these blobs makes."""
    found = {blobid_of(one): one for one in contents}
    return {f"{name[:2]}/{name[2:4]}/{name}": content for name, content in found.items()}
