"""A staged file gets its name, and nothing that has it already is lost: `blobdir/publish.py`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ntt_backup.blobdir.publish import Publisher
from ntt_backup.wire.messages import PRESENT, REFUSED, REPLACED

DIGEST = bytes.fromhex("ab12" + "00" * 30)
CONTENT = b"x" * 300_000  # More than is compared at once.
PLACE = f"ab/12/{DIGEST.hex()}"


class Place:
    """A blob directory, a stage beside it, and one file in that."""

    def __init__(self, root: Path) -> None:
        self.by_hash, self.stage = root / "by-hash", root / "stage"
        self.by_hash.mkdir()
        self.stage.mkdir()
        self.staged = self.stage / "7"
        self.staged.write_bytes(CONTENT)
        self.name = self.by_hash / PLACE
        self.fds = [os.open(one, os.O_RDONLY) for one in (self.by_hash, self.stage)]

    def publisher(self, *, may_replace: bool = False, by_file: bool = False) -> Publisher:
        device = self.by_hash.stat().st_dev
        return Publisher(self.fds[0], device, may_replace, by_file)

    def publish(self, *, may_replace: bool = False) -> tuple[int, str] | None:
        publisher = self.publisher(may_replace=may_replace)
        try:
            return publisher.publish(DIGEST, self.fds[1], b"7")
        finally:
            publisher.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for fd in made.fds:
        os.close(fd)


def put(place: Place, content: bytes) -> None:
    place.name.parent.mkdir(parents=True)
    place.name.write_bytes(content)


def test_a_free_name_is_taken_and_its_directories_are_told(place: Place) -> None:
    publisher = place.publisher()

    assert publisher.publish(DIGEST, place.fds[1], b"7") is None

    assert place.name.read_bytes() == CONTENT
    assert not place.staged.exists()
    assert publisher.entered == {"ab", "ab/12"}
    publisher.close()


def test_equal_content_is_present_and_the_file_stays_staged(place: Place) -> None:
    put(place, CONTENT)
    there = place.name.stat().st_ino

    assert place.publish(may_replace=True) == (PRESENT, "")

    assert place.name.stat().st_ino == there
    assert place.staged.exists()


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"y", b"y" + CONTENT[1:], CONTENT[:-1], b""])
def test_other_content_is_replaced_by_who_knows_better_alone(place: Place, content: bytes) -> None:
    put(place, content)

    refused = place.publish()

    assert refused == (REFUSED, "other content stands in its place")
    assert (place.name.read_bytes(), place.staged.read_bytes()) == (content, CONTENT)
    assert place.publish(may_replace=True) == (REPLACED, "other content stood there")
    assert place.name.read_bytes() == CONTENT
    assert not place.staged.exists()


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda path: path.symlink_to("/etc/passwd"), "a symbolic link"), (os.mkfifo, "a FIFO")],
)
def test_what_is_no_file_is_replaced_by_who_knows_better_alone(
    place: Place, make: Callable[[Path], None], kind: str
) -> None:
    place.name.parent.mkdir(parents=True)
    make(place.name)

    assert place.publish() == (REFUSED, f"{kind} stands in its place")
    assert place.publish(may_replace=True) == (REPLACED, f"{kind} stood there")
    assert place.name.read_bytes() == CONTENT
    assert not place.name.is_symlink()


def test_a_directory_is_replaced_by_nobody(place: Place) -> None:
    place.name.mkdir(parents=True)

    assert place.publish(may_replace=True) == (REFUSED, "a directory stands in its place")
    assert place.name.is_dir()


def test_what_cannot_be_read_for_its_rights_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, CONTENT)
    opening = os.open

    def open_file(path: object, flags: int, *args: object, **more: object) -> int:
        if path == DIGEST.hex().encode():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opening(path, flags, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_file)

    verdict, text = place.publish(may_replace=True) or (None, "")

    assert verdict == REFUSED
    assert text.startswith("EACCES")
    assert place.staged.exists()


@pytest.mark.parametrize(("number", "verdict"), [(errno.EIO, REPLACED), (errno.ENOMEM, None)])
def test_a_bad_sector_is_other_content_and_any_other_error_is_an_error(
    place: Place, monkeypatch: pytest.MonkeyPatch, number: int, verdict: int | None
) -> None:
    put(place, CONTENT)
    reading, calls = os.read, []

    def read(fd: int, size: int) -> bytes:
        calls.append(fd)
        if len(calls) % 2 == 0:  # What stands there is read after ours.
            raise OSError(number, os.strerror(number))
        return reading(fd, size)

    monkeypatch.setattr(os, "read", read)

    if verdict is None:
        with pytest.raises(OSError, match=os.strerror(number)):
            place.publish(may_replace=True)
    else:
        assert place.publish(may_replace=True) == (
            verdict,
            "content that cannot be read stood there",
        )


@pytest.mark.parametrize("by_file", [False, True])
def test_what_is_present_is_synced_where_no_sync_of_the_file_system_follows(
    place: Place, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    put(place, CONTENT)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    publisher = place.publisher(by_file=by_file)

    assert publisher.publish(DIGEST, place.fds[1], b"7") == (PRESENT, "")

    assert synced == ([place.name.stat().st_ino] if by_file else [])
    publisher.close()


def test_a_directory_moves_as_a_whole_where_there_is_none(place: Place) -> None:
    new = place.stage / "d"
    new.mkdir()
    (new / DIGEST.hex()).write_bytes(CONTENT)
    publisher = place.publisher()

    assert publisher.move(f"{DIGEST[:1].hex()}/{DIGEST[1:2].hex()}", place.fds[1], "d")

    assert place.name.read_bytes() == CONTENT
    new.mkdir()
    assert not publisher.move(f"{DIGEST[:1].hex()}/{DIGEST[1:2].hex()}", place.fds[1], "d")
    assert new.is_dir()
    assert place.name.exists()
    publisher.close()


def test_descriptors_are_closed(place: Place) -> None:
    before = set(os.listdir("/proc/self/fd"))
    publisher = place.publisher()
    for prefix in range(20):
        (place.stage / "8").write_bytes(b"")
        assert publisher.publish(bytes([prefix]) * 32, place.fds[1], b"8") is None
        # Two directories are kept open.
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 3

    publisher.close()

    assert set(os.listdir("/proc/self/fd")) == before
