"""Versions come back: whole, in part, as a delta, after an interruption, with damage."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.blobdir import descriptors
from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import ConfigError, DestinationError, LockHeld, RemoteError
from ntt_backup.filestore.contract import StoredFile
from ntt_backup.process import durable
from ntt_backup.snapshot.format.entry import DIRECTORY, FILE, HARD_LINK, SYMLINK, Entry
from ntt_backup.snapshot.names import SnapshotDamaged
from ntt_backup.snapshot.origins import NO_KEYS, NOBODY, Origins
from ntt_backup.snapshot.restore import fetch
from ntt_backup.snapshot.restore import files as restored_files
from ntt_backup.snapshot.restore import version as restoring
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.tree import MARKER
from ntt_backup.snapshot.restore.version import RestoredVersion
from ntt_backup.snapshot.restore.version import restore as restore_version
from ntt_backup.snapshot.take.walk import SnapshotSet
from ntt_backup.snapshot.versions import Version
from tests.helpers.blobs import tree as files_of
from tests.helpers.file_system import (
    files_and_directories,
    inode,
    noted_syncs,
    put_on_bad_sectors,
    without_syncfs,
)
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import VERSION, directory, file, put_version, restore
from tests.unit.taker import KEYS, OTHERS, Taker

BLOCK = 8 << 10
EMPTY = blake3(b"").hexdigest()
chance = random.Random(16)


class Example(Taker):
    """A tree, a repository with versions of it, and where they are restored."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "root", home / "cache")
        self.set = SnapshotSet("etc", (str(self.root),))
        self.to = home / "to"
        self.first = ""

    @property
    def restored(self) -> Path:
        return self.to / str(self.root)[1:]

    def is_same(self) -> bool:
        return _look(self.root) == _look(self.restored)


def _said_of_parents(root: Path) -> list[str]:
    """Returns the notes of a restore by this user about the directories above root, such as /tmp:
    an ordinary user cannot give them back to the superuser.
    """
    owners = {parent.stat().st_uid for parent in root.parents}
    note = "owners are not set where they are others: this user may not"
    return [] if os.geteuid() == 0 or owners == {os.geteuid()} else [note]


def _look(root: Path) -> dict[str, object]:
    """All of a tree that a version keeps. Inodes by the first path that has them."""
    seen: dict[str, object] = {}
    inodes: dict[int, str] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        name = str(path.relative_to(root))
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        xattrs = {
            one: os.getxattr(path, one, follow_symlinks=False)
            for one in os.listxattr(path, follow_symlinks=False)
        }
        owner = (status.st_uid, status.st_gid)
        first = inodes.setdefault(status.st_ino, name)
        seen[name] = (status.st_mode, owner, status.st_mtime_ns, content, xattrs, first)
    return seen


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads in which tests are spread over processes only wait for the next one."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.fixture
def example(tmp_path: Path) -> Example:
    return Example(tmp_path)


@pytest.fixture
def everything(example: Example) -> Example:
    """A tree with something of every kind."""
    for number in range(250):
        path = example.write(f"many/{number % 7}/{number}", chance.randbytes(number))
        os.utime(path, ns=(number, number * 10**15 + 123))
    example.write("empty", b"")
    example.write("zeros", bytes(5000))
    example.write("big", chance.randbytes(3 << 20))
    (example.root / "no files").mkdir(mode=0o700)
    os.link(example.root / "big", example.root / "same as big")
    (example.root / "to nowhere").symlink_to("/nowhere/at/all")
    os.mkfifo(example.root / "fifo", 0o620)
    with (example.root / "sparse").open("wb") as out:
        out.truncate(16 << 20)
        out.seek(10 << 20)
        out.write(b"an island")
    os.utime(example.root / "to nowhere", ns=(5, -7), follow_symlinks=False)
    os.setxattr(example.root / "many", "user.of", b"a directory")
    os.setxattr(example.root / "empty", "user.of", bytes(range(256)))
    (example.root / "zeros").chmod(0o4711)
    (example.root / os.fsdecode(b"no utf-8 \xff")).write_bytes(b"x")
    if os.geteuid() == 0:
        os.chown(example.root / "big", 1234, 5678)
        os.chown(example.root / "many" / "5" / "5", 1234, 5678)
        os.chown(example.root / "to nowhere", 1234, 5678, follow_symlinks=False)
        os.chown(example.root / "no files", 1234, 5678)
    (example.root / "many" / "3").chmod(0o555)
    return example


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("verify", [True, False])
def test_a_tree_comes_back_as_it_was(everything: Example, jobs: int, verify: bool) -> None:
    everything.take()
    done = restore(everything.repository, everything.to, jobs=jobs, verify=verify)
    assert (done.wrong, done.problems, done.notes) == (0, [], _said_of_parents(everything.root))
    assert everything.is_same()
    assert (everything.restored / "sparse").stat().st_blocks < 2048
    again = restore(everything.repository, everything.to, jobs=jobs, verify=verify)
    assert (again.files, again.kept, again.fetched) == (0, done.files, 0)
    assert everything.is_same()


def test_thousands_of_small_files_take_a_few_requests(everything: Example) -> None:
    everything.take()
    before = everything.repository.requests["read"]
    restore(everything.repository, everything.to)
    assert everything.repository.requests["read"] - before <= 10


def test_what_differs_is_replaced_and_what_the_version_lacks_is_left_alone(
    everything: Example,
) -> None:
    everything.take()
    restore(everything.repository, everything.to)
    restored = everything.restored
    changed = restored / "many" / "1" / "8"
    time = changed.stat().st_mtime_ns
    changed.write_bytes(b"other...")
    (restored / "many" / "2" / "2").chmod(0o600)
    touched = restored / "many" / "2" / "9"
    touched.touch()
    (restored / "to nowhere").unlink()
    (restored / "to nowhere").symlink_to("elsewhere")
    (restored / "same as big").unlink()
    (restored / "more").write_bytes(b"not of the version")
    inode = touched.stat().st_ino
    done = restore(everything.repository, everything.to)
    assert changed.stat().st_mtime_ns == time
    assert touched.stat().st_ino == inode
    assert (done.wrong, done.files) == (0, 3)
    assert (restored / "more").read_bytes() == b"not of the version"
    (restored / "more").unlink()
    os.utime(restored, ns=(0, everything.root.stat().st_mtime_ns))
    assert everything.is_same()


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (["/root/a"], {"a/x.conf", "a/b/y.conf", "a/b/y"}),
        (["*.conf"], {"a/x.conf", "a/b/y.conf", "z.conf"}),
        (["/root/*.conf", "b/y"], {"z.conf", "a/b/y"}),
        (["**/root/empty"], set()),
        (["link"], {"link", "a/b/y"}),
        (["soft"], set()),
        (["/root"], {"a/b/y", "a/b/y.conf", "a/x.conf", "other", "z.conf", "link"}),
    ],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_only_what_fits_a_pattern_is_restored(
    tmp_path: Path, patterns: list[str], wanted: set[str], jobs: int
) -> None:
    names = ["a/b/y", "a/b/y.conf", "a/x.conf", "other", "z.conf"]
    entries = [directory("before"), directory("root")]
    entries += [(Entry(f"root/{name}", DIRECTORY, 0o711), ()) for name in ("a", "a/b")]
    entries += [file(f"root/{name}") for name in names[:3]]
    entries.append(directory("root/empty"))
    entries.append((Entry("root/link", HARD_LINK, 0o644, mtime=1, target="root/a/b/y"), ()))
    entries += [file(f"root/{name}") for name in names[3:]]
    entries.append((Entry("root/soft", SYMLINK, 0o777, mtime=1, target="root/other"), ()))
    repository = put_version(MemoryStore(), entries)
    parts: list[float | None] = []

    def note(done: RestoredVersion) -> None:
        parts.append(done.part)

    done = restore(repository, tmp_path / "to", "etc", *patterns, jobs=jobs, on_progress=note)
    assert done.wrong == 0
    assert parts[-1] == (1.0 if wanted else 0.0)
    to = tmp_path / "to"
    assert set(files_of(to)) == {f"root/{name}" for name in wanted}
    assert (to / "root" / "empty").exists() == ("empty" in patterns[0] or patterns == ["/root"])
    assert not (to / "before").exists()
    for above in {parent for name in wanted for parent in Path(name).parents} - {Path()}:
        assert stat.S_IMODE((to / "root" / above).stat().st_mode) == 0o711


# --- deltas ---------------------------------------------------------------------------------------


@pytest.fixture
def pages(example: Example) -> Example:
    """Two versions of a file of pages, 1 % of which differ. In the second it is longer, and has a
    hole. The first is restored.
    """
    content = bytearray(chance.randbytes(24 << 20))
    example.write("pages", bytes(content))
    example.write("small", b"small")
    example.write("shorter", chance.randbytes(4 << 20))
    example.first = example.take().version
    restore(example.repository, example.to)
    for page in chance.sample(range(len(content) // BLOCK), len(content) // BLOCK // 100):
        content[page * BLOCK : page * BLOCK + 4] = b"page"
    content[9 << 20 : (9 << 20) + (200 << 10)] = bytes(200 << 10)
    example.write("pages", bytes(content) + chance.randbytes(50_000))
    example.write("small", b"other")
    os.truncate(example.root / "shorter", (3 << 20) + 5)
    example.take()
    return example


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("jobs", "holes"), [(1, True), (2, True), (1, False)])
def test_a_delta_fetches_what_differs_and_no_more(
    pages: Example, in_place: bool, jobs: int, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:  # A file system that can make none of them.
        monkeypatch.setattr(restored_files, "_fallocate", lambda *_: -1)
    changed = sum(
        len(data)
        for name, data in pages.repository.files.items()
        if "/pack-" in name and pages.first not in name
    )
    inode = (pages.restored / "pages").stat().st_ino
    done = restore(pages.repository, pages.to, delta=True, in_place=in_place, jobs=jobs)
    assert (done.wrong, done.files) == (0, 3)
    assert done.fetched <= 1.5 * changed
    assert pages.is_same()
    assert ((pages.restored / "pages").stat().st_ino == inode) == in_place
    # And back, where the super blocks are those of the full version.
    restore(pages.repository, pages.to, f"etc@{pages.first}", delta=True)
    again = restore(pages.repository, pages.to, delta=True)
    assert again.fetched <= 1.5 * changed
    assert pages.is_same()


def test_a_file_that_has_another_name_outside_is_never_changed_in_place(
    pages: Example, tmp_path: Path
) -> None:
    before = (pages.restored / "pages").read_bytes()
    os.link(pages.restored / "pages", tmp_path / "outside")
    assert restore(pages.repository, pages.to, delta=True, in_place=True).wrong == 0
    assert (tmp_path / "outside").read_bytes() == before
    assert pages.is_same()


def test_a_delta_without_a_sound_map_fetches_files_whole(pages: Example) -> None:
    name = max(name for name in pages.repository.files if name.endswith("/map"))
    pages.repository.files[name] = b"?" + pages.repository.files[name][1:]
    done = restore(pages.repository, pages.to, delta=True)
    of_map = [note for note in done.notes if note not in _said_of_parents(pages.root)]
    assert (done.wrong, len(of_map)) == (0, 1)
    assert pages.is_same()


def test_a_map_that_becomes_any_number_of_sums_takes_no_more_memory_than_the_file_has(
    tmp_path: Path,
) -> None:
    small = file("small")
    huge = Entry("huge", FILE, 0o644, mtime=1, size=(16 << 20) * BLOCK, block=BLOCK, digest=EMPTY)
    repository = put_version(MemoryStore(), [small, (huge, ())], map=bytes(8 * (16 << 20)))
    (tmp_path / "to" / "huge").mkdir(parents=True)
    tracemalloc.start()
    done = restore(repository, tmp_path / "to", delta=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert done.problems == [("huge", "a directory stands in its place")]
    assert peak < 48 << 20


def test_a_delta_of_what_has_the_same_time_and_size_sees_what_differs(pages: Example) -> None:
    restore(pages.repository, pages.to)
    path = pages.restored / "pages"
    time = path.stat().st_mtime_ns
    with path.open("r+b") as out:
        out.seek(5 << 20)
        out.write(b"a flipped bit")
    os.utime(path, ns=(time, time))
    done = restore(pages.repository, pages.to, delta=True)
    assert done.files == 1
    assert pages.is_same()


@pytest.mark.parametrize("how", [{"delta": True}, {}])
def test_holes_of_a_file_that_is_there_are_not_read(
    example: Example, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    path = example.write("sparse", b"begin")
    with path.open("r+b") as out:
        out.seek(200 << 20)
        out.write(b"an island")
        out.truncate(300 << 20)
    example.take()
    restore(example.repository, example.to)
    os.utime(example.restored / "sparse", (1, 1))
    read = 0
    preadv = os.preadv

    def counted(fd: int, buffers: Any, at: int) -> int:
        nonlocal read
        read += (count := preadv(fd, buffers, at))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    done = restore(example.repository, example.to, **how)
    assert (done.files, done.kept, done.fetched) == (0, 1, 0)
    assert read < 1 << 20
    assert example.is_same()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_delta_replaces_a_file_that_the_disk_cannot_read(
    pages: Example, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    put_on_bad_sectors(pages.restored / "pages", monkeypatch)
    done = restore(pages.repository, pages.to, delta=True, in_place=in_place)
    assert (done.wrong, done.files) == (0, 3)
    assert pages.is_same()


# --- damage and interruptions ---------------------------------------------------------------------


@pytest.mark.parametrize(("jobs", "verify"), [(1, False), (2, True)])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_pack_costs_the_files_in_it_and_no_others(
    everything: Example, damage: str, jobs: int, verify: bool
) -> None:
    everything.take()
    small = everything.write("zz small", b"of another pack")
    everything.take()
    name = min(name for name in everything.repository.files if "/pack-" in name)
    data = bytearray(everything.repository.files[name])
    data[len(data) // 2] ^= 1
    everything.repository.files[name] = (
        bytes(data) if damage == "flipped" else bytes(data[:-500_000])
    )
    if damage == "missing":
        del everything.repository.files[name]
    done = restore(everything.repository, everything.to, jobs=jobs, verify=verify)
    wanted, found = files_of(everything.root), files_of(everything.restored)
    wanted = {name: data for name, data in wanted.items() if name in found}
    assert done.exit_code == 7
    assert found == wanted
    assert len(files_of(everything.root)) - len(found) == done.wrong > 0
    assert (everything.restored / small.name).read_bytes() == b"of another pack"
    if damage == "flipped":
        assert done.wrong < 1200


def test_content_that_is_not_that_of_the_manifest_is_left_out_unless_nobody_looks(
    tmp_path: Path,
) -> None:
    small, large = file("small"), file("large", chance.randbytes(2 << 20))
    small[0].digest = large[0].digest = "00" * 32
    repository = put_version(MemoryStore(), [large, small, file("z")])
    done = restore(repository, tmp_path / "to")
    assert sorted(path for path, _ in done.problems) == ["large", "small"]
    assert set(files_of(tmp_path / "to")) == {"z"}
    assert restore(repository, tmp_path / "to", verify=False).wrong == 0
    assert set(files_of(tmp_path / "to")) == {"large", "small", "z"}


def test_nothing_is_written_by_a_manifest_of_another_version_or_a_damaged_one(
    example: Example,
) -> None:
    example.write("file", b"old")
    old = example.take().version
    example.write("file", b"new")
    new = example.take().version
    files = example.repository.files
    files[f"etc/{new}/manifest"] = files[f"etc/{old}/manifest"]
    with pytest.raises(SnapshotDamaged, match="that of another version"):
        restore(example.repository, example.to, f"etc@{new}")
    files[f"etc/{old}/manifest"] = files[f"etc/{old}/manifest"][:-30]
    with pytest.raises(SnapshotDamaged, match="cut off"):
        restore(example.repository, example.to, f"etc@{old}")
    assert list(example.to.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_only_what_this_host_made_comes_back_unless_the_target_is_trusted(
    tmp_path: Path, jobs: int
) -> None:
    taker = Taker(tmp_path / "root", tmp_path / "cache")
    taker.keys = KEYS
    taker.write("file", b"content")
    version = taker.take().version
    opened: list[MemoryStore] = []

    def open_store() -> MemoryStore:
        # A process with the threads of another repository could not be copied.
        assert all(one.closed for one in opened)
        opened.append(MemoryStore())
        opened[-1].files = taker.repository.files
        return opened[-1]

    def back(to: str, origins: Origins, *, trust: bool = False) -> RestoredVersion:
        opened.clear()
        place = tmp_path / to
        return restore_version(
            open_store,
            f"s@{version}",
            place,
            RestoreOptions(),
            jobs=jobs,
            origins=origins,
            trust=trust,
        )

    restored = str(tmp_path / "root" / "file")[1:]
    for to, origins in (("by-key", Origins(KEYS)), ("by-sum", taker.copies.origins(NO_KEYS))):
        done = back(to, origins)
        assert (done.files, done.wrong, done.part) == (1, 0, 1.0)
        assert done.origin == str(Origin.OURS)
        assert (tmp_path / to / restored).read_bytes() == b"content"
    for number, origins in enumerate((NOBODY, Origins(OTHERS))):
        with pytest.raises(ConfigError, match="so nothing was restored") as caught:
            back(f"refused{number}", origins)
        assert "--trust-target" in caught.value.hint
        assert list((tmp_path / f"refused{number}").iterdir()) == []
        done = back(f"trusted{number}", origins, trust=True)
        assert (done.files, done.origin) == (1, str(Origin.UNKNOWN))


@pytest.mark.parametrize("how", [{}, {"delta": True}, {"delta": True, "in_place": True}])
def test_a_restore_that_was_killed_is_gone_on_with(pages: Example, how: Any) -> None:
    for number in range(3000):
        pages.write(f"more/{number}", chance.randbytes(9000))
    pages.take()
    whole = sum(len(data) for name, data in pages.repository.files.items() if "/pack-" in name)
    reads = 0

    def kill(verb: str, name: str) -> None:
        nonlocal reads
        reads += verb == "read" and "/pack-" in name
        if reads == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        pages.repository.before = kill
        restore(pages.repository, pages.to, **how)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    done = restore(pages.repository, pages.to, **how)
    assert done.wrong == 0
    assert done.kept > 0
    assert done.fetched < whole
    assert pages.is_same()


CAPABILITY = bytes.fromhex("0100000202200000000000000000000000000000")  # cap_net_raw=ep
ACL = bytes.fromhex("0200000001000600ffffffff02000700d204000004000400ffffffff")
ACL += bytes.fromhex("10000700ffffffff20000000ffffffff")  # user:1234:rwx


@pytest.mark.parametrize("how", [{}, {"delta": True}, {"jobs": 2}])
@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("zeros", "security.capability", CAPABILITY),
        ("big", "user.new", b"not of the version"),
        ("empty", "user.of", b"other"),
        ("empty", "user.of", None),
        ("many", "user.new", b"of a directory"),
        ("many/1/8", "system.posix_acl_access", ACL),
        ("many", "system.posix_acl_default", ACL),
        ("fifo", "system.posix_acl_access", ACL),
    ],
)
def test_a_file_whose_extended_attributes_differ_is_not_taken_for_right(
    everything: Example, path: str, name: str, value: bytes | None, how: Any
) -> None:
    everything.take()
    restore(everything.repository, everything.to)
    changed = everything.restored / path
    time = changed.stat().st_mtime_ns
    try:
        if value is None:
            os.removexattr(changed, name)
        else:
            os.setxattr(changed, name, value)
    except OSError as error:
        pytest.skip(f"no {name} here: {error.strerror}")
    os.utime(changed, ns=(time, time))
    assert not everything.is_same()
    done = restore(everything.repository, everything.to, **how)
    # A FIFO is made anew.
    assert (done.files, done.fetched) == (int(path == "fifo"), 0)
    assert done.notes == _said_of_parents(everything.root)
    assert everything.is_same()


def test_an_attribute_that_cannot_be_set_or_removed_is_told(
    everything: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.setxattr(everything.root / "big", "user.of", b"the version")
    everything.take()
    with monkeypatch.context() as without:
        without.setattr(os, "setxattr", _forbidden)
        done = restore(everything.repository, everything.to)
    assert any(
        note.startswith("some extended attributes are not set: user.")
        and note.endswith(": Operation not permitted")
        for note in done.notes
    )
    restore(everything.repository, everything.to)
    os.setxattr(everything.restored / "big", "user.new", b"not of the version")
    monkeypatch.setattr(os, "removexattr", _forbidden)
    done = restore(everything.repository, everything.to)
    assert [note for note in done.notes if note not in _said_of_parents(everything.root)] == [
        "some extended attributes that the version lacks are still there: user.new:"
        " Operation not permitted"
    ]


def _forbidden(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


# --- a power cut: sizes and times may be on the disk, and the content not


@pytest.fixture
def power_cut(everything: Example, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays a restore whose sync fails, and takes the content of all files that it wrote."""
    everything.take()

    def cut(wanted: str = "etc", *patterns: str) -> None:
        def failing(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(durable, "syncfs", failing)
            with pytest.raises(DestinationError, match="Input/output error"):
                restore(everything.repository, everything.to, wanted, *patterns)
        for path in everything.restored.rglob("*"):
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                with path.open("r+b") as out:
                    out.write(bytes(status.st_size))
                os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))

    return cut


@pytest.mark.parametrize("how", [{}, {"jobs": 2}, {"verify": False}, {"delta": True}])
def test_after_a_power_cut_nothing_is_kept_by_its_size_and_time(
    everything: Example, power_cut: Callable[..., None], how: Any
) -> None:
    power_cut()
    done = restore(everything.repository, everything.to, **how)
    assert done.wrong == 0
    assert everything.is_same()
    assert [one.name for one in everything.to.iterdir()] == [everything.to.parent.parts[1]]
    # All is durable by now: size and time suffice again.
    path = everything.restored / "zeros"
    time = path.stat().st_mtime_ns
    path.write_bytes(b"x" * 5000)
    os.utime(path, ns=(time, time))
    path.chmod(0o4711)
    assert restore(everything.repository, everything.to).files == 0


def test_only_the_restore_that_was_cut_off_ends_the_doubt(
    everything: Example, power_cut: Callable[..., None]
) -> None:
    power_cut()
    # A part of the version, and another version, say nothing of the other files.
    restore(everything.repository, everything.to, "etc", "/**/big")
    everything.write("new", b"file")
    everything.take()
    first = min(name.split("/")[1] for name in everything.repository.files)
    shutil.rmtree(everything.root / "many" / "4")
    last = everything.take().version
    restore(everything.repository, everything.to, f"etc@{last}")
    damaged = everything.restored / "many" / "4" / "11"
    assert damaged.read_bytes() == bytes(11)
    restore(everything.repository, everything.to, f"etc@{first}")
    assert damaged.read_bytes() != bytes(11)


def test_a_restore_of_the_whole_version_ends_the_doubt_about_a_part(
    everything: Example, power_cut: Callable[..., None]
) -> None:
    power_cut("etc", "/**/big")
    assert (everything.to / MARKER).exists()
    restore(everything.repository, everything.to)
    assert not (everything.to / MARKER).exists()


def test_a_restore_is_marked_as_unfinished_before_its_first_file(
    everything: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything.take()
    order: list[str] = []
    fsync, syncfs, open_, unlink = os.fsync, descriptors.syncfs, os.open, os.unlink

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        order.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}')}")

    def noted_sync(fd: int) -> None:
        syncfs(fd)
        order.append("syncfs")

    def noted_open(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_CREAT and os.fspath(path) in ("zeros", "empty"):
            order.append("file")
        return open_(path, flags, *more, **others)

    def noted_unlink(path: Any, **others: Any) -> None:
        if os.fspath(path) == MARKER:
            order.append("unlink")
        unlink(path, **others)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(durable, "syncfs", noted_sync)
    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "unlink", noted_unlink)
    restore(everything.repository, everything.to)
    first = order.index("file")
    assert f"fsync {everything.to}" in order[:first]  # The name of the marker.
    assert f"fsync {everything.to.parent}" in order[:first]  # The name of the directory.
    assert sum(line.startswith(f"fsync {everything.to}/.") for line in order[:first]) == 1
    assert order[-2:] == ["syncfs", "unlink"]


@pytest.mark.parametrize("closed", ["big", "many/5"])
def test_a_restore_stays_unfinished_where_a_file_cannot_be_synced(
    everything: Example, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """Where syncfs does not reach the disk, a file or directory that its user may not open."""
    everything.take()
    without_syncfs(monkeypatch)
    open_ = os.open

    def may_not(path: Any, flags: int, *more: Any, **others: Any) -> int:
        fd = open_(path, flags, *more, **others)
        at = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if syncing and at == everything.restored / closed:
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return fd

    sync, syncing = durable.sync_below, list[int]()

    def noted(directory: int, **more: Any) -> int:
        syncing.append(directory)
        return sync(directory, **more)

    monkeypatch.setattr("ntt_backup.snapshot.restore.files.sync_below", noted)
    monkeypatch.setattr(os, "open", may_not)
    done = restore(everything.repository, everything.to)
    assert (everything.to / MARKER).exists()
    assert any("cannot be made durable" in one for one in done.notes)
    monkeypatch.setattr(os, "open", open_)
    assert restore(everything.repository, everything.to).wrong == 0
    assert not (everything.to / MARKER).exists()


def test_a_marker_is_no_file_of_the_version_and_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"content")
    to = tmp_path / "to"
    to.mkdir()
    (to / MARKER).symlink_to(tmp_path / "precious")
    (to / f".{MARKER}.0123").write_bytes(b"half of a mark, which a power cut has left")
    repository = put_version(MemoryStore(), [file(MARKER, b"not ours"), file("other")])
    done = restore(repository, to)
    assert [path for path, _ in done.problems] == [MARKER]
    assert (tmp_path / "precious").read_bytes() == b"content"
    assert [one.name for one in to.iterdir()] == ["other"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_where_syncfs_does_not_reach_the_disk_each_file_is_synced(
    everything: Example, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    everything.take()
    without_syncfs(monkeypatch)
    synced = noted_syncs(monkeypatch)
    restore(everything.repository, everything.to, jobs=jobs)
    missed = [
        path
        for path in files_and_directories(everything.to)
        if not path.is_symlink() and inode(path) not in synced
    ]
    assert missed == []


def test_what_is_changed_in_place_is_synced_by_itself(
    pages: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On xfs syncfs does not flush the disk where only old blocks were written to."""
    pages.take()
    restore(pages.repository, pages.to)
    path = pages.restored / "pages"
    with path.open("r+b") as out:
        out.write(b"x")
    synced = noted_syncs(monkeypatch)
    restore(pages.repository, pages.to, delta=True, in_place=True)
    assert inode(path) in synced
    assert pages.is_same()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_file_system_that_is_mounted_below_is_synced_too(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.write("below/file", b"content")
    example.write("beside", b"content")
    example.take()
    below = example.restored / "below"
    below.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", below], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    synced = []
    monkeypatch.setattr(durable, "syncfs", lambda fd: synced.append(os.fstat(fd).st_dev))
    try:
        assert restore(example.repository, example.to).wrong == 0
        assert sorted(synced) == sorted({below.stat().st_dev, example.to.stat().st_dev})
    finally:
        subprocess.run(["umount", below], check=True)


def test_a_restore_that_ends_within_a_file_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_WINDOW_BYTES", 1)
    content = chance.randbytes(2 << 20)
    large, _ = file("root/large", content)
    parts = [(at, content[at : at + (1 << 20)]) for at in (0, 1 << 20)]
    repository = put_version(MemoryStore(), [directory("root"), (large, parts)])
    to = tmp_path / "to"
    begun: list[Path] = []

    def away(verb: str, name: str) -> None:
        begun.extend((to / "root").glob("*"))
        if begun:
            raise RemoteError("the target is away")

    repository.before = away
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RemoteError, match="the target is away"):
        restore(repository, to)
    assert os.listdir("/proc/self/fd") == before
    assert begun
    assert not [*(to / "root").glob("*")]


def test_a_disk_that_is_full_ends_the_restore(
    everything: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything.take()
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) == 140:
            raise OSError(28, "No space left on device", "name in a directory")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    told = rf"cannot restore into {everything.to}: No space left on device: \S+/many/0/140"
    with pytest.raises(DestinationError, match=told) as caught:
        restore(everything.repository, everything.to)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("call", ["mkfifo", "symlink"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSYS, errno.EPERM])
def test_a_file_system_without_special_files_gets_all_others(
    everything: Example, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """exfat says EIO for a FIFO, and ENOSYS for a symlink, by FUSE; EPERM by the kernel."""
    everything.take()

    def lacking(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, lacking)
        done = restore(everything.repository, everything.to)
    name = {"mkfifo": "fifo", "symlink": "to nowhere"}[call]
    assert [(path.rpartition("/")[2], why) for path, why in done.problems] == [
        (name, os.strerror(number))
    ]
    assert done.exit_code == 7
    assert restore(everything.repository, everything.to).files == 1
    assert everything.is_same()


def test_a_directory_that_cannot_be_used_is_an_error(everything: Example, tmp_path: Path) -> None:
    everything.take()
    (tmp_path / "file").touch()
    for to in (tmp_path / "file", tmp_path / "no" / "parent"):
        with pytest.raises(DestinationError):
            restore(everything.repository, to)

    def meanwhile(verb: str, name: str) -> None:
        if verb == "read" and "/pack-" in name:
            everything.repository.before = lambda *_: None
            with pytest.raises(LockHeld):
                restore(everything.repository, everything.to)
            everything.repository.closed = False

    everything.repository.before = meanwhile
    assert restore(everything.repository, everything.to).wrong == 0


# --- an ordinary user -----------------------------------------------------------------------------


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A directory in which everybody may write."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o777)
    yield home
    shutil.rmtree(home)


def test_a_closed_directory_that_somebody_replaces_is_a_problem_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Entry("closed", DIRECTORY, 0)
    repository = put_version(MemoryStore(), [(closed, ()), directory("open")])
    settle = Attributes.set

    def meanwhile(self: Attributes, fd: int, entry: Entry) -> None:
        settle(self, fd, entry)
        (tmp_path / "to" / "closed").rmdir()
        (tmp_path / "to" / "closed").touch()

    monkeypatch.setattr(Attributes, "set", meanwhile)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    done = restore(repository, tmp_path / "to")
    assert [path for path, _ in done.problems] == ["closed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("how", [{}, {"delta": True}])
def test_an_ordinary_user_restores_all_but_owners(
    everything: Example, open_home: Path, how: Any
) -> None:
    for mode in (0, 0o200, 0o444):
        path = everything.write(f"of mode {mode}", bytes(mode))
        os.setxattr(path, "user.of", b"a file")
        path.chmod(mode)
    # What is closed is opened and closed again, also for a link to a file in it.
    for number, mode in enumerate((0, 0o300, 0o400, 0o111)):
        closed = everything.write(f"closed/{number}/below/file", bytes(number)).parent
        os.link(closed / "file", everything.root / f"link to {number}")
        closed.chmod(mode)
        closed.parent.chmod(mode)
    everything.take()
    everything.to = open_home / "to"
    status = 1
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            done = restore(everything.repository, everything.to)
            again = restore(everything.repository, everything.to, **how)
            alike = (done.wrong, again.wrong, again.kept) == (0, 0, done.files)
            status = 0 if alike and len(done.notes) == len(again.notes) == 1 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for path in everything.restored.glob("of mode *"):
        assert os.getxattr(path, "user.of") == b"a file"
    assert files_of(everything.root) == files_of(everything.restored)
    for path in everything.restored.rglob("*"):
        wanted, found = (
            (everything.root / path.relative_to(everything.restored)).lstat(),
            path.lstat(),
        )
        assert found.st_uid == 65534
        assert found.st_mtime_ns == wanted.st_mtime_ns
        assert stat.S_IMODE(found.st_mode) == stat.S_IMODE(wanted.st_mode) & ~0o6000


def test_a_file_is_whole_however_few_bytes_a_write_takes(
    everything: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything.take()
    really = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: really(fd, data[: len(data) // 2 + 1]))
    assert restore(everything.repository, everything.to).wrong == 0
    monkeypatch.undo()
    assert everything.is_same()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ((), "is missing"),
        ((StoredFile(f"etc/{VERSION}/manifest", 0, datetime.now(UTC)),), "is empty"),
    ],
)
def test_a_version_without_a_manifest_is_damaged(
    tmp_path: Path, files: tuple[StoredFile, ...], why: str
) -> None:
    with pytest.raises(SnapshotDamaged, match=why):
        restoring._keep(MemoryStore(), Version("etc", VERSION, files), "manifest", tmp_path)


def test_a_file_that_cannot_be_compared_is_told_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = put_version(
        MemoryStore(), [directory("root"), file("root/file"), file("root/other")]
    )
    restore(repository, tmp_path)
    kept = tmp_path / "root" / "file"
    kept.write_bytes(b"changed")

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("ntt_backup.snapshot.restore.files._compare_content", fail)
    done = restore(repository, tmp_path)
    assert done.problems == [("root/file", "Permission denied")]
    assert (done.wrong, done.kept) == (1, 1)
    assert kept.read_bytes() == b"changed"
