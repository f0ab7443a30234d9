"""File stores ask ahead in bounds, leave nothing open, and are opened as their target is."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.blobdir.descriptors import Misplaced
from ntt_backup.config import RemoteConfig
from ntt_backup.dump.store import DUMPS
from ntt_backup.errors import RemoteDenied, Unsupported
from ntt_backup.filestore import by_receiver
from ntt_backup.filestore import open as opening
from ntt_backup.filestore.by_bucket import FileStoreByBucket
from ntt_backup.filestore.by_directory import FileStoreByDirectory
from ntt_backup.filestore.contract import Area, FileMissing, FileUnreadable, Range, ask_ahead
from ntt_backup.filestore.sealed import ReadableSealedStore, SealedStore
from ntt_backup.objects import s3
from ntt_backup.objects.bucket import ObjectArchived
from ntt_backup.snapshot.names import SNAPSHOTS
from ntt_backup.wire.stored_names import PLACES
from tests.helpers.fake_bucket import SMALLEST_PART, FakeBucket
from tests.helpers.memory_store import MemoryStore

VERSION = "db/20260304T120000Z-0badcafe"
NAME = f"{VERSION}/manifest"
DUMP = "20260304T120000Z-0badcafe.dump"
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


@pytest.mark.parametrize(
    ("area", "name", "link", "missing", "below"),
    [
        (SNAPSHOTS, NAME, f"{VERSION}/map", f"{VERSION}/pack-00001", ["", "db/", f"{VERSION}/"]),
        (DUMPS, DUMP, DUMP.replace("0bad", "1bad"), DUMP.replace("0bad", "2bad"), [""]),
    ],
    ids=["snapshots", "dumps"],
)
def test_a_directory_is_read_and_closed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    area: Area,
    name: str,
    link: str,
    missing: str,
    below: list[str],
) -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        FileStoreByDirectory(str(tmp_path), area)
    assert descriptors() == before
    place = tmp_path / area.name
    (place / name).parent.mkdir(parents=True)
    (place / name).write_bytes(b"0123456789")
    (place / link).symlink_to(place / name)
    store = FileStoreByDirectory(str(tmp_path), area)
    for one in below:
        assert [(found.name, found.size) for found in store.list(one)] == [(name, 10)]
    if area is SNAPSHOTS:
        assert list(store.list("etc/")) == []
    with pytest.raises(ValueError, match="is no directory of"):
        store.list("../")
    ranges = [Range(name, 0, 4), Range(name, 8, 4), Range(name, 2, 5)]
    real = os.pread
    for most in (100, 2):
        monkeypatch.setattr(os, "pread", lambda fd, n, at, most=most: real(fd, min(n, most), at))
        assert list(store.read(ranges)) == [b"0123", b"89", b"23456"]
    monkeypatch.undo()
    with pytest.raises(FileMissing):
        list(store.read([Range(missing, 0, 1)]))
    with pytest.raises(FileUnreadable, match="cannot be read"):
        list(store.read([Range(link, 0, 1)]))
    store.close()
    store.close()
    assert descriptors() == before


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), Misplaced("Permission denied")]
)
def test_a_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "snapshots").mkdir()
    with closing(FileStoreByDirectory(str(tmp_path), SNAPSHOTS)) as store:

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(store._files, "found", fail)
        with pytest.raises(RemoteDenied, match="cannot be listed") as caught:
            store.list()
        assert "Permission denied" in caught.value.detail


# --- a bucket -------------------------------------------------------------------------------------


def test_a_file_in_an_archive_class_is_named() -> None:
    bucket = FakeBucket()
    key = f"snapshots/{NAME}"
    bucket.objects[key] = b"content"
    with closing(FileStoreByBucket(bucket, SMALLEST_PART, SNAPSHOTS)) as store:
        assert list(store.read([Range(NAME, 0, 3)])) == [b"con"]

        def archived(verb: str, _: str) -> None:
            if verb == "get_range":
                raise ObjectArchived

        bucket.before = archived
        with pytest.raises(FileUnreadable, match="archive class") as caught:
            list(store.read([Range(NAME, 0, 3)]))
        assert caught.value.detail == key


def test_what_else_lies_in_a_bucket_is_no_file_of_the_area() -> None:
    bucket = FakeBucket()
    for key in (f"snapshots/{NAME}", f"snapshots/{DUMP}", "snapshots/x", f"pgdump/{NAME}", "packs"):
        bucket.objects[key] = b"content"
    bucket.objects[f"pgdump/{DUMP}.json.age"] = b"content"
    with closing(FileStoreByBucket(bucket, SMALLEST_PART, SNAPSHOTS)) as store:
        assert [one.name for one in store.list()] == [NAME]
    with closing(FileStoreByBucket(bucket, SMALLEST_PART, DUMPS)) as store:
        assert list(store.list()) == []


def test_more_small_files_may_be_open_than_there_are_buffers() -> None:
    """A dump has two more files beside it, and all three are open at once."""
    bucket = FakeBucket()
    names = [DUMP + ending for ending in ("", PLACES, ".json")]
    waits = iter(range(20))
    with closing(FileStoreByBucket(bucket, SMALLEST_PART, DUMPS)) as store:
        store.on_wait = lambda: cast(None, next(waits))  # It ends by StopIteration, not never.
        files = [store.write(name) for name in names]
        for file in files:
            file.add(b"content")
        for file in reversed(files):
            file.finish()
            file.publish()
    assert bucket.objects == dict.fromkeys((f"pgdump/{name}" for name in names), b"content")


# --- how it is opened -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "made", "opened"),
    [
        ("file://{}", True, FileStoreByDirectory),
        ("file://{}", False, MemoryStore),
        ("ssh://vault/srv", True, MemoryStore),
        ("s3://bucket/backup", True, FileStoreByBucket),
    ],
)
def test_a_store_is_opened_by_what_its_target_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, made: bool, opened: object
) -> None:
    if made:
        (tmp_path / "snapshots").mkdir()
    monkeypatch.setattr(opening, "connect", lambda *_: MemoryStore())
    monkeypatch.setattr(s3, "open_bucket", lambda *_: FakeBucket())
    settings = RemoteConfig.model_validate({"remote": {"url": url.format(tmp_path)}})
    found = cast(ReadableSealedStore, opening.open_to_read(settings, SNAPSHOTS))
    assert type(found._within) is opened
    found.close()
    anew = cast(SealedStore, opening.open_store(settings, SNAPSHOTS))
    assert type(anew._store) is (FileStoreByBucket if settings.remote.kind == "s3" else MemoryStore)
    anew.close()


def test_a_remote_without_python_is_told_what_snapshots_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise Unsupported("Python 2.7")

    monkeypatch.setattr(by_receiver, "FileStoreByReceiver", fail)
    spec = cast(Any, SimpleNamespace(run=SimpleNamespace(strategy="stream"), transport=None))
    with pytest.raises(Unsupported, match=r"snapshots need Python 3\.8") as caught:
        opening.connect(spec, SNAPSHOTS)
    assert caught.value.detail == "Python 2.7"
