"""`take`: a version is what the disk has; only what changed is read, and only that is stored."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.errors import (
    BackupError,
    ConfigError,
    DestinationError,
    NameTaken,
    RemoteCannotStore,
    RemoteDenied,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.snapshot.format.entry import MAX_NUMBER, Entry
from ntt_backup.snapshot.format.manifest import (
    END_BYTES,
    ManifestReader,
    ManifestWriter,
    ending_of,
    tail_size,
)
from ntt_backup.snapshot.names import SnapshotDamaged, new_version
from ntt_backup.snapshot.origins import NO_KEYS
from ntt_backup.snapshot.take import changed_file, last_version
from ntt_backup.snapshot.take import new_version as taking
from ntt_backup.snapshot.take.last_version import Copies, LastVersion, open_copies
from ntt_backup.snapshot.take.new_version import Taken
from ntt_backup.snapshot.take.walk import SnapshotSet, WalkedFile, walk
from ntt_backup.snapshot.versions import choose, facts, last_begun, names_of_host, versions
from tests.helpers.blobs import noise
from tests.unit.taker import BLOCK, KEYS, OTHERS, Taker, rewrite

# FS_IOC_SETFLAGS, and FS_NODUMP_FL.
_SET_FLAGS = 0x40086602
_NO_DUMP = 0x40


@pytest.fixture
def taker(tmp_path: Path) -> Taker:
    return Taker(tmp_path / "tree", tmp_path / "cache")


# --- what is taken -------------------------------------------------------------------------------


def test_a_version_has_every_kind_of_file_with_what_belongs_to_it(taker: Taker) -> None:
    file = taker.write("d/file", b"content")
    file.chmod(0o4751)
    os.utime(file, ns=(0, -1_500_000_001))
    os.setxattr(file, "user.note", b"\0\xff")
    os.setxattr(file.parent, "user.of", b"a directory")
    os.link(file, taker.root / "e-other-name")
    (taker.root / "link").symlink_to("../no where")
    os.mkfifo(taker.root / "pipe", 0o600)
    taker.write("zeros", bytes(100))
    taker.write("empty", b"")
    taken = taker.take()
    found = taker.entries()
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "d": "d",
        "d/file": "f",
        "e-other-name": "h",
        "empty": "f",
        "link": "l",
        "pipe": "p",
        "zeros": "f",
    }
    assert found["d/file"].mode == 0o4751
    assert (found["d/file"].uid, found["d/file"].gid) == (os.getuid(), os.getgid())
    assert found["d/file"].mtime == -1_500_000_001
    assert found["d/file"].xattrs == {"user.note": b64encode(b"\0\xff").decode()}
    assert found["d"].xattrs == {"user.of": b64encode(b"a directory").decode()}
    assert found["e-other-name"].target == found["d/file"].path
    assert found["link"].target == "../no where"
    assert found["zeros"].extents == []
    assert taker.contents() == {"d/file": b"content", "empty": b"", "zeros": bytes(100)}
    assert (taken.files, taken.bytes, taken.changed) == (taker.trailer.files, 107, 3)
    assert (taken.parent, taken.exit_code, taker.problems) == ("", 0, {})


def test_a_link_is_recorded_only_to_what_is_proved_to_be_the_same_file(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = taker.write("a", b"old")
    for name in ("tree/b-link", "tree/c-link", "not taken", "not taken either"):
        os.link(old, taker.root.parent / name)
    os.link(taker.write("m", b"new"), taker.root / "n-link")

    def reusing(*how: Any) -> Iterator[WalkedFile]:
        for found in walk(*how):
            status = found.status
            if found.name == "c-link":  # The file has changed since its first name was passed.
                old.write_bytes(b"old, and more")
                status = old.stat()
            elif found.name == "m":  # As if it had the number of the other, removed meanwhile.
                times = {one: getattr(status, one) for one in ("st_mtime_ns", "st_ctime_ns")}
                status = os.stat_result((status[0], old.stat().st_ino, *status[2:]), times)
            yield found._replace(status=status)

    def take(**how: bool) -> dict[str, str]:
        taker.take(**how)
        assert taker.contents()["m"] == b"new"
        return {name: Path(one.target).name for name, one in taker.entries().items()}

    linked = {"a": "", "b-link": "a", "c-link": "a", "m": "", "n-link": "m"}
    assert take() == take() == linked
    monkeypatch.setattr("ntt_backup.snapshot.take.new_version.walk", reusing)
    for full in (False, True):
        old.write_bytes(b"old")
        assert take(full=full) == {**linked, "c-link": ""}
        assert taker.contents()["c-link"] == b"old, and more"


def test_of_a_file_that_has_not_changed_no_content_is_read(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        taker.write(f"{number % 7}/{number}", noise(10, number))
    taker.write("big", noise(3 << 20))
    os.link(taker.root / "big", taker.root / "a-link")
    taker.take()
    assert taker.repository.requests["write"] == 3  # a pack, the map and the manifest
    before = taker.entries()
    monkeypatch.setattr("ntt_backup.snapshot.take.changed_file.FileReader.read", _never)
    for number in range(0, 300, 3):  # What is gone lets no neighbour be read.
        (taker.root / f"{number % 7}/{number}").unlink()
    (taker.root / "new-directory").mkdir()
    taken = taker.take()
    assert (taken.read, taken.stored, taken.changed) == (0, 0, 0)
    after = taker.entries()
    files = {name: one for name, one in after.items() if one.kind == "f"}
    assert len(files) == 201
    assert all(before[name] == one for name, one in files.items())
    assert taker.repository.requests["read"] > 0
    assert taker.contents()["a-link"] == noise(3 << 20)


def _never(*_: object) -> None:
    raise AssertionError("no content may be read")


def test_a_touched_file_is_read_and_nothing_of_it_is_stored(taker: Taker) -> None:
    taker.write("small", b"small")
    taker.write("big", noise(3 << 20))
    taker.take()
    for name in ("small", "big"):
        os.utime(taker.root / name, ns=(0, 12345))
    taken = taker.take()
    assert (taken.stored, taken.changed, taken.read) == (0, 0, 5 + (3 << 20))
    assert taker.contents() == {"small": b"small", "big": noise(3 << 20)}
    assert taker.entries()["big"].mtime == 12345


def test_paranoid_finds_a_change_that_lstat_does_not_show(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker.write("small", b"small")
    taker.take()
    monkeypatch.setattr("os.pread", lambda *_: b"SMALL")
    assert taker.take().changed == 0
    assert taker.take(paranoid=True).changed == 1
    assert taker.contents() == {"small": b"SMALL"}


def test_a_sparse_file_stays_sparse(taker: Taker) -> None:
    path = taker.root / "sparse"
    with path.open("wb") as file:
        file.truncate(100 << 20)
        file.seek(70 << 20)
        file.write(noise(100_000))
        file.write(bytes(1 << 20))
        file.write(b"end")
    taken = taker.take()
    entry = taker.entries()["sparse"]
    assert taken.bytes == entry.size == 100 << 20
    assert taken.read < 4 << 20
    assert sum(one.length for one in entry.extents) <= 100_000 + 2 * BLOCK
    assert entry.digest == blake3().update_mmap(path).hexdigest()
    rewrite(path, 3, b"in the hole")
    os.truncate(path, (70 << 20) + 50_000)
    taker.take()
    assert taker.contents()["sparse"] == path.read_bytes()


def test_a_hole_of_any_size_takes_neither_all_memory_nor_years(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_file, "_MOST_BLOCKS", 512)
    path = taker.write("hole", noise(3 << 20))
    taker.take()
    os.truncate(path, 30 << 20)
    taker.take()
    found = taker.entries()["hole"]
    assert found.block == 64 << 10
    assert taker.content(found) == path.read_bytes()
    monkeypatch.setattr(changed_file, "_LARGEST", 40 << 20)
    os.truncate(path, 41 << 20)
    taker.write("other", b"content")
    assert taker.take().exit_code == 7
    assert taker.problems == {str(path): "it has more than 64 TiB"}
    assert taker.contents() == {"other": b"content"}


def test_a_file_in_too_many_pieces_is_stored_in_larger_ones(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_file, "MAX_EXTENTS", 64)
    monkeypatch.setattr(changed_file, "_MANY", 16)
    islands = taker.write("islands", b"".join(noise(BLOCK) + bytes(BLOCK) for _ in range(192)))
    even = taker.write("even", noise(3 << 20, 2))

    def take() -> tuple[Taken, dict[str, Entry]]:
        taken = taker.take()
        assert (taken.exit_code, taker.problems) == (0, {})
        found = taker.entries()
        for name, one in found.items():
            assert len(one.extents) <= 64
            assert taker.content(one) == (taker.root / name).read_bytes()
        return taken, found

    _, found = take()
    assert (found["islands"].block, found["even"].block) == (256 << 10, BLOCK)
    for block in range(0, 384, 2):
        rewrite(even, block * BLOCK, b"changed")
    taker.write("large", noise(20 << 20, 3))
    _, found = take()
    assert (found["even"].block, found["large"].block) == (256 << 10, BLOCK)
    rewrite(islands, 0, b"changed")
    rewrite(even, 0, b"again")
    taken, _ = take()
    assert taken.stored < 3 * (256 << 10)


def test_a_file_that_is_in_too_many_pieces_even_so_is_told_and_left_out(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MAX_EXTENTS", 64), ("_MANY", 16), ("MAX_SUPER_BLOCK", BLOCK)):
        monkeypatch.setattr(changed_file, name, value)
    islands = b"".join(noise(BLOCK) + bytes(BLOCK) for _ in range(192))
    os.link(taker.write("big", islands), taker.root / "big-link")
    taker.write("other", b"content")
    assert taker.take().exit_code == 7
    told = "it is in too many pieces for a version"
    assert taker.problems == {str(taker.root / one): told for one in ("big", "big-link")}
    assert taker.contents() == {"other": b"content"}


def test_more_extended_attributes_than_a_manifest_has_room_for_are_told(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every local user can give them to files, and must not end the takes of all others."""
    monkeypatch.setattr(changed_file, "MAX_XATTRS", 100)
    for path in (taker.write("bad/file", b"content"), taker.root / "bad"):
        os.setxattr(path, "user.large", bytes(100))
    os.setxattr(taker.write("good", b"content"), "user.small", b"1")
    assert taker.take().exit_code == 7
    told = "it has more than 1 MiB of extended attributes"
    assert taker.problems == {str(taker.root / one): told for one in ("bad", "bad/file")}
    assert {name: one.xattrs for name, one in taker.entries().items()} == {
        "bad": {},
        "good": {"user.small": "MQ=="},
    }


@pytest.mark.parametrize("seconds", [9_300_000_000, -9_300_000_000])
def test_a_file_of_any_time_leaves_the_version_readable(taker: Taker, seconds: int) -> None:
    path = taker.write("file", b"content")
    os.utime(path, (0, seconds))
    if abs(path.stat().st_mtime_ns) < MAX_NUMBER:
        pytest.skip("the file system has no such time")
    taker.take()
    assert taker.contents() == {"file": b"content"}
    assert taker.entries()["file"].mtime == (MAX_NUMBER - 1) * (1 if seconds > 0 else -1)
    assert taker.take().read == 0


def test_a_version_that_no_restore_would_read_is_not_made(
    taker: Taker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker.write("file", b"content")
    first = taker.take()
    taker.write("new", b"new")
    monkeypatch.setattr(changed_file, "times_of", lambda _: (MAX_NUMBER, 0))
    with pytest.raises(SourceError, match="could not be restored"):
        taker.take()
    assert [one.name for one in versions(taker.repository, "s") if one.whole] == [first.version]
    bad = tmp_path / "manifest"
    bad.write_bytes(b"no manifest")
    for full, error in ((True, SourceError), (False, SnapshotDamaged)):
        with pytest.raises(error):
            taking._require_readable(bad, full=full)


# --- files that do not hold still ----------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_file_that_changes_while_it_is_read_is_read_again(
    taker: Taker, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = taker.write("busy", noise(size))
    rest = 1

    def change() -> None:
        nonlocal rest
        if rest:
            rest -= 1
            rewrite(path, 0, b"changed")

    _while_reading(monkeypatch, change)
    taken = taker.take()
    assert (taken.unsettled, taker.problems) == (0, {})
    assert taker.contents()["busy"] == b"changed" + noise(size)[7:]
    assert taken.stored <= size + 2 * BLOCK  # Not twice.


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_file_that_never_holds_still_is_told_and_read_again_the_next_time(
    taker: Taker, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = taker.write("busy", noise(size))
    with monkeypatch.context() as patch:
        _while_reading(patch, lambda: rewrite(path, size, b"more and more"))
        taken = taker.take()
    assert (taken.unsettled, taken.exit_code) == (1, 0)
    assert taker.problems == {str(path): "it changed as often as it was read"}
    assert taker.entries()["busy"].unsettled
    assert taker.trailer.unsettled == 1
    assert taker.contents()["busy"][:size] == noise(size)
    taken = taker.take()
    assert taken.read >= size
    assert not taker.entries()["busy"].unsettled
    assert taker.contents()["busy"] == path.read_bytes()


def test_a_file_that_becomes_shorter_while_it_is_read_has_what_was_read(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = taker.write("busy", noise(12 << 20))
    sizes = iter([9 << 20, 6 << 20, (3 << 20) + 5])
    _while_reading(monkeypatch, lambda: os.truncate(path, next(sizes)))
    assert taker.take().unsettled == 1
    assert taker.contents()["busy"] == noise(12 << 20)[: (3 << 20) + 5]


def _while_reading(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Changes a file between the look at it and the reading."""
    wait = changed_file._let_the_clock_pass

    def changing(status: os.stat_result) -> None:
        wait(status)
        change()

    monkeypatch.setattr(changed_file, "_let_the_clock_pass", changing)


# --- what cannot be read -------------------------------------------------------------------------


def test_what_cannot_be_read_is_told_and_the_rest_is_taken(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "good", "vanished"):
        taker.write(name, b"content")
    taker.take()
    for name in ("bad", "good", "vanished"):
        taker.write(name, b"new content")
    real = os.pread

    def failing(fd: int, size: int, offset: int) -> bytes:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name == "bad":
            (taker.root / "vanished").unlink()
            raise OSError(5, "Input/output error")
        return real(fd, size, offset)

    monkeypatch.setattr("os.pread", failing)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(taker.root / "socket"))
        taken = taker.take()
    assert (taken.unreadable, taken.skipped, taken.exit_code) == (1, 2, 7)
    assert taker.problems == {
        str(taker.root / "bad"): "Input/output error",
        str(taker.root / "socket"): "sockets and devices are not taken",
    }
    assert taker.contents() == {"good": b"new content"}
    assert taker.trailer.skipped == 2


def test_what_a_version_does_not_keep_is_told(taker: Taker) -> None:
    for number in range(3):
        path = taker.write(f"flagged{number}", b"content")
        with path.open("rb") as file:
            try:
                fcntl.ioctl(file, _SET_FLAGS, array("l", [_NO_DUMP]))
            except OSError as error:
                pytest.skip(f"no flags of chattr here: {error.strerror}")
    (taker.root / "link").symlink_to("nowhere")
    os.link(taker.root / "link", taker.root / "other link", follow_symlinks=False)
    os.mkfifo(taker.root / "pipe")
    os.link(taker.root / "pipe", taker.root / "other pipe")
    taken = taker.take()
    assert taken.exit_code == 0
    assert taker.problems == {
        str(taker.root / "flagged0"): (
            "its flags of chattr are not kept (so for 3 files that were read)"
        ),
        str(taker.root / "link"): (
            "its other names become files of their own (so for 4 files that were read)"
        ),
    }
    taker.take()
    assert taker.problems == {}  # Once: they are not read again.


def test_a_set_of_which_nothing_is_there_is_an_error_and_one_path_of_two_is_told(
    taker: Taker,
) -> None:
    taker.set = SnapshotSet("s", ("/no/where",))
    with pytest.raises(SourceError, match="/no/where: No such file"):
        taker.take()
    taker.set = SnapshotSet("s", ("/no/where", str(taker.root)))
    assert taker.take().exit_code == 7
    assert taker.problems == {"/no": "No such file or directory"}


def test_a_set_whose_files_are_all_gone_gets_no_version_but_by_full(taker: Taker) -> None:
    taker.write("file", b"content")
    first = taker.take()
    (taker.root / "file").unlink()
    with pytest.raises(SourceError, match="its directories are empty"):
        taker.take()
    assert taker.contents() == {"file": b"content"}
    assert taker.take(full=True).files == first.files - 1
    assert taker.take().files == first.files - 1
    # A directory in it tells that its disk is mounted.
    taker.write("directory/file", b"content")
    taker.take()
    (taker.root / "directory" / "file").unlink()
    assert taker.take().files == first.files


# --- chains, copies and faults -------------------------------------------------------------------


def test_a_version_is_full_when_that_is_asked_for_and_when_the_chain_is_old(taker: Taker) -> None:
    taker.write("file", noise(100))
    assert taker.take().parent == ""
    assert taker.take().parent
    assert taker.take(full=True).parent == ""
    taker.now += taker.set.full_every
    assert taker.take().parent == ""
    assert taker.contents() == {"file": noise(100)}


@pytest.mark.parametrize(
    ("number", "file", "left"),
    [
        (0, "pack-00001", None),
        (0, "pack-00001", 60_000),
        (1, "pack-00001", None),
        (1, "manifest", 100),
    ],
)
def test_a_version_builds_on_no_chain_that_is_not_whole_and_says_so(
    taker: Taker, number: int, file: str, left: int | None
) -> None:
    taker.write("file", noise(70_000))
    names = [taker.take().version]
    taker.write("other", noise(70_000, 2))
    names.append(taker.take().version)
    content = taker.repository.files.pop(f"s/{names[number]}/{file}")
    if left is not None:
        taker.repository.files[f"s/{names[number]}/{file}"] = content[:left]
    taker.copies.drop(names[1])
    taken = taker.take()
    assert taken.parent == (names[0] if file == "manifest" else "")
    assert list(taker.problems) == [f"version {names[1]}"]
    assert taker.contents(taken.version) == {"file": noise(70_000), "other": noise(70_000, 2)}


def test_another_host_goes_on_from_what_the_repository_has(taker: Taker, tmp_path: Path) -> None:
    """As one does that shares the host key, and this one without its cache."""
    taker.keys = KEYS
    path = taker.write("big", noise(3 << 20))
    first = taker.take()
    taker.copies = Copies(tmp_path / "another-host")
    (tmp_path / "another-host").mkdir()
    rewrite(path, 0, b"!")
    second = taker.take()
    assert second.parent == first.version
    assert second.stored < 2 * BLOCK
    assert taker.contents() == {"big": path.read_bytes()}


def test_with_its_own_copies_a_take_fetches_nothing_and_a_bad_copy_is_fetched_anew(
    taker: Taker, tmp_path: Path
) -> None:
    taker.write("big", noise(3 << 20))
    taker.take()
    fetched = taker.repository.requests["read"]
    last = taker.take()
    # But who made the last version.
    assert taker.repository.requests["read"] == fetched + 1
    copies = taker.copies.paths(last.version)
    assert set((tmp_path / "cache").iterdir()) == {*copies, tmp_path / "cache" / "made"}
    with open_copies(tmp_path / "cache") as again:
        assert all(one.exists() for one in again.paths(last.version))
        again.drop(last.version)
        assert not any(one.exists() for one in copies)
    assert set((tmp_path / "cache").iterdir()) == {tmp_path / "cache" / "made"}
    assert (tmp_path / "cache" / "made").stat().st_mode & 0o777 == 0o600
    last = taker.take()

    def flip(path: Path) -> None:
        rewrite(path, path.stat().st_size - 15, b"spoilt")

    def make_unreadable(path: Path) -> None:
        path.unlink()
        path.symlink_to("/proc/self/mem")  # Its beginning gives EIO.

    # The manifest, and the map.
    for number, spoil in product(range(2), (flip, make_unreadable)):
        spoil(taker.copies.paths(last.version)[number])
        taken = taker.take()
        assert (taken.parent, taken.read, taker.problems) == (last.version, 0, {})
        last = taken


def test_a_copy_that_is_gone_meanwhile_is_a_damaged_one(tmp_path: Path) -> None:
    gone = tmp_path / "none"
    for read in (lambda: LastVersion(gone, gone), lambda: last_version._ending(gone, b"")):
        with pytest.raises(SnapshotDamaged, match="cannot be read: No such file"):
            read()


def test_a_machine_that_can_keep_no_copies_is_told(
    taker: Taker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").rmdir()
    with pytest.raises(DestinationError, match="cannot be written"):
        taker.take()
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(DestinationError, match="cannot be written"), open_copies(Path("/proc/no")):
        raise AssertionError("there are none")


def test_what_is_no_file_any_more_is_not_read(tmp_path: Path) -> None:
    reader = object.__new__(changed_file.FileReader)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert not changed_file.has_chattr_flags(fd)
        with pytest.raises(OSError, match="replaced by something else"):
            reader.read(fd, "path", None)
    finally:
        os.close(fd)
    with Path("/dev/null").open("rb") as null:
        assert not changed_file.has_chattr_flags(null.fileno())


def test_what_waits_for_its_content_is_bounded(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        taker.write(f"{number}", noise(1000, number))
    taker.take()
    assert len({one.extents[0].offset for one in taker.entries().values()}) == 1
    monkeypatch.setattr(taking, "_WAITING", 2)
    taker.take(full=True)
    assert len({one.extents[0].offset for one in taker.entries().values()}) > 1


def test_what_goes_while_it_is_taken_is_told(taker: Taker, monkeypatch: pytest.MonkeyPatch) -> None:
    taker.write("file", b"content")
    (taker.root / "link").symlink_to("nowhere")
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def fail(*_: object, **__: object) -> None:
        raise gone

    really = WalkedFile.open
    monkeypatch.setattr(
        WalkedFile, "open", lambda one: fail() if one.name == "file" else really(one)
    )
    monkeypatch.setattr(os, "readlink", fail)
    taken = taker.take()
    monkeypatch.undo()
    why = "it is gone since its directory was listed"
    assert taker.problems == {f"{taker.root}/{one}": why for one in ("file", "link")}
    assert (taken.skipped, taken.unreadable) == (2, 0)
    assert taker.entries() == {}


@pytest.mark.parametrize("error", [RemoteDenied("no get"), ConfigError("no identity")])
def test_where_the_last_version_may_not_be_read_a_full_one_is_taken_and_told(
    taker: Taker, error: BackupError
) -> None:
    taker.write("file", b"content")
    first = taker.take()

    def deny(verb: str, name: str) -> None:
        if verb == "read":
            raise error

    taker.repository.before = deny
    second = taker.take()
    assert (second.parent, taker.problems) == (first.version, {})
    taker.copies.drop(second.version)
    assert taker.take().parent == ""
    assert str(error) in taker.problems[f"version {second.version}"]


@pytest.mark.parametrize("file", ["pack-00001", "map", "manifest"])
@pytest.mark.parametrize("error", [RemoteUnreachable("away"), RemoteCannotStore("full")])
def test_a_fault_of_the_repository_leaves_no_version(
    taker: Taker, file: str, error: Exception
) -> None:
    taker.write("big", noise(3 << 20))
    taker.take()
    taker.write("big", noise(3 << 20, 2))

    def fail(verb: str, name: str) -> None:
        if verb == "finish" and name.endswith(file):
            raise error

    taker.repository.before = fail
    with pytest.raises(type(error)):
        taker.take()
    taker.repository.before = lambda verb, name: None
    assert taker.contents() == {"big": noise(3 << 20)}
    assert taker.take().parent
    assert taker.contents() == {"big": noise(3 << 20, 2)}


def test_what_is_damaged_where_nothing_is_built_on_is_told_in_its_own_words(taker: Taker) -> None:
    taker.write("file", b"content")
    asked = []

    def fail(verb: str, name: str) -> None:
        asked.append(verb)
        if asked.count("list") == 2:
            raise SnapshotDamaged("another answer than was asked for")

    taker.repository.before = fail
    with pytest.raises(SnapshotDamaged, match="another answer"):
        taker.take()


def test_a_take_whose_parent_is_removed_meanwhile_needs_it_no_more(taker: Taker) -> None:
    taker.write("file", noise(70_000))
    first = taker.take()
    taker.write("other", noise(70_000, 2))

    def forget(verb: str, name: str) -> None:
        if verb == "write" and "/pack-" in name:  # As by another host, which has a newer version.
            for one in [one for one in taker.repository.files if first.version in one]:
                del taker.repository.files[one]

    taker.repository.before = forget
    taken = taker.take()
    assert taken.parent == ""
    assert taker.contents(taken.version) == {"file": noise(70_000), "other": noise(70_000, 2)}


def test_a_take_whose_packs_are_removed_meanwhile_makes_no_version(taker: Taker) -> None:
    taker.write("file", noise(70_000))

    def forget(verb: str, name: str) -> None:
        if verb == "write" and name.endswith("/map"):
            taker.repository.files.clear()

    taker.repository.before = forget
    with pytest.raises(RemoteCannotStore, match="pack-00001"):
        taker.take()
    assert not [one for one in versions(taker.repository, "s") if one.whole]


def test_two_takes_at_once_have_no_copies_in_common(taker: Taker, tmp_path: Path) -> None:
    """As by two configurations, each with a lock of its own."""
    taker.keys = KEYS
    taker.write("file", b"content")
    cache = tmp_path / "cache"
    with open_copies(cache) as ours, open_copies(cache) as theirs:
        taker.copies = theirs
        first = taker.take()
        taker.copies = ours
        second = taker.take()
        assert (second.parent, second.read) == (first.version, 0)
        assert all(one.exists() for one in theirs.paths(first.version))
    assert set(cache.iterdir()) == {*ours.paths(second.version), cache / "made"}
    with open_copies(cache) as again:
        assert all(one.exists() for one in again.paths(second.version))


# --- what others have planted --------------------------------------------------------------------


def planted(taker: Taker, tmp_path: Path, keys: SigningKeys, **changed: bytes) -> str:
    """A version of somebody else, right behind the last one, with the times of the files of this
    host and another content. Returns its name.
    """
    enemy = Taker(tmp_path / "enemy", tmp_path / "cache of the enemy")
    enemy.set, enemy.repository, enemy.keys = taker.set, taker.repository, keys
    enemy.now = taker.now
    kept = {path: (path.read_bytes(), path.stat()) for path in taker.root.iterdir()}
    for name, content in changed.items():
        taker.write(name, content)
        os.utime(taker.root / name, ns=(0, kept[taker.root / name][1].st_mtime_ns))
    version = enemy.take(full=True).version
    for path, (content, status) in kept.items():
        path.write_bytes(content)
        os.utime(path, ns=(0, status.st_mtime_ns))
    return version


@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["key", "no key"])
@pytest.mark.parametrize("theirs", [OTHERS, NO_KEYS], ids=["signed", "unsigned"])
def test_a_planted_version_is_no_parent_of_the_next_ones(
    taker: Taker,
    tmp_path: Path,
    keys: SigningKeys,
    theirs: SigningKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if it knew what lstat says here, which it can read from the last manifest.
    monkeypatch.setattr("ntt_backup.snapshot.format.entry.times_of", lambda _: (1, 1))
    taker.keys = keys
    taker.write("file", b"content")
    first = taker.take()
    bad = planted(taker, tmp_path, theirs, file=b"planted")
    taker.write("other", b"other")
    second = taker.take()
    assert (second.parent, taker.problems) == (first.version, {})
    assert taker.contents(second.version) == {"file": b"content", "other": b"other"}
    # Not even where this host has nothing left of its own.
    for one in [one for one in taker.repository.files if bad not in one]:
        del taker.repository.files[one]
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    third = taker.take()
    assert third.parent == ""
    assert list(taker.problems) == ["set s"]
    assert taker.contents(third.version) == {"file": b"content", "other": b"other"}


def test_a_version_for_another_target_is_no_parent_and_not_the_newest(
    taker: Taker, tmp_path: Path
) -> None:
    """This host has signed it; somebody has put it where it does not belong."""
    taker.keys = KEYS
    taker.target = "a"
    taker.write("file", b"content")
    first = taker.take()
    there = Taker(tmp_path / "enemy", tmp_path / "cache of the other target")
    there.set, there.keys, there.target, there.now = taker.set, KEYS, "b", taker.now
    second = there.take()
    taker.repository.files |= there.repository.files
    told: list[str] = []
    assert str(choose(taker.repository, "s", taker.origins, told.append)) == f"s@{first.version}"
    (said,) = told
    assert said.startswith(f"s@{second.version} is passed over, since it is of another target")
    third = taker.take()
    assert (third.parent, taker.problems) == (first.version, {})
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    found = {
        one.version.name: one.origin
        for one in facts(taker.repository, versions(taker.repository, "s"), taker.origins)
    }
    assert found[second.version] == Origin.ELSEWHERE
    assert found[third.version] == Origin.OURS


@pytest.mark.parametrize("of", ["header", "entries"])
def test_a_version_with_the_seal_of_another_is_no_parent(taker: Taker, of: str) -> None:
    """The signature is right, what stands before it is not."""
    taker.keys = KEYS
    taker.write("file", b"content")
    first = taker.take()
    manifest = f"s/{first.version}/manifest"
    data = taker.repository.files[manifest]
    reader = ManifestReader([data])
    tail = data[-tail_size(data[-END_BYTES:]) :]
    out: list[bytes] = []
    header = replace(reader.header, key="0" * 64) if of == "header" else reader.header
    writer = ManifestWriter(out.append, header)
    for entry in reader.entries():
        writer.add(replace(entry, uid=entry.uid + (of == "entries")).line())
    writer.end(ending_of(tail)[0])
    forged = b"".join(out)
    taker.repository.files[manifest] = forged[: -tail_size(forged[-END_BYTES:])] + tail
    shutil.rmtree(taker.copies.paths("")[0].parent)
    taker.copies.paths("")[0].parent.mkdir()
    second = taker.take()
    assert (second.parent, second.changed) == ("", 1)
    assert taker.contents(second.version) == {"file": b"content"}


@pytest.mark.parametrize("content", [b"x", b""])
@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["key", "no key"])
def test_a_version_of_the_last_of_days_does_not_stop_takes(
    taker: Taker, content: bytes, keys: SigningKeys
) -> None:
    taker.keys = keys
    taker.write("file", b"content")
    first = taker.take()
    planted = "s/99991231T235959Z-00000000/manifest"
    taker.repository.files[planted] = content
    taker.repository.arrived[planted] = taker.now
    second = taker.take()
    assert (second.parent, taker.problems) == (first.version, {})
    assert second.version[:8] == first.version[:8]
    assert last_begun(taker.repository, "s", taker.now, taker.origins) == taker.now.replace(
        microsecond=0
    )


@pytest.mark.parametrize("planted", [b"x", b"", None])
@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["key", "no key"])
def test_a_manifest_that_somebody_plants_first_takes_the_place_of_no_version(
    taker: Taker, keys: SigningKeys, planted: bytes | None
) -> None:
    """Whoever sees the first pack knows the name of the version; None is a genuine manifest."""
    taker.keys = keys
    taker.write("file", b"content")
    first = taker.take()
    begun = last_begun(taker.repository, "s", taker.now, taker.origins)
    genuine = taker.repository.files[f"s/{first.version}/manifest"]

    def plant(verb: str, name: str) -> None:
        if verb == "finish" and name.endswith("/map"):
            manifest = f"{name.removesuffix('map')}manifest"
            taker.repository.files[manifest] = genuine if planted is None else planted
            taker.repository.arrived[manifest] = taker.now

    taker.repository.before = plant
    taker.write("file", b"changed")
    with pytest.raises(NameTaken, match="somebody else"):
        taker.take()
    taker.repository.before = lambda *_: None
    taker.repository.writing = False
    assert list(taker.origins.made("s")) == [first.version]
    _is_newest_of_host(taker, first, begun)
    assert taker.problems == {}


def test_a_name_that_this_host_once_gave_proves_no_version(taker: Taker) -> None:
    """It may have died before the manifest had its name, or have removed the version."""
    taker.write("file", b"content")
    first = taker.take()
    begun = last_begun(taker.repository, "s", taker.now, taker.origins)
    name = new_version(taker.now, first.version)
    taker.origins.keep_made("s", name, "0" * 64)
    taker.repository.files[f"s/{name}/manifest"] = b"x"
    taker.repository.arrived[f"s/{name}/manifest"] = taker.now
    _is_newest_of_host(taker, first, begun)
    assert list(taker.problems) == [f"version {name}"]


def test_where_genuine_manifests_may_not_be_read_a_planted_one_is_still_none(taker: Taker) -> None:
    """A sealed one asks for an identity; one that is not sealed is refused unread."""
    taker.write("file", b"content")
    first = taker.take()
    name = new_version(taker.now, first.version)
    taker.origins.keep_made("s", name, "0" * 64)
    taker.repository.files[f"s/{name}/manifest"] = b"x"

    def deny(verb: str, file: str) -> None:
        if verb == "read" and first.version in file:
            raise ConfigError("no identity")

    taker.repository.before = deny
    assert choose(taker.repository, "s", taker.origins).name == first.version


def _is_newest_of_host(taker: Taker, first: Taken, begun: datetime | None) -> None:
    """Checks that all see the first version as the newest of this host, whatever is beside it."""
    assert len([one for one in versions(taker.repository, "s") if one.whole]) == 2
    assert choose(taker.repository, "s", taker.origins).name == first.version
    assert last_begun(taker.repository, "s", taker.now, taker.origins) == begun
    assert set(names_of_host(taker.repository, "s", taker.origins)) == {first.version}
    assert taker.take().parent == first.version


@pytest.mark.parametrize("may_read", [True, False])
def test_a_file_that_somebody_adds_to_a_version_makes_no_take_a_full_one(
    taker: Taker, may_read: bool
) -> None:
    def deny(verb: str, name: str) -> None:
        if verb == "read" and not may_read:
            raise RemoteDenied("no get")
        # Also while a version is on its way.
        if verb == "finish" and name.endswith("/map"):
            taker.repository.files[f"s/{last.version}/pack-00100"] = b"x"

    taker.write("file", b"content")
    last = taker.take()
    taker.repository.before = deny
    for number in range(3 if may_read else 1):
        taker.repository.files[f"s/{last.version}/pack-00099"] = b"x"
        taker.write(f"file{number}", b"content")
        taken = taker.take()
        assert (taken.parent, taker.problems) == (last.version, {})
        last = taken


def test_a_version_that_is_unpinned_meanwhile_makes_no_take_a_full_one(taker: Taker) -> None:
    taker.write("file", b"content")
    last = taker.take()
    pin = f"s/{last.version}/pin-{'0' * 16}-{'0' * 64}"
    taker.repository.files[pin] = b"{}"

    def unpin(verb: str, name: str) -> None:
        if verb == "finish" and name.endswith("/map"):
            taker.repository.files.pop(pin, None)

    taker.repository.before = unpin
    taker.write("another", b"content")
    taken = taker.take()
    assert (taken.parent, taker.problems) == (last.version, {})
    assert pin not in taker.repository.files
