"""Packs are unpacked into a directory: all that is right and nothing else, and nowhere else."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.config.sealing import Keyring
from ntt_backup.errors import ConfigError, DestinationError
from ntt_backup.pack.age_encryption import HEAD, SEALED_CHUNK
from ntt_backup.pack.format import TAIL_BYTES
from ntt_backup.pack.reader import _FIRST_READ
from ntt_backup.packstore import contents as giving
from ntt_backup.restore import destination
from ntt_backup.restore.unpack import UnpackedAll
from ntt_backup.restore.unpack import unpack as unpack_files
from tests.helpers.blobs import MIX, Person, noise, pack, put_as, reader, sealed, text, tree
from tests.helpers.file_system import files_and_directories, inode, noted_syncs, without_syncfs

WAYS = [(jobs, verify) for jobs in (1, 3) for verify in (True, False)]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads in which tests are spread over processes only wait for the next one."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def unpack(
    data: bytes | Sequence[bytes],
    to: Path,
    *,
    jobs: int = 1,
    verify: bool = True,
    keyring: Keyring | None = None,
) -> UnpackedAll:
    files = []
    for number, one in enumerate([data] if isinstance(data, bytes) else data):
        files.append(to.parent / f"{number}.tar")
        files[-1].write_bytes(one)
    return unpack_files(
        files, to, jobs=jobs, verify=verify, on_progress=lambda _: None, keyring=keyring
    )


def path_of(content: bytes) -> str:
    return relative_path(blake3(content).hexdigest())


def blobs(contents: Sequence[bytes]) -> dict[str, bytes]:
    return {path_of(one): one for one in contents}


@pytest.mark.parametrize(("jobs", "verify"), WAYS)
def test_a_directory_gets_every_blob(tmp_path: Path, jobs: int, verify: bool) -> None:
    done = unpack(pack(MIX), tmp_path / "to", jobs=jobs, verify=verify)
    assert tree(tmp_path / "to") == blobs(MIX)
    assert (done.unpacked, done.right, done.exit_code) == (len(MIX), 0, 0)
    assert done.bytes == sum(map(len, MIX))
    assert done.part == 1


@pytest.mark.parametrize(("jobs", "verify"), WAYS)
def test_what_is_right_stays_and_what_is_wrong_is_replaced(
    tmp_path: Path, jobs: int, verify: bool
) -> None:
    to = tmp_path / "to"
    unpack(pack(MIX[: len(MIX) // 2]), to)
    states = {path: path.stat() for path in to.rglob("*") if path.is_file()}
    cut, changed, extra = MIX[10], MIX[20], noise(50, 5)
    put_as(to, blake3(cut).hexdigest(), cut[:-1])
    put_as(to, blake3(changed).hexdigest(), b"?" + changed[1:])
    put_as(to, blake3(extra).hexdigest(), extra)
    before = len(os.listdir("/proc/self/fd"))
    done = unpack(pack(MIX), to, jobs=jobs, verify=verify)
    assert len(os.listdir("/proc/self/fd")) == before
    assert tree(to) == blobs([*MIX, extra])
    assert (done.right, done.exit_code) == (len(MIX) // 2 - 2, 0)
    kept = set(states) - {to / path_of(one) for one in (cut, changed)}
    assert all(path.stat().st_mtime_ns == states[path].st_mtime_ns for path in kept)
    assert all(path.stat().st_ino == states[path].st_ino for path in kept)


def test_others_may_look_and_not_write_whatever_the_umask_is(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        unpack(pack([b"content"]), tmp_path / "to")
    finally:
        os.umask(umask)
    found = [stat.S_IMODE(one.stat().st_mode) for one in sorted((tmp_path / "to").rglob("*"))]
    assert found == [0o755, 0o755, 0o644]


def test_a_disk_that_tells_only_at_the_close_that_it_is_full_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FUSE and network file systems do."""
    close = os.close

    def full(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if path.endswith(path_of(b"content")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", full)
    with pytest.raises(DestinationError, match="No space left"):
        unpack(pack([b"content"]), tmp_path / "to")
    assert tree(tmp_path / "to") == {}


def test_where_syncfs_does_not_reach_the_disk_each_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_syncfs(monkeypatch)
    synced = noted_syncs(monkeypatch)
    unpack(pack(MIX), tmp_path / "to")
    missed = [one for one in files_and_directories(tmp_path / "to") if inode(one) not in synced]
    assert missed == []


def test_several_packs_may_have_the_same_blobs(tmp_path: Path) -> None:
    done = unpack([pack(MIX[:100]), pack(()), pack(MIX[50:150])], tmp_path / "to")
    assert tree(tmp_path / "to") == blobs(MIX[:150])
    assert (done.unpacked, done.right) == (150, 50)


@pytest.mark.parametrize("size", [100, 20_000, 3_000_000], ids=["dense", "plain", "large"])
def test_a_damaged_blob_is_left_out_unless_nobody_looks(tmp_path: Path, size: int) -> None:
    bad, good = noise(size, 1), noise(size, 2)
    data = bytearray(pack([bad, good], compress=False))
    entry = reader(bytes(data)).table.find(blake3(bad).digest())
    assert entry is not None
    data[entry.offset + size // 2] ^= 1
    done = unpack(bytes(data), tmp_path / "to")
    assert tree(tmp_path / "to") == blobs([good])
    assert done.exit_code == 7
    assert [one.blobid for one in done.wrong.first] == [entry.digest.hex()]
    done = unpack(bytes(data), tmp_path / "other", verify=False)
    assert done.exit_code == 0
    assert len(tree(tmp_path / "other")) == 2


@pytest.mark.parametrize("damage", ["no end", "no table", "a header", "a bad member"])
def test_of_a_damaged_pack_the_larger_blobs_are_found(tmp_path: Path, damage: str) -> None:
    larger = [noise(20_000 + n, n) for n in range(40)]
    smaller = [text(n, 3000) for n in range(40)]
    data = bytearray(pack([*larger, *smaller]))
    found = reader(bytes(data))
    first = min(found.table, key=lambda one: one.offset)
    lost: set[bytes] = set()
    data[found.trailer.table_offset + 5] ^= 1
    if damage == "no end":
        del data[-TAIL_BYTES:]
    elif damage == "a header":
        data[first.offset - 500] ^= 1
        lost = {first.digest}
    elif damage == "a bad member":
        data[first.offset + 7] ^= 1
        lost = {first.digest}
    done = unpack(bytes(data), tmp_path / "to", verify=False)
    left = [one for one in larger if blake3(one).digest() not in lost]
    assert tree(tmp_path / "to") == blobs(left)
    assert done.exit_code == 7
    assert len(done.damaged) == 1


@pytest.mark.parametrize("lacks", [0, 1])
def test_of_a_pack_that_is_cut_the_blobs_before_the_cut_are_found(
    tmp_path: Path, lacks: int
) -> None:
    larger = [noise(20_000 + n, n) for n in range(3)]
    data = pack(larger)
    last = max(reader(data).table, key=lambda one: one.offset)
    before = len(os.listdir("/proc/self/fd"))
    done = unpack(data[: last.offset + last.stored - lacks], tmp_path / "to")
    left = [one for one in larger if not lacks or blake3(one).digest() != last.digest]
    assert tree(tmp_path / "to") == blobs(left)
    assert done.exit_code == 7
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_link_in_the_directory_is_followed(tmp_path: Path) -> None:
    to, outside = tmp_path / "to", tmp_path / "outside"
    content = noise(100, 1)
    for linked in (path_of(content)[:2], path_of(content)[:5]):
        outside.mkdir()
        (to / linked).parent.mkdir(parents=True, exist_ok=True)
        (to / linked).symlink_to(outside)
        with pytest.raises(DestinationError):
            unpack(pack([content]), to)
        assert tree(outside) == {}
        outside.rmdir()
        (to / linked).unlink()
    other = tmp_path / "file"
    other.write_bytes(b"not ours")
    (to / path_of(content)).parent.mkdir(parents=True, exist_ok=True)
    (to / path_of(content)).symlink_to(other)
    unpack(pack([content]), to)
    assert other.read_bytes() == b"not ours"
    assert not (to / path_of(content)).is_symlink()
    assert tree(to) == blobs([content])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_directory_in_the_place_of_a_blob_is_told(tmp_path: Path, jobs: int) -> None:
    contents = [noise(50, n) for n in range(600)]
    (tmp_path / "to" / path_of(contents[0])).mkdir(parents=True)
    done = unpack(pack(contents), tmp_path / "to", jobs=jobs)
    assert tree(tmp_path / "to") == blobs(contents[1:])
    assert (done.unpacked, done.exit_code) == (599, 7)
    assert "a directory stands in its place" in done.wrong.first[0].detail


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path, jobs: int) -> None:
    contents = [noise(50, n) for n in range(600)]
    to = tmp_path / "to"
    to.mkdir()
    for number in range(256):
        (to / f"{number:02x}").write_bytes(b"")
    with pytest.raises(DestinationError):
        unpack(pack(contents), to, jobs=jobs)
    assert set(tree(to).values()) == {b""}


def test_a_pack_that_is_sealed_for_others_is_told_and_the_others_are_unpacked(
    tmp_path: Path,
) -> None:
    owner, to = Person.new(), tmp_path / "to"
    foreign, good = sealed(MIX[:5], [Person.new().public]), sealed(MIX[5:50], [owner.public])
    key = owner.file(tmp_path / "key")

    done = unpack([foreign, good], to, keyring=Keyring(lambda: key))

    assert tree(to) == blobs(MIX[5:50])
    assert (done.unpacked, done.exit_code) == (45, 7)
    (said,) = done.damaged
    assert "0.tar: it is sealed for other identities" in said


def test_of_a_large_blob_that_breaks_off_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing resumes it: what is damaged in a pack stays damaged."""
    monkeypatch.setattr(destination, "RESUMABLE", 100_000)
    monkeypatch.setattr(giving, "LARGEST_RANGE", 200_000)
    owner, content = Person.new(), noise(600_000, 1)
    data = bytearray(sealed([content], [owner.public]))
    data[HEAD + 6 * SEALED_CHUNK] ^= 1
    key = owner.file(tmp_path / "key")
    done = unpack(bytes(data), tmp_path / "to", keyring=Keyring(lambda: key))
    assert (done.unpacked, len(done.wrong)) == (0, 1)
    assert not (tmp_path / "to").exists()


def test_where_no_pack_opens_the_identity_is_told(tmp_path: Path) -> None:
    foreign = sealed(MIX[:5], [Person.new().public])
    key = Person.new().file(tmp_path / "key")
    with pytest.raises(ConfigError, match="for other identities than those in"):
        unpack([foreign, foreign], tmp_path / "to", keyring=Keyring(lambda: key))
    assert not tree(tmp_path / "to")


def test_a_file_that_is_missing_is_a_mistake_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        unpack_files(
            [tmp_path / "no"], tmp_path / "to", jobs=1, verify=True, on_progress=lambda _: None
        )
    assert not (tmp_path / "to").exists()


# --- blob by blob ---------------------------------------------------------------------------------


SOME = (b"", b"x", *(text(n, 900) for n in range(120)), noise(20_000, 1), noise(30_000, 2))


@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_every_blob_is_whole_however_little_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    contents = SOME if most > 1 else SOME[:9]
    before = len(os.listdir("/proc/self/fd"))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:most])))
    done = unpack(pack(contents), tmp_path / "to")
    assert (done.unpacked, done.right, len(done.wrong)) == (len(contents), 0, 0)
    assert done.bytes == sum(map(len, contents))
    assert tree(tmp_path / "to") == blobs(contents)
    again = unpack(pack(contents), tmp_path / "to")
    assert (again.unpacked, again.right, again.bytes) == (0, len(contents), 0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("content", [SOME[50], SOME[-1]])
@pytest.mark.parametrize("damage", ["altered", "unreadable"])
def test_one_bad_blob_is_told_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, content: bytes
) -> None:
    data = bytearray(pack(SOME))
    bad = reader(bytes(data)).table.find(blake3(content).digest())
    assert bad is not None
    last = bad.offset + bad.stored - 1
    pread = os.pread

    def reading(fd: int, length: int, offset: int) -> bytes:
        opening = length in (_FIRST_READ, len(data))
        if not opening and offset <= last < offset + length:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, length, offset)

    if damage == "altered":
        data[last] ^= 1
    else:
        monkeypatch.setattr(os, "pread", reading)
    done = unpack(bytes(data), tmp_path / "to")
    (told,) = done.wrong.first
    assert told.blobid == bad.digest.hex()
    words = {"altered": "in the pack hash to|cannot be decompressed"}.get(damage, "cannot be read")
    assert re.search(words, told.detail)
    assert tree(tmp_path / "to") == blobs([one for one in SOME if one != content])
    assert done.bytes == sum(map(len, SOME)) - len(content)
