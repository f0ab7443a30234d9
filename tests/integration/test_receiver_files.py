"""The receiver's session for the files in an area, frame by frame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.receiver import file_areas
from ntt_backup.receiver.file_areas import DumpArea, FileArea, FoundFile, SnapshotArea
from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import framing, messages
from ntt_backup.wire.messages import MISSING, SUCCEEDED, TAKEN
from ntt_backup.wire.stored_names import MAX_RECORD
from tests.helpers.receivers import (
    BYE,
    RemoteReceiver,
    ScriptedSession,
    a_dump,
    a_file,
    a_record,
    an_unnamed_file,
    everything,
)

DATA, END = messages.FILE_DATA.frame(0, b"content"), messages.FILE_END.frame(0)
FILES = messages.FILES.frame("")
VERSION = "db/20260304T120000Z-0badcafe"
DUMP = "20260304T120000Z-0badcafe.dump"
NAME = f"{VERSION}/map"
DUMP_NAMES = [f"20260304T120000Z-{number:08x}.dump" for number in range(6)]


class Kind(NamedTuple):
    """An area. name: of a file in it. send: what a client says to store content under a name."""

    area: type[FileArea]
    name: str
    send: Callable[[bytes, str], bytes]

    @property
    def called(self) -> str:
        return self.area.called

    @property
    def other(self) -> str:
        """Another name of the same directory."""
        return self.name.replace("map", "manifest").replace("cafe.", "caff.")


KINDS = [Kind(SnapshotArea, NAME, a_file), Kind(DumpArea, DUMP, a_dump)]


@pytest.fixture(params=KINDS, ids=["snapshots", "dumps"])
def kind(request: pytest.FixtureRequest) -> Kind:
    assert isinstance(request.param, Kind)
    return request.param


class Client(ScriptedSession):
    """Sessions for one area."""

    def __init__(self, root: Path, kind: Kind, *allow: str) -> None:
        super().__init__(root, allow or ALLOWED)
        self.kind = kind

    def files(self, *said: bytes) -> Client:
        self._files(self.kind.called, *said)
        return self


@pytest.fixture
def client(root: Path, kind: Kind) -> Client:
    return Client(root, kind)


@pytest.fixture
def snapshots(root: Path) -> Client:
    return Client(root, KINDS[0])


@pytest.fixture
def dumps(root: Path) -> Client:
    return Client(root, KINDS[1])


def reading(name: str, length: int = 1 << 30) -> bytes:
    return messages.READ.frame(0, length, name)


def removing(*names: str) -> bytes:
    return messages.REMOVE.frame(names)


def removed(client: ScriptedSession) -> list[int]:
    """How many files were removed by each REMOVE, or told of by each FILES."""
    return [messages.DONE.read(one) for kind, one in client.answers if kind == messages.DONE]


def content_of(client: ScriptedSession) -> bytes:
    return b"".join(
        messages.PIECE.read(memoryview(payload))
        for kind, payload in client.answers
        if kind == messages.PIECE
    )


# --- files come and go ----------------------------------------------------------------------------


def test_several_files_go_and_come_back_in_one_session(client: Client, kind: Kind) -> None:
    contents = {
        kind.name.replace("0badcafe", f"{size:08x}"): os.urandom(size)
        for size in (0, 1, (3 << 20) + 1)
    }
    said = [kind.send(content, name) for name, content in contents.items()]
    client.files(*said, FILES, *map(reading, contents), BYE)
    told = {name: size for name, size in client.listed() if not name.endswith(".json")}
    assert told == {name: len(content) for name, content in contents.items()}
    assert client.listed() == sorted(client.listed())
    assert content_of(client) == b"".join(contents.values())
    assert client.kinds.count(messages.BLOB_END) == 3


def test_files_of_several_slots_go_at_once(snapshots: Client) -> None:
    """Each has its own content, and its sum."""
    contents = {f"{VERSION}/pack-{slot:05}": os.urandom(300_000 + slot) for slot in range(4)}
    said = []
    for at in range(0, 300_010, 1000):
        for slot, content in enumerate(contents.values()):
            if content[at:]:
                said.append(messages.FILE_DATA.frame(slot, content[at : at + 1000]))
    said += [messages.FILE_END.frame(slot) for slot in range(4)]
    said += [messages.PUBLISH.frame(slot, name) for slot, name in enumerate(contents)]
    snapshots.files(*said, *map(reading, contents), BYE)
    assert snapshots.said() == [SUCCEEDED] * 4
    assert [size for size, _ in snapshots.sums()] == [len(one) for one in contents.values()]
    assert content_of(snapshots) == b"".join(contents.values())


def test_a_slot_is_free_once_its_file_has_ended_in_any_way(snapshots: Client) -> None:
    discard = messages.DISCARD.frame(0)
    snapshots.files(
        *(DATA, discard, discard),
        *(DATA, END, discard),
        *(a_file(b"first", NAME), a_file(b"second", NAME)),
        a_file(b"third", f"{VERSION}/manifest"),
        FILES,
        BYE,
    )
    assert snapshots.said() == [SUCCEEDED, TAKEN, SUCCEEDED]
    assert snapshots.listed() == [(f"{VERSION}/manifest", 5), (NAME, 5)]


PUBLISH = messages.PUBLISH.frame(0, NAME)


@pytest.mark.parametrize(
    "said",
    [
        [DATA],
        [DATA, BYE],
        [DATA, END],
        [DATA, END, BYE],
        [END],
        [DATA, DATA[:-1]],
        [DATA, END, DATA],
        [DATA, END, END],
        [DATA, PUBLISH],
        [PUBLISH],
        [DATA, messages.DISCARD.frame(0), PUBLISH],
        [DATA, END, messages.PUBLISH.frame(1, NAME)],
        [DATA, messages.FILE_END.frame(1), PUBLISH],
        [messages.FILE_DATA.frame(4, b"content")],
        [a_file(b"content", NAME)[:-1]],
        [a_file(b"content", NAME)[:-1] + b"?"],
        [DATA, framing.head(messages.FILE_DATA, framing.MAX_CHUNK + 6)],
        [FILES, reading(NAME), removing(NAME), BYE],
    ],
)
def test_what_has_no_name_is_gone_with_its_session(
    root: Path, kind: Kind, client: Client, said: list[bytes]
) -> None:
    client.files(*(one.replace(NAME.encode(), kind.name.encode()) for one in said))
    assert client.error in ("", "protocol")
    assert everything(root) == {}


def test_a_session_that_only_looks_makes_nothing(root: Path, kind: Kind, client: Client) -> None:
    client.files(FILES, reading(kind.name), removing(kind.name), BYE)
    done = messages.DONE
    assert client.kinds == [messages.READY, done, messages.FILE_SAID, done, messages.LEFT]
    assert client.said() == [MISSING]
    assert everything(root) == {}


def test_what_the_killed_left_is_no_file_and_is_removed_after_an_hour(
    root: Path, kind: Kind, client: Client
) -> None:
    with RemoteReceiver(root) as remote:
        remote.hello(place=False, files=kind.called)
        remote.write(DATA)
        remote.ping()
        os.kill(remote.child.pid, signal.SIGKILL)
        remote.child.wait()
    (left,) = (root / kind.called).iterdir()
    client.files(FILES)
    assert client.listed() == []
    for name, age in {left.name: 7200, ".incoming-1": 60, "by-hand": 7200}.items():
        (root / kind.called / name).touch()
        os.utime(root / kind.called / name, (time.time() - age,) * 2)
    client.files(kind.send(b"content", kind.name), FILES)
    assert (kind.name, 7) in client.listed()
    files = {path.name for path in (root / kind.called).iterdir()}
    assert files >= {".incoming-1", "by-hand"}
    assert left.name not in files


def test_what_a_living_session_writes_seldom_stays(root: Path, kind: Kind) -> None:
    """As a snapshot's pack does while hours of unchanged content are read."""
    with closing(os.open(root, os.O_RDONLY)) as fd:
        area, other = kind.area(fd), kind.area(fd)
        seldom = area.begin()
        seldom.write(memoryview(b"content"))
        os.utime(root / kind.called / seldom.name, (0, 0))
        if kind.area is DumpArea:
            record = other.begin()
            record.write(memoryview(a_record(b"content")))
            other.publish(record, f"{kind.name}.json")
            record.remove()

        other.begin().remove()

        seldom.sync()
        area.publish(seldom, kind.name)
        seldom.remove()
        area.close()
        other.close()
    assert (root / kind.called / kind.name).read_bytes() == b"content"


def test_a_bit_that_flips_on_the_disk_is_noticed_wherever_it_lies(
    snapshots: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning is summed while the rest comes in, the rest at the end."""
    content = bytes(3 << 20)
    monkeypatch.setattr(file_areas, "_STEP", 1 << 20)
    real = os.pread
    snapshots.files(an_unnamed_file(content))
    (right,) = snapshots.sums()
    for place in (0, 1 << 20, len(content) - 1):

        def pread(fd: int, length: int, at: int, place: int = place) -> bytes:
            data = bytearray(real(fd, length, at))
            if at <= place < at + length:
                data[place - at] ^= 1
            return bytes(data)

        monkeypatch.setattr(os, "pread", pread)
        snapshots.files(an_unnamed_file(content))
        ((size, digest),) = snapshots.sums()
        assert size == right[0]
        assert digest != right[1]


def test_an_error_of_the_disk_behind_the_writing_is_told(
    root: Path, client: Client, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells a descriptor of it once."""
    monkeypatch.setattr(file_areas, "_STEP", 1 << 20)
    told: list[int] = []

    def fsync(fd: int) -> None:
        told.append(fd)
        if len(told) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    assert client.files(an_unnamed_file(bytes(4 << 20))).error == kind.area.word
    assert everything(root) == {}


# --- the directory --------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["symlink", "file"])
def test_an_area_is_a_directory_of_its_own(
    root: Path, kind: Kind, client: Client, made: str
) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    if made == "symlink":
        (root / kind.called).symlink_to(elsewhere)
    else:
        (root / kind.called).touch()
    for said in (FILES, DATA, reading(kind.name), removing(kind.name)):
        assert client.files(said).error == "place"
    assert list(elsewhere.iterdir()) == []


def test_files_are_for_the_account_alone(root: Path, snapshots: Client, dumps: Client) -> None:
    before = os.umask(0)
    try:
        snapshots.files(a_file(b"content", NAME))
        dumps.files(a_dump(b"content", DUMP))
    finally:
        os.umask(before)
    made = {path.name: path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert made.pop("pgdump") == made.pop("snapshots") == 0o700
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_directories_go_with_their_last_file(root: Path, snapshots: Client) -> None:
    other = NAME.replace("map", "manifest")
    snapshots.files(a_file(b"content", NAME), a_file(b"content", other), removing(NAME), FILES)
    assert snapshots.listed() == [(other, 7)]
    snapshots.files(removing(other, NAME))
    assert snapshots.error == ""
    assert removed(snapshots) == [1]
    assert list((root / "snapshots").iterdir()) == []


def test_reading_files_is_a_right_of_its_own_but_for_records(root: Path, kind: Kind) -> None:
    for allow in ([kind.area.word], [kind.area.word, "get"]):
        client = Client(root, kind, *allow)
        for name in {kind.name: 0, f"{kind.name}.age": 0}:
            error = "" if "get" in allow else "refused"
            assert client.files(FILES, reading(name)).error == error
    client = Client(root, KINDS[1], "dump")
    client.files(a_dump(b"content", DUMP), reading(f"{DUMP}.json"))
    assert content_of(client) == a_record(b"content")


def test_a_version_that_goes_meanwhile_hides_no_other(root: Path) -> None:
    names = [f"db/2026030{day}T120000Z-0badcafe/map" for day in (4, 5, 6)]
    for name in names:
        (root / "snapshots" / name).parent.mkdir(parents=True)
        (root / "snapshots" / name).touch()
    with closing(os.open(root, os.O_RDONLY)) as fd:
        area, other = SnapshotArea(fd), SnapshotArea(fd)
        found = area.found("db/")
        first = next(found)

        assert other.remove([names[1]], frozenset({"replace"})) == 1

        assert [(one.name, one.size) for one in (first, *found)] == [(names[0], 0), (names[2], 0)]
        area.close()
        other.close()


def test_few_files_stay_open_and_none_after_the_session(root: Path) -> None:
    names = [f"db/20260304T120000Z-{number:08x}/map" for number in range(40)]
    for name in names:
        (root / "snapshots" / name).parent.mkdir(parents=True)
        (root / "snapshots" / name).touch()
    with closing(os.open(root, os.O_RDONLY)) as fd:
        before = len(os.listdir("/proc/self/fd"))
        area = SnapshotArea(fd)
        opened = {area.open(name) for name in names}
        assert len(opened) < len(names)  # Some got the number of one that was closed.
        assert len(os.listdir("/proc/self/fd")) <= before + 17
        area.remove(names[:1], frozenset({"replace"}))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        area.open(names[1])
        area.close()
        assert len(os.listdir("/proc/self/fd")) == before


# --- dumps and their records ----------------------------------------------------------------------


def test_what_another_session_removes_meanwhile_is_removed(
    root: Path, dumps: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps.files(a_dump(b"content", DUMP))
    real = DumpArea.found

    def found(self: DumpArea, below: str = "") -> Iterator[FoundFile]:
        yield from list(real(self, below))
        for path in (root / "pgdump").iterdir():
            path.unlink()

    monkeypatch.setattr(DumpArea, "found", found)
    assert dumps.files(removing(DUMP, f"{DUMP}.json")).error == ""
    assert removed(dumps) == [0]


@pytest.mark.parametrize("record_first", [False, True])
def test_dumps_are_removed_in_the_order_in_which_they_are_named(
    dumps: Client, monkeypatch: pytest.MonkeyPatch, record_first: bool
) -> None:
    """So that no increment is left without what it needs. A dump whose record was removed before it
    would stay for ever if the receiver were killed between the two.
    """
    dumps.files(*(a_dump(b"content", name) for name in DUMP_NAMES), BYE)
    files = [file for name in reversed(DUMP_NAMES) for file in (name, f"{name}.json")]
    gone: list[str] = []
    real = os.unlink

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        gone.append(name)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    asked = [file for name in reversed(DUMP_NAMES) for file in (f"{name}.json", name)]
    dumps.files(removing(*(asked if record_first else files)))
    assert gone == files


@pytest.mark.parametrize("allow", [("dump",), ALLOWED])
@pytest.mark.parametrize("ending", ["", ".age"])
def test_a_record_goes_with_its_dump_or_behind_it(
    root: Path, allow: tuple[str, ...], ending: str
) -> None:
    """A dump without its record would stay for ever."""
    client = Client(root, KINDS[1], *allow)
    for name in DUMP_NAMES:
        client.files(
            *(an_unnamed_file(b"content"), a_file(a_record(b"content"), f"{name}.json", 1)),
            messages.PUBLISH.frame(0, name + ending),
        )
        assert client.said() == [SUCCEEDED, SUCCEEDED]
    old = DUMP_NAMES[2]  # The first of the day and the newest two stay without `replace`.
    client.files(removing(f"{old}.json"))
    assert removed(client) == [0]
    client.files(removing(f"{old}.json", old + ending))
    assert removed(client) == [2]
    old = DUMP_NAMES[3]
    client.files(removing(old + ending), removing(f"{old}.json"))
    assert removed(client) == [1, 1]
    left = {path.name.partition(".")[0] for path in (root / "pgdump").iterdir()}
    assert left == {DUMP_NAMES[at].partition(".")[0] for at in (0, 1, 4, 5)}


@pytest.mark.parametrize("ending", ["", ".age"])
def test_a_places_file_has_the_sum_that_its_record_says_and_goes_with_its_dump(
    root: Path, ending: str
) -> None:
    client = Client(root, KINDS[1], "dump", "replace")
    beside = f"{DUMP}.places.jsonl.zst{ending}"
    record = a_record(b"content", places_bytes=5, places_sha256=sha256(b"files").hexdigest())
    client.files(a_file(record, f"{DUMP}.json"))
    client.files(a_file(b"files", beside), a_file(b"content", DUMP + ending))
    assert client.said()[-2:] == [SUCCEEDED, SUCCEEDED]
    client.files(removing(f"{DUMP}.json", DUMP + ending))
    assert removed(client) == [1]  # The record stays as long as a file of the dump does.
    client.files(removing(f"{DUMP}.json", beside))
    assert removed(client)[-1] == 2
    assert list((root / "pgdump").iterdir()) == []


def test_a_places_file_without_a_record_or_of_another_one_is_refused(root: Path) -> None:
    for record, content in ((None, b"files"), (a_record(b"content"), b"files")):
        client = Client(root, KINDS[1])
        before = [a_file(record, f"{DUMP}.json", 1)] if record else []
        client.files(*before, a_file(content, f"{DUMP}.places.jsonl.zst"))
        assert SUCCEEDED not in client.said()[len(before) :]
        assert not (root / "pgdump" / f"{DUMP}.places.jsonl.zst").exists()


@pytest.mark.parametrize("first", ["", ".age"])
def test_no_file_is_named_beside_one_that_differs_by_its_ending_alone(
    root: Path, kind: Kind, client: Client, first: str
) -> None:
    """Which of the two counts would be open."""
    other = "" if first else ".age"
    record = [a_file(a_record(b"content"), f"{DUMP}.json")] if kind.area is DumpArea else []
    client.files(*record, a_file(b"content", kind.name + first))
    client.files(a_file(b"content", kind.name + other))
    assert client.said() == [TAKEN]
    assert (root / kind.called / (kind.name + first)).read_bytes() == b"content"
    assert not (root / kind.called / (kind.name + other)).exists()


def test_a_record_without_its_dump_is_removed(dumps: Client) -> None:
    dumps.files(a_file(a_record(b"content"), f"{DUMP}.json"), removing(f"{DUMP}.json"))
    assert removed(dumps) == [1]


def test_what_is_torn_or_somebody_elses_is_told_as_it_is(root: Path, dumps: Client) -> None:
    place = root / "pgdump"
    names = DUMP_NAMES[:5]
    for name in names:
        dumps.files(a_dump(b"content", name))
    whole, missing, unreadable, bare, long = names
    (place / missing).unlink()
    (place / f"{unreadable}.json").write_text("{")
    (place / f"{bare}.json").unlink()
    (place / f"{long}.json").write_bytes(bytes(MAX_RECORD + 2))
    (place / "by-hand.dump.json").touch()
    (place / f"{whole}.link").symlink_to(whole)
    dumps.files(FILES)
    found = dict(dumps.listed())
    assert {name for name in found if not name.endswith(".json")} == {whole, unreadable, bare, long}
    assert found[f"{long}.json"] == MAX_RECORD + 2
    assert len(found) == 8

    files = [file for name in names for file in (name, f"{name}.json")]
    Client(root, KINDS[1], "dump").files(removing(*files))

    left = {path.name for path in place.iterdir() if path.name.startswith("2026")}
    assert {name.partition(".")[0] for name in left} == {
        name.partition(".")[0] for name in (whole, unreadable, bare, long)
    }


def test_a_file_that_is_put_beside_a_dump_makes_it_no_younger(root: Path) -> None:
    """Else a client without `replace` could have its own good dumps of the last days removed."""
    client, day = Client(root, KINDS[1], "dump"), 86400
    noon = time.time() // day * day - day // 2
    for number, name in enumerate(DUMP_NAMES):
        client.files(a_dump(b"content", name))
        os.utime(root / "pgdump" / name, (noon - number * day,) * 2)
    for name in DUMP_NAMES:
        client.files(a_file(b"evil", f"{name}.age"))
        assert client.said() == [TAKEN]
        # Somebody has put it there by hand.
        (root / "pgdump" / f"{name}.age").write_bytes(b"evil")
    client.files(removing(*(name + end for name in DUMP_NAMES for end in ("", ".age", ".json"))))
    left = {path.name for path in (root / "pgdump").iterdir()}
    assert left >= {name + end for name in DUMP_NAMES for end in ("", ".json")}


PIN = f"pin-{'0' * 16}-{'ab' * 32}"


def pin_of(kind: Kind, mac: int = 0) -> str:
    """The name of a pin of what `kind.name` belongs to."""
    of = VERSION + "/" if kind.area is SnapshotArea else DUMP + "."
    return f"{of}pin-{'0' * 16}-{mac:064x}"


def test_a_pin_is_small_beside_what_is_there_and_not_one_of_too_many(
    root: Path, kind: Kind, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that may only add would fill the disk with files that no retention removes."""
    assert client.files(a_file(b"why", pin_of(kind))).error == "refused"
    client.files(kind.send(b"content", kind.name.replace("map", "manifest")))
    assert client.files(a_file(bytes(MAX_RECORD + 1), pin_of(kind))).error == "protocol"
    monkeypatch.setattr(file_areas, "MAX_PINS", 2)
    client.files(a_file(b"why", pin_of(kind)), a_file(b"why", pin_of(kind, 1), 1))
    assert client.said() == [SUCCEEDED, SUCCEEDED]
    assert client.files(a_file(b"why", pin_of(kind, 2))).error == kind.area.word  # as for a quota
    client.files(removing(pin_of(kind)))
    assert removed(client) == [1]


def test_a_client_that_may_only_add_removes_no_pin_and_nothing_that_is_pinned(root: Path) -> None:
    client = Client(root, KINDS[1], "dump")
    client.files(a_dump(b"content", DUMP_NAMES[2]), *(a_dump(b"", one) for one in DUMP_NAMES[:2]))
    client.files(*(a_dump(b"content", one) for one in DUMP_NAMES[3:]))
    pinned = DUMP_NAMES[1]
    pin = f"{pinned}.{PIN}"
    client.files(a_file(b"why", pin))
    client.files(removing(*(one + end for one in DUMP_NAMES for end in ("", ".json")), pin))
    left = {path.name for path in (root / "pgdump").iterdir()}
    assert left >= {pinned, f"{pinned}.json", pin}
    assert DUMP_NAMES[0] not in left
    owner = Client(root, KINDS[1])
    owner.files(removing(pin), removing(pinned, f"{pinned}.json"))
    assert removed(owner) == [1, 2]
