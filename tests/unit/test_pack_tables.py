"""The packs of a target, by their tables: against a model, and what the local cache may do."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ntt_backup.audit.remote_names import PackNames
from ntt_backup.blobdir.walk import StrayKind
from ntt_backup.config import RunSettings
from ntt_backup.config.sealing import Keyring
from ntt_backup.errors import ConfigError
from ntt_backup.filestore.local_cache import Cache, cache_directory
from ntt_backup.filestore.reconnecting import ReconnectingSharedStore
from ntt_backup.model import StoredPack
from ntt_backup.packstore.tables import Tables, packs_for, packs_of
from tests.helpers.blobs import Person
from tests.helpers.bucket_packs import blobid_of, packs_in, put_large, put_pack
from tests.helpers.fake_bucket import FakeBucket


def patient(bucket: FakeBucket) -> ReconnectingSharedStore:
    run = RunSettings(backoff_base=0.01, backoff_cap=0.01, outage_timeout=1)
    return ReconnectingSharedStore(lambda: packs_in(bucket), run, lambda *_: None)


@settings(max_examples=25)
@given(st.lists(st.sets(st.integers(0, 300), min_size=1), max_size=8), st.integers(0, 400))
def test_names_and_places_are_those_of_a_model(packs: list[set[int]], seed: int) -> None:
    bucket = FakeBucket()
    recorded: list[StoredPack] = []
    content = {number: b"%d," % number * (number % 5 + 1) for number in range(300)}
    model: dict[bytes, int] = {}
    holders: dict[bytes, set[str]] = {}
    for numbers in {frozenset(one & content.keys()) for one in packs} - {frozenset()}:
        blobs = {content[number] for number in numbers}
        pack, _ = put_pack(bucket, blobs)
        recorded.append(pack)
        for blob in blobs:
            digest = blake3(blob).digest()
            model[digest] = len(blob)
            holders.setdefault(digest, set()).add(pack.key)
    put_large(bucket, b"no large blob")
    bucket.objects |= {"packs/ab/other": b"x", "blobs/ab/other": b"x"}
    reader = patient(bucket)
    names = PackNames(reader, Tables(reader, None), lambda: recorded)
    chance = random.Random(seed)
    digits = chance.choice(sorted(model) or [bytes(32)]).hex()
    for prefix in ("", f"{chance.randrange(16):x}", f"{chance.randrange(256):02x}", digits[:5]):
        found = Counter(names.below(prefix, lambda *_: None))
        assert found == {
            one: len(holders[one[0]]) for one in model.items() if one[0].hex().startswith(prefix)
        }
        keys = {pack.key for pack in packs_of(reader, prefix)}
        for digest, at in holders.items():
            assert not digest.hex().startswith(prefix) or at <= keys
    some = sorted(chance.sample(sorted(holders), min(len(holders), 5)))
    keys = {pack.key for pack in packs_for(reader, some)}
    assert set().union(*(holders[one] for one in some)) <= keys


def names_in(bucket: FakeBucket, owner: Person, at: Path, recorded: list[StoredPack]) -> PackNames:
    key, reader = owner.file(at / "key"), patient(bucket)
    return PackNames(reader, Tables(reader, None, Keyring(lambda: key)), lambda: recorded)


def all_of(names: PackNames) -> tuple[set[str], dict[str, str]]:
    """Returns the blobids, and what is told of strays by their paths."""
    strays: dict[str, str] = {}

    def stray(path: str, kind: StrayKind, detail: str = "") -> None:
        strays[path] = f"{kind} {detail}"

    unknown = [pack for pack in packs_of(names.store) if not names.knows(pack)]
    list(names.learn(unknown, stray))
    return {digest.hex() for digest, _ in names.below("", stray)}, strays


def test_a_pack_that_is_sealed_for_others_is_a_stray(tmp_path: Path) -> None:
    bucket, owner = FakeBucket(), Person.new()
    good, _ = put_pack(bucket, [b"a", b"b"], owner)
    planted, _ = put_pack(bucket, [b"c", b"d"], Person.new())

    names = names_in(bucket, owner, tmp_path, [good])
    found, strays = all_of(names)

    assert found == {blobid_of(b"a"), blobid_of(b"b")}
    assert list(strays) == [planted.key]
    assert "unreadable it is sealed for other identities" in strays[planted.key]
    assert not names.hides(blobid_of(b"c"))
    assert all_of(names) == (found, {})


def test_of_a_pack_of_this_host_that_no_identity_opens_nothing_is_known(tmp_path: Path) -> None:
    """It may be sealed for a recipient of earlier: its blobs are not lost."""
    bucket, owner = FakeBucket(), Person.new()
    packs = [put_pack(bucket, [b"a"], owner)[0], put_pack(bucket, [b"c"], Person.new())[0]]
    names = names_in(bucket, owner, tmp_path, packs)
    assert all_of(names)[0] == {blobid_of(b"a")}
    assert names.hides(blobid_of(b"c"))
    assert not names.hides(blobid_of(b"b"))


def test_where_no_pack_of_this_host_opens_it_is_the_identity(tmp_path: Path) -> None:
    bucket, owner = FakeBucket(), Person.new()
    mine, _ = put_pack(bucket, [b"a"], owner)
    for recorded in ([mine], []):
        with pytest.raises(ConfigError, match="for other identities than those in"):
            all_of(names_in(bucket, Person.new(), tmp_path, recorded))
    # All packs of this host are lost: what somebody else has put there tells nothing of the
    # identity.
    del bucket.objects[mine.key]
    planted, _ = put_pack(bucket, [b"c"], Person.new())
    assert list(all_of(names_in(bucket, owner, tmp_path, [mine]))[1]) == [planted.key]


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)

    assert cache_directory() == Path("/var/cache/ntt-backup")


def test_the_cache_stays_within_its_bound_where_each_program_keeps_little(tmp_path: Path) -> None:
    for number in range(500):
        Cache("s3://bucket", tmp_path, most=10_000).store(f"{number:032x}", bytes(1000))
    # By chance one in ten of them looks.
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 250_000


def test_the_cache_stays_within_its_bound_and_does_without_a_directory(tmp_path: Path) -> None:
    cache = Cache("s3://bucket", tmp_path / "cache", most=10_000)
    for number in range(100):
        cache.store(f"{number:032x}", bytes(1000))
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= 20_000
    assert cache.load(f"{99:032x}") == bytes(1000)
    assert Cache("s3://other", tmp_path / "cache").load(f"{99:032x}") is None
    (tmp_path / "file").write_text("")
    nowhere = Cache("s3://bucket", tmp_path / "file")
    nowhere.store("00", b"x")
    assert nowhere.load("00") is None
