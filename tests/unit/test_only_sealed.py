"""Where a target is sealed, what is not sealed is refused: anybody who may write can plant it."""

from __future__ import annotations

import random
import threading
from datetime import UTC, date, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.cli.commands.pack import _mount_bucket as of_bucket
from ntt_backup.cli.commands.restore import lines
from ntt_backup.cli.common import Common
from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.host_key import OF_PACKS, HostKey, HostKeys, Origin
from ntt_backup.config.sealing import NOT_SEALED, SealPolicy
from ntt_backup.dump import remote_dir
from ntt_backup.dump.by_objects import DumpsByObjects
from ntt_backup.errors import (
    ConfigError,
    MountImpossible,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
)
from ntt_backup.mount import kernel, packs_or_snapshot
from ntt_backup.mount.image import Options as MountOptions
from ntt_backup.objects import open as opening
from ntt_backup.objects import s3
from ntt_backup.objects.cache import cache_of
from ntt_backup.objects.keys import PackKey
from ntt_backup.objects.tables import PackObject, packs_of
from ntt_backup.pack.format import PackError
from ntt_backup.pack.seal import NotSealed
from ntt_backup.restore.blobs import Restored, Wanted, restore
from ntt_backup.snapshot.origins import NOBODY
from ntt_backup.snapshot.repository import by_objects
from ntt_backup.snapshot.repository.by_objects import RepositoryByObjects
from ntt_backup.snapshot.repository.contract import Range, SnapshotDamaged
from ntt_backup.snapshot.repository.names import pack_name
from ntt_backup.snapshot.repository.open import open_repository
from ntt_backup.snapshot.restore.plan import Options
from ntt_backup.snapshot.restore.version import restore as restore_version
from ntt_backup.snapshot.verify import Question, verify
from ntt_backup.snapshot.versions import choose, facts, versions
from tests.bucket_packs import bucket_settings, by_path, put_large, put_pack
from tests.contract.dumps import record_of
from tests.fake_bucket import FakeBucket
from tests.files import tree
from tests.memory_repository import MemoryRepository
from tests.packs import Person
from tests.snapshots import VERSION, file, put_version

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
    return opening.open_to_read(settings, lambda error, seconds: None, threading.Event())[1]


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
    for module in (opening, remote_dir, s3):
        monkeypatch.setattr(module, "open_bucket", lambda *_, **__: bucket)
    settings = bucket_settings(recipients=[owner.public])
    bucket.put(f"snapshots/{FILE}", b"planted", sha256(b"planted").digest())
    with pytest.raises(SnapshotDamaged, match="not sealed"):
        list(open_repository(settings).read([Range(FILE, 0, 7)]))
    bucket.put(f"pgdump/{DUMP}", b"planted", sha256(b"planted").digest())
    with pytest.raises(RemoteDenied, match="not sealed"):
        list(remote_dir.open_remote_dir(settings).fetch(DUMP))


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
    (pack,) = packs_of(bucket)
    plain = bucket_settings()
    opening.open_to_read(plain, lambda error, seconds: None, threading.Event())[1].open(pack)
    assert cache_of(plain.remote).load(f"{pack.name.pack_id}-{pack.size}") is not None
    with pytest.raises(NotSealed):
        tables(tmp_path, owner).open(pack)


@pytest.mark.parametrize("seals", [False, True])
def test_a_pack_is_what_the_end_of_its_name_says(
    bucket: FakeBucket, tmp_path: Path, owner: Person, seals: bool
) -> None:
    put_pack(bucket, contents(1), owner if seals else None)
    (pack,) = packs_of(bucket)
    other = pack.name._replace(kind="tar" if seals else "sealed")
    bucket.objects[other.key] = bucket.objects.pop(pack.key)
    for policy in ({}, {"unsealed_until": (NOW + timedelta(days=2)).date()}):
        with pytest.raises(NotSealed):
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
    with pytest.raises(PackError, match="another pack than its name says"):
        tables(tmp_path, owner, unsealed_until=(NOW + timedelta(days=2)).date()).open(
            PackObject(name, second.size, NOW)
        )


@pytest.mark.parametrize("kind", ["tar", "sealed"])
def test_a_planted_pack_is_not_mounted_whatever_its_name_says(
    bucket: FakeBucket, tmp_path: Path, owner: Person, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for need in ("require_erofs", "require_mount_point"):
        monkeypatch.setattr(kernel, need, lambda _: None)
    monkeypatch.setattr(packs_or_snapshot, "_serving", lambda: None)
    monkeypatch.setattr(s3, "open_bucket", lambda *_: bucket)
    put_pack(bucket, contents(100))
    (pack,) = packs_of(bucket)
    bucket.objects[pack.name._replace(kind=kind).key] = bucket.objects.pop(pack.key)
    settings = bucket_settings(recipients=[owner.public])
    told: list[str] = []
    why = {"tar": "there is no blob to mount", "sealed": "is sealed: that cannot be mounted"}[kind]
    with pytest.raises(MountImpossible, match=why):
        of_bucket(cast(Common, SimpleNamespace(load=lambda _: settings)))(
            tmp_path, MountOptions(tmp_path, "", told.append)
        )
    assert [NOT_SEALED in one for one in told] == [True] * (kind == "tar")


# --- snapshots ------------------------------------------------------------------------------------


def repository(bucket: FakeBucket, tmp_path: Path, owner: Person, **pack: Any) -> Any:
    from ntt_backup.config.sealing import Keyring

    settings = bucket_settings(recipients=[owner.public], **pack)
    identity = owner.file(tmp_path / "identity")
    keyring = Keyring(lambda: identity)
    return RepositoryByObjects(
        bucket, 5 << 20, settings.recipients, keyring, SealPolicy.of(settings)
    )


def write(place: Any, name: str, content: bytes) -> None:
    file = place.write(name)
    file.add(content)
    file.finish()


def test_a_planted_file_of_a_snapshot_is_damage_of_that_file(tmp_path: Path, owner: Person) -> None:
    bucket = FakeBucket()
    place = repository(bucket, tmp_path, owner)
    other = FILE.replace("0badcafe", "0badcaff")
    write(place, other, b"sealed")
    bucket.put(f"snapshots/{FILE}", b"planted", sha256(b"planted").digest())
    for again in (place, repository(bucket, tmp_path, owner)):
        with pytest.raises(SnapshotDamaged, match=f"{FILE} is not sealed"):
            list(again.read([Range(FILE, 0, 7)]))
        list(again.list())
        with pytest.raises(SnapshotDamaged, match="is not sealed"):
            list(again.read([Range(FILE, 0, 7)]))
        assert list(again.read([Range(other, 0, 6)])) == [b"sealed"]
    bucket.came(f"snapshots/{FILE}", LONG_AGO)
    old = repository(bucket, tmp_path, owner, unsealed_until=NOW.date())
    assert list(old.read([Range(FILE, 0, 7)])) == [b"planted"]


def test_the_sealed_one_of_two_files_counts_and_both_are_removed(
    tmp_path: Path, owner: Person
) -> None:
    bucket = FakeBucket()
    write(repository(bucket, tmp_path, owner), FILE, b"sealed")
    bucket.put(f"snapshots/{FILE}", b"planted", sha256(b"planted").digest())
    for lists in (True, False):
        place = repository(bucket, tmp_path, owner, unsealed_until=(NOW + timedelta(9)).date())
        if lists:
            assert [(one.name, one.size) for one in place.list()] == [(FILE, 6)]
        assert list(place.read([Range(FILE, 0, 7)])) == [b"sealed"]
    place.remove([FILE])
    assert bucket.objects == {}


@pytest.mark.parametrize(
    ("sealing", "seconds"),
    [(False, 0), (False, 1), (True, 1)],
    ids=["never sealed, and at once", "never sealed", "sealed since"],
)
def test_an_object_that_is_put_beside_a_file_does_not_hide_it(
    tmp_path: Path, owner: Person, sealing: bool, seconds: int
) -> None:
    """It has the ending of what is sealed, and may even open."""
    bucket = FakeBucket()
    write(RepositoryByObjects(bucket, 5 << 20), FILE, b"good")
    bucket.came(f"snapshots/{FILE}", LONG_AGO)
    other = FakeBucket()
    write(repository(other, tmp_path, owner), FILE, b"junk")
    for junk in (b"x", other.objects[f"snapshots/{FILE}.sealed"]):
        bucket.delete(f"snapshots/{FILE}.sealed")
        bucket.put(f"snapshots/{FILE}.sealed", junk, sha256(junk).digest())
        bucket.came(f"snapshots/{FILE}.sealed", LONG_AGO + timedelta(seconds=seconds))
        for lists in (True, False):
            place = (
                repository(bucket, tmp_path, owner, unsealed_until=NOW.date())
                if sealing
                else RepositoryByObjects(bucket, 5 << 20)
            )
            if lists:
                assert [(one.name, one.size) for one in place.list()] == [(FILE, 4)]
            assert list(place.read([Range(FILE, 0, 7)])) == [b"good"]
    place.remove([FILE])
    assert bucket.objects == {}


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_that_another_object_stands_beside_is_not_said_to_be_stored(
    tmp_path: Path, owner: Person, sealed: bool
) -> None:
    """Somebody has put it there while the file was sent: who reads both takes the first one."""
    bucket = FakeBucket()
    place = repository(bucket, tmp_path, owner) if sealed else RepositoryByObjects(bucket, 5 << 20)
    beside = f"snapshots/{FILE}" if sealed else f"snapshots/{FILE}.sealed"
    bucket.put(beside, b"planted", sha256(b"planted").digest())
    with pytest.raises(RemoteCannotStore, match="beside"):
        write(place, FILE, b"good")


def test_what_is_called_sealed_and_is_not_is_damaged(tmp_path: Path, owner: Person) -> None:
    bucket = FakeBucket()
    bucket.put(f"snapshots/{FILE}.sealed", bytes(9000), sha256(bytes(9000)).digest())
    place = repository(bucket, tmp_path, owner, unsealed_until=(NOW + timedelta(9)).date())
    with pytest.raises(SnapshotDamaged):
        list(place.read([Range(FILE, 0, 7)]))


def put_sealed(place: Any, name: str) -> None:
    """Puts a version with one file."""
    made = MemoryRepository()
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
    checked = verify(repository(bucket, tmp_path, owner), Question())
    assert (checked.versions, len(checked.damaged), checked.exit_code) == (3, 2, 7)


def test_where_no_version_opens_the_identity_is_told_at_once(tmp_path: Path, owner: Person) -> None:
    bucket = FakeBucket()
    for number in range(3):
        place = repository(bucket, tmp_path, owner)
        put_sealed(place, f"2026010{number + 1}T030405Z-0123abcd")
    for ask in (
        lambda place: list(facts(place, versions(place, "etc"))),
        lambda place: choose(place, "etc"),
        lambda place: verify(place, Question()),
        lambda place: list(place.read([Range(next(place.list()).name, 0, 9)])),
    ):
        with pytest.raises(ConfigError, match="for other identities than those in"):
            ask(repository(bucket, tmp_path, Person.new()))


@pytest.mark.parametrize("damage", ["sealed for others", "its key was altered", "is missing"])
def test_a_pack_that_cannot_be_read_costs_its_own_files_alone(
    tmp_path: Path, owner: Person, damage: str
) -> None:
    bucket, made = FakeBucket(), MemoryRepository()
    first, second = "20260102T030405Z-0123abcd", "20260103T030405Z-0123abcd"
    old = [file(f"old{n}", b"%d" % n * 90_000) for n in range(3)]
    put_version(made, old, chain=(first,))
    put_version(made, [*((one, ()) for one, _ in old), file("new")], chain=(first, second))
    place = repository(bucket, tmp_path, owner)
    for name, content in made.files.items():
        write(place, name, content)
    name = pack_name("etc", first, 1)
    key = f"snapshots/{name}.sealed"
    sealed = bytearray(bucket.objects.pop(key))
    if damage.startswith("sealed"):
        write(repository(bucket, tmp_path, Person.new()), name, made.files[name])
    elif damage != "is missing":
        sealed[99] ^= 1
        bucket.put(key, sealed, sha256(sealed).digest())

    def opened() -> Any:
        return repository(bucket, tmp_path, owner)

    done = restore_version(opened, "etc", tmp_path / "to", Options(), trust=True)

    assert tree(tmp_path / "to") == {"new": b"content"}
    assert (done.files, done.wrong, done.exit_code) == (1, 3, 7)
    # An ordinary user is told of owners, too.
    (note,) = [one for one in done.notes if "pack-" in one]
    assert name in note
    assert damage.replace("others", "other identities") in note
    checked = verify(opened(), Question(share=1.0))
    assert sorted(checked.damaged) == [f"etc@{first}", f"etc@{second}"]
    if damage != "is missing":
        assert note in {one.detail for one in checked.wrong}


def test_of_a_pack_that_is_damaged_in_one_place_the_rest_comes_back(
    tmp_path: Path, owner: Person
) -> None:
    bucket, made = FakeBucket(), MemoryRepository()
    chance = random.Random(1)
    put_version(made, [file(f"f{n}", chance.randbytes(1 << 20)) for n in range(4)])
    for name, content in made.files.items():
        write(repository(bucket, tmp_path, owner), name, content)
    key = f"snapshots/{pack_name('etc', VERSION, 1)}.sealed"
    data = bytearray(bucket.objects[key])
    data[len(data) // 8] ^= 1
    bucket.objects[key] = bytes(data)

    done = restore_version(
        lambda: repository(bucket, tmp_path, owner), "etc", tmp_path / "to", Options(), trust=True
    )

    assert sorted(tree(tmp_path / "to")) == ["f1", "f2", "f3"]
    assert (done.wrong, done.exit_code) == (1, 7)


def test_a_listing_of_snapshots_is_bounded(
    tmp_path: Path, owner: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_objects, "_MOST_FILES", 3)
    bucket = FakeBucket()
    for number in range(4):
        name = FILE.replace("0badcafe", f"0badcaf{number}")
        bucket.put(f"snapshots/{name}", b"", sha256(b"").digest())
    with pytest.raises(ProtocolViolation, match="more files"):
        list(repository(bucket, tmp_path, owner).list())


# --- dumps ----------------------------------------------------------------------------------------


def test_a_planted_dump_is_told_and_not_read(owner: Person) -> None:
    bucket = FakeBucket()
    settings = bucket_settings(recipients=[owner.public])
    place = DumpsByObjects(bucket, 5 << 20, settings.recipients, policy=SealPolicy.of(settings))
    bucket.put(f"pgdump/{DUMP}", b"planted", sha256(b"planted").digest())

    (found,) = place.contents().dumps

    assert not found.whole
    assert found.torn == NOT_SEALED
    with pytest.raises(RemoteDenied, match="not sealed") as caught:
        list(place.fetch(DUMP))
    assert "pack.unsealed_until" in caught.value.hint
    bucket.came(f"pgdump/{DUMP}", LONG_AGO)
    policy = SealPolicy(required=True, until=NOW)
    old = DumpsByObjects(bucket, 5 << 20, settings.recipients, policy=policy)
    assert old.contents().dumps[0].refused == ""
    assert list(old.fetch(DUMP)) == [b"planted"]


def test_a_planted_dump_beside_the_sealed_one_changes_nothing(
    tmp_path: Path, owner: Person
) -> None:
    from ntt_backup.config.sealing import Keyring

    bucket = FakeBucket()
    identity = owner.file(tmp_path / "identity")
    place = DumpsByObjects(
        bucket,
        5 << 20,
        (owner.public,),
        Keyring(lambda: identity),
        SealPolicy(required=True),
    )
    upload = place.upload(DUMP)
    upload.send(b"sealed")
    upload.finish()
    upload._upload.finish()
    bucket.put(f"pgdump/{DUMP}", b"planted", sha256(b"planted").digest())
    (found,) = place.contents().dumps
    assert found.refused == ""
    assert b"".join(place.fetch(DUMP)) == b"sealed"


def test_a_junk_object_with_the_ending_of_a_sealed_one_does_not_hide_a_dump() -> None:
    bucket = FakeBucket()
    place = DumpsByObjects(bucket, 5 << 20)
    upload = place.upload(DUMP)
    upload.send(b"a good dump")
    assert upload.finish() == (11, sha256(b"a good dump").hexdigest())
    upload.name(record_of(b"a good dump"))
    bucket.put(f"pgdump/{DUMP}.age", b"x", sha256(b"x").digest())
    (found,) = place.contents().dumps
    assert found.whole
    assert b"".join(place.fetch(DUMP)) == b"a good dump"
    # What goes is what the record names; the other one is a dump without a record, until it is
    # removed by its name.
    assert place.drop([DUMP]) == 1
    assert [key for key in bucket.objects if DUMP in key] == [f"pgdump/{DUMP}.age"]
    assert [one.record for one in place.contents().dumps] == [None]
    place.drop([DUMP])
    assert not place.contents().dumps


def test_a_listing_of_dumps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntt_backup.dump.by_objects._MOST_OBJECTS", 3)
    bucket = FakeBucket()
    for number in range(4):
        bucket.put(f"pgdump/{number}", b"", sha256(b"").digest())
    with pytest.raises(ProtocolViolation, match="more dumps"):
        DumpsByObjects(bucket, 5 << 20).contents()


# --- who made it ----------------------------------------------------------------------------------


def test_sealed_packs_that_this_host_has_not_signed_are_counted_and_read(
    bucket: FakeBucket, tmp_path: Path, owner: Person
) -> None:
    mine, theirs = (HostKey.of(bytes([n]) * 32) for n in (1, 2))
    file = tmp_path / "host.key"
    file.write_text(f"ntt-host-key-1 {mine.secret.hex()}\n")
    file.chmod(0o600)
    keys = HostKeys([mine], file), HostKeys([theirs], file)
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
    keys = HostKeys.of(settings)
    assert keys.origin(OF_PACKS, b"data", spec.sign(b"data")) is Origin.OURS


@pytest.mark.parametrize("planted", ["junk that is called sealed", "one that is not sealed"])
def test_a_planted_manifest_ends_no_command_for_its_set(planted: str, owner: Person) -> None:
    bucket, made = FakeBucket(), MemoryRepository()
    put_version(made, [file("a")])
    name = "snapshots/etc/20261124T000000Z-00000000/manifest"
    sealed = planted.startswith("junk")
    files = {f"snapshots/{one}": bytes(content) for one, content in made.files.items()}
    files[name + (".sealed" if sealed else "")] = b"junk" * 2000
    for key, content in files.items():
        bucket.put(key, content, sha256(content).digest())
    # In the sealed target the good version is as foreign as the planted one.
    policy = SealPolicy(False) if sealed else SealPolicy(True)
    place = RepositoryByObjects(bucket, 8 << 20, policy=policy)
    whole = [one for one in versions(place, "etc") if one.whole]
    told = [(one.version.name[:4], one.header is not None) for one in facts(place, whole)]
    assert told == [("2026", sealed), ("2026", False)]
    assert choose(place, "etc", NOBODY) in whole
