"""What reads a repository of snapshots asks ahead in bounds, and leaves nothing open."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyrage
import pytest
from blake3 import blake3

from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.sealing import Keyring
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import (
    ConfigError,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteError,
    Unsupported,
)
from ntt_backup.objects.bucket import ObjectArchived
from ntt_backup.pack.format import PackError
from ntt_backup.pack.seal import SealedForOthers
from ntt_backup.process.threads import Cancelled
from ntt_backup.snapshot.repository import by_objects, names, sealed
from ntt_backup.snapshot.repository import open as open_module
from ntt_backup.snapshot.repository.ahead import ask_ahead
from ntt_backup.snapshot.repository.by_directory import RepositoryByDirectory
from ntt_backup.snapshot.repository.by_objects import RepositoryByObjects
from ntt_backup.snapshot.repository.by_receiver import RepositoryByReceiver
from ntt_backup.snapshot.repository.contract import FileMissing, Range
from ntt_backup.wire import file_messages, framing, read_messages, write_messages
from ntt_backup.wire.framing import ProtocolError
from tests.fake_bucket import SMALLEST_PART, FakeBucket
from tests.memory_repository import MemoryRepository
from tests.packs import Person
from tests.receiver_driver import frames

VERSION = "db/20260304T120000Z-0badcafe"
NAME = f"{VERSION}/manifest"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("lengths", "done"),
    [
        ([1] * 5, "a0 a1 a2 t0 a3 t1 a4 t2 t3 t4"),
        ([8 * MIB] * 3, "a0 a1 t0 a2 t1 t2"),
        ([8 * MIB, 8 * MIB + 1, 1], "a0 t0 a1 a2 t1 t2"),
        ([20 * MIB, 1], "a0 t0 a1 t1"),
        ([], ""),
    ],
    ids=str,
)
def test_as_many_ranges_are_asked_for_ahead_as_there_is_room_for(
    lengths: list[int], done: str
) -> None:
    log: list[str] = []

    def ask(one: Range) -> Range:
        log.append(f"a{one.start}")
        return one

    def take(one: Range) -> bytes:
        log.append(f"t{one.start}")
        return b"%d" % one.start

    ranges = [Range(NAME, at, length) for at, length in enumerate(lengths)]
    assert list(ask_ahead(ranges, 3, ask, take)) == [b"%d" % at for at in range(len(lengths))]
    assert log == done.split()


# --- a directory of this machine ------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_directory_is_read_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        RepositoryByDirectory(str(tmp_path))
    assert descriptors() == before
    place = tmp_path / "snapshots" / VERSION
    place.mkdir(parents=True)
    (place / "manifest").write_bytes(b"0123456789")
    (place / "map").symlink_to("manifest")
    repository = RepositoryByDirectory(str(tmp_path))
    assert [(one.name, one.size) for one in repository.list()] == [(NAME, 10)]
    assert list(repository.list(f"{VERSION}/")) == list(repository.list("db/"))
    assert list(repository.list("etc/")) == []
    ranges = [Range(NAME, 0, 4), Range(NAME, 8, 4), Range(NAME, 2, 5)]
    real = os.pread
    for most in (100, 2):
        monkeypatch.setattr(os, "pread", lambda fd, n, at, most=most: real(fd, min(n, most), at))
        assert list(repository.read(ranges)) == [b"0123", b"89", b"23456"]
    monkeypatch.undo()
    with pytest.raises(FileMissing):
        list(repository.read([Range(f"{VERSION}/pack-00001", 0, 1)]))
    with pytest.raises(RemoteDenied, match="cannot be read"):
        list(repository.read([Range(f"{VERSION}/map", 0, 1)]))
    repository.close()
    repository.close()
    assert descriptors() == before


def test_a_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshots").mkdir()
    with closing(RepositoryByDirectory(str(tmp_path))) as repository:

        def fail(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(repository._directory, "found", fail)
        with pytest.raises(RemoteDenied, match="cannot be listed") as caught:
            repository.list()
        assert "Permission denied" in caught.value.detail


# --- a receiver -----------------------------------------------------------------------------------


class Connection:
    """A connection to a receiver. answers: the frames that come, each once it is waited for."""

    def __init__(self, *allowed: str) -> None:
        self.answers: list[bytes] = []
        self.closed = False
        self.banner = SimpleNamespace(allowed={"snapshot", *allowed})
        self.channel = SimpleNamespace(hear=self._hear, heard=float("inf"), ended=False)

    def hello(self, **_: int) -> None: ...

    def checked(self) -> Any:
        return nullcontext()

    def send(self, *_: object) -> None: ...

    def _hear(self, hear: Any, _: float) -> None:
        hear(self.answers.pop(0))

    def frames(self, data: bytes) -> Any:
        return frames(data, file_messages.TO_CLIENT)

    def close(self) -> None:
        self.closed = True


def by_connection(monkeypatch: pytest.MonkeyPatch, connection: Connection) -> RepositoryByReceiver:
    monkeypatch.setattr("ntt_backup.client.connection.ReceiverConnection", lambda *_: connection)
    spec = SimpleNamespace(cancelled=lambda: None, run=RunSettings())
    return RepositoryByReceiver(cast(SessionSpec, spec))


def test_a_command_that_is_ending_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(by_connection(monkeypatch, Connection())) as repository:

        def cancelled() -> None:
            raise Cancelled

        monkeypatch.setattr(repository._spec, "cancelled", cancelled)
        with pytest.raises(Cancelled):
            repository.list()


def test_what_a_receiver_says_of_a_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection("get")
    with closing(by_connection(monkeypatch, connection)) as repository:
        for answer, kind, why in (
            (file_messages.said(file_messages.MISSING, "gone"), FileMissing, "manifest"),
            (file_messages.said(file_messages.TAKEN, "odd"), RemoteDenied, "cannot be read"),
            (read_messages.blob_end(read_messages.BROKEN, "EIO"), RemoteDenied, "cannot be read"),
        ):
            connection.answers = [answer]
            with pytest.raises(kind, match=why):
                list(repository.read([Range(NAME, 0, 1)]))
        for status, text, error, detail in (
            (file_messages.TAKEN, "odd", NameTaken, NAME),
            (file_messages.MISSING, "", RemoteCannotStore, NAME),
            (file_messages.MISSING, "EIO", RemoteCannotStore, "EIO"),
        ):
            connection.answers = [file_messages.said(status, text)]
            with pytest.raises(error) as caught:
                repository.end_file(NAME, 1, bytes(32))
            assert caught.value.detail == detail
        connection.answers = [file_messages.said(file_messages.GIVEN)]
        repository.end_file(NAME, 1, bytes(32))
        with pytest.raises(RemoteDenied, match="append-only"):
            repository.remove([NAME])
        assert not connection.closed
    assert connection.closed


def test_a_receiver_that_names_others_or_answers_unasked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Connection("get", "replace")
    with closing(by_connection(monkeypatch, connection)) as repository:
        done = write_messages.numbered(framing.DONE, 1)
        connection.answers = [file_messages.names([(NAME, 1, 0)]), done]
        with pytest.raises(ProtocolError, match="not asked for"):
            repository.list("etc/")
        connection.answers = [done]
        assert repository.remove([NAME]) == 1
        connection.answers = [done + done]
        with pytest.raises(ProtocolError, match="without a question"):
            repository.remove([NAME])


def test_a_file_in_an_archive_class_is_named() -> None:
    bucket = FakeBucket()
    key = f"snapshots/{NAME}"
    bucket.objects[key] = b"content"
    with closing(RepositoryByObjects(bucket, SMALLEST_PART)) as repository:
        assert list(repository.read([Range(NAME, 0, 3)])) == [b"con"]

        def archived(verb: str, _: str) -> None:
            if verb == "get_range":
                raise ObjectArchived

        bucket.before = archived
        with pytest.raises(RemoteDenied, match="archive class") as caught:
            list(repository.read([Range(NAME, 0, 3)]))
        assert caught.value.detail == key


def test_keys_of_sealed_files_are_kept_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, bucket = Person.new(), FakeBucket()
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))
    monkeypatch.setattr(by_objects, "_KEPT_OPEN", 1)
    with closing(RepositoryByObjects(bucket, SMALLEST_PART, [owner.public], keyring)) as repository:
        for name in (NAME, f"{VERSION}/map"):
            file = repository.write(name)
            file.add(b"content")
            file.finish()
            assert list(repository.read([Range(name, 0, 7)])) == [b"content"]
        assert [*repository._opened] == [f"{VERSION}/map"]


@pytest.mark.parametrize(
    ("kind", "made", "opened"),
    [
        ("file", True, RepositoryByDirectory),
        ("file", False, "receiver"),
        ("ssh", True, "receiver"),
        ("s3", True, "bucket"),
    ],
)
def test_a_repository_is_opened_by_what_its_target_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, made: bool, opened: object
) -> None:
    if made:
        (tmp_path / "snapshots").mkdir()
    monkeypatch.setattr(open_module, "_by_receiver", lambda _: "receiver")
    monkeypatch.setattr(open_module, "_by_objects", lambda _: "bucket")
    settings = cast(Any, SimpleNamespace(remote=SimpleNamespace(kind=kind, path=str(tmp_path))))
    found = open_module.open_to_read(settings)
    if isinstance(found, RepositoryByDirectory):
        found.close()
    assert opened in (type(found), found)
    anew = cast(object, open_module.open_repository(settings))
    assert anew == ("bucket" if kind == "s3" else "receiver")


def test_a_remote_without_python_is_told_what_snapshots_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise Unsupported("Python 2.7")

    monkeypatch.setattr(open_module, "_by_receiver", fail)
    settings = cast(Any, SimpleNamespace(remote=SimpleNamespace(kind="ssh")))
    with pytest.raises(Unsupported, match=r"snapshots need Python 3\.8") as caught:
        open_module.open_repository(settings)
    assert caught.value.detail == "Python 2.7"


# --- names and seals ------------------------------------------------------------------------------


def test_a_version_comes_behind_the_newest_whatever_the_clock_says() -> None:
    now = datetime(2026, 3, 4, 12, tzinfo=UTC)
    assert names.new_version(now).startswith("20260304T120000Z-")
    for hours, stamp in ((1, "20260304T130001Z-"), (-1, "20260304T120000Z-")):
        newest = f"{names.stamp(now + timedelta(hours=hours))}-0badcafe"
        assert names.new_version(now, newest).startswith(stamp)
    with pytest.raises(RemoteError, match="can come behind"):
        names.new_version(now, "99991231T235959Z-0badcafe")
    for number in (0, names.MAX_PACKS + 1):
        with pytest.raises(ValueError, match="99999 packs"):
            names.pack_name("db", "v", number)
    for number in (1, names.MAX_PACKS):
        assert names.pack_name("db", "v", number) == f"db/v/pack-{number:05}"


def test_a_sealed_file_is_opened_by_whom_it_is_for_and_else_told(tmp_path: Path) -> None:
    owner, other = Person.new(), Person.new()
    repository = MemoryRepository()
    file = sealed.SealedFile(repository.write(NAME), [owner.public])
    file.add(b"content")
    file.finish()
    data = repository.files[NAME]
    assert sealed.plain_size(len(data)) == 7
    keyring = Keyring(lambda: owner.file(tmp_path / "key"))

    def opened(content: bytes, keyring: Keyring = keyring) -> bytes:
        def read(at: int, count: int) -> bytes:
            return content[at : at + count]

        return sealed.opened(read, len(content), keyring).read(0, 7)

    assert opened(data) == b"content"
    with pytest.raises(SealedForOthers):
        opened(data, Keyring(lambda: other.file(tmp_path / "other")))
    head = sealed._HEAD.size
    for bad in (b"", b"X" + data[1:], data[:head] + b"X" + data[head + 1 :]):
        with pytest.raises(PackError, match="no sealed file"):
            opened(bad)
    keys = pyrage.encrypt(b"no key", [pyrage.x25519.Recipient.from_str(owner.public)])
    lie = sealed._HEAD.pack(sealed._MAGIC, len(keys), blake3(keys).digest()) + keys
    with pytest.raises(PackError):
        opened(lie.ljust(len(data), b"\0"))
    with pytest.raises(ConfigError, match="50 recipients are too many"):
        sealed.SealedFile(repository.write(f"{VERSION}/map"), [owner.public] * 50)
