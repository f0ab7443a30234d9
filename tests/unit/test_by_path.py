"""Paths of other programs are checked, and their checksums are understood."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup.catalog.unread_files import Unread
from ntt_backup.config import RunSettings
from ntt_backup.model import BadFile, FileReason, ReadFile
from ntt_backup.source import by_path
from ntt_backup.source.by_path import FirstReader, parse_checksum
from ntt_backup.source.paths import Paths, checked_path
from ntt_backup.source.store import READ_SIZE, Store
from ntt_backup.upload import first_reads
from ntt_backup.upload.first_reads import FirstReads


@pytest.mark.parametrize(
    "path", [b"a", b"a/b", b"...", b"a/..b", b"a/\n", b"\n", b"a\xff/b", b"/srv/a", b".hidden/x"]
)
def test_a_path_below_the_root_is_taken(path: bytes) -> None:
    assert not checked_path(path, Path("/srv")).startswith("/")


@pytest.mark.parametrize(
    "path",
    [
        *(b"", b".", b"..", b"/", b"a/", b"a//b", b"./a", b"a/.", b"a/../b", b"../a", b"a\0b"),
        *(b"/srv", b"/srv/", b"/srv/../etc/passwd", b"/srvx/a", b"/etc/passwd", b"//srv/a"),
        *(b"a/" * 200 + b"a", b"a" * 5000),
    ],
)
def test_a_path_that_leads_out_or_is_none_is_refused(path: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        checked_path(path, Path("/srv"))


@pytest.mark.parametrize("name", ["md5", "sha1", "sha256", "sha384", "sha512"])
def test_checksums_are_told_by_their_length_or_their_prefix(name: str) -> None:
    digest = hashlib.new(name, b"x").digest()
    for text in (digest.hex(), digest.hex().upper(), base64.b64encode(digest).decode()):
        assert parse_checksum(text) == (name, digest)
        assert parse_checksum(f"{name}:{text}") == (name, digest)
    wrong = "md5" if name != "md5" else "sha1"
    assert parse_checksum(f"{wrong}:{digest.hex()}") is None


@pytest.mark.parametrize("text", ["", "x", "abc", "0" * 33, "z" * 63, "crc32:00000000"])
def test_other_text_is_no_checksum(text: str) -> None:
    assert parse_checksum(text) is None


@pytest.mark.parametrize("size", [0, 1, READ_SIZE - 1, READ_SIZE, READ_SIZE + 1, 3 * READ_SIZE])
def test_a_file_of_any_size_is_hashed_as_a_whole(tmp_path: Path, size: int) -> None:
    content = b"0123456789abcdef" * (size // 16 + 1)
    (tmp_path / "file").write_bytes(content[:size])
    store = Store(tmp_path, paths=Paths())
    with store.tree() as tree:
        found = FirstReader(tree, store).read(
            b"file", size, hashlib.md5(content[:size], usedforsecurity=False).hexdigest()
        )
    assert isinstance(found, ReadFile)
    assert found.blob.size == size


def test_a_device_is_not_read_without_end(tmp_path: Path) -> None:
    store = Store(Path("/dev"), paths=Paths())
    with store.tree() as tree:
        found = FirstReader(tree, store).read(b"zero", None, None)
    assert isinstance(found, BadFile)
    assert found.reason is FileReason.NOT_A_FILE


LARGE = bytes(3 * READ_SIZE)


def read(
    root: Path, name: str, grace: float = 0.0, cancelled: Callable[[], None] = lambda: None
) -> ReadFile | BadFile:
    store = Store(root, grace=grace, paths=Paths())
    with store.tree() as tree:
        return FirstReader(tree, store, cancelled).read(os.fsencode(name), None, None)


def test_what_took_the_place_of_a_file_may_be_gone_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").mkdir()
    readv = os.readv

    def remove(fd: int, buffers: list[memoryview]) -> int:
        (tmp_path / "file").rmdir()
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", remove)
    found = read(tmp_path, "file")
    assert found == BadFile(FileReason.NOT_A_FILE, "file is gone by now")


def test_what_stands_there_is_said_whatever_its_name_is(tmp_path: Path) -> None:
    (tmp_path / "l\udcff\nk").symlink_to("/etc/passwd")
    found = read(tmp_path, "l\udcff\nk")
    said = r"l\xff; k is a symbolic link, which is not followed"
    assert found == BadFile(FileReason.NOT_A_FILE, said)


def test_a_large_file_that_is_being_written_is_not_read_over_and_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)
    pieces: list[None] = []
    found = read(tmp_path, "file", grace=3600, cancelled=lambda: pieces.append(None))
    assert isinstance(found, BadFile)
    assert (found.young, pieces) == (True, [])


def test_a_large_file_that_is_changed_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(LARGE)
    found = read(tmp_path, "file", cancelled=lambda: os.utime(file))
    assert isinstance(found, BadFile)
    assert found.young
    assert isinstance(read(tmp_path, "file"), ReadFile)


def test_a_file_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_path, "MAX_BLOB", 2 * READ_SIZE)
    (tmp_path / "file").write_bytes(LARGE)
    found = read(tmp_path, "file")
    assert found == BadFile(FileReason.UNREADABLE, "file: File too large")


def test_the_read_of_a_large_file_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LARGE)

    class Ended(Exception):
        pass

    def end() -> None:
        raise Ended

    before = os.listdir("/proc/self/fd")
    with pytest.raises(Ended):
        read(tmp_path, "file", cancelled=end)
    assert os.listdir("/proc/self/fd") == before


def test_few_files_are_read_for_longer_and_more_are_asked_for_only_where_they_are_read_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    asked: list[int] = []
    found: list[int] = []

    def some(limit: int) -> list[Unread]:
        asked.append(limit)
        return [Unread(number, b"a", 1, None) for number in range(min(limit, 5000))]

    unread: Any = SimpleNamespace(
        turn=lambda: nullcontext(True), next=some, record=lambda ok, *_: found.append(len(ok))
    )
    pipe: Any = SimpleNamespace(stopping=False, state=lambda state: None)
    reads = FirstReads(Store(tmp_path), RunSettings(), pipe, watch=False)
    for seconds, most in ((0, 0), (0, 0), (0, 60), (0, 60), (0, 60), (0, 60), (60, 60)):
        monkeypatch.setattr(first_reads, "_SECONDS", seconds)
        monkeypatch.setattr(first_reads, "_MOST_SECONDS", most)
        assert reads.read_some(unread) == "some"
    assert asked == [40_000, 1000, 1000, 2000, 4000, 8000, 8000]
    assert found == [1, 1, 1000, 2000, 4000, 4000, 5000]


def test_a_worker_says_that_it_is_alive_while_it_reads_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_reads, "_LOOK_SECONDS", 0)
    (tmp_path / "file").write_bytes(LARGE)
    states: list[str] = []
    unread: Any = SimpleNamespace(
        turn=lambda: nullcontext(True),
        next=lambda limit: [Unread(1, b"file", None, hashlib.sha256(LARGE).hexdigest())],
        record=lambda *_: None,
    )
    pipe: Any = SimpleNamespace(stopping=False, state=states.append)
    FirstReads(Store(tmp_path), RunSettings(), pipe, watch=False).read_some(unread)
    assert states == ["reading"] * (-(-len(LARGE) // READ_SIZE) + 1)
