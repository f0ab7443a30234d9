"""Parts of a receiver, in this process: its terms, workspace and sessions."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from blake3 import blake3

from ntt_backup.receiver import hashing, read_session
from ntt_backup.receiver.file_areas import DumpArea
from ntt_backup.receiver.file_session import FileSession
from ntt_backup.receiver.read_session import HashJob, ReadSession
from ntt_backup.receiver.terms import ALLOWED, Terms
from ntt_backup.receiver.workspace import Refusal, Workspace
from ntt_backup.receiver.write_workspace import WriteWorkspace
from ntt_backup.wire import messages
from tests.helpers.receivers import PLACE, Frames, ScriptedSession, commit, digest_of, put


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_what_is_required_is_lacking_where_nothing_checks_names(
    required: bool, checked: bool
) -> None:
    hashes = hashing.available() if checked else {}
    require = frozenset({"blake3"} if required else ())
    said = Terms(None, frozenset(), 60.0, hashes, {}, None, require).lacking
    assert bool(said) == (required and not checked)


def test_a_workspace_is_in_place_where_both_directories_have_their_names(tmp_path: Path) -> None:
    root = tmp_path / "root"
    by_hash, moved = root / "by-hash", root / "moved"
    by_hash.mkdir(parents=True)
    workspace = Workspace(str(root))
    assert workspace.in_place
    by_hash.rename(moved)
    assert not workspace.in_place
    by_hash.mkdir()
    assert not workspace.in_place
    by_hash.rmdir()
    moved.rename(by_hash)
    assert workspace.in_place
    root.rename(tmp_path / "other")
    assert not workspace.in_place
    root.mkdir()
    assert not workspace.in_place
    workspace.leave()


def test_blobs_on_another_file_system_than_the_root_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "by-hash").mkdir()
    elsewhere = (tmp_path / "by-hash").stat().st_ino
    look = os.fstat

    def fstat(fd: int) -> Any:
        found = look(fd)
        if found.st_ino != elsewhere:
            return found
        return SimpleNamespace(st_dev=found.st_dev + 1, st_ino=elsewhere)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        with pytest.raises(Refusal, match=r"^by-hash is on another file system"):
            WriteWorkspace(str(tmp_path), "owner", "run", "0")
    assert [*tmp_path.iterdir()] == [tmp_path / "by-hash"]


def test_a_session_that_reads_needs_blake3_to_verify_and_drops_its_answer(tmp_path: Path) -> None:
    (tmp_path / "by-hash").mkdir()
    workspace = Workspace(str(tmp_path))
    terms = Terms(None, frozenset(ALLOWED), 60.0, {}, {})
    session = ReadSession(workspace, terms, cast(Any, SimpleNamespace(wake=-1)))
    with pytest.raises(Refusal, match="there is no BLAKE3"):
        session.handlers()[messages.VERIFY](memoryview(bytes(33 + 32)))
    dropped: list[int] = []

    def frames() -> Iterator[bytes]:
        try:
            yield b""
        finally:
            dropped.append(1)

    session.frames = cast(Any, frames())
    assert next(cast(Any, session.frames)) == b""
    session.close()
    assert dropped
    workspace.leave()


@pytest.fixture
def wake() -> Iterator[int]:
    told, wake = os.pipe()
    yield wake
    os.close(told)
    os.close(wake)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Workspace, list[bytes]]]:
    """A workspace with five blobs, and their digests."""
    contents = [b"%d" % number for number in range(5)]
    for content in contents:
        put(tmp_path, digest_of(content), content)
    workspace = Workspace(str(tmp_path))
    yield workspace, [*map(digest_of, contents)]
    workspace.leave()


@pytest.mark.parametrize(("files", "bytes_"), [(2, 99), (9, 2)])
def test_the_program_gets_some_blobs_at_a_time(
    stored: tuple[Workspace, list[bytes]],
    wake: int,
    monkeypatch: pytest.MonkeyPatch,
    files: int,
    bytes_: int,
) -> None:
    monkeypatch.setattr(read_session, "_FILES", files)
    monkeypatch.setattr(read_session, "_BYTES", bytes_)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    counts: list[int] = []

    def digests(expected: dict[str, bytes], *_: object, **__: object) -> dict[str, bytes]:
        counts.append(len(expected))
        return expected

    program = cast(Any, SimpleNamespace(digests=digests))
    job = HashJob(*stored, None, program, b"", wake)
    assert [*job.frames(lambda: b"answer")][-1] == b"answer"
    assert job.found == [messages.BlobHash(messages.WHOLE, 1, digest) for digest in stored[1]]
    assert counts == [2, 2, 1]


def test_sums_that_nobody_waits_for_are_not_made(
    stored: tuple[Workspace, list[bytes]], wake: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    begun: list[int] = []

    def new(data: bytes) -> blake3:
        begun.append(1)
        for _ in range(100):
            if not job._stopped:
                time.sleep(0.01)
        return blake3(data)

    job = HashJob(*stored, cast(Any, new), None, b"", wake)
    answer = job.frames(bytes)
    assert next(answer) == b""
    answer.close()
    assert len(begun) <= 1


def test_a_blob_that_breaks_off_has_neither_a_size_nor_a_hash(
    stored: tuple[Workspace, list[bytes]],
    tmp_path: Path,
    wake: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = b"more than one byte"
    put(tmp_path, digest_of(content), content)

    def reads(fd: int, buffers: list[memoryview]) -> int:
        if read.setdefault(fd, 0):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read[fd] += 1
        return 1

    read: dict[int, int] = {}
    monkeypatch.setattr(os, "readv", reads)
    job = HashJob(stored[0], [digest_of(content)], cast(Any, blake3), None, b"", wake)
    list(job.frames(bytes))
    why = f"EIO: {os.strerror(errno.EIO)}"
    assert job.found == [messages.BlobHash(messages.UNREADABLE, 0, bytes(32), why)]


def test_a_file_that_gets_no_name_is_removed_whatever_was_begun_behind_it(tmp_path: Path) -> None:
    """To begin a file opens the directory anew, which may get another number then."""
    taken = os.open(os.devnull, os.O_RDONLY)
    root = os.open(tmp_path, os.O_RDONLY)
    area = DumpArea(root)
    first = area.begin()
    os.close(taken)
    second = area.begin()
    assert len([*(tmp_path / "pgdump").iterdir()]) == 2
    first.remove()
    second.remove()
    area.close()
    os.close(root)
    assert [*tmp_path.iterdir()] == []


def test_a_session_that_is_interrupted_while_a_file_gets_its_name_is_interrupted() -> None:
    """A thread gives the name, and forgets the file then."""
    session = FileSession(cast(Any, None), cast(Any, None), cast(Any, None))
    stopped: list[int] = []

    class Named:
        def __init__(self, slot: int) -> None:
            self.slot = slot

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "stopped":
                stopped.append(self.slot)
                session._incoming.pop(self.slot)

    session._incoming = {slot: cast(Any, Named(slot)) for slot in (1, 2)}
    session.interrupt()
    assert stopped == [1, 2]


CONTENT = b"content"
BATCH = messages.BATCH.frame(1, 9, 99)
LARGE = messages.LARGE.frame(digest_of(CONTENT), len(CONTENT), 0)
UNCHECKED = messages.END.frame(messages.COMPLETE, b"")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (lambda one: [BATCH, messages.BATCH.frame(2, 9, 99)], "a BATCH within a batch"),
        (lambda one: [one.pack([CONTENT])], "a PACK outside a batch"),
        (lambda one: [LARGE], "a LARGE outside a batch"),
        (lambda one: [BATCH, *one.pieces(CONTENT)], "a DATA outside a large blob"),
        (lambda one: [BATCH, one.end(CONTENT)], "an END outside a large blob"),
        (lambda one: [BATCH, LARGE, one.pack([CONTENT])], "a PACK within a large blob"),
        (lambda one: [BATCH, LARGE, LARGE], "a LARGE within a large blob"),
        (lambda one: [BATCH, LARGE, commit(1)], "the end of a batch within a large blob"),
        (lambda one: [BATCH, LARGE, UNCHECKED], "a checksum too many or too few"),
        (lambda one: [BATCH, commit(2)], "the end of batch 2 within batch 1"),
    ],
)
def test_a_frame_where_it_does_not_belong_ends_the_session(
    tmp_path: Path, said: Callable[[Frames], list[bytes]], why: str
) -> None:
    session = ScriptedSession(tmp_path)
    session.say(PLACE, *said(session))
    assert session.error == "protocol"
    assert why in session.error_text
