"""Where a target is sealed, what is not sealed is refused: anybody who may write can plant it."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.cli.commands.pack import _mount_target as of_bucket
from ntt_backup.cli.commands.restore import lines
from ntt_backup.cli.global_options import Common
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy
from ntt_backup.config.signing_key import OF_PACKS, Origin, SigningKey, SigningKeys
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import DUMPS, fetch_dump, list_dumps, open_dumps
from ntt_backup.errors import (
    ConfigError,
    MountImpossible,
    ProtocolViolation,
)
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.contract import Area, Range, StoredFileDamaged
from ntt_backup.filestore.local_cache import cache_of
from ntt_backup.filestore.open import open_store
from ntt_backup.filestore.sealed import SealedStore
from ntt_backup.mount import kernel, packs_or_snapshot
from ntt_backup.mount.image import Options as MountOptions
from ntt_backup.objects import s3
from ntt_backup.pack.age_encryption import HEAD, NotSealed
from ntt_backup.pack.format import PackError
from ntt_backup.pack.names import PackKey
from ntt_backup.packstore.tables import PackObject, open_to_read, packs_of
from ntt_backup.restore.blobs import Restored, Wanted, restore
from ntt_backup.snapshot.names import SNAPSHOTS, pack_name
from ntt_backup.snapshot.origins import NOBODY
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.version import restore as restore_version
from ntt_backup.snapshot.verify import verify
from ntt_backup.snapshot.versions import choose, facts, versions
from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_packs import bucket_settings, by_path, packs_in, put_large, put_pack
from tests.helpers.fake_bucket import FakeBucket
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import VERSION, file, put_version

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=400)
FILE = "etc/20260304T120000Z-0badcafe/manifest"
DUMP = "20260304T120000Z-0badcafe.dump"


@pytest.fixture
def owner() -> Person:
    return Person.new()


def contents(seed: int) -> list[bytes]:
    return [random.Random(seed + n).randbytes(500) for n in range(20)]


def back(tmp_path: Path, owner: Person, host: Path | None = None, **pack: Any) -> Restored:
    identity = owner.file(tmp_path / "identity")
    settings = bucket_settings(identity=identity, host=host, recipients=[owner.public], **pack)
    return restore(
        settings,
        tmp_path / "back",
        Wanted(),
        workers=2,
        trust_size=False,
        on_progress=lambda done: None,
        on_outage=lambda error, seconds: None,
    )


def tables(tmp_path: Path, owner: Person, **pack: Any) -> Any:
    identity = owner.file(tmp_path / "identity")
    settings = bucket_settings(identity=identity, recipients=[owner.public], **pack)
    return open_to_read(settings, lambda error, seconds: None, threading.Event())[1]


# --- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipients", "until", "arrived", "refused"),
    [
        (False, None, NOW, False),
        (False, None, None, False),
        (True, None, NOW, True),
        (True, None, LONG_AGO, True),
        (True, None, None, True),
        (True, date(2026, 11, 20), datetime(2026, 11, 19, 23, 59, 59, tzinfo=UTC), False),
        (True, date(2026, 11, 20), datetime(2026, 11, 20, tzinfo=UTC), True),
        (True, date(2026, 11, 20), None, True),
    ],
)
def test_what_is_not_sealed_is_refused_unless_it_came_before_the_day(
    owner: Person,
    recipients: bool,
    until: date | None,
    arrived: datetime | None,
    refused: bool,
) -> None:
    public = [owner.public] if recipients else []
    settings = bucket_settings(recipients=public, unsealed_until=until)
    assert SealPolicy.of(settings).refuses(arrived) == refused


def test_all_that_opens_a_bucket_has_the_policy(
    monkeypatch: pytest.MonkeyPatch, owner: Person
) -> None:
    bucket = FakeBucket()
    monkeypatch.setattr(s3, "open_bucket", lambda *_, **__: bucket)
    settings = bucket_settings(recipients=[owner.public])
    bucket.put(f"snapshots/{FILE}", b"planted", sha256(b"planted").digest())
    with pytest.raises(StoredFileDamaged, match="not sealed"):
        list(open_store(settings, SNAPSHOTS).read([Range(FILE, 0, 7)]))
    bucket.put(f"pgdump/{DUMP}", b"planted", sha256(b"planted").digest())
    dumps = open_dumps(settings)
    with pytest.raises(StoredFileDamaged, match="not sealed"):
        list(fetch_dump(dumps, Stored(DUMP, 7, None)))
    (found,) = list_dumps(dumps)
    assert (found.whole, found.torn) == (False, NOT_SEALED)


# --- packs ----------------------------------------------------------------------------------------


def test_a_planted_pack_is_named_and_the_rest_comes_back(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    put_pack(bucket, contents(1), owner)
    planted, _ = put_pack(bucket, contents(100))

    done = back(tmp_path, owner)

    assert tree(tmp_path / "back") == by_path(contents(1))
    (failure,) = done.wrong.first
    assert failure.blobid == planted.key
    assert NOT_SEALED in failure.detail
    assert done.exit_code == 7


def test_a_pack_of_the_time_before_the_bucket_was_sealed_comes_back(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    put_pack(bucket, contents(1), owner)
    old, _ = put_pack(bucket, contents(100))
    bucket.came(old.key, LONG_AGO)

    done = back(tmp_path, owner, unsealed_until=(NOW - timedelta(days=30)).date())

    assert tree(tmp_path / "back") == by_path([*contents(1), *contents(100)])
    assert done.exit_code == 0


def test_a_large_blob_of_its_own_is_proved_by_its_name(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    put_pack(bucket, contents(1), owner)
    put_large(bucket, contents(7)[0])
    assert back(tmp_path, owner).exit_code == 0
    assert tree(tmp_path / "back") == by_path([*contents(1), contents(7)[0]])


def test_a_table_that_this_machine_keeps_is_refused_as_its_pack_is(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    put_pack(bucket, contents(1))
    (pack,) = packs_of(packs_in(bucket))
    plain = bucket_settings()
    open_to_read(plain, lambda error, seconds: None, threading.Event())[1].open(pack)
    assert cache_of(plain.remote).load(f"{pack.name.pack_id}-{pack.size}") is not None
    with pytest.raises(NotSealed):
        tables(tmp_path, owner).open(pack)


@pytest.mark.parametrize("seals", [False, True])
def test_a_pack_is_what_the_end_of_its_name_says(
    bucket: FakeBucket, tmp_path: Path, owner: Person, seals: bool
) -> None:
    put_pack(bucket, contents(1), owner if seals else None)
    (pack,) = packs_of(packs_in(bucket))
    other = pack.name._replace(kind="tar" if seals else "tar.age")
    bucket.objects[other.key] = bucket.objects.pop(pack.key)
    for policy in ({}, {"unsealed_until": (NOW + timedelta(days=2)).date()}):
        with pytest.raises(PackError):
            tables(tmp_path, owner, **policy).open(PackObject(other, pack.size, NOW))


@pytest.mark.parametrize("seals", [False, True])
def test_a_pack_under_another_packs_name_is_refused(
    bucket: FakeBucket, tmp_path: Path, owner: Person, seals: bool
) -> None:
    first, _ = put_pack(bucket, contents(1), owner if seals else None)
    second, _ = put_pack(bucket, contents(50), owner if seals else None)
    bucket.objects[first.key] = bucket.objects[second.key]
    name = PackKey.read(first.key)
    assert name is not None
    with pytest.raises(PackError, match="id is not that in its name"):
        tables(tmp_path, owner, unsealed_until=(NOW + timedelta(days=2)).date()).open(
            PackObject(name, second.size, NOW)
        )


@pytest.mark.parametrize("kind", ["tar", "tar.age"])
def test_a_planted_pack_is_not_mounted_whatever_its_name_says(
    bucket: FakeBucket, tmp_path: Path, owner: Person, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for need in ("require_erofs", "require_mount_point"):
        monkeypatch.setattr(kernel, need, lambda _: None)
    monkeypatch.setattr(packs_or_snapshot, "_fuse", lambda: None)
    monkeypatch.setattr(s3, "open_bucket", lambda *_, **__: bucket)
    put_pack(bucket, contents(100))
    (pack,) = packs_of(packs_in(bucket))
    bucket.objects[pack.name._replace(kind=kind).key] = bucket.objects.pop(pack.key)
    settings = bucket_settings(recipients=[owner.public])
    told: list[str] = []
    why = {"tar": "no blobs can be mounted", "tar.age": "is sealed: that cannot be mounted"}[kind]
    with pytest.raises(MountImpossible, match=why):
        of_bucket(cast(Common, SimpleNamespace(load=lambda _: settings)))(
            tmp_path, MountOptions(tmp_path, "", told.append)
        )
    assert [NOT_SEALED in one for one in told] == [True] * (kind == "tar")


# --- snapshots ------------------------------------------------------------------------------------


def repository(bucket: FakeBucket, tmp_path: Path, owner: Person, **pack: Any) -> SealedStore:
    settings = bucket_settings(recipients=[owner.public], **pack)
    identity = owner.file(tmp_path / "identity")
    within = FileStoreByBucket(bucket, 5 << 20, SNAPSHOTS)
    policy = SealPolicy.of(settings)
    return SealedStore(within, SNAPSHOTS, settings.recipients, Keyring(lambda: identity), policy)


def write(place: SealedStore, name: str, content: bytes) -> None:
    file = place.write(name)
    file.add(content)
    file.finish()
    file.publish()


def test_a_bucket_tells_which_of_two_files_came_first(tmp_path: Path, owner: Person) -> None:
    """See tests/unit/test_sealed_store.py for all cases."""
    bucket = FakeBucket()
    write(repository(bucket, tmp_path, owner), FILE, b"sealed")
    bucket.put(f"snapshots/{FILE}", b"planted", sha256(b"planted").digest())
    until = {"unsealed_until": (NOW + timedelta(9)).date()}
    for came, content in ((NOW + timedelta(days=1), b"sealed"), (LONG_AGO, b"planted")):
        bucket.came(f"snapshots/{FILE}", came)
        place = repository(bucket, tmp_path, owner, **until)
        assert list(place.read([Range(FILE, 0, 7)])) == [content]
    place.remove([FILE])
    assert bucket.objects == {}


def put_sealed(place: SealedStore, name: str) -> None:
    """Puts a version with one file."""
    made = MemoryStore()
    put_version(made, [file("a")], chain=(name,), map=bytes(32))
    for one, content in made.files.items():
        write(place, one, content)


def test_a_version_that_is_sealed_for_others_is_damaged_and_ends_no_command(
    tmp_path: Path, owner: Person
) -> None:
    bucket, good = FakeBucket(), "20260102T030405Z-0123abcd"
    put_sealed(repository(bucket, tmp_path, owner), good)
    for name in ("19710102T030405Z-0123abcd", "20260202T030405Z-0123abcd"):
        put_sealed(repository(bucket, tmp_path, Person.new()), name)

    place = repository(bucket, tmp_path, owner)
    found = list(facts(place, versions(place, "etc")))
    assert [one.header is not None for one in found] == [False, True, False]
    assert all("sealed for other identities" in found[n].problem for n in (0, 2))
    told: list[str] = []
    for wanted in (f"etc@{good}", "etc"):
        assert not told
        place = repository(bucket, tmp_path, owner)
        assert choose(place, wanted, NOBODY, told.append).name == good
    (said,) = told
    assert said.startswith("etc@20260202T030405Z-0123abcd is passed over, since it is damaged: ")
    checked = verify(repository(bucket, tmp_path, owner))
    assert (checked.versions, len(checked.damaged), checked.exit_code) == (3, 2, 7)


def test_where_no_version_opens_the_identity_is_told_at_once(tmp_path: Path, owner: Person) -> None:
    bucket = FakeBucket()
    for number in range(3):
        place = repository(bucket, tmp_path, owner)
        put_sealed(place, f"2026010{number + 1}T030405Z-0123abcd")
    for ask in (
        lambda place: list(facts(place, versions(place, "etc"))),
        lambda place: choose(place, "etc"),
        lambda place: verify(place),
        lambda place: list(place.read([Range(next(place.list()).name, 0, 9)])),
    ):
        with pytest.raises(ConfigError, match="for other identities than those in"):
            ask(repository(bucket, tmp_path, Person.new()))


@pytest.mark.parametrize("damage", ["sealed for others", "its header was altered", "is missing"])
def test_a_pack_that_cannot_be_read_costs_its_own_files_alone(
    tmp_path: Path, owner: Person, damage: str
) -> None:
    bucket, made = FakeBucket(), MemoryStore()
    first, second = "20260102T030405Z-0123abcd", "20260103T030405Z-0123abcd"
    old = [file(f"old{n}", b"%d" % n * 90_000) for n in range(3)]
    put_version(made, old, chain=(first,))
    put_version(made, [*((one, ()) for one, _ in old), file("new")], chain=(first, second))
    place = repository(bucket, tmp_path, owner)
    for name, content in made.files.items():
        write(place, name, content)
    name = pack_name("etc", first, 1)
    key = f"snapshots/{name}.age"
    sealed = bytearray(bucket.objects.pop(key))
    if damage.startswith("sealed"):
        write(repository(bucket, tmp_path, Person.new()), name, made.files[name])
    elif damage != "is missing":
        sealed[HEAD - 100] ^= 1
        bucket.put(key, sealed, sha256(sealed).digest())

    def opened() -> Any:
        return repository(bucket, tmp_path, owner)

    done = restore_version(opened, "etc", tmp_path / "to", RestoreOptions(), trust=True)

    assert tree(tmp_path / "to") == {"new": b"content"}
    assert (done.files, done.wrong, done.exit_code) == (1, 3, 7)
    # An ordinary user is told of owners, too.
    (note,) = [one for one in done.notes if "pack-" in one]
    assert name in note
    assert damage.replace("others", "other identities") in note
    checked = verify(opened(), share=1.0)
    assert sorted(checked.damaged) == [f"etc@{first}", f"etc@{second}"]
    if damage != "is missing":
        assert note in {one.detail for one in checked.wrong}


def test_of_a_pack_that_is_damaged_in_one_place_the_rest_comes_back(
    tmp_path: Path, owner: Person
) -> None:
    bucket, made = FakeBucket(), MemoryStore()
    chance = random.Random(1)
    put_version(made, [file(f"f{n}", chance.randbytes(1 << 20)) for n in range(4)])
    for name, content in made.files.items():
        write(repository(bucket, tmp_path, owner), name, content)
    key = f"snapshots/{pack_name('etc', VERSION, 1)}.age"
    data = bytearray(bucket.objects[key])
    data[len(data) // 8] ^= 1
    bucket.objects[key] = bytes(data)

    done = restore_version(
        lambda: repository(bucket, tmp_path, owner),
        "etc",
        tmp_path / "to",
        RestoreOptions(),
        trust=True,
    )

    assert sorted(tree(tmp_path / "to")) == ["f1", "f2", "f3"]
    assert (done.wrong, done.exit_code) == (1, 7)


@pytest.mark.parametrize("area", [SNAPSHOTS, DUMPS], ids=["snapshots", "dumps"])
def test_a_listing_is_bounded(area: Area) -> None:
    """Also of what is no file of the area."""
    bucket, few = FakeBucket(), area._replace(most=3)
    with closing(FileStoreByBucket(bucket, 5 << 20, few)) as store:
        for number in range(4):
            assert list(store.list()) == []
            bucket.put(f"{area.name}/{number}", b"", sha256(b"").digest())
        with pytest.raises(ProtocolViolation, match=f"more {area.files} than are allowed"):
            list(store.list())


# --- who made it ----------------------------------------------------------------------------------


def test_sealed_packs_that_this_host_has_not_signed_are_counted_and_read(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    mine, theirs = (SigningKey.of(bytes([n]) * 32) for n in (1, 2))
    file = tmp_path / "host.key"
    file.write_text(f"ntt-host-key-1 {mine.secret.hex()}\n")
    file.chmod(0o600)
    keys = SigningKeys([mine], file), SigningKeys([theirs], file)
    put_pack(bucket, contents(1), owner, partial(keys[0].sign, OF_PACKS))
    put_pack(bucket, contents(50), owner, partial(keys[1].sign, OF_PACKS))
    put_pack(bucket, contents(100), owner)

    for key_file, strangers in ((file, 2), (tmp_path / "missing", 0)):
        done = back(tmp_path, owner, host=key_file)
        assert (done.strangers, done.exit_code) == (strangers, 0)
        said = "\n".join(lines(done, tmp_path))
        assert ("2 sealed packs not signed by this host" in said) == bool(strangers)
    assert tree(tmp_path / "back") == by_path([*contents(1), *contents(50), *contents(100)])


def test_a_run_signs_its_sealed_packs(tmp_path: Path, owner: Person) -> None:
    file = tmp_path / "host.key"
    file.write_text(f"ntt-host-key-1 {'1' * 64}\n")
    file.chmod(0o600)
    settings = bucket_settings(recipients=[owner.public], host=file)
    spec = SessionSpec.of(settings, "run", "0", sends=True)
    keys = SigningKeys.of(settings)
    assert keys.origin(OF_PACKS, b"data", spec.sign(b"data")) is Origin.OURS


@pytest.mark.parametrize("planted", ["junk that is called sealed", "one that is not sealed"])
def test_a_planted_manifest_ends_no_command_for_its_set(planted: str, owner: Person) -> None:
    bucket, made = FakeBucket(), MemoryStore()
    put_version(made, [file("a")])
    name = "snapshots/etc/20261124T000000Z-00000000/manifest"
    sealed = planted.startswith("junk")
    files = {f"snapshots/{one}": bytes(content) for one, content in made.files.items()}
    files[name + (".age" if sealed else "")] = b"junk" * 2000
    for key, content in files.items():
        bucket.put(key, content, sha256(content).digest())
    # In the sealed target the good version is as foreign as the planted one.
    policy = SealPolicy(False) if sealed else SealPolicy(True)
    within = FileStoreByBucket(bucket, 8 << 20, SNAPSHOTS)
    place = SealedStore(within, SNAPSHOTS, (), Keyring(), policy)
    whole = [one for one in versions(place, "etc") if one.whole]
    told = [(one.version.name[:4], one.header is not None) for one in facts(place, whole)]
    assert told == [("2026", sealed), ("2026", False)]
    assert choose(place, "etc", NOBODY) in whole
