"""Dumps of the catalog by the receiver, by the remote's shell, and where neither takes them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pyrage
import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.sealing import Keyring
from ntt_backup.config.sections import RunSettings
from ntt_backup.dump.by_objects import DumpsByObjects
from ntt_backup.dump.by_receiver import DumpsByReceiver
from ntt_backup.dump.by_shell import DumpsByShell
from ntt_backup.dump.record import Contents
from ntt_backup.dump.remote_dir import connect
from ntt_backup.errors import (
    ConfigError,
    DumpImpossible,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
)
from ntt_backup.objects import store_format
from ntt_backup.objects.bucket import Bucket
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.wire.dump_messages import MAX_DUMPS
from tests.contract.dumps import NAME, record_of, send_dump
from tests.contract.harness import PATIENT, Machine
from tests.environment import wait_until
from tests.fake_bucket import SMALLEST_PART, FakeBucket
from tests.lying_receiver import LYING_RECEIVER
from tests.packs import Person
from tests.receiver_driver import PROJECT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "by-hash").mkdir(parents=True)
    return root


@pytest.fixture
def spec(root: Path, machine: Machine) -> SessionSpec:
    return SessionSpec(machine, str(root), "0" * 12, "run", "dump", RunSettings(**PATIENT))


@pytest.mark.parametrize("way", [DumpsByReceiver, DumpsByShell])
def test_a_dump_goes_comes_back_and_is_dropped(
    root: Path, spec: SessionSpec, way: type[DumpsByReceiver | DumpsByShell]
) -> None:
    content = bytes(range(256)) * 20_000
    place = way(spec)
    place.try_out()
    place.close()
    place = way(spec)
    assert not (root / "pgdump").exists()
    send_dump(place, content)
    assert {path.name for path in (root / "pgdump").iterdir()} == {NAME, f"{NAME}.json"}
    assert {path.stat().st_mode & 0o777 for path in (root / "pgdump").iterdir()} == {0o600}
    assert (root / "pgdump").stat().st_mode & 0o777 == 0o700
    (found,) = place.contents().dumps
    assert (found.name, found.size, found.record) == (NAME, len(content), record_of(content))
    assert b"".join(place.fetch(NAME)) == content
    assert place.drop([NAME]) == 1
    assert list((root / "pgdump").iterdir()) == []
    place.close()


@pytest.mark.parametrize("way", [DumpsByReceiver, DumpsByShell])
def test_a_dump_has_arrived_when_it_got_its_name(
    root: Path, spec: SessionSpec, way: type[DumpsByReceiver | DumpsByShell]
) -> None:
    """Not when its last byte came: a client could wait for weeks before it asks for the name."""
    place = way(spec)
    upload = place.upload(NAME)
    upload.send(b"content")
    upload.finish()
    for path in (root / "pgdump").iterdir():
        os.utime(path, (0, 0))
    before = datetime.now(UTC).replace(microsecond=0)
    upload.name(record_of(b"content"))
    (found,) = place.contents().dumps
    assert found.arrived is not None
    assert before - timedelta(seconds=1) <= found.arrived <= datetime.now(UTC)
    (root / "pgdump" / NAME).unlink()
    assert [(one.size, one.arrived) for one in place.contents().dumps] == [(None, None)]
    place.close()


def test_a_shell_without_the_tools_for_it_says_of_no_dump_when_it_came(
    spec: SessionSpec, machine: Machine
) -> None:
    place = DumpsByShell(spec)
    send_dump(place, b"content")
    machine.tool("stat", "exit 1")
    machine.tool("date", "exit 1")
    assert [(one.size, one.arrived) for one in place.contents().dumps] == [(7, None)]


def test_a_dump_of_a_bucket_has_arrived_when_the_bucket_says_so() -> None:
    bucket = FakeBucket()
    before = datetime.now(UTC)
    send_dump(DumpsByObjects(bucket, SMALLEST_PART), b"content")
    (found,) = DumpsByObjects(bucket, SMALLEST_PART).contents().dumps
    assert found.arrived is not None
    assert before <= found.arrived <= datetime.now(UTC)


def test_a_dump_that_stands_still_for_hours_is_not_taken_for_a_dead_one(
    root: Path, spec: SessionSpec
) -> None:
    """As one of a series does while nothing has changed: sh locks no file."""
    still = DumpsByShell(spec).upload("20260305T120000Z-0badcafe.dump")
    still.send(b"content")
    wait_until(lambda: any(one.stat().st_size for one in (root / "pgdump").glob("*")), "content")
    (path,) = (root / "pgdump").iterdir()
    os.utime(path, (time.time() - 7200,) * 2)

    send_dump(DumpsByShell(spec), b"another one")

    assert still.finish() == (7, sha256(b"content").hexdigest())
    still.give_up()


def test_a_link_that_is_lost_within_a_dump_is_not_its_end(
    spec: SessionSpec, machine: Machine
) -> None:
    place = DumpsByShell(spec)
    send_dump(place, b"content")
    machine.tool("cat", "printf cont; kill -KILL $PPID")
    with pytest.raises(RemoteUnreachable):
        list(place.fetch(NAME))


def test_the_shell_syncs_the_files_of_a_dump_and_not_their_file_system_alone(
    root: Path, spec: SessionSpec, machine: Machine, tmp_path: Path
) -> None:
    """What stands behind FUSE or SMB hears of a file's own sync only."""
    called = tmp_path / "called"
    machine.tool("sync", f'ls -di "$@" >>"{called}"')
    send_dump(DumpsByShell(spec), b"content")
    synced = called.read_text().split()
    assert {str(path.stat().st_ino) for path in (root / "pgdump").iterdir()} <= set(synced)


def test_a_dump_beside_one_that_is_only_tried_out_keeps_its_directory(spec: SessionSpec) -> None:
    trying, place = DumpsByReceiver(spec), DumpsByReceiver(spec)
    trying.try_out()
    assert place.contents().dumps == ()
    trying.close()
    send_dump(place, b"content")
    assert [one.name for one in place.contents().dumps] == [NAME]
    place.close()


@pytest.mark.parametrize(
    "answer",
    [
        "say(dump('20260304T120000Z-0badcafe.dump', 1, 0, b'{}')); say(given(1))",
        "say(dump('20260304T120000Z-0badcafe.dump', 1, -1, b'{}')); say(numbered(DONE, 1))",
        "say(dump('20260304T120000Z-0badcafe.dump', 1, (1 << 63) - 1, b'{}'))",
        "say(frame(DUMP, bytes(46)))",
        "say(head(DUMP, 1 << 30))",
        "say(dump_sum(1, bytes(32)))",
        "os._exit(0)",
    ],
)
def test_dumps_that_cannot_be_end_the_session(
    spec: SessionSpec, machine: Machine, tmp_path: Path, answer: str
) -> None:
    program = tmp_path / "lying.py"
    program.write_text(LYING_RECEIVER.replace("{answer}", answer))
    machine.tool("python3", f"PYTHONPATH={PROJECT} exec {sys.executable} {program}")
    place = connect(spec)
    with pytest.raises(RemoteUnreachable):
        place.contents()


def test_more_dumps_than_may_lie_there_are_refused(
    spec: SessionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the receiver where one more gets its name, and by us where somebody has put more there."""
    monkeypatch.setattr("ntt_backup.dump.by_receiver._MOST", 2)
    monkeypatch.setattr("ntt_backup.dump.by_objects.MAX_DUMPS", 2)
    bucket = FakeBucket()
    for day in range(1, 4):
        receiver, objects = DumpsByReceiver(spec), DumpsByObjects(bucket, SMALLEST_PART)
        name = f"2026030{day}T120000Z-0badcafe.dump"
        send_dump(receiver, b"content", name)
        send_dump(objects, b"content", name)
        if day < 3:
            assert len(receiver.contents().dumps) == len(objects.contents().dumps) == day
            receiver.close()
    with pytest.raises(RemoteUnreachable) as caught:
        receiver.contents()
    assert "too many" in caught.value.detail
    with pytest.raises(RemoteDenied, match="more than 2 dumps"):
        objects.contents()


def test_the_receiver_names_no_more_dumps_than_may_lie_there(root: Path, spec: SessionSpec) -> None:
    (root / "pgdump").mkdir()
    for number in range(MAX_DUMPS):
        (root / "pgdump" / f"20260304T120000Z-{number:08x}.dump.json").touch()
    with pytest.raises(RemoteCannotStore):
        send_dump(DumpsByReceiver(spec), b"content")
    assert len(list((root / "pgdump").iterdir())) == MAX_DUMPS
    (root / "pgdump" / f"20260304T120000Z-{0:08x}.dump.json").unlink()
    send_dump(DumpsByReceiver(spec), b"content")
    assert (root / "pgdump" / NAME).read_bytes() == b"content"


def test_a_remote_without_a_new_python_takes_dumps_by_its_shell(
    spec: SessionSpec, machine: Machine
) -> None:
    machine.tool("python3", "printf '\\nNTT-LOADER 1 python=3.7.1\\n'; exit 1")
    assert isinstance(connect(spec), DumpsByShell)


def test_a_receiver_that_takes_no_dumps_is_named_before_it_is_asked(
    root: Path, spec: SessionSpec, machine: Machine
) -> None:
    """One of before dumps would take the HELLO for that of a session that writes."""
    words = "NTT-RECEIVE 1 version=0 hash=sha256 allow=put,list,verify,get,replace"
    forced = replace(machine, startup=f"printf '\\n{words}\\n'; head -c 1 >{root}/said; exit 1")
    with pytest.raises(DumpImpossible) as caught:
        connect(replace(spec, transport=forced))
    assert "forced command" in caught.value.message
    assert "add dump to --allow" in caught.value.hint
    assert not (root / "said").exists() or (root / "said").read_bytes() == b""


@pytest.fixture(params=["fake", "weak", "s3"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    if request.param == "s3":
        return open_bucket(request.getfixturevalue("s3").bucket())
    return FakeBucket(weak=request.param == "weak")


def test_a_dump_goes_into_a_bucket_by_parts_comes_back_and_is_dropped(bucket: Bucket) -> None:
    content = bytes(range(256)) * 41_000
    place = DumpsByObjects(bucket, SMALLEST_PART)
    place.try_out()
    assert list(bucket.uploads("")) == []
    assert place.contents() == Contents((), placed=False)
    store_format.make(bucket)
    upload = place.upload(NAME)
    for at in range(0, len(content), 1 << 20):
        upload.send(content[at : at + (1 << 20)])
    record = record_of(content)
    assert upload.finish() == (record.bytes, record.sha256)
    assert place.contents() == Contents((), placed=True)
    upload.name(record)
    (found,) = place.contents().dumps
    assert (found.name, found.size, found.record) == (NAME, len(content), record)
    assert b"".join(place.fetch(NAME)) == content
    assert place.drop([NAME]) == 1
    assert place.contents().dumps == ()


def test_a_trial_tells_of_a_bucket_that_takes_no_content() -> None:
    bucket = FakeBucket()

    def refuse(verb: str, key: str) -> None:
        if verb == "put_part":
            raise RemoteDenied("read-only")

    bucket.before = refuse
    with pytest.raises(RemoteDenied, match="read-only"):
        DumpsByObjects(bucket, SMALLEST_PART).try_out()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_dump_that_is_given_up_leaves_nothing_in_the_bucket(bucket: Bucket, sealed: bool) -> None:
    """Nor a thread that seals it."""
    place = DumpsByObjects(bucket, SMALLEST_PART, [Person.new().public] if sealed else [])
    upload = place.upload(NAME)
    upload.send(bytes(SMALLEST_PART + 1))
    upload.give_up()
    assert list(bucket.uploads("")) == []
    assert place.contents().dumps == ()


def test_a_dump_whose_last_answer_was_lost_has_its_name() -> None:
    bucket, lost = FakeBucket(), RemoteUnreachable("the answer was lost")

    def lose(verb: str, key: str) -> None:
        if verb == "complete":
            raise lost

    place = DumpsByObjects(bucket, SMALLEST_PART)
    upload = place.upload(NAME)
    upload.send(b"content")
    upload.finish()
    bucket.after = lose
    upload.name(record_of(b"content"))
    assert place.contents().dumps[0].whole


def test_a_record_that_the_bucket_has_already_is_compared() -> None:
    """The answer to the first request for it was lost."""
    bucket = FakeBucket()
    text = record_of(b"content").to_json().encode()
    bucket.before = lambda verb, key: verb == "put" and bucket.objects.setdefault(key, text)
    place = DumpsByObjects(bucket, SMALLEST_PART)
    send_dump(place, b"content")
    assert place.contents().dumps[0].whole


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("planted", [b"{}", record_of(b"CONTENT").to_json().encode()])
def test_a_record_that_somebody_plants_for_a_dump_on_its_way_ends_the_dump(
    sealed: bool, planted: bytes
) -> None:
    """Whoever may list uploads knows the name before the record is stored."""
    bucket, key = FakeBucket(), f"pgdump/{NAME}.json"
    bucket.after = lambda verb, _: verb == "put_part" and bucket.objects.setdefault(key, planted)
    place = DumpsByObjects(bucket, SMALLEST_PART, [Person.new().public] if sealed else [])
    with pytest.raises(NameTaken, match="somebody else") as caught:
        send_dump(place, b"content")
    assert caught.value.detail == key
    # The dump has no name, so nobody takes it for one.
    assert bucket.objects == {key: planted}


@pytest.mark.parametrize("ending", ["", ".age"])
@pytest.mark.parametrize("planted", [b"x", b"CONTENT"])
def test_content_that_somebody_plants_for_a_dump_on_its_way_ends_the_dump(
    ending: str, planted: bytes
) -> None:
    bucket, key = FakeBucket(), f"pgdump/{NAME}{ending}"
    bucket.after = lambda verb, _: verb == "put_part" and bucket.objects.setdefault(key, planted)
    place = DumpsByObjects(bucket, SMALLEST_PART, [Person.new().public] if ending else [])
    with pytest.raises(NameTaken, match="somebody else") as caught:
        send_dump(place, b"content")
    assert caught.value.detail == key
    # No record of ours vouches for what has the size of the dump.
    assert [one.record for one in place.contents().dumps] == [None]


def test_a_dump_that_the_bucket_has_damaged_gets_no_receipt() -> None:
    bucket = FakeBucket(weak=True, opaque=True)
    place = DumpsByObjects(bucket, SMALLEST_PART)

    def damage(verb: str, key: str) -> None:
        if verb == "complete":
            bucket.objects[key] = b"CONTENT"

    upload = place.upload(NAME)
    upload.send(b"content")
    upload.finish()
    bucket.after = damage
    with pytest.raises(RemoteCannotStore, match="not what was sent"):
        upload.name(record_of(b"content"))


def test_a_dump_that_may_not_be_removed_stays_and_is_told() -> None:
    bucket = FakeBucket()
    place = DumpsByObjects(bucket, SMALLEST_PART)
    send_dump(place, b"content")
    bucket.append_only = True
    with pytest.raises(RemoteDenied):
        place.drop([NAME])
    assert place.contents().dumps[0].whole


def test_a_dump_that_was_killed_leaves_its_parts_for_a_day() -> None:
    bucket = FakeBucket()
    place = DumpsByObjects(bucket, SMALLEST_PART)
    old, young = bucket.create_upload(f"pgdump/{NAME}"), bucket.create_upload(f"pgdump/{NAME}")
    pack = bucket.create_upload("packs/one")
    for upload_id, hours in ((old, 25), (young, 23), (pack, 25)):
        bucket.begun(upload_id, datetime.now(UTC) - timedelta(hours=hours))
    send_dump(place, b"content")
    assert {one.upload_id for one in bucket.uploads("")} == {young, pack}


def test_a_dump_whose_upload_somebody_aborts_is_an_outage() -> None:
    bucket = FakeBucket()
    upload = DumpsByObjects(bucket, SMALLEST_PART).upload(NAME)

    def abort(verb: str, key: str) -> None:
        for begun in bucket.uploads("") if verb == "put_part" else ():
            bucket.abort(begun.key, begun.upload_id)

    bucket.before = abort
    upload.send(b"content")
    with pytest.raises(RemoteUnreachable, match="aborted"):
        upload.finish()


def test_a_sealed_dump_is_a_file_of_age(bucket: Bucket, tmp_path: Path) -> None:
    owner, content = Person.new(), bytes(range(256)) * 41_000
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))
    place = DumpsByObjects(bucket, SMALLEST_PART, [owner.public], keyring)
    place.try_out()
    upload, record = place.upload(NAME), record_of(content)
    for at in range(0, len(content), 1 << 20):
        upload.send(content[at : at + (1 << 20)])
    assert upload.finish() == (record.bytes, record.sha256)
    upload.name(replace(record, sealed=upload.sealed))

    (stored,) = place.contents().dumps
    assert stored.whole
    assert stored.record is not None
    assert (stored.record.bytes, stored.record.sha256) == (record.bytes, record.sha256)
    sealed = bucket.get_range(f"pgdump/{NAME}.age", 0, 1 << 30)
    identity = pyrage.x25519.Identity.from_str(owner.secret)
    assert pyrage.decrypt(sealed, [identity]) == content
    assert b"".join(place.fetch(NAME)) == content
    assert place.drop([NAME]) == 1
    assert place.contents().dumps == ()


def test_a_sealed_dump_needs_the_right_identity(tmp_path: Path) -> None:
    bucket, owner, stranger = FakeBucket(), Person.new(), Person.new()
    send_dump(DumpsByObjects(bucket, SMALLEST_PART, [owner.public]), b"content")
    for find, said in (
        (lambda: None, "no identity is given"),
        (lambda: stranger.file(tmp_path / "other"), "for other identities"),
        (lambda: tmp_path / "none", "cannot read the identity file"),
    ):
        place = DumpsByObjects(bucket, SMALLEST_PART, keyring=Keyring(find))
        with pytest.raises(ConfigError, match=said):
            list(place.fetch(NAME))


def test_a_sealed_dump_that_is_damaged_ends_early(tmp_path: Path) -> None:
    bucket, owner = FakeBucket(), Person.new()
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))
    place = DumpsByObjects(bucket, SMALLEST_PART, [owner.public], keyring)
    send_dump(place, bytes(1_000_000))
    key = f"pgdump/{NAME}.age"
    whole = bytearray(bucket.objects[key])
    whole[500_000] ^= 1
    for damaged in (bytes(whole), bucket.objects[key][:-20]):
        bucket.objects[key] = damaged
        assert len(b"".join(place.fetch(NAME))) < 1_000_000
