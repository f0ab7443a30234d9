"""A dump and its record are two files: each alone is told as what it is."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ntt_backup.config.sealing import NOT_SEALED, Keyring, SealPolicy
from ntt_backup.dump import store as store_module
from ntt_backup.dump.record import Stored
from ntt_backup.dump.store import DUMPS, fetch_dump, list_dumps, publish_dump, remove_dumps
from ntt_backup.errors import BackupError, NameTaken, RemoteDenied, RemoteUnreachable
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    FileMissing,
    FileUnreadable,
    StoredFileDamaged,
)
from ntt_backup.filestore.sealed import SealedStore
from ntt_backup.wire.stored_names import MAX_RECORD, PLACES, RECORD
from tests.contract.dumps import NAME, record_of, send_dump
from tests.helpers.blobs import Person, noise
from tests.helpers.memory_store import MemoryStore

NAMES = [f"2026030{day}T120000Z-0badcafe.dump" for day in range(1, 6)]
NOW = datetime(2026, 11, 20, tzinfo=UTC)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(DUMPS)


def records(store: MemoryStore) -> dict[str, object]:
    return {one.name: one.record for one in list_dumps(store)}


def test_a_dump_gets_its_name_behind_its_record(store: MemoryStore) -> None:
    named: list[str] = []
    store.before = lambda verb, name: named.append(name) if verb == "publish" else None
    record = send_dump(store, b"content")
    assert named == [NAME + RECORD, NAME]
    assert store.files[NAME + RECORD] == record.to_json().encode() + b"\n"
    (found,) = list_dumps(store)
    assert (found.name, found.size, found.record, found.whole) == (NAME, 7, record, True)
    assert found.arrived == store.arrived[NAME]
    assert b"".join(fetch_dump(store, found)) == b"content"


def test_a_places_file_gets_its_name_between_record_and_dump_and_goes_with_them(
    store: MemoryStore,
) -> None:
    named: list[str] = []
    store.before = lambda verb, name: named.append(name) if verb == "publish" else None
    upload = store.write(NAME)
    upload.add(b"content")
    upload.finish()
    places = store.write(NAME + PLACES)
    places.add(b"files")
    places.finish()
    publish_dump(store, upload, NAME, record_of(b"content"), places)
    assert named == [NAME + RECORD, NAME + PLACES, NAME]
    assert [one.name for one in list_dumps(store)] == [NAME]
    assert remove_dumps(store, [NAME]) == 1
    assert store.files == {}


@pytest.mark.parametrize("verb", ["add", "finish", "publish"])
@pytest.mark.parametrize("of", [NAME, NAME + RECORD])
def test_a_dump_that_fails_on_its_way_leaves_no_dump(
    store: MemoryStore, verb: str, of: str
) -> None:
    def fail(done: str, name: str) -> None:
        if (done, name) == (verb, of):
            raise RemoteUnreachable("the link was lost")

    store.before = fail
    with pytest.raises(RemoteUnreachable):
        send_dump(store, b"content")
    assert store.writing == 0
    # A record without its dump is told from a good one.
    assert set(store.files) <= {NAME + RECORD}
    assert [one.whole for one in list_dumps(store)] == [False] * len(store.files)


def test_the_name_of_a_record_that_is_taken_ends_the_dump(store: MemoryStore) -> None:
    upload = store.write(NAME)
    upload.add(b"content")
    upload.finish()
    store.files[NAME + RECORD] = b"{}"
    with pytest.raises(NameTaken):
        publish_dump(store, upload, NAME, record_of(b"content"))
    upload.discard()
    assert store.files == {NAME + RECORD: b"{}"}


@pytest.mark.parametrize("append_only", [False, True])
def test_no_record_vouches_for_the_content_of_somebody_else(
    store: MemoryStore, append_only: bool
) -> None:
    upload = store.write(NAME)
    upload.add(b"content")
    upload.finish()
    store.files[NAME], store.arrived[NAME] = b"CONTENT", NOW
    store.append_only = append_only
    with pytest.raises(NameTaken):
        publish_dump(store, upload, NAME, record_of(b"content"))
    upload.discard()
    # Who may not remove the record removes no older dumps either.
    assert set(store.files) == ({NAME, NAME + RECORD} if append_only else {NAME})


def test_each_file_alone_is_told_as_it_is(store: MemoryStore) -> None:
    made = [send_dump(store, b"content", name) for name in NAMES]
    whole, bare, lost, unreadable, long = NAMES
    del store.files[bare + RECORD]
    del store.files[lost]
    store.files[unreadable + RECORD] = b"{"
    text = store.files[long + RECORD].strip()
    store.files[long + RECORD] = text + b" " * (MAX_RECORD - len(text) + 1)
    found = {one.name: one for one in list_dumps(store)}
    assert {one: found[one].record for one in found} == {
        whole: made[0],
        bare: None,
        lost: made[2],
        unreadable: None,
        long: made[4],
    }
    assert [found[one].size for one in NAMES] == [7, 7, None, 7, 7]
    assert (found[lost].arrived, found[lost].whole) == (None, False)


def test_a_record_that_is_cut_off_at_its_bound_is_none(store: MemoryStore) -> None:
    """No more of it is read, however large it is."""
    send_dump(store, b"content")
    text = store.files[NAME + RECORD].strip()
    store.files[NAME + RECORD] = b" " * (MAX_RECORD + 1 - len(text)) + text
    assert records(store) == {NAME: record_of(b"content")}
    store.files[NAME + RECORD] = b" " + store.files[NAME + RECORD]
    assert records(store) == {NAME: None}


@pytest.mark.parametrize(
    "error", [FileMissing("gone"), StoredFileDamaged("rotten"), FileUnreadable("EIO")]
)
def test_a_record_that_cannot_be_read_hides_no_other(store: MemoryStore, error: Exception) -> None:
    made = {name: send_dump(store, b"content", name) for name in NAMES}
    bad = {NAMES[0], NAMES[2], NAMES[3]}

    def fail(verb: str, name: str) -> None:
        if verb == "read" and name.removesuffix(RECORD) in bad:
            raise error

    store.before = fail
    assert records(store) == {name: None if name in bad else made[name] for name in NAMES}


@pytest.mark.parametrize(
    "error", [RemoteUnreachable("the link was lost"), RemoteDenied("no right to read")]
)
def test_what_is_wrong_with_the_target_hides_no_record(
    store: MemoryStore, error: BackupError
) -> None:
    send_dump(store, b"content")

    def fail(verb: str, _: str) -> None:
        if verb == "read":
            raise error

    store.before = fail
    with pytest.raises(type(error)) as caught:
        list_dumps(store)
    assert caught.value is error


def test_a_target_that_does_not_say_when_a_dump_came_is_not_believed(store: MemoryStore) -> None:
    send_dump(store, b"content")
    store.arrived[NAME] = UNKNOWN_ARRIVAL
    assert [one.arrived for one in list_dumps(store)] == [None]


def test_of_too_many_dumps_no_record_is_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        send_dump(store, b"content", name)
    for most in (5, 4):
        monkeypatch.setattr(store_module, "MAX_DUMPS", most)
        store.requests.clear()
        if most == 5:
            assert len(records(store)) == 5
            continue
        with pytest.raises(RemoteDenied, match="more than 4 dumps"):
            list_dumps(store)
        assert store.requests["read"] == 0


def test_a_dump_is_read_in_pieces_up_to_its_end(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PIECE", 100)
    content = noise(1050, 1)
    send_dump(store, content)
    (found,) = list_dumps(store)
    assert [len(one) for one in fetch_dump(store, found)] == [100] * 10 + [50]
    # It is shorter than was listed, or larger.
    store.files[NAME] = content[:300]
    assert b"".join(fetch_dump(store, found)) == content[:300]
    store.files[NAME] = content * 2
    assert b"".join(fetch_dump(store, found)) == content
    del store.files[NAME]
    with pytest.raises(FileMissing):
        list(fetch_dump(store, found))
    assert list(fetch_dump(store, Stored(NAME, None, None))) == []


def test_dumps_are_removed_in_order_each_before_its_record(store: MemoryStore) -> None:
    for name in NAMES:
        send_dump(store, b"content", name)
    assert remove_dumps(store, []) == 0
    assert store.requests["remove"] == 0
    assert remove_dumps(store, [NAMES[3], NAMES[1], NAME.replace("0304", "0309")]) == 3
    assert store.removed == [
        *(NAMES[3], NAMES[3] + RECORD),
        *(NAMES[1], NAMES[1] + RECORD),
    ]


def test_what_the_target_keeps_is_not_counted(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        send_dump(store, b"content", name)
    real = store.remove
    monkeypatch.setattr(
        store, "remove", lambda names: real([one for one in names if NAMES[1] not in one])
    )
    assert remove_dumps(store, NAMES[:3]) == 2
    assert set(records(store)) == {NAMES[1], *NAMES[3:]}
    store.append_only = True
    with pytest.raises(RemoteDenied):
        remove_dumps(store, NAMES)


# --- sealed ---------------------------------------------------------------------------------------


def sealing(store: MemoryStore, owner: Person, path: Path) -> SealedStore:
    keyring = Keyring(lambda: owner.file(path))
    return SealedStore(store, DUMPS, [owner.public], keyring, SealPolicy(required=True))


def test_the_record_of_a_sealed_dump_tells_of_what_is_in_it(
    store: MemoryStore, tmp_path: Path
) -> None:
    sealed, content = sealing(store, Person.new(), tmp_path / "key"), noise(200_000, 1)
    record = send_dump(sealed, content)
    assert set(store.files) == {f"{NAME}.age", NAME + RECORD}
    (found,) = list_dumps(sealed)
    assert (found.whole, found.sealed, found.refused) == (True, True, "")
    assert (record.bytes, record.sha256) == (200_000, hashlib.sha256(content).hexdigest())
    assert b"".join(fetch_dump(sealed, found)) == content
    # Whoever does not know that it is sealed takes it for no dump.
    (found,) = [one for one in list_dumps(store) if one.record]
    assert (found.name, found.whole) == (NAME, False)
    assert remove_dumps(sealed, [NAME]) == 1
    assert store.files == {}


def test_a_planted_dump_is_told_and_not_read(store: MemoryStore, tmp_path: Path) -> None:
    send_dump(store, b"planted")
    sealed = sealing(store, Person.new(), tmp_path / "key")
    (found,) = list_dumps(sealed)
    assert (found.whole, found.torn) == (False, NOT_SEALED)
    with pytest.raises(StoredFileDamaged, match="is not sealed"):
        list(fetch_dump(sealed, found))
