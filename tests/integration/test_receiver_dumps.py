"""The receiver's session for dumps of the catalog, frame by frame."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.blobdir.open import closing
from ntt_backup.receiver.dump_directory import DumpDirectory, FoundDump
from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import dump_messages, framing, read_messages
from tests.receiver_driver import BYE, ScriptedSession, a_dump, everything

pytestmark = pytest.mark.usefixtures("placed")

NAME = "20260304T120000Z-0badcafe.dump"
DATA = framing.frame(framing.DUMP_DATA, b"content")
END, DUMPS = framing.frame(framing.DUMP_END), framing.frame(framing.DUMPS)


def fetching(name: str) -> bytes:
    return dump_messages.named(framing.FETCH, name)


def dropping(*names: str) -> bytes:
    return dump_messages.named(framing.DROP, *names)


@pytest.fixture
def client(root: Path) -> ScriptedSession:
    return ScriptedSession(root, ALLOWED)


def listed(client: ScriptedSession) -> list[tuple[str, int | None, bytes]]:
    """What the last session was told of."""
    told = [payload for kind, payload in client.answers if kind == framing.DUMP]
    return [(name, size, record) for name, size, _, record in map(dump_messages.read_dump, told)]


def test_several_dumps_go_and_come_back_in_one_session(client: ScriptedSession) -> None:
    contents = {
        f"20260304T120000Z-{size:08x}.dump": os.urandom(size) for size in (0, 1, (3 << 20) + 1)
    }
    said = [a_dump(content, name) for name, content in contents.items()]
    client.dumps(*said, DUMPS, *map(fetching, contents), BYE)
    assert [(name, size) for name, size, _ in listed(client)] == [
        (name, len(content)) for name, content in contents.items()
    ]
    pieces = (
        read_messages.read_piece(memoryview(payload))
        for kind, payload in client.answers
        if kind == framing.PIECE
    )
    assert b"".join(pieces) == b"".join(contents.values())
    assert client.kinds.count(framing.BLOB_END) == 3


@pytest.mark.parametrize(
    "said",
    [
        [DATA],
        [DATA, END],
        [DATA, END, BYE],
        [END],
        [DATA, DATA[:-1]],
        [DATA, END, DATA],
        [DATA, END, END],
        [DATA, framing.frame(framing.NAME, NAME.encode(), b"{}")],
        [framing.frame(framing.NAME, NAME.encode(), b"{}")],
        [a_dump(b"content", NAME)[:-1]],
        [a_dump(b"content", NAME)[:-1] + b"?"],
        [DATA, framing.head(framing.DUMP_DATA, framing.MAX_CHUNK + 5)],
    ],
)
def test_what_has_no_name_is_gone_with_its_session(
    root: Path, client: ScriptedSession, said: list[bytes]
) -> None:
    client.dumps(*said)
    assert client.error in ("", "protocol")
    assert set(everything(root)) == {"by-hash"}


def test_what_the_killed_left_is_removed_after_an_hour(root: Path, client: ScriptedSession) -> None:
    client.dumps(a_dump(b"content", NAME))
    for name, age in {".incoming-0": 7200, ".incoming-1": 60, "by-hand": 7200}.items():
        (root / "pgdump" / name).touch()
        os.utime(root / "pgdump" / name, (time.time() - age,) * 2)
    client.dumps(DATA)
    left = {path.name for path in (root / "pgdump").iterdir()}
    assert left == {NAME, f"{NAME}.json", ".incoming-1", "by-hand"}


def test_what_a_living_session_writes_seldom_stays(root: Path) -> None:
    """As a snapshot's pack does while hours of unchanged content are read."""
    with closing(os.open(root, os.O_RDONLY)) as fd:
        directory = DumpDirectory(fd)
        seldom = directory.begin()
        seldom.write(memoryview(b"content"))
        os.utime(root / "pgdump" / seldom.name, (0, 0))

        DumpDirectory(fd).begin().remove()

        seldom.sync()
        directory.name(seldom, NAME, b"{}")
        seldom.remove()
    assert (root / "pgdump" / NAME).read_bytes() == b"content"


@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_pgdump_is_a_directory_of_its_own(root: Path, client: ScriptedSession, kind: str) -> None:
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    if kind == "symlink":
        (root / "pgdump").symlink_to(elsewhere)
    else:
        (root / "pgdump").touch()
    for said in (DUMPS, a_dump(b"content", NAME), fetching(NAME), dropping(NAME)):
        assert client.dumps(said).error == "place"
    assert list(elsewhere.iterdir()) == []


def test_a_session_that_only_looks_makes_nothing(root: Path, client: ScriptedSession) -> None:
    client.dumps(DUMPS, fetching(NAME), dropping(NAME), BYE)
    assert client.kinds == [
        framing.READY,
        framing.DONE,
        framing.BLOB_END,
        framing.DONE,
        framing.LEFT,
    ]
    assert read_messages.read_blob_end(client.answers[2][1])[0] == read_messages.BROKEN
    assert set(everything(root)) == {"by-hash"}


def test_fetching_a_dump_is_a_right_of_its_own(root: Path) -> None:
    for allow, error in ((["dump"], "refused"), (["dump", "get"], "")):
        client = ScriptedSession(root, allow)
        assert client.dumps(DUMPS, fetching(NAME)).error == error


def test_what_another_session_drops_meanwhile_is_dropped(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.dumps(a_dump(b"content", NAME))
    real = DumpDirectory.found

    def found(self: DumpDirectory) -> Iterator[FoundDump]:
        yield from list(real(self))
        for path in (root / "pgdump").iterdir():
            path.unlink()

    monkeypatch.setattr(DumpDirectory, "found", found)
    assert client.dumps(dropping(NAME)).error == ""


def test_dumps_are_dropped_in_the_order_in_which_they_are_named(
    client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no increment is left without what it needs."""
    names = [f"20260304T120000Z-{number:08x}.dump" for number in range(6)]
    client.dumps(*(a_dump(b"content", name) for name in names), BYE)
    gone: list[str] = []
    real = os.unlink

    def unlink(name: str, *, dir_fd: int | None = None) -> None:
        gone.append(name)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    client.dumps(dropping(*reversed(names)))
    assert [name for name in gone if name in names] == names[::-1]


def test_what_is_torn_or_somebody_elses_is_told_as_it_is(
    root: Path, client: ScriptedSession
) -> None:
    place = root / "pgdump"
    names = [f"20260304T120000Z-{number:08x}.dump" for number in range(5)]
    for name in names:
        client.dumps(a_dump(b"content", name))
    whole, missing, unreadable, bare, long = names
    (place / missing).unlink()
    (place / f"{unreadable}.json").write_text("{")
    (place / f"{bare}.json").unlink()
    (place / f"{long}.json").write_bytes(bytes(dump_messages.MAX_RECORD + 2))
    (place / "by-hand.dump.json").touch()
    client.dumps(DUMPS)
    found = {name: (size, bool(record)) for name, size, record in listed(client)}
    assert found == {
        whole: (7, True),
        missing: (None, True),
        unreadable: (7, True),
        long: (7, False),
    }

    ScriptedSession(root, ["dump"]).dumps(dropping(*names))

    left = {path.name for path in place.iterdir() if path.name.startswith("2026")}
    assert {name.partition(".")[0] for name in left} == {
        name.partition(".")[0] for name in (whole, unreadable, bare, long)
    }
