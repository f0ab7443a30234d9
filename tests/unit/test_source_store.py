"""The source store: every blob ends in one list, no link is followed, and nothing is changed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.blobdir.walk import Stray, StrayKind
from ntt_backup.errors import SourceError
from ntt_backup.model import Blob, Failure, Reason
from ntt_backup.source.store import KEPT_DIRECTORIES, READ_SIZE, Store
from tests.helpers.blobs import path_of, put, put_as

NOBODY = 65534


def place(root: Path, blob: Blob) -> Path:
    return root / relative_path(blob.blobid)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "by-hash"
    path.mkdir()
    return path


@pytest.fixture
def blobs(root: Path) -> list[Blob]:
    return [put(root, f"content of blob {number}".encode() * number) for number in range(20)]


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A store that another user can reach; pytest's own directories are private."""
    path = Path(tempfile.mkdtemp(prefix="ntt-store-"))
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    for directory, names, _ in os.walk(path):
        for name in names:
            os.chmod(os.path.join(directory, name), 0o755)
    shutil.rmtree(path)


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom permission bits bind; root is bound by none."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def fail(code: int, *_: object) -> NoReturn:
    raise OSError(code, os.strerror(code))


def fail_to_open(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Opening what ends in name fails, as on a file system that no directory of ours is on."""
    real = os.open

    def answer(path: str, flags: int, *, dir_fd: int | None = None) -> int:
        return fail(code) if path.endswith(name) else real(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", answer)


def switching(blobs: list[Blob], action: Callable[[], None]) -> Sequence[Blob]:
    """Blobs whose reading does something to the store half-way."""

    def read() -> Iterator[Blob]:
        yield blobs[0]
        action()
        yield from blobs[1:]

    return cast(Sequence[Blob], read())


def reasons(store: Store, blobs: Sequence[Blob], *, verify: bool = True) -> dict[str, Reason]:
    return {one.blobid: one.reason for one in store.inspect(blobs, verify=verify).failed}


# --- what is well ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_good_blobs_are_ready_in_order_with_their_true_size(
    root: Path, blobs: list[Blob], verify: bool
) -> None:
    asked = [
        Blob(blob.blobid, None if index % 2 else blob.size) for index, blob in enumerate(blobs)
    ]
    found = Store(root).inspect(asked, verify=verify)
    assert found.ready == blobs
    assert found.failed == []


def test_a_root_that_is_a_symlink_is_followed(
    root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    assert Store(link).inspect(blobs, verify=True).ready == blobs


def test_inspect_leaves_no_descriptor_open_however_many_directories_it_meets(root: Path) -> None:
    many = [put(root, str(number).encode()) for number in range(3 * KEPT_DIRECTORIES)]
    before = len(os.listdir("/proc/self/fd"))
    found = Store(root).inspect([*many, *reversed(many)], verify=True)
    assert found.ready == [*many, *reversed(many)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_life_is_shown_for_each_blob_and_while_a_large_one_is_hashed(
    root: Path, blobs: list[Blob]
) -> None:
    """Claims end where a worker is silent, and a disk may be slow."""
    signs: list[None] = []
    store = Store(root, lambda: signs.append(None))
    unsized = [Blob(blob.blobid) for blob in blobs]
    assert store.measure(unsized) == blobs
    assert len(signs) == len(blobs)
    inspection = store.inspect(unsized, verify=False)
    assert len(signs) == 2 * len(blobs)
    assert store.altered(inspection) == []
    assert len(signs) == 3 * len(blobs)
    signs.clear()
    large = put(root, bytes(3 * READ_SIZE))
    assert store.inspect([large], verify=True).ready == [large]
    assert len(signs) > 3


def test_content_larger_than_one_read_is_hashed_whole_in_constant_memory(root: Path) -> None:
    size = 40 * READ_SIZE + 17
    hasher = blake3()
    scratch = root / "scratch"
    with scratch.open("wb") as file:
        file.truncate(size)
    with scratch.open("rb") as file:
        while piece := file.read(1024**2):
            hasher.update(piece)
    blob = Blob(hasher.hexdigest(), size)
    place(root, blob).parent.mkdir(parents=True)
    scratch.rename(place(root, blob))
    store = Store(root)
    tracemalloc.start()
    try:
        found = store.inspect([blob], verify=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.ready == [blob]
    assert peak < 2 * READ_SIZE


def test_nothing_in_the_store_is_changed_not_even_access_times(
    root: Path, blobs: list[Blob]
) -> None:
    put_as(root, "ab" * 32, b"not what it says")
    paths = [root, *root.rglob("*")]
    # Read later than changed: the kernel would note a reading now, unless told not to.
    for path in paths:
        os.utime(path, ns=(10**18, 2 * 10**18))
    before = {path: path.stat() for path in paths}
    store = Store(root)
    store.probe()
    store.measure([Blob(blob.blobid) for blob in blobs])
    store.inspect([*blobs, Blob("ab" * 32)], verify=True)
    walk(root)
    assert {path: path.stat() for path in paths} == before
    assert sorted([root, *root.rglob("*")]) == sorted(paths)


# --- what is wrong with one blob ------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_a_symlink_in_the_place_of_a_directory_fails_its_blobs_only(
    root: Path, blobs: list[Blob], tmp_path: Path, level: int
) -> None:
    directory = place(root, blobs[0]).parents[2 - level]
    moved = tmp_path / "moved"
    directory.rename(moved)
    directory.symlink_to(moved)
    found = Store(root).inspect(blobs, verify=True)
    (failure,) = [one for one in found.failed if one.blobid == blobs[0].blobid]
    name = directory.relative_to(root)
    assert failure.reason is Reason.NOT_A_FILE
    assert failure.detail == f"{name} is a symbolic link, which is not followed"
    assert found.ready


def test_an_unreadable_file_or_directory_fails_its_blobs_only(open_root: Path) -> None:
    blobs = [put(open_root, str(number).encode()) for number in range(10)]
    place(open_root, blobs[0]).chmod(0)
    place(open_root, blobs[1]).parent.chmod(0)
    with unprivileged():
        found = Store(open_root).inspect(blobs, verify=True)
    assert found.ready == blobs[2:]
    first, second = (relative_path(blob.blobid) for blob in blobs[:2])
    assert [(one.reason, one.detail) for one in found.failed] == [
        (Reason.UNREADABLE, f"{first}: Permission denied"),
        (Reason.UNREADABLE, f"{second[:5]}: Permission denied"),
    ]


@given(st.lists(st.text(st.characters(codec=None), max_size=70) | st.just("0" * 64), max_size=20))
def test_every_text_ends_in_one_list_and_only_blobids_are_looked_for(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        put_as(Path(directory), "0" * 64, b"")
        found = Store(Path(directory)).inspect([Blob(text) for text in texts], verify=False)
    assert [blob.blobid for blob in found.ready] == [text for text in texts if is_blobid(text)]
    assert [one.blobid for one in found.failed] == [text for text in texts if not is_blobid(text)]
    assert {one.reason for one in found.failed} <= {Reason.BAD_BLOBID}


def test_a_directory_full_of_strays_is_walked_in_constant_memory(tmp_path: Path) -> None:
    """As when source.root is a directory of millions of other files."""
    for number in range(4_000):
        (tmp_path / f"no blob {number}").touch()
    (tmp_path / "00" / "00").mkdir(parents=True)
    strays = 0
    with Store(tmp_path).tree() as tree:
        tracemalloc.start()
        try:
            for entry in tree.directories():
                strays += isinstance(entry, Stray)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert strays == 4_000
    assert peak < 200_000


# --- when the store is away -----------------------------------------------------------------------


def test_an_unmounted_disk_fails_no_blob(root: Path, blobs: list[Blob], tmp_path: Path) -> None:
    store = Store(root)
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    with pytest.raises(SourceError, match="is empty") as caught:
        store.inspect(blobs, verify=True)
    assert "mount" in caught.value.hint
    with pytest.raises(SourceError, match="is empty"):
        store.inspect([Blob("x"), blobs[0]], verify=False)


def test_a_disk_unmounted_in_the_middle_of_a_batch_fails_no_blob(
    root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    def unmount() -> None:
        root.rename(tmp_path / "unmounted")
        root.mkdir()

    gone = [Blob("0" * 64), Blob("1" * 64)]
    with pytest.raises(SourceError, match="is empty"):
        Store(root).inspect(switching(gone, unmount), verify=True)


def test_what_was_read_before_a_disk_was_unmounted_counts(
    root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    corrupt = put_as(root, "cc" * 32, b"something else")
    for number, known in enumerate((blobs[0], corrupt)):

        def unmount(name: str = f"unmounted {number}") -> None:
            root.rename(tmp_path / name)
            root.mkdir()

        found = Store(root).inspect(switching([known, Blob("0" * 64)], unmount), verify=True)
        assert (found.failed[-1].blobid, found.failed[-1].reason) == ("0" * 64, Reason.MISSING)
        root.rmdir()
        (tmp_path / f"unmounted {number}").rename(root)


def test_a_disk_mounted_in_the_middle_of_a_batch_fails_no_blob(
    root: Path, blobs: list[Blob], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    root.rename(disk)
    root.mkdir()

    def mount() -> None:
        root.rename(tmp_path / "mount point")
        disk.rename(root)

    store = Store(root)
    with pytest.raises(SourceError, match="was replaced"):
        store.inspect(switching(blobs, mount), verify=True)
    assert store.inspect(blobs, verify=True).ready == blobs


def test_a_malformed_id_says_nothing_about_the_store(root: Path) -> None:
    assert reasons(Store(root), [Blob("x")]) == {"x": Reason.BAD_BLOBID}


def test_a_store_that_is_another_users_fails_no_blob(open_root: Path) -> None:
    blobs = [put(open_root, str(number).encode()) for number in range(10)]
    for blob in blobs:
        place(open_root, blob).chmod(0o600 if os.geteuid() == 0 else 0)
    with unprivileged():
        store = Store(open_root)
        with pytest.raises(SourceError, match=r"nothing in the store .* Permission denied"):
            store.inspect(blobs, verify=True)
        with pytest.raises(SourceError, match="nothing in the store"):
            store.probe()
    for blob in blobs:
        place(open_root, blob).chmod(0o644)
    # Access times cannot be kept.
    with unprivileged():
        assert store.inspect(blobs, verify=True).ready == blobs
    open_root.chmod(0)
    with unprivileged(), pytest.raises(SourceError, match="Permission denied") as caught:
        store.probe()
    assert "uid" in caught.value.hint


def test_a_store_of_links_fails_no_blob(root: Path, blobs: list[Blob], tmp_path: Path) -> None:
    for prefix in list(root.iterdir()):
        prefix.rename(tmp_path / prefix.name)
        prefix.symlink_to(tmp_path / prefix.name)
    with pytest.raises(SourceError, match="symbolic links") as caught:
        Store(root).inspect(blobs, verify=True)
    assert "bind mounts" in caught.value.hint


@pytest.mark.parametrize(
    ("at", "code"),
    [
        ("root", errno.ESTALE),
        ("prefix", errno.ENOTCONN),
        ("blob", errno.ENODEV),
        ("content", errno.ETIMEDOUT),
    ],
)
def test_a_file_system_that_is_away_fails_no_blob(
    root: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch, code: int, at: str
) -> None:
    blobid = blobs[3].blobid
    if at == "content":
        monkeypatch.setattr(os, "readv", partial(fail, code))
    else:
        name = {"root": root.name, "prefix": blobid[:2], "blob": blobid}[at]
        fail_to_open(monkeypatch, name, code)
    with pytest.raises(SourceError, match=os.strerror(code)):
        Store(root).inspect(blobs, verify=True)


def test_a_dead_disk_fails_no_blob(
    root: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("readv", "scandir"):
        monkeypatch.setattr(os, name, partial(fail, errno.EIO))
    with pytest.raises(SourceError, match="Input/output error"):
        Store(root).inspect(blobs, verify=True)
    with pytest.raises(SourceError, match="Input/output error"):
        walk(root)


def test_running_out_of_descriptors_fails_no_blob(root: Path, blobs: list[Blob]) -> None:
    store = Store(root)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 12, hard))
    try:
        with pytest.raises(SourceError, match="Too many open files") as caught:
            store.inspect(blobs, verify=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "LimitNOFILE" in caught.value.hint
    assert store.inspect(blobs, verify=True).ready == blobs


# --- probe and measure ----------------------------------------------------------------------------


def test_probe_says_what_is_there_also_in_a_new_store_with_one_empty_prefix(root: Path) -> None:
    (root / "00").mkdir()
    assert Store(root).probe() == "1 prefix directory"
    put_as(root, "ab" * 32, b"")
    assert Store(root).probe() == "2 prefix directories"


def test_probe_of_a_wrong_root_says_so_whatever_lies_in_it(root: Path) -> None:
    """A link is one of the store's only where it has the name of a prefix."""
    (root / "bin").symlink_to("/usr/bin")
    (root / "home").mkdir()
    with pytest.raises(SourceError, match="is empty: no directory in it has two") as caught:
        Store(root).probe()
    assert "source.root" in caught.value.hint
    assert "00/" in caught.value.hint
    (root / "0a").symlink_to("/usr/bin")
    (root / "zz").symlink_to("/usr/bin")
    with pytest.raises(SourceError, match="symbolic links"):
        Store(root).probe()


def test_measure_fills_in_what_is_unknown_and_nothing_else(root: Path, blobs: list[Blob]) -> None:
    link = Blob("ee" * 32)
    place(root, link).parent.mkdir(parents=True, exist_ok=True)
    place(root, link).symlink_to("/etc/passwd")
    asked = [Blob(blobs[0].blobid), Blob(blobs[1].blobid, 7), Blob("0" * 64), Blob("x"), link]
    assert Store(root).measure(asked) == [blobs[0], *asked[1:]]
    assert Store(root / "unmounted").measure(asked) == asked


# --- altered --------------------------------------------------------------------------------------


def test_blobs_rewritten_replaced_or_gone_are_altered(root: Path, blobs: list[Blob]) -> None:
    store = Store(root)
    asked = [Blob("0" * 64), *blobs[1:]]
    for verify in (True, False):
        found = store.inspect(asked, verify=verify)
        assert store.altered(found) == []
        rewritten, replaced, gone = (place(root, blob) for blob in blobs[1:4])
        status = rewritten.stat()
        rewritten.write_bytes(b"y" * status.st_size)
        os.utime(rewritten, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        shutil.copy2(replaced, root / "copy")
        (root / "copy").rename(replaced)
        gone.unlink()
        assert store.altered(found) == blobs[1:4]
        for blob in blobs[1:4]:
            number = blobs.index(blob)
            place(root, blob).write_bytes(f"content of blob {number}".encode() * number)


# --- walking --------------------------------------------------------------------------------------


def walk(root: Path, after: str | None = None) -> tuple[list[str], set[str], list[Stray]]:
    """Directories in order, blobids, strays."""
    directories: list[str] = []
    blobids: set[str] = set()
    strays: list[Stray] = []
    with Store(root).tree() as tree:
        for directory in tree.directories(after):
            if isinstance(directory, Stray):
                strays.append(directory)
                continue
            directories.append(directory)
            for entry in tree.entries(directory):
                if isinstance(entry, Stray):
                    strays.append(entry)
                else:
                    blobids.add(entry)
    return directories, blobids, strays


def test_walk_finds_every_blob_and_names_every_stray(root: Path, blobs: list[Blob]) -> None:
    home = place(root, blobs[0]).parent
    top = home.parent
    (root / "README").touch()
    (root / "lost+found").mkdir()
    (root / ("ff" * 32)).touch()
    (root / "zz").symlink_to(root)
    (top / "x").touch()
    (top / "f0").touch()
    (home / ".tmp123").touch()
    (home / blobs[0].blobid.upper()).touch()
    (home / ("0" * 64)).touch()
    (home / (blobs[0].blobid[:4] + "0" * 60)).symlink_to("/etc/passwd")
    (home / (blobs[0].blobid[:4] + "1" * 60)).mkdir()
    os.mkfifo(home / "pipe")
    os.close(os.open(os.fsencode(home) + b"/caf\xe9", os.O_CREAT | os.O_WRONLY))
    directories, blobids, strays = walk(root)
    assert blobids == {blob.blobid for blob in blobs}
    assert directories == sorted({relative_path(blob.blobid)[:5] for blob in blobs})
    assert f"{StrayKind.SYMLINK}" == "symlink"  # On every Python: operators read the word.
    aa, bb = top.name, f"{top.name}/{home.name}"
    assert {stray.path: stray.kind for stray in strays} == {
        "README": StrayKind.NOT_A_BLOBID,
        "lost+found": StrayKind.NOT_A_FILE,
        "ff" * 32: StrayKind.WRONG_DIRECTORY,
        "zz": StrayKind.SYMLINK,
        f"{aa}/x": StrayKind.NOT_A_BLOBID,
        f"{aa}/f0": StrayKind.NOT_A_BLOBID,
        f"{bb}/.tmp123": StrayKind.NOT_A_BLOBID,
        f"{bb}/{blobs[0].blobid.upper()}": StrayKind.NOT_A_BLOBID,
        f"{bb}/{'0' * 64}": StrayKind.WRONG_DIRECTORY,
        f"{bb}/{blobs[0].blobid[:4] + '0' * 60}": StrayKind.SYMLINK,
        f"{bb}/{blobs[0].blobid[:4] + '1' * 60}": StrayKind.NOT_A_FILE,
        f"{bb}/pipe": StrayKind.NOT_A_FILE,
        f"{bb}/caf\\xe9": StrayKind.NOT_A_BLOBID,
    }


def test_walk_skips_directories_it_cannot_read_and_names_them(open_root: Path) -> None:
    kept = put_as(open_root, "ab" * 32, b"")
    for closed in ("cd" * 32, "ef" * 32):
        put_as(open_root, closed, b"")
    (open_root / "cd").chmod(0)
    (open_root / "ef" / "ef").chmod(0)
    with unprivileged():
        _, blobids, strays = walk(open_root)
    assert blobids == {kept.blobid}
    assert strays == [
        Stray("cd", StrayKind.UNREADABLE, "Permission denied"),
        Stray("ef/ef", StrayKind.UNREADABLE, "Permission denied"),
    ]


def test_a_file_system_that_goes_away_under_a_walk_is_no_stray(
    root: Path, blobs: list[Blob], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = relative_path(blobs[0].blobid)
    fail_to_open(monkeypatch, path[3:5], errno.ESTALE)
    with Store(root).tree() as tree:
        with pytest.raises(SourceError, match="Stale"):
            tree.lstat(path)
        with pytest.raises(SourceError, match="Stale"):
            list(tree.entries(path[:5]))


prefixes = st.integers(0, 255).map(lambda number: f"{number:02x}")


@given(places=st.sets(st.tuples(prefixes, prefixes), max_size=12), data=st.data())
def test_a_walk_goes_on_after_any_directory(
    places: set[tuple[str, str]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for first, second in places:
            put_as(root, (first + second) * 16, b"")
        expected = sorted(f"{first}/{second}" for first, second in places)
        assert walk(root)[0] == expected
        after = data.draw(st.sampled_from([*expected, "00/00", "7f/ff", "ff/ff"]))
        assert walk(root, after)[0] == [name for name in expected if name > after]


def test_what_was_changed_lately_may_still_be_written(root: Path) -> None:
    kinds = [Reason.MISSING, Reason.WRONG_SIZE, Reason.CORRUPT_SOURCE]
    new, missing, nowhere, ahead = "aa" * 32, "ac" * 32, "ad" * 32, "ae" * 32
    for blobid in (new, ahead):
        put_as(root, blobid, b"wrong")
    path_of(root, missing).parent.mkdir(parents=True)
    store = Store(root, grace=900)
    later = time.time() + 86400
    os.utime(path_of(root, ahead), (later, later))
    failures = [Failure(one, kinds[n % 3]) for n, one in enumerate((new, missing, nowhere, ahead))]

    ages = store.ages_of_young([*failures, Failure("ba" * 32, Reason.REMOTE_REJECTED)])

    # A directory that is new makes all that is missing in it young.
    assert ages.keys() == {new, missing, nowhere}
    assert all(0 <= age < 60 for age in ages.values())
    assert Store(root).ages_of_young(failures) == {}
    assert Store(root, grace=1e-9).ages_of_young(failures) == {}
    # A change of this moment, and a clock that was set back since.
    soon = time.time() + 30
    os.utime(path_of(root, new), (soon, soon))
    assert store.ages_of_young(failures)[new] == 0.0
