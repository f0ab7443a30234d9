"""Partial files and locks, rule by rule: what is durable, what is kept, and whose a file is."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.blobdir.descriptors import (
    Misplaced,
    closing,
    lock_file,
    lock_new,
    names_in,
    open_below,
    open_untouched,
    remove_tree,
)
from ntt_backup.blobdir.layout import BlobDirectory, Layout, NotAFile
from ntt_backup.blobdir.walk import Tree
from ntt_backup.receiver import large_blob, write_workspace
from ntt_backup.receiver.large_blob import Partial, open_partial, remove_useless
from ntt_backup.receiver.write_workspace import INCOMING, WriteWorkspace

NAME, OTHER = "ab12" + "0" * 60, "cd34" + "0" * 60
WEEK = 7 * 86400


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    """A directory by descriptor; all that was opened meanwhile is closed again."""
    before = descriptors()
    with closing(os.open(tmp_path, os.O_RDONLY)) as fd:
        yield fd
    assert descriptors() == before


def opened(directory: int, name: str = NAME) -> Partial:
    found = open_partial(directory, name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mark", "durable"),
    [
        (None, 0),
        (b"", 0),
        (b"5", 0),
        (b"5\n", 5),
        (b"%020d\n" % 5, 5),
        (b"9\n", 9),
        (b"10\n", 0),
        (b"-1\n", 0),
        (b"x\n", 0),
        (b"\n", 0),
    ],
)
def test_durable_is_what_a_whole_mark_says_and_the_file_has(
    directory: int, tmp_path: Path, mark: bytes | None, durable: int
) -> None:
    found = opened(directory)
    os.write(found.fd, b"123456789")
    if mark is not None:
        (tmp_path / "partial" / f"{NAME}.mark").write_bytes(mark)
    assert found.durable() == durable
    found.close()


def test_what_is_kept_is_synced_before_it_is_noted(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, mark = opened(directory), tmp_path / "partial" / f"{NAME}.mark"
    noted: list[bytes] = []

    def synced(fd: int) -> None:
        assert fd == found.fd
        noted.append(mark.read_bytes() if mark.exists() else b"")

    monkeypatch.setattr(os, "fdatasync", synced)
    for length in (7, 12):
        os.write(found.fd, b"x" * 6)
        found.keep(length)
    assert noted == [b"", b"%020d\n" % 7]
    assert mark.read_bytes() == b"%020d\n" % 12
    assert found.durable() == 12
    found.cut(5)
    assert (os.fstat(found.fd).st_size, os.lseek(found.fd, 0, os.SEEK_CUR)) == (5, 5)
    assert mark.exists()
    found.cut(0)
    assert (os.fstat(found.fd).st_size, os.lseek(found.fd, 0, os.SEEK_CUR)) == (0, 0)
    assert not mark.exists()
    found.close()


@pytest.mark.parametrize("end", ["remove", "moved", "close"])
def test_a_partial_file_and_its_mark_go_or_stay(directory: int, tmp_path: Path, end: str) -> None:
    found = opened(directory)
    found.keep(0)
    getattr(found, end)()
    left = {path.name for path in (tmp_path / "partial").iterdir()}
    assert left == {"remove": set(), "moved": {NAME}, "close": {NAME, f"{NAME}.mark"}}[end]


def test_a_partial_file_is_one_sessions_and_there_are_so_many(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_blob, "_MOST_NAMES", 2)
    first = opened(directory)
    assert open_partial(directory, NAME) is None
    second = opened(directory, OTHER)
    assert open_partial(directory, "ef" * 32) is None
    first.close()
    opened(directory).close()
    second.remove()
    opened(directory, "ef" * 32).close()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/tmp"), Path.touch])
def test_partial_files_lie_in_a_directory_or_nowhere(
    directory: int, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "partial")
    assert open_partial(directory, NAME) is None
    remove_useless(directory, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["partial"]


@pytest.mark.parametrize(
    ("name", "age", "mark", "published", "stays"),
    [
        (NAME, 0, True, False, True),
        (NAME, WEEK - 60, True, False, True),
        (NAME, WEEK + 60, True, False, False),
        (NAME, 0, False, False, False),
        (NAME, 0, True, True, False),
        ("note", 0, False, False, True),
        ("note", WEEK + 60, False, False, False),
    ],
)
def test_what_nobody_can_resume_goes(
    directory: int,
    tmp_path: Path,
    name: str,
    age: int,
    mark: bool,
    published: bool,
    stays: bool,
) -> None:
    place = tmp_path / "partial"
    place.mkdir()
    file = place / name
    file.touch()
    os.utime(file, (time.time() - age,) * 2)
    if mark:
        (place / f"{name}.mark").touch()
    if published:
        blob = tmp_path / NAME[:2] / NAME[2:4] / NAME
        blob.parent.mkdir(parents=True)
        blob.touch()
    held = lock_file(directory, f"partial/{name}", create=False)
    assert held is not None
    remove_useless(directory, directory)
    assert file.exists()
    os.close(held)
    remove_useless(directory, directory)
    assert (file.exists(), (place / f"{name}.mark").exists()) == (stays, stays and mark)


def test_a_mark_goes_without_its_file(directory: int, tmp_path: Path) -> None:
    place = tmp_path / "partial"
    place.mkdir()
    for name in (f"{NAME}.mark", f"{OTHER}.mark", OTHER):
        (place / name).touch()
    remove_useless(directory, directory)
    assert {path.name for path in place.iterdir()} == {OTHER, f"{OTHER}.mark"}


def test_only_so_many_partial_files_are_looked_at(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_blob, "_MOST_NAMES", 3)
    (tmp_path / "partial").mkdir()
    for number in range(5):
        (tmp_path / "partial" / f"{number}.mark").touch()
    remove_useless(directory, directory)
    assert len([*(tmp_path / "partial").iterdir()]) == 2


# --- locks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.link(path.with_name("x"), path)])
def test_what_is_no_file_of_one_name_is_not_locked(
    directory: int, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "x").touch()
    make(tmp_path / "lock")
    assert lock_file(directory, "lock", create=True) is None


@pytest.mark.parametrize("create", [True, False])
def test_a_file_is_made_only_when_that_is_asked_for(
    directory: int, tmp_path: Path, create: bool
) -> None:
    if not create:
        with pytest.raises(FileNotFoundError):
            lock_file(directory, "lock", create=False)
        assert not (tmp_path / "lock").exists()
        (tmp_path / "lock").touch()
    fd = lock_file(directory, "lock", create=create)
    assert fd is not None
    assert lock_file(directory, "lock", create=True) is None
    os.close(fd)


@pytest.mark.parametrize("swaps", [1, 3, 30])
@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_lost_its_name_before_it_was_locked_is_not_the_one(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: int, gone: bool
) -> None:
    flock, left = fcntl.flock, [swaps]
    path = tmp_path / "lock"
    path.touch()

    def lock(fd: int, how: int) -> None:
        flock(fd, how)
        if left[0]:
            left[0] -= 1
            path.unlink()
            if not gone:
                path.touch()

    monkeypatch.setattr(fcntl, "flock", lock)
    fd = lock_file(directory, "lock", create=True)
    assert (fd is None) == (swaps == 30)
    if fd is not None:
        assert os.path.samestat(os.fstat(fd), path.stat())
        os.close(fd)


@pytest.mark.parametrize(
    ("number", "ours"),
    [
        (0, True),
        (errno.EAGAIN, False),
        (errno.ENOLCK, True),
        (errno.ENOSYS, True),
        (errno.EOPNOTSUPP, True),
        (errno.EINVAL, True),
        (errno.EIO, None),
        (errno.EBADF, None),
    ],
)
def test_a_new_file_is_ours_unless_another_one_holds_its_lock(
    monkeypatch: pytest.MonkeyPatch, number: int, ours: bool | None
) -> None:
    def lock(fd: int, how: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", lock)
    if ours is None:
        with pytest.raises(OSError, match=os.strerror(number)):
            lock_new(0)
    else:
        assert lock_new(0) == ours


# --- directories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_as_many_directories_stay_open_as_may(directory: int, tmp_path: Path, kept: int) -> None:
    before = descriptors()
    blobs = BlobDirectory(directory, kept=kept)
    assert blobs.directory("") == directory
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        fd = blobs.directory(str(number))
        assert blobs.directory(str(number)) == fd
        assert descriptors() == before + min(kept, number + 1)
    blobs.directory("4")
    if kept > 1:
        blobs.directory("3")
        blobs.directory("0")  # The one that was not used for longest goes: not 3.
        assert "3" in blobs._opened
    blobs.close()
    assert descriptors() == before


@pytest.mark.parametrize("device", [True, False])
def test_a_directory_that_is_missing_or_none_is_an_error_at_its_path(
    directory: int, tmp_path: Path, device: bool
) -> None:
    blobs = BlobDirectory(directory, os.fstat(directory).st_dev if device else None)
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "file").touch()
    for path, number in (("aa/bb", errno.ENOENT), ("aa/file", errno.ENOTDIR)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            blobs.directory(path)
        assert caught.value.filename == path
    with pytest.raises(FileNotFoundError) as missing:
        blobs.lstat("aa/none")
    assert missing.value.filename == "aa/none"
    assert blobs.lstat("aa/file").st_size == 0
    blobs.close()


def test_a_blob_is_a_file_and_nothing_stays_open_for_what_is_none(
    directory: int, tmp_path: Path
) -> None:
    blobs = BlobDirectory(directory)
    place = tmp_path / NAME[:2] / NAME[2:4]
    place.mkdir(parents=True)
    (place / NAME).write_bytes(b"abc")
    fd, status = blobs.open_blob(NAME)
    assert (os.read(fd, 9), status.st_size) == (b"abc", 3)
    os.close(fd)
    (place / NAME).unlink()
    os.mkfifo(place / NAME)
    before = descriptors()
    with pytest.raises(NotAFile, match="a FIFO"):
        blobs.open_blob(NAME)
    assert descriptors() == before
    with pytest.raises(ValueError, match="passwd"):
        blobs.open_blob("../../etc/passwd")
    blobs.close()


@pytest.mark.parametrize(("number", "again"), [(errno.EPERM, True), (errno.EACCES, False)])
def test_what_may_not_be_opened_untouched_is_opened(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, again: bool
) -> None:
    (tmp_path / "file").touch()
    opening = os.open

    def refuse(path: str, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(number, os.strerror(number), path)
        return opening(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    if again:
        os.close(open_untouched("file", os.O_RDONLY, directory))
    else:
        with pytest.raises(PermissionError):
            open_untouched("file", os.O_RDONLY, directory)


def test_a_directory_of_ours_is_one_and_on_its_file_system(directory: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dir").mkdir()
    for name in ("file", "link"):
        with pytest.raises(Misplaced, match=f"{name} is a symlink, or no directory"):
            open_below(directory, name)
    with pytest.raises(FileNotFoundError):
        open_below(directory, "none")
    device = os.fstat(directory).st_dev
    os.close(open_below(directory, "dir", device))
    with pytest.raises(Misplaced, match="dir is on another file system"):
        open_below(directory, "dir", device + 1)
    assert sorted(names_in(directory)) == ["dir", "file", "link"]


def begun(root: Path, alive: Callable[[], None] = lambda: None) -> WriteWorkspace:
    return WriteWorkspace(str(root), "owner", "run", "slot", alive)


def swap_nothing(incoming: int, name: str) -> None: ...


def swap_lock(incoming: int, name: str) -> None:
    os.unlink(f"{name}/lock", dir_fd=incoming)


def swap_stage(incoming: int, name: str) -> None:
    os.rename(name, "moved", src_dir_fd=incoming, dst_dir_fd=incoming)
    os.mkdir(name, dir_fd=incoming)


def swap_link(incoming: int, name: str) -> None:
    os.rename(name, "moved", src_dir_fd=incoming, dst_dir_fd=incoming)
    os.symlink("moved", name, dir_fd=incoming)


@pytest.mark.parametrize("swap", [swap_nothing, swap_lock, swap_stage, swap_link])
def test_a_stage_is_one_that_nobody_has_touched(
    directory: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: Callable[[int, str], None],
) -> None:
    looking = os.stat
    names: list[str] = []

    def look(name: str, *, dir_fd: int, follow_symlinks: bool) -> os.stat_result:
        names.append(name)
        if len(names) == 1:
            swap(dir_fd, name)
        return looking(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    umask = os.umask(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look)
        stage = begun(tmp_path)
    os.umask(umask)
    assert len(names) == (1 if swap is swap_nothing else 2)
    incoming = tmp_path / INCOMING
    mine = incoming / names[-1]
    assert os.path.samestat(mine.lstat(), os.fstat(stage.stage))
    for path, mode in ((incoming, 0o755), (mine, 0o700), (mine / "lock", 0o600)):
        assert path.lstat().st_mode & 0o777 == mode
    opened(stage.incoming).close()  # Without a mark nobody resumes it.
    stage.leave()
    assert incoming.exists() == (swap in (swap_stage, swap_link))
    assert not mine.exists()


@pytest.mark.parametrize("patience", [0.0, 1e9])
def test_a_stage_takes_the_place_of_dead_ones_and_of_its_own_worker(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(write_workspace, "_PREDECESSOR_SECONDS", patience)
    incoming = tmp_path / INCOMING
    living = ["owner.run.slot.2", "owner.run.other.3", "owner.other.slot.4"]
    others = ["other.run.slot.5", "owner.run.slot", "owner.run.slot.6.more"]
    held = []
    for name in ["owner.gone.slot.1", *living, *others]:
        (incoming / name).mkdir(parents=True)
        fd = os.open(incoming / name / "lock", os.O_RDWR | os.O_CREAT)
        if name in living:
            fcntl.flock(fd, fcntl.LOCK_EX)
            held.append(fd)
        else:
            os.close(fd)
    waited: list[str] = []

    def alive() -> None:
        waited.append("")
        if len(waited) == 2:
            (incoming / living[0]).rmdir()

    stage = begun(tmp_path, alive)
    waited.clear()
    (mine,) = {*os.listdir(incoming)} - {*living, *others}
    assert mine.startswith("owner.run.slot.")
    assert {*os.listdir(incoming)} == {*living, *others, mine}
    for name in [*living, *others]:
        assert os.listdir(incoming / name) == ([] if name == living[0] else ["lock"])
    stage.await_predecessors()
    assert len(waited) == (2 if patience else 0)
    monkeypatch.setattr(write_workspace, "_PREDECESSOR_SECONDS", 1e9)
    stage.await_predecessors()
    assert len(waited) == (2 if patience else 0)
    assert not stage.superseded
    (incoming / mine / "lock").unlink()
    assert stage.superseded
    stage.leave()
    assert {*os.listdir(incoming)} == {*living[1 if patience else 0 :], *others}
    for fd in held:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, 256, 257])
def test_a_tree_is_removed_with_signs_of_life(directory: int, tmp_path: Path, count: int) -> None:
    below = tmp_path / "tree" / "below"
    below.mkdir(parents=True)
    for number in range(count):
        (below / str(number)).touch()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    alive: list[int] = []
    remove_tree(directory, "tree", lambda: alive.append(1))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert len(alive) == 1 + -(-count // 256)


def test_a_blob_directory_is_walked_in_order_and_from_anywhere(
    directory: int, tmp_path: Path
) -> None:
    places = ["00/00", "00/ff", "a0/01", "ff/fe", "ff/ff"]
    for place in places:
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "a0" / "zz").mkdir()
    (tmp_path / "note").touch()
    tree = Tree(directory)

    def walked(**how: str) -> list[str]:
        return [one for one in tree.directories(**how) if isinstance(one, str)]

    assert walked() == places
    for number, place in enumerate(places):
        assert walked(first=place) == places[number:]
        assert walked(after=place) == places[number + 1 :]
        assert walked(last=place) == places[: number + 1]
        assert walked(first=place, last=place) == [place]
    strays = [one for one in tree.directories() if not isinstance(one, str)]
    assert {one.path for one in strays} == {"note", "a0/zz"}
    blob = tmp_path / "a0" / "01" / ("a001" + "0" * 60)
    blob.touch()
    for odd in ("a002" + "0" * 60, "a001" + "A" * 60, "x"):
        (blob.parent / odd).touch()
    (blob.parent / ("a001" + "1" * 60)).mkdir()
    assert [one for one in tree.entries("a0/01") if isinstance(one, str)] == [blob.name]
    assert len([*tree.entries("a0/01")]) == 5
    assert [*tree.entries("a0/77")] == []
    tree.close()


@pytest.mark.parametrize("text", ["0:2/2:4/4:", "0:2/2:", "0:3/3:6/0:", "0:4/4:"])
def test_every_layout_is_walked_in_order_and_gives_the_blobids_again(
    directory: int, tmp_path: Path, text: str
) -> None:
    layout = Layout(text)
    blobids = sorted(blake3(b"%d" % number).hexdigest() for number in range(40))
    for blobid in blobids:
        path = tmp_path / layout.path_of(blobid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "0").mkdir()
    tree = Tree(directory, layout=layout)
    places = [one for one in tree.directories() if isinstance(one, str)]
    assert [name for place in places for name in sorted(map(str, tree.entries(place)))] == blobids
    for at, place in enumerate(places):
        assert [*tree.directories(after=place)][1:] == places[at + 1 :]  # After the stray.
        below = place.partition("/")[0]
        assert set(tree.directories(below=below)) == {
            one for one in places if one.startswith(below)
        }
    low = blobids[20]
    some = [one for one in tree.directories(first=low, last=low[:2]) if isinstance(one, str)]
    assert some == [one for one in places if one[:2] == low[:2] and one >= layout.directory(low)]
    tree.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0:",
        "0:2/2:4/6:",
        "0:2/2:4/2:",
        "0:2/3:5/0:",
        "1:3/0:",
        "0:2/2:3/0:",
        "0:5/5:",
        "0:2/4:",
        "0:2/2:4/4:64",
        "0:2/2:4/4:/",
        "0:2/0:2",
    ],
)
def test_a_layout_that_does_not_name_each_blob_once_and_in_order_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout(text)
