"""The receiver's session for snapshots, frame by frame."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ntt_backup.blobdir.open import closing
from ntt_backup.receiver import incoming
from ntt_backup.receiver.snapshot_directory import SnapshotDirectory
from ntt_backup.receiver.terms import ALLOWED
from ntt_backup.wire import file_messages, framing
from tests.receiver_driver import (
    BYE,
    RemoteReceiver,
    ScriptedSession,
    a_dump,
    a_file,
    everything,
)

NAME = "db/20260304T120000Z-0badcafe/map"
DATA, END = framing.frame(framing.FILE_DATA, b"content"), a_file(b"content", NAME)
FORGET, FILES = framing.frame(framing.FORGET), file_messages.listing("")


@pytest.fixture
def client(root: Path) -> ScriptedSession:
    return ScriptedSession(root, ALLOWED)


@pytest.mark.parametrize(
    "said",
    [
        [DATA],
        [DATA, BYE],
        [DATA, FORGET, FORGET, BYE],
        [END[:-1]],
        [END[:-1] + b"?"],
        [a_file(b"content", NAME, bytes(32))],
        [DATA, framing.head(framing.FILE_DATA, framing.MAX_CHUNK + 5)],
        [FILES, file_messages.reading(NAME, 0, 1), file_messages.removing([NAME]), BYE],
    ],
)
def test_what_has_no_name_is_gone_with_its_session(
    root: Path, client: ScriptedSession, said: list[bytes]
) -> None:
    client.snapshots(*said)
    assert client.error in ("", "protocol")
    assert everything(root) == {}


def test_a_version_that_goes_meanwhile_hides_no_other(root: Path) -> None:
    names = [f"db/2026030{day}T120000Z-0badcafe/map" for day in (4, 5, 6)]
    for name in names:
        (root / "snapshots" / name).parent.mkdir(parents=True)
        (root / "snapshots" / name).touch()
    with closing(os.open(root, os.O_RDONLY)) as fd:
        found = SnapshotDirectory(fd).found("db", "")
        first = next(found)

        SnapshotDirectory(fd).remove([names[1]])

        assert [(one.name, one.size) for one in (first, *found)] == [(names[0], 0), (names[2], 0)]


def test_what_the_killed_left_is_no_file_and_is_removed_after_an_hour(
    root: Path, client: ScriptedSession
) -> None:
    with RemoteReceiver(root) as remote:
        remote.hello(place=False, snapshots=1)
        remote.write(DATA)
        remote.ping()
        os.kill(remote.child.pid, signal.SIGKILL)
        remote.child.wait()
    (left,) = (root / "snapshots").iterdir()
    client.snapshots(FILES)
    assert client.listed() == []
    os.utime(left, (time.time() - 7200,) * 2)
    client.snapshots(END, FILES)
    assert client.listed() == [(NAME, 7)]
    assert [path.name for path in (root / "snapshots").iterdir()] == ["db"]


def test_a_bit_that_flips_on_the_disk_is_noticed_wherever_it_lies(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning is summed while the rest comes in, the rest at the end."""
    content = bytes(3 << 20)
    monkeypatch.setattr(incoming, "_STEP", 1 << 20)
    real = os.pread
    for place in (0, 1 << 20, len(content) - 1, -1):

        def pread(fd: int, length: int, at: int, place: int = place) -> bytes:
            data = bytearray(real(fd, length, at))
            if at <= place < at + length:
                data[place - at] ^= 1
            return bytes(data)

        monkeypatch.setattr(os, "pread", pread)
        client.snapshots(a_file(content, NAME), FILES)
        good = place < 0
        assert client.said() == [file_messages.GIVEN if good else file_messages.DIFFERENT]
        assert client.listed() == [(NAME, len(content))] * good


def test_an_error_of_the_disk_behind_the_writing_is_told(
    root: Path, client: ScriptedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells a descriptor of it once."""
    monkeypatch.setattr(incoming, "_STEP", 1 << 20)
    told: list[int] = []

    def fsync(fd: int) -> None:
        told.append(fd)
        if len(told) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    assert client.snapshots(a_file(bytes(4 << 20), NAME)).error == "snapshot"
    assert everything(root) == {}


def test_snapshots_is_a_directory_of_its_own(root: Path, client: ScriptedSession) -> None:
    (root.parent / "elsewhere").mkdir()
    (root / "snapshots").symlink_to(root.parent / "elsewhere")
    for said in (FILES, END, file_messages.reading(NAME, 0, 1), file_messages.removing([NAME])):
        assert client.snapshots(said).error == "place"
    assert list((root.parent / "elsewhere").iterdir()) == []


def test_dumps_and_snapshots_are_for_the_account_alone(root: Path, client: ScriptedSession) -> None:
    before = os.umask(0)
    try:
        client.snapshots(END)
        client.dumps(a_dump(b"content", "20260304T120000Z-0badcafe.dump"))
    finally:
        os.umask(before)
    made = {path.name: path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert made.pop("pgdump") == made.pop("snapshots") == 0o700
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_directories_go_with_their_last_file(root: Path, client: ScriptedSession) -> None:
    other = NAME.replace("map", "manifest")
    client.snapshots(END, a_file(b"content", other), file_messages.removing([NAME]), FILES)
    assert client.listed() == [(other, 7)]
    client.snapshots(file_messages.removing([other, NAME]))
    assert client.error == ""
    assert list((root / "snapshots").iterdir()) == []


def test_reading_snapshots_is_a_right_of_its_own(root: Path) -> None:
    for allow, error in ((["snapshot"], "refused"), (["snapshot", "get"], "")):
        client = ScriptedSession(root, allow)
        assert client.snapshots(FILES, file_messages.reading(NAME, 0, 1)).error == error


def test_few_files_stay_open_and_none_after_the_session(root: Path) -> None:
    names = [f"db/20260304T120000Z-{number:08x}/map" for number in range(40)]
    for name in names:
        (root / "snapshots" / name).parent.mkdir(parents=True)
        (root / "snapshots" / name).touch()
    with closing(os.open(root, os.O_RDONLY)) as fd:
        before = len(os.listdir("/proc/self/fd"))
        directory = SnapshotDirectory(fd)
        opened = {directory.open(name) for name in names}
        assert len(opened) < len(names)  # Some got the number of one that was closed.
        assert len(os.listdir("/proc/self/fd")) <= before + 17
        directory.remove(names[:1])
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        directory.open(names[1])
        directory.close()
        assert len(os.listdir("/proc/self/fd")) == before
