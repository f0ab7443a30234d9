"""Dumps of the catalog by the receiver, by the remote's shell and in a bucket, plain and sealed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pyrage
import pytest

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sealing import Keyring, SealPolicy
from ntt_backup.config.sections import RunSettings
from ntt_backup.config.signing_key import SigningKey, SigningKeys
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import DUMPS, fetch_dump, list_dumps, publish_dump, remove_dumps
from ntt_backup.errors import (
    BackupError,
    DumpImpossible,
    NameTaken,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    Unsupported,
)
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.by_receiver import FileStoreByReceiver
from ntt_backup.filestore.by_shell import FileStoreByShell
from ntt_backup.filestore.contract import FileMissing, FileStore, Range
from ntt_backup.filestore.open import connect
from ntt_backup.filestore.pins import put_pin, read_pins
from ntt_backup.filestore.sealed import SealedStore
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.packstore import marker
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.wire.stored_names import MAX_DUMPS
from tests.contract.dumps import NAME, record_of, send_dump
from tests.contract.harness import PATIENT, Machine
from tests.helpers.blobs import Person
from tests.helpers.bucket_packs import packs_in
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket
from tests.helpers.receivers import PROJECT
from tests.helpers.waiting import wait_until

OWNER = Person.new()
CONTENT = bytes(range(256)) * 21_000
NAMES = [f"2026030{day}T120000Z-0badcafe.dump" for day in range(1, 6)]
WAYS = {"receiver": FileStoreByReceiver, "shell": FileStoreByShell}
DIRECT = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))

Open = Callable[[], FileStore]
Keep = Callable[[FileStore], FileStore]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "by-hash").mkdir(parents=True)
    return root


@pytest.fixture
def spec(root: Path, machine: Machine) -> SessionSpec:
    return SessionSpec(machine, str(root), "0" * 12, "run", "dump", RunSettings(**PATIENT))


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Returns a store as it is, which is closed at the end."""
    with ExitStack() as stack:
        yield lambda store: stack.enter_context(closing(store))


@pytest.fixture
def by_receiver(spec: SessionSpec, keep: Keep) -> Open:
    return lambda: keep(FileStoreByReceiver(spec, DUMPS))


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


InBucket = Callable[..., FileStore]


@pytest.fixture
def in_bucket(bucket: FakeBucket, keep: Keep) -> InBucket:
    """Opens the store of dumps in a bucket, as `filestore.open` does."""

    def opened(recipient: str = "") -> FileStore:
        within = FileStoreByBucket(bucket, SMALLEST_PART, DUMPS)
        recipients = [recipient] if recipient else []
        return keep(SealedStore(within, DUMPS, recipients, Keyring(), SealPolicy()))

    return opened


@pytest.fixture(params=["receiver", "shell", "fake", "weak", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def sealed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def open_anew(
    request: pytest.FixtureRequest, kind: str, sealed: bool, spec: SessionSpec, tmp_path: Path
) -> Open:
    """Opens one store, as often as it is called."""
    bucket = (
        open_bucket(request.getfixturevalue("s3").bucket())
        if kind == "s3"
        else FakeBucket(weak=kind == "weak")
    )
    if kind not in WAYS:
        marker.make(packs_in(bucket))
    keyring = Keyring(lambda: OWNER.file(tmp_path / "key"))

    def opened() -> FileStore:
        within: FileStore = FileStoreByBucket(bucket, SMALLEST_PART, DUMPS)
        if kind == "receiver":
            within = FileStoreByReceiver(spec, DUMPS)
        elif kind == "shell":
            within = FileStoreByShell(spec, DUMPS)
        recipients = [OWNER.public] if sealed else []
        return SealedStore(within, DUMPS, recipients, keyring, SealPolicy(required=sealed))

    return opened


def get(store: FileStore, name: str, size: int = 1 << 30) -> bytes:
    return b"".join(fetch_dump(store, Stored(name, size, None)))


def test_a_dump_goes_comes_back_and_is_removed(
    open_anew: Open, kind: str, sealed: bool, root: Path
) -> None:
    with closing(open_anew()) as trying:
        trying.try_out()
    assert not (root / "pgdump").exists()
    with closing(open_anew()) as store:
        assert (list_dumps(store), store.placed) == ([], True)
        before = datetime.now(UTC) - timedelta(seconds=2)
        record = send_dump(store, CONTENT)
    with closing(open_anew()) as store:
        (found,) = list_dumps(store)
        assert (found.name, found.size, found.record) == (NAME, len(CONTENT), record)
        assert (found.whole, found.sealed) == (True, sealed)
        assert found.arrived is not None
        assert before <= found.arrived <= datetime.now(UTC) + timedelta(seconds=2)
        assert get(store, NAME) == CONTENT
        if kind in WAYS:
            stored = root / "pgdump" / (NAME + ".age" * sealed)
            assert {path.name for path in stored.parent.iterdir()} == {stored.name, f"{NAME}.json"}
            assert {path.stat().st_mode & 0o777 for path in stored.parent.iterdir()} == {0o600}
            assert stored.parent.stat().st_mode & 0o777 == 0o700
            if sealed:
                identity = pyrage.x25519.Identity.from_str(OWNER.secret)
                assert pyrage.decrypt(stored.read_bytes(), [identity]) == CONTENT
        store.remove([NAME, f"{NAME}.json"])
        assert list_dumps(store) == []


def test_a_pin_lies_beside_a_dump_and_goes_with_it(open_anew: Open) -> None:
    keys = SigningKeys([SigningKey.of(bytes(32))], Path("host.key"))
    with closing(open_anew()) as store:
        send_dump(store, CONTENT)
        assert put_pin(store, DUMPS, NAME, keys, "of the old machine")
    with closing(open_anew()) as store:
        (found,) = list_dumps(store)
        assert read_pins(store, DUMPS, found.pins, keys) == {NAME: "of the old machine"}
        assert remove_dumps(store, [NAME]) == 1
        assert [*store.list()] == []


def test_ranges_of_several_dumps_come_in_their_order(open_anew: Open) -> None:
    contents = {name: os.urandom(300_000) for name in NAMES[:3]}
    with closing(open_anew()) as store:
        for name, content in contents.items():
            send_dump(store, content, name)
        ranges = [Range(name, at, 1000) for at in (0, 1000, 150_000, 299_500) for name in contents]
        ranges += [Range(NAMES[0], at, 100_000) for at in range(0, 300_000, 100_000)]
        assert list(store.read(ranges)) == [
            contents[name][at : at + length] for name, at, length in ranges
        ]
        with pytest.raises(FileMissing):
            list(store.read([Range(NAMES[3], 0, 1)]))


def test_a_dump_is_seen_by_nobody_before_it_is_published(open_anew: Open, root: Path) -> None:
    with closing(open_anew()) as store, closing(open_anew()) as other:
        for end in ("give up", "publish"):
            upload = store.write(NAME)
            upload.add(CONTENT)
            assert upload.finish() == (len(CONTENT), sha256(CONTENT).digest())
            assert list_dumps(other) == []
            if end == "publish":
                publish_dump(store, upload, NAME, record_of(CONTENT))
            upload.discard()
        assert [one.whole for one in list_dumps(other)] == [True]
        with pytest.raises(NameTaken):
            send_dump(other, b"another")
        assert get(other, NAME) == CONTENT
    if (root / "pgdump").exists():
        assert not list((root / "pgdump").glob(".*"))


def test_what_is_removed_is_no_more_found_by_who_has_read_it(open_anew: Open) -> None:
    with closing(open_anew()) as store:
        for name in NAMES:
            send_dump(store, b"content", name)
        assert len(list_dumps(store)) == 5
        assert remove_dumps(store, NAMES[:2]) == 2
        assert [one.name for one in list_dumps(store)] == NAMES[2:]
        for name in (NAMES[0], f"{NAMES[0]}.json"):
            with pytest.raises(FileMissing):
                list(store.read([Range(name, 0, 1)]))


@DIRECT
def test_a_dump_has_arrived_when_it_got_its_name(
    root: Path, spec: SessionSpec, keep: Keep, way: type[FileStoreByReceiver | FileStoreByShell]
) -> None:
    """Not when its last byte came: a client could wait for weeks before it asks for the name."""
    store = keep(way(spec, DUMPS))
    upload = store.write(NAME)
    upload.add(b"content")
    upload.finish()
    for path in (root / "pgdump").iterdir():
        os.utime(path, (time.time() - 80_000,) * 2)
    before = datetime.now(UTC).replace(microsecond=0)
    publish_dump(store, upload, NAME, record_of(b"content"))
    (found,) = list_dumps(store)
    assert found.arrived is not None
    assert before - timedelta(seconds=1) <= found.arrived <= datetime.now(UTC)
    (root / "pgdump" / NAME).unlink()
    assert [(one.size, one.arrived) for one in list_dumps(store)] == [(None, None)]


def test_a_dump_beside_one_that_is_only_tried_out_keeps_its_directory(by_receiver: Open) -> None:
    trying, store = by_receiver(), by_receiver()
    trying.try_out()
    assert list_dumps(store) == []
    trying.close()
    send_dump(store, b"content")
    assert [one.name for one in list_dumps(store)] == [NAME]


def test_the_newest_dumps_stay_where_only_replace_may_remove_them(
    spec: SessionSpec, machine: Machine
) -> None:
    """A record alone is not removed, either: its dump would stay for ever."""
    with closing(FileStoreByReceiver(forced(spec, machine), DUMPS)) as store:
        assert "replace" not in store.banner.allowed
        for name in NAMES:
            send_dump(store, b"content", name)
        assert store.remove([f"{NAMES[0]}.json"]) == 0
        # The first of the day, and the newest two.
        assert remove_dumps(store, NAMES[::-1]) == 2
        assert [one.name for one in list_dumps(store) if one.whole] == [
            NAMES[0],
            *NAMES[3:],
        ]


def test_records_are_read_by_who_may_read_no_dump(spec: SessionSpec, machine: Machine) -> None:
    with closing(FileStoreByReceiver(forced(spec, machine), DUMPS)) as store:
        record = send_dump(store, b"content")
        assert [one.record for one in list_dumps(store)] == [record]
        with pytest.raises(Unsupported, match="may not get"):
            get(store, NAME)


def forced(spec: SessionSpec, machine: Machine) -> SessionSpec:
    """How a receiver is reached that may only take dumps."""
    program = "from ntt_backup.receiver.__main__ import main; raise SystemExit(main())"
    run = f"PYTHONPATH={PROJECT} exec {sys.executable} -c '{program}'"
    machine.tool("python3", f"{run} --root {spec.root} --allow dump")
    return spec


def test_more_dumps_than_may_lie_there_are_refused(
    spec: SessionSpec, bucket: FakeBucket, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody has put more there."""
    few = DUMPS._replace(most=4)
    stores: dict[type[BackupError], FileStore] = {
        RemoteUnreachable: keep(FileStoreByReceiver(spec, few)),
        ProtocolViolation: keep(FileStoreByBucket(bucket, SMALLEST_PART, few)),
        RemoteDenied: FileStoreByShell(spec, DUMPS),
    }
    for name in NAMES[:2]:
        send_dump(stores[RemoteUnreachable], b"content", name)
        send_dump(stores[ProtocolViolation], b"content", name)
    monkeypatch.setattr("ntt_backup.dump.store.MAX_DUMPS", 2)
    for store in stores.values():
        assert len(list_dumps(store)) == 2
    send_dump(stores[ProtocolViolation], b"content", NAMES[2])
    send_dump(stores[RemoteDenied], b"content", NAMES[2])
    for error, store in stores.items():
        with pytest.raises(error):
            list_dumps(store)


def test_the_receiver_names_no_more_dumps_than_may_lie_there(root: Path, by_receiver: Open) -> None:
    (root / "pgdump").mkdir()
    for number in range(MAX_DUMPS):
        (root / "pgdump" / f"20260304T120000Z-{number:08x}.dump.json").touch()
    with pytest.raises(RemoteCannotStore):
        send_dump(by_receiver(), b"content")
    assert len(list((root / "pgdump").iterdir())) == MAX_DUMPS
    (root / "pgdump" / f"20260304T120000Z-{0:08x}.dump.json").unlink()
    send_dump(by_receiver(), b"content")
    assert (root / "pgdump" / NAME).read_bytes() == b"content"


def test_a_receiver_that_takes_no_dumps_is_named_before_it_is_asked(
    root: Path, spec: SessionSpec, machine: Machine
) -> None:
    """One of before dumps would take the HELLO for that of a session that writes."""
    words = "NTT-RECEIVE 1 version=0 hash=sha256 allow=put,list,verify,get,replace"
    startup = f"printf '\\n{words}\\n'; head -c 1 >{root}/said; exit 1"
    with pytest.raises(DumpImpossible) as caught:
        connect(replace(spec, transport=replace(machine, startup=startup)), DUMPS)
    assert "forced command" in caught.value.message
    assert "add dump to --allow" in caught.value.hint
    assert not (root / "said").exists() or (root / "said").read_bytes() == b""


# --- by the remote's shell ------------------------------------------------------------------------


def test_a_remote_without_a_new_python_takes_dumps_by_its_shell(
    spec: SessionSpec, machine: Machine
) -> None:
    tar = replace(spec, run=RunSettings(strategy="tar", **PATIENT))
    assert isinstance(connect(tar, DUMPS), FileStoreByShell)
    machine.tool("python3", "printf '\\nNTT-LOADER 1 python=3.7.1\\n'; exit 1")
    assert isinstance(connect(spec, DUMPS), FileStoreByShell)
    with pytest.raises(Unsupported, match=r"snapshots need Python 3\.8"):
        connect(tar, SNAPSHOTS)


def test_a_shell_without_the_tools_for_it_says_of_no_dump_when_it_came(
    spec: SessionSpec, machine: Machine
) -> None:
    store = FileStoreByShell(spec, DUMPS)
    send_dump(store, b"content")
    machine.tool("stat", "exit 1")
    machine.tool("date", "exit 1")
    assert [(one.size, one.arrived) for one in list_dumps(store)] == [(7, None)]


def test_a_dump_that_stands_still_for_hours_is_not_taken_for_a_dead_one(
    root: Path, spec: SessionSpec
) -> None:
    """As one of a series does while nothing has changed: sh locks no file."""
    still = FileStoreByShell(spec, DUMPS).write(NAMES[4])
    still.add(b"content")
    wait_until(lambda: any(one.stat().st_size for one in (root / "pgdump").glob("*")), "content")
    (path,) = (root / "pgdump").iterdir()
    os.utime(path, (time.time() - 7200,) * 2)

    send_dump(FileStoreByShell(spec, DUMPS), b"another one")

    assert still.finish() == (7, sha256(b"content").digest())
    still.discard()


def test_a_link_that_is_lost_within_a_dump_is_not_its_end(
    spec: SessionSpec, machine: Machine
) -> None:
    store = FileStoreByShell(spec, DUMPS)
    send_dump(store, b"content")
    machine.tool("tail", "printf cont; kill -KILL $PPID")
    with pytest.raises(RemoteUnreachable):
        get(store, NAME)


def test_the_shell_syncs_the_files_of_a_dump_and_not_their_file_system_alone(
    root: Path, spec: SessionSpec, machine: Machine, tmp_path: Path
) -> None:
    """What stands behind FUSE or SMB hears of a file's own sync only."""
    called = tmp_path / "called"
    machine.tool("sync", f'ls -di "$@" >>"{called}"')
    send_dump(FileStoreByShell(spec, DUMPS), b"content")
    synced = called.read_text().split()
    assert {str(path.stat().st_ino) for path in (root / "pgdump").iterdir()} <= set(synced)


# --- in a bucket ----------------------------------------------------------------------------------


def test_a_trial_tells_of_a_bucket_that_takes_no_content(
    bucket: FakeBucket, in_bucket: InBucket
) -> None:
    def refuse(verb: str, key: str) -> None:
        if verb == "put_part":
            raise RemoteDenied("read-only")

    bucket.before = refuse
    with pytest.raises(RemoteDenied, match="read-only"):
        in_bucket().try_out()


def test_a_dump_whose_last_answer_was_lost_has_its_name(
    bucket: FakeBucket, in_bucket: InBucket
) -> None:
    lost = RemoteUnreachable("the answer was lost")

    def lose(verb: str, key: str) -> None:
        if verb == "complete":
            bucket.after = lambda verb, key: None
            raise lost

    store = in_bucket()
    upload = store.write(NAME)
    upload.add(CONTENT)
    upload.finish()
    bucket.after = lose
    publish_dump(store, upload, NAME, record_of(CONTENT))
    assert list_dumps(store)[0].whole


@pytest.mark.parametrize("recipient", ["", OWNER.public], ids=["plain", "sealed"])
@pytest.mark.parametrize("planted", [b"{}", record_of(b"CONTENT").to_json().encode()])
def test_a_record_that_somebody_plants_for_a_dump_on_its_way_ends_the_dump(
    bucket: FakeBucket, in_bucket: InBucket, recipient: str, planted: bytes
) -> None:
    """Whoever may list uploads knows the name before the record is stored."""
    key = f"pgdump/{NAME}.json"
    bucket.after = lambda verb, _: verb == "put_part" and bucket.objects.setdefault(key, planted)
    with pytest.raises(NameTaken, match="somebody else") as caught:
        send_dump(in_bucket(recipient), CONTENT)
    assert caught.value.detail == key
    # The dump has no name, so nobody takes it for one.
    assert bucket.objects == {key: planted}


@pytest.mark.parametrize("ending", ["", ".age"])
@pytest.mark.parametrize("planted", [b"x", b"CONTENT"])
def test_content_that_somebody_plants_for_a_dump_on_its_way_ends_the_dump(
    bucket: FakeBucket, in_bucket: InBucket, ending: str, planted: bytes
) -> None:
    key = f"pgdump/{NAME}{ending}"
    bucket.after = lambda verb, _: verb == "put_part" and bucket.objects.setdefault(key, planted)
    store = in_bucket(OWNER.public if ending else "")
    with pytest.raises(NameTaken, match="somebody else") as caught:
        send_dump(store, CONTENT)
    assert caught.value.detail == key
    # No record of ours vouches for what has the size of the dump.
    assert [one.record for one in list_dumps(store)] == [None]


def test_a_dump_that_was_killed_leaves_its_parts_for_a_day(
    bucket: FakeBucket, in_bucket: InBucket
) -> None:
    old, young = bucket.create_upload(f"pgdump/{NAME}"), bucket.create_upload(f"pgdump/{NAME}")
    pack = bucket.create_upload("packs/one")
    for upload_id, hours in ((old, 25), (young, 23), (pack, 25)):
        bucket.begun(upload_id, datetime.now(UTC) - timedelta(hours=hours))
    send_dump(in_bucket(), b"content")
    assert {one.upload_id for one in bucket.uploads("")} == {young, pack}
