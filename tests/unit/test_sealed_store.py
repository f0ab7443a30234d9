"""What a store seals on its way, and which of a plain and a sealed file counts on the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pyrage
import pytest

from ntt_backup.config.sealing import NOT_SEALED, Keyring, OtherIdentities, SealPolicy
from ntt_backup.dump.store import DUMPS
from ntt_backup.errors import ConfigError, NameTaken, RemoteCannotStore, RemoteUnreachable
from ntt_backup.filestore import sealed as sealed_module
from ntt_backup.filestore.contract import (
    Area,
    FileMissing,
    Range,
    StoredFileDamaged,
    Sum,
    WholeFileDamaged,
)
from ntt_backup.filestore.sealed import ReadableSealedStore, SealedStore
from ntt_backup.pack.age_encryption import CHUNK, HEAD, SEALED_CHUNK, sealed_size
from ntt_backup.snapshot.names import SNAPSHOTS
from tests.helpers.blobs import Person, noise
from tests.helpers.memory_store import MemoryStore

NOW = datetime(2026, 11, 20, tzinfo=UTC)
OWNER, OTHER = Person.new(), Person.new()
VERSION = "db/20260304T120000Z-0badcafe"
NAME, MAP = f"{VERSION}/manifest", f"{VERSION}/map"
DUMP = "20260304T120000Z-0badcafe.dump"
CONTENT = noise(3 * CHUNK, 1)


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(lambda: OWNER.file(tmp_path / "key"))


@pytest.fixture
def within() -> MemoryStore:
    return MemoryStore()


def sealing(
    within: MemoryStore,
    keyring: Keyring | None = None,
    recipient: str = OWNER.public,
    policy: SealPolicy | None = None,
) -> SealedStore:
    """A store that seals for a recipient, where one is given. policy: by default what is read has
    to be sealed where there is one.
    """
    recipients = [recipient] if recipient else []
    policy = policy or SealPolicy(required=bool(recipients))
    return SealedStore(within, within.area, recipients, keyring or Keyring(), policy)


def put(store: SealedStore, name: str, content: bytes = b"content") -> None:
    file = store.write(name)
    for at in range(0, len(content), 1000):
        file.add(content[at : at + 1000])
    assert file.finish() == Sum(len(content), sha256(content).digest())
    file.publish()


def plant(within: MemoryStore, name: str, content: bytes, arrived: datetime = NOW) -> None:
    within.files[name] = content
    within.arrived[name] = arrived


def get(store: ReadableSealedStore, name: str, start: int = 0, length: int = 1 << 20) -> bytes:
    (found,) = store.read([Range(name, start, length)])
    return found


def put_sealed(within: MemoryStore, name: str, person: Person, content: bytes = b"sealed") -> None:
    put(sealing(within, recipient=person.public), name, content)


# --- on its way -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("area", "name", "ending"),
    [(SNAPSHOTS, NAME, ".age"), (DUMPS, DUMP, ".age"), (DUMPS, f"{DUMP}.json", "")],
)
@pytest.mark.parametrize("recipient", ["", OWNER.public], ids=["plain", "sealed"])
def test_a_file_is_sealed_where_there_are_recipients_but_for_records(
    keyring: Keyring, area: Area, name: str, ending: str, recipient: str
) -> None:
    within = MemoryStore(area)
    store = sealing(within, keyring, recipient)
    assert store.placed
    put(store, name, CONTENT)
    if not recipient:
        ending = ""
    (stored,) = within.files
    assert stored == name + ending
    if ending:
        identity = pyrage.x25519.Identity.from_str(OWNER.secret)
        assert pyrage.decrypt(within.files[stored], [identity]) == CONTENT
        assert len(within.files[stored]) == sealed_size(len(CONTENT))
    else:
        assert within.files[stored] == CONTENT
    for opened in (store, sealing(within, keyring)):
        (found,) = opened.list()
        assert (found.name, found.size, found.sealed) == (name, len(CONTENT), bool(ending))
        assert found.arrived == within.arrived[stored]
    assert get(store, name) == CONTENT
    assert store.remove([name]) == 1
    assert within.files == {}


def test_a_file_that_is_dropped_or_refused_leaves_nothing(within: MemoryStore) -> None:
    store = sealing(within)
    file = store.write(NAME)
    file.add(CONTENT)
    file.discard()
    assert (within.files, within.writing) == ({}, 0)

    def lose(verb: str, _: str) -> None:
        if verb in ("add", "poll"):
            raise RemoteUnreachable("the link was lost")

    file = store.write(NAME)
    within.before = lose
    with pytest.raises(RemoteUnreachable):
        file.poll()
    with pytest.raises(RemoteUnreachable):
        file.add(CONTENT)
    file.discard()
    assert (within.files, within.writing) == ({}, 0)
    with pytest.raises(ValueError, match="is not a file of a snapshot"):
        store.write(f"{NAME}/x")


def test_recipients_that_are_none_are_told() -> None:
    with pytest.raises(ConfigError, match="cannot seal"):
        sealing(MemoryStore(), recipient="age1no").write(NAME)


@pytest.mark.parametrize("recipient", ["", OWNER.public], ids=["plain", "sealed"])
def test_a_name_is_taken_by_its_own_kind(within: MemoryStore, recipient: str) -> None:
    store = sealing(within, recipient=recipient)
    put(store, NAME)
    with pytest.raises(NameTaken):
        store.write(NAME)


@pytest.mark.parametrize("recipient", ["", OWNER.public], ids=["plain", "sealed"])
def test_a_file_beside_which_another_one_is_put_is_not_said_to_be_stored(
    within: MemoryStore, recipient: str
) -> None:
    """Somebody has put it there while the file was sent: who reads both takes the first one."""
    store = sealing(within, recipient=recipient)
    other = NAME if recipient else f"{NAME}.age"
    for before in (True, False):
        within.files.clear()
        file = store.write(NAME)
        file.add(b"content")
        file.finish()
        if before:
            plant(within, other, b"planted")
        else:
            within.before = lambda verb, _: plant(within, other, b"") if verb == "list" else None
        with pytest.raises(RemoteCannotStore, match="beside") as caught:
            file.publish()
        assert caught.value.detail == f"snapshots/{other}"
        within.before = lambda *_: None


@pytest.mark.parametrize("recipient", ["", OWNER.public], ids=["plain", "sealed"])
def test_the_other_files_of_a_version_are_not_listed_for_one(
    within: MemoryStore, recipient: str
) -> None:
    store = sealing(within, recipient=recipient)
    asked: list[tuple[str, str]] = []
    within.before = lambda *said: asked.append(said) if said[0] == "list" else None
    file = store.write(NAME)
    file.add(b"content")
    file.finish()
    file.publish()
    assert asked == [("list", NAME if recipient else f"{NAME}.age")]


# --- on its way back ------------------------------------------------------------------------------


def test_what_is_not_sealed_is_damage_of_that_file_alone(
    within: MemoryStore, keyring: Keyring
) -> None:
    put_sealed(within, MAP, OWNER)
    plant(within, NAME, b"planted")
    for lists in (True, False):
        store = sealing(within, keyring)
        if lists:
            assert [one.refused for one in store.list()] == [NOT_SEALED, ""]
        with pytest.raises(WholeFileDamaged, match=f"{NAME} is not sealed"):
            get(store, NAME)
        assert get(store, MAP) == b"sealed"
    # Nor is there a policy where nobody seals.
    assert get(sealing(within, keyring, ""), NAME) == b"planted"
    # It came before the day on which nothing was sealed yet.
    old = sealing(within, keyring, policy=SealPolicy(required=True, until=NOW + timedelta(days=1)))
    assert [one.refused for one in old.list()] == ["", ""]
    assert get(old, NAME) == b"planted"


def test_a_record_is_read_although_it_is_not_sealed() -> None:
    within = MemoryStore(DUMPS)
    for name in (DUMP, f"{DUMP}.json"):
        plant(within, name, b"{}")
    store = sealing(within)
    assert [(one.name, bool(one.refused)) for one in store.list()] == [
        (DUMP, True),
        (f"{DUMP}.json", False),
    ]
    assert get(store, f"{DUMP}.json") == b"{}"


@pytest.mark.parametrize(
    ("policy", "plain_s", "counts"),
    [
        (SealPolicy(), -1, "plain"),
        (SealPolicy(), 0, "plain"),  # A server tells whole seconds.
        (SealPolicy(), None, "plain"),
        (SealPolicy(), 1, "sealed"),
        (SealPolicy(required=True), -1, "sealed"),
        (SealPolicy(required=True), 0, "sealed"),
        (SealPolicy(required=True), None, "sealed"),
        (SealPolicy(required=True), 1, "sealed"),
        (SealPolicy(required=True, until=NOW + timedelta(9)), -1, "plain"),
        (SealPolicy(required=True, until=NOW + timedelta(9)), 0, "sealed"),
        (SealPolicy(required=True, until=NOW + timedelta(9)), None, "sealed"),
        (SealPolicy(required=True, until=NOW + timedelta(9)), 1, "sealed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("lists", [True, False])
def test_of_two_files_of_a_name_the_one_counts_that_came_first(
    within: MemoryStore,
    keyring: Keyring,
    policy: SealPolicy,
    plain_s: float | None,
    counts: str,
    lists: bool,
) -> None:
    """Of those that may be read. plain_s: how long after the sealed one the plain one came; None:
    the target does not say.
    """
    put_sealed(within, NAME, OWNER)
    within.arrived[f"{NAME}.age"] = NOW
    unknown = datetime(1970, 1, 1, tzinfo=UTC)
    arrived = unknown if plain_s is None else NOW + timedelta(seconds=plain_s)
    plant(within, NAME, b"plain!", arrived)
    store = sealing(within, keyring, policy=policy)
    if lists:
        (found,) = store.list()
        assert (found.size, found.sealed, found.refused) == (6, counts == "sealed", "")
    assert get(store, NAME) in (b"sealed", b"plain!")
    assert get(store, NAME).startswith(counts.encode())
    # Both go: one that stayed would come back under the name.
    store.remove([NAME])
    assert within.files == {}


@pytest.mark.parametrize("lists", [True, False])
def test_files_are_removed_as_they_are_stored_and_in_that_order(
    within: MemoryStore, keyring: Keyring, lists: bool
) -> None:
    put_sealed(within, MAP, OWNER)
    plant(within, NAME, b"plain")
    store = sealing(within, keyring)
    if lists:
        list(store.list())
    assert store.remove([NAME, MAP, f"{VERSION}/pack-00001"]) == 2
    assert within.removed == [NAME, f"{MAP}.age"]
    for name in (NAME, MAP):
        with pytest.raises(FileMissing):
            get(store, name)


@pytest.mark.parametrize("at", [100, HEAD - 20, HEAD - 1, HEAD + 5, HEAD + 2 * SEALED_CHUNK + 5])
def test_damage_is_of_the_file_or_of_a_piece_of_it(
    within: MemoryStore, keyring: Keyring, at: int
) -> None:
    put_sealed(within, MAP, OWNER)
    put_sealed(within, NAME, OWNER, CONTENT)
    data = bytearray(within.files[f"{NAME}.age"])
    data[at] ^= 1
    within.files[f"{NAME}.age"] = bytes(data)
    bad = None if at < HEAD else (at - HEAD) // SEALED_CHUNK
    for number in range(3):
        store = sealing(within, keyring)
        assert get(store, MAP) == b"sealed"
        if number == bad or at < HEAD - 16:
            with pytest.raises(StoredFileDamaged, match="damaged") as caught:
                get(store, NAME, number * CHUNK, 10)
            assert caught.value.detail.startswith(f"{NAME}: ")
            assert isinstance(caught.value, WholeFileDamaged) == (at < HEAD)
        elif at < HEAD:  # The nonce: nothing of it can be opened.
            with pytest.raises(StoredFileDamaged):
                get(store, NAME, number * CHUNK, 10)
        else:
            assert get(store, NAME, number * CHUNK, 10) == CONTENT[number * CHUNK :][:10]


@pytest.mark.parametrize("length", [0, 10, HEAD, HEAD + 20, HEAD + SEALED_CHUNK, -1])
def test_a_file_that_is_cut_off_is_damaged(
    within: MemoryStore, keyring: Keyring, length: int
) -> None:
    put_sealed(within, NAME, OWNER, CONTENT)
    put_sealed(within, MAP, OWNER)
    within.files[f"{NAME}.age"] = within.files[f"{NAME}.age"][:length]
    with pytest.raises(StoredFileDamaged):
        list(sealing(within, keyring).read([Range(NAME, at, CHUNK) for at in (0, 2 * CHUNK)]))


def test_a_file_that_is_cut_off_behind_its_listing_is_damaged(
    within: MemoryStore, keyring: Keyring
) -> None:
    put_sealed(within, NAME, OWNER, CONTENT)
    store = sealing(within, keyring)
    list(store.list())
    within.files[f"{NAME}.age"] = within.files[f"{NAME}.age"][:-1]
    with pytest.raises(StoredFileDamaged, match="damaged") as caught:
        get(store, NAME, 2 * CHUNK, 10)
    assert "it is cut off" in caught.value.detail


def test_an_error_comes_when_the_turn_of_its_range_does(
    within: MemoryStore, keyring: Keyring
) -> None:
    put_sealed(within, NAME, OWNER, CONTENT)
    plant(within, MAP, b"planted")
    for name, error in (
        (MAP, WholeFileDamaged),
        (f"{VERSION}/pack-00001", FileMissing),
        ("no name", ValueError),
    ):
        store = sealing(within, keyring)
        reading = store.read([Range(NAME, 0, 9), Range(NAME, 9, 9), Range(name, 0, 1)])
        assert next(reading) == CONTENT[:9]
        assert next(reading) == CONTENT[9:18]
        with pytest.raises(error):
            next(reading)


def test_an_error_of_what_makes_ranges_is_that_error(within: MemoryStore, keyring: Keyring) -> None:
    put_sealed(within, NAME, OWNER)

    def ranges() -> Iterator[Range]:
        yield Range(NAME, 0, 6)
        raise RemoteUnreachable("the link was lost")

    reading = sealing(within, keyring).read(ranges())
    assert next(reading) == b"sealed"
    with pytest.raises(RemoteUnreachable):
        next(reading)


def test_a_key_is_fetched_once_and_kept_up_to_a_number(
    within: MemoryStore, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{VERSION}/pack-{number:05}" for number in range(4)]
    for name in names:
        put_sealed(within, name, OWNER, CONTENT)
    monkeypatch.setattr(sealed_module, "_KEPT_OPEN", 2)
    store = sealing(within, keyring)
    list(store.list())
    for name in names[:2]:
        list(store.read([Range(name, at, 10) for at in range(0, 3 * CHUNK, 1000)]))
    per_file = len(range(0, 3 * CHUNK, 1000)) + 1
    assert within.requests["read"] == 2 * per_file
    get(store, names[2])
    assert [*store._opened] == names[1:3]
    store.remove(names[1:2])
    assert [*store._opened] == names[2:3]
    with closing(store):
        assert not within.closed
    assert within.closed


# --- by whom --------------------------------------------------------------------------------------


def test_a_file_that_is_sealed_for_others_is_damage_where_another_one_opens(
    within: MemoryStore, keyring: Keyring
) -> None:
    put_sealed(within, MAP, OTHER)
    put_sealed(within, NAME, OWNER)
    # Whichever is read first.
    for first, second in ((MAP, NAME), (NAME, MAP)):
        store = sealing(within, keyring)
        for name in (first, second):
            if name == NAME:
                assert get(store, NAME) == b"sealed"
                continue
            with pytest.raises(WholeFileDamaged) as caught:
                get(store, MAP)
            assert (
                caught.value.detail == f"{MAP}: it is sealed for other identities than those given"
            )


def test_where_nothing_opens_the_identity_is_told(within: MemoryStore, tmp_path: Path) -> None:
    for name in (NAME, MAP, NAME.replace("0bad", "1bad")):
        put_sealed(within, name, OTHER)
    plant(within, NAME.replace("0bad", "2bad"), b"planted")
    plant(within, NAME.replace("0bad", "3bad") + ".age", b"junk")
    for name in (NAME, MAP):
        keyring = Keyring(lambda: OWNER.file(tmp_path / "key"))
        with pytest.raises(OtherIdentities, match="for other identities than those in"):
            get(sealing(within, keyring), name)
    with pytest.raises(ConfigError, match="no identity is given"):
        get(sealing(within), NAME)
    with pytest.raises(ConfigError, match="cannot read the identity file"):
        get(sealing(within, Keyring(lambda: tmp_path / "none")), NAME)


def test_junk_that_is_called_sealed_is_damage_also_where_there_is_no_identity(
    within: MemoryStore,
) -> None:
    """Whoever may write to the target can put it there."""
    plant(within, f"{NAME}.age", b"junk" * 2000)
    plant(within, MAP, b"good")
    store = sealing(within, recipient="")
    with pytest.raises(WholeFileDamaged) as caught:
        get(store, NAME)
    assert "it is no sealed file" in caught.value.detail
    assert get(store, MAP) == b"good"


def test_only_so_many_files_are_tried_and_those_that_came_first(
    within: MemoryStore, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the target puts any number of files there, but none before the first."""
    monkeypatch.setattr(sealed_module, "_MOST_TRIED", 2)
    names = [f"db/20260304T120000Z-{number:08x}/manifest" for number in range(5)]
    for day, name in enumerate(names):
        put_sealed(within, name, OTHER if day else OWNER)
        within.arrived[f"{name}.age"] = NOW + timedelta(days=day)
    with pytest.raises(WholeFileDamaged):
        get(sealing(within, keyring), names[4])
    within.arrived[f"{names[0]}.age"] = NOW + timedelta(days=9)
    within.requests.clear()
    with pytest.raises(OtherIdentities):
        get(sealing(within, Keyring(keyring._find)), names[4])
    assert within.requests["read"] == 3


def test_what_does_not_tell_is_not_tried(within: MemoryStore, keyring: Keyring) -> None:
    """Packs are many; each version has a manifest."""
    put_sealed(within, f"{VERSION}/pack-00001", OTHER)
    put_sealed(within, f"{VERSION}/pack-00002", OWNER)
    with pytest.raises(OtherIdentities):
        get(sealing(within, keyring), f"{VERSION}/pack-00001")
    assert within.requests["read"] == 1
