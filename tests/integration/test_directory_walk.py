"""A walk of directories registers files, lists what has changed, and notes what is gone."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ntt_backup.audit import directory_walk
from ntt_backup.audit.register import register_due, register_files
from ntt_backup.catalog import origin_passes, unread_files
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.origin_passes import Registration
from ntt_backup.config import StoreConfig
from ntt_backup.errors import CatalogError
from ntt_backup.model import MOST_PATH_BYTES, Blob, ReadFile
from tests.helpers.application import Application
from tests.integration.catalogs import losing

LISTED = "gone_at is null and replaced_at is null"


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the times of directories trusted at once."""
    monkeypatch.setattr(directory_walk, "TRUSTED_NS", -1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a/1", "a/2", "a/b/3", "a/b/c/4", "a-b/5", "d/6", "7"):
        make(tmp_path / "files" / name)
    return tmp_path / "files"


def make(path: Path, content: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def settings(root: Path, *paths: str, **others: object) -> StoreConfig:
    walked = {"paths": [str(root / path) for path in paths or (".",)], **others}
    return StoreConfig.model_validate({"source": {"root": str(root)}, "files": {"images": walked}})


def places_where(catalog: Connection, where: str = LISTED) -> set[bytes]:
    rows = catalog.execute(f"select path from ntt_backup.places where {where}")
    return {path for (path,) in rows.fetchall()}


def on_disk(root: Path) -> set[bytes]:
    return {os.fsencode(one.relative_to(root)) for one in root.rglob("*") if one.is_file()}


def read_all(catalog: Connection, root: Path) -> None:
    unread = unread_files.UnreadFiles(catalog, "remote")
    found = []
    for one in unread.next(1000):
        status = (root / os.fsdecode(one.path)).stat()
        blob = Blob(f"{one.id:064x}", status.st_size)
        found.append((one.id, ReadFile(blob, status.st_mtime_ns, 0o644)))
    unread.record(found, [])


def problems(catalog: Connection, wanted: StoreConfig) -> tuple[Registration, dict[str, str]]:
    said: dict[str, str] = {}
    done = register_files(catalog, wanted, problem=said.__setitem__)
    noted = origin_passes.problems(catalog, ["images"])
    assert bool(noted) == bool(said) == bool(done.unreadable)
    return done, said


def test_only_what_has_changed_is_listed_again(catalog: Connection, root: Path) -> None:
    wanted = settings(root)
    losing(catalog, "ntt_backup.places", "40001")
    assert register_files(catalog, wanted).registered == 7
    assert places_where(catalog) == on_disk(root)
    assert register_files(catalog, wanted).rows == 0
    make(root / "a" / "b" / "new")
    make(root / "a" / "b" / "deep" / "er" / "new")
    found = register_files(catalog, wanted)
    assert (found.rows, found.registered, found.gone) == (3, 2, 0)  # 3, and both that are new.
    assert places_where(catalog) == on_disk(root)
    whole = register_files(catalog, wanted, whole=True)
    assert (whole.rows, whole.registered, whole.changed, whole.gone) == (9, 0, 0, 0)
    assert register_files(catalog, settings(root, whole_every=0)).rows == 9


def test_young_times_are_not_trusted(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_walk, "TRUSTED_NS", 60 * 10**9)
    wanted = settings(root, on_change="version")
    assert register_files(catalog, wanted).rows == 7
    read_all(catalog, root)
    assert register_files(catalog, wanted).rows == 0
    # All that follows is within one tick of the times of the directory.
    times = (root / "a").stat()
    (root / "a" / "1").write_bytes(b"changed")
    done = register_files(catalog, wanted)
    assert (done.rows, done.changed) == (2, 1)
    make(root / "a" / "new")
    (root / "a" / "2").unlink()
    os.utime(root / "a", ns=(times.st_mtime_ns, times.st_mtime_ns))
    done = register_files(catalog, wanted)
    assert (done.rows, done.registered, done.gone) == (2, 1, 1)
    assert places_where(catalog) == on_disk(root)
    # Once the times are trusted, they are noted, and nothing is listed for that.
    monkeypatch.setattr(directory_walk, "TRUSTED_NS", -1)
    assert register_files(catalog, wanted).rows == 0
    left = catalog.execute("select count(*) from ntt_backup.directories where mtime_ns is null")
    assert left.fetchone() == (0,)
    assert places_where(catalog) == on_disk(root)


def test_times_of_another_clock_are_not_trusted(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_walk, "TRUSTED_NS", 60 * 10**9)
    behind = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: behind)
    assert register_files(catalog, settings(root)).rows == 7
    make(root / "a" / "new")
    assert register_files(catalog, settings(root)).rows == 3
    untrusted = "select count(*) from ntt_backup.directories where mtime_ns is null"
    assert catalog.execute(untrusted).fetchone() == (6,)


def test_times_may_be_any(catalog: Connection, root: Path) -> None:
    """Not every file system takes them all."""
    for number, name in ((1 << 62, "a/1"), (-(1 << 62), "a/2"), (1 << 62, "a"), (-(1 << 62), "d")):
        os.utime(root / name, (number, number))
    register_files(catalog, settings(root))
    read_all(catalog, root)
    assert register_files(catalog, settings(root), whole=True).changed == 0
    assert places_where(catalog, "blobid is not null") == on_disk(root)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_removed_is_gone_and_comes_back(
    catalog: Connection, root: Path, tmp_path: Path, whole: bool
) -> None:
    wanted = settings(root)
    register_files(catalog, wanted)
    (root / "a" / "1").unlink()
    (root / "a" / "b").rename(tmp_path / "aside")
    (root / "d").rename(root / "e")
    found = register_files(catalog, wanted, whole=whole)
    assert (found.gone, found.registered) == (4, 1)
    assert places_where(catalog, "gone_at is not null") == {b"a/1", b"a/b/3", b"a/b/c/4", b"d/6"}
    assert places_where(catalog) == on_disk(root)
    (tmp_path / "aside").rename(root / "a" / "b")
    assert register_files(catalog, wanted, whole=whole).back == 2
    assert places_where(catalog) == on_disk(root)
    # A directory whose files are replaced as a whole, in place of a file, and the other way round.
    shutil.rmtree(root / "a" / "b")
    make(root / "a" / "b")
    (root / "7").unlink()
    make(root / "7" / "8")
    register_files(catalog, wanted, whole=whole)
    assert places_where(catalog) == on_disk(root)


@pytest.mark.parametrize("on_change", ["report", "version"])
def test_a_file_with_another_size_or_time_was_changed(
    catalog: Connection, root: Path, on_change: str
) -> None:
    wanted = settings(root, on_change=on_change)
    register_files(catalog, wanted)
    read_all(catalog, root)
    os.utime(root / "d" / "6", ns=(0, 10**18))
    make(root / "a" / "b" / "3", b"longer")
    make(root / "d" / "beside")
    found = register_files(catalog, wanted)
    assert (found.changed, found.gone) == (1, 0)  # The other one was changed in place.
    found = register_files(catalog, wanted, whole=True)
    assert (found.changed, found.gone) == (1, 0)
    if on_change == "report":
        assert places_where(catalog, "failed = 'changed'") == {b"d/6", b"a/b/3"}
    else:
        assert places_where(catalog, "replaced_at is not null") == {b"d/6", b"a/b/3"}
        assert places_where(catalog) == on_disk(root)
    assert register_files(catalog, wanted, whole=True).changed == 0


def test_any_bytes_may_be_a_name(catalog: Connection, root: Path) -> None:
    names = [
        b"new\nline",
        b"\xff\xfe",
        b"\xff" * 255,
        b"a b\t",
        b"\\",
        b"'",
        b"0",
        b"/".join([b"\xff"] * 9),
    ]
    for name in names:
        make(root / os.fsdecode(name) / "file")
    register_files(catalog, settings(root))
    assert places_where(catalog) == on_disk(root)
    shutil.rmtree(os.fsdecode(os.fsencode(root) + b"/" + b"\xff"))
    register_files(catalog, settings(root))
    assert places_where(catalog) == on_disk(root)


def test_what_is_no_file_is_left_aside(catalog: Connection, root: Path, tmp_path: Path) -> None:
    make(tmp_path / "outside" / "secret")
    (root / "a" / "up").symlink_to(tmp_path / "outside")
    (root / "a" / "link").symlink_to(root / "7")
    os.mkfifo(root / "a" / "fifo")
    done = register_files(catalog, settings(root))
    assert (done.registered, done.strays) == (7, 3)
    (root / "d" / "6").unlink()
    (root / "d").rmdir()
    (root / "d").symlink_to(tmp_path / "outside")
    done = register_files(catalog, settings(root))
    assert (done.gone, places_where(catalog, "convert_from(path, 'UTF8') like '%secret'")) == (
        1,
        set(),
    )


def test_patterns_leave_out_files_and_directories(catalog: Connection, root: Path) -> None:
    register_files(catalog, settings(root))
    done = register_files(catalog, settings(root, exclude=["b", f"{root}/a-b/*", "7"]))
    assert done.gone == 4
    assert places_where(catalog) == {b"a/1", b"a/2", b"d/6"}


def test_files_outside_of_the_paths_of_today_are_gone(catalog: Connection, root: Path) -> None:
    register_files(catalog, settings(root, "a", "a/b", "d"))
    assert places_where(catalog) == {b"a/1", b"a/2", b"a/b/3", b"a/b/c/4", b"d/6"}
    assert register_files(catalog, settings(root, "a-b", "d")).gone == 4
    assert places_where(catalog) == {b"a-b/5", b"d/6"}
    assert register_files(catalog, settings(root, "a-b", "d")).rows == 0


@pytest.mark.parametrize("away", ["missing", "empty", "lost+found"])
def test_a_disk_that_is_not_mounted_loses_nothing(
    catalog: Connection, root: Path, tmp_path: Path, away: str
) -> None:
    wanted = settings(root, "a", "d")
    register_files(catalog, wanted)
    (root / "a").rename(tmp_path / "disk")
    if away != "missing":
        (root / "a").mkdir()
    if away == "lost+found":
        (root / "a" / "lost+found").mkdir()
    make(root / "d" / "new")
    for _ in range(2):
        done, said = problems(catalog, wanted)
        assert (done.gone, set(said)) == (0, {"a"})
    assert b"d/new" in places_where(catalog)
    assert b"a/b/c/4" in places_where(catalog)
    shutil.rmtree(root / "a", ignore_errors=True)
    (tmp_path / "disk").rename(root / "a")
    done, said = problems(catalog, wanted)
    assert (done.gone, done.registered, said) == (0, 0, {})


def test_a_disk_below_that_is_not_mounted_loses_nothing(
    catalog: Connection, root: Path, tmp_path: Path
) -> None:
    wanted = settings(root)
    register_files(catalog, wanted)
    # As if a file system had been mounted there.
    catalog.execute("update ntt_backup.directories set mounted = true where path = 'a/b'")
    (root / "a" / "b").rename(tmp_path / "disk")
    (root / "a" / "b").mkdir()
    done, said = problems(catalog, wanted)
    assert (set(said), b"a/b/3" in places_where(catalog)) == ({"a/b"}, True)
    make(root / "a" / "b" / "new")
    done, said = problems(catalog, wanted)
    assert (done.registered, said) == (1, {})


def test_files_of_a_directory_that_cannot_be_read_are_not_gone(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(root)
    register_files(catalog, wanted)
    scandir = os.scandir
    refused = os.stat(root / "a" / "b").st_ino

    def refuse(fd: int) -> object:
        if isinstance(fd, int) and os.fstat(fd).st_ino == refused:
            raise PermissionError(13, "Permission denied")
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", refuse)
    make(root / "a" / "b" / "new")
    make(root / "a" / "b" / "c" / "new")
    for _ in range(2):
        done, said = problems(catalog, wanted)
        assert (done.gone, said) == (0, {"a/b": "Permission denied"})
    assert places_where(catalog) == on_disk(root) - {b"a/b/new"}
    monkeypatch.setattr(os, "scandir", scandir)
    done, said = problems(catalog, wanted)
    assert (done.registered, said) == (1, {})


def test_a_file_of_which_nothing_is_known_stops_no_other(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(root)
    make(root / "a" / "bad")
    register_files(catalog, wanted)

    class Refusing:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.is_dir, self.is_file = entry.name, entry.is_dir, entry.is_file
            self._entry = entry

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            if self.name == "bad":
                raise OSError(117, "Structure needs cleaning")
            return self._entry.stat(follow_symlinks=follow_symlinks)

    class Listing(list[Refusing]):
        def __enter__(self) -> list[Refusing]:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda fd: Listing(map(Refusing, scandir(fd))))
    (root / "a" / "1").unlink()
    make(root / "a" / "new")
    for _ in range(2):
        done, said = problems(catalog, wanted)
        assert (done.gone, said) == (0, {"a/bad": "Structure needs cleaning"})
    assert {b"a/new", b"a/bad"} < places_where(catalog)
    monkeypatch.setattr(os, "scandir", scandir)
    done, said = problems(catalog, wanted)
    assert (done.gone, said) == (1, {})


def test_a_path_without_room_in_the_catalog_is_named_each_time(
    catalog: Connection, root: Path
) -> None:
    above = root
    level = os.open(root, os.O_RDONLY)
    while len(os.fsencode(above.relative_to(root))) < MOST_PATH_BYTES - 255:
        above = above / os.urandom(120).hex()
        os.mkdir(above.name, dir_fd=level)
        level, before = os.open(above.name, os.O_RDONLY, dir_fd=level), level
        os.close(before)
    for length in (1, 255):
        os.close(os.open("x" * length, os.O_CREAT, dir_fd=level))
    os.mkdir("d" * 255, dir_fd=level)
    os.close(level)
    for _ in range(2):
        done, said = problems(catalog, settings(root))
        assert (done.unreadable, set(said.values())) == (2, {"its path is too long"})
    found = places_where(catalog)
    assert (len(found), max(map(len, found)) <= MOST_PATH_BYTES) == (8, True)


def test_a_pass_goes_on_where_it_was_interrupted(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_walk, "STEP_FILES", 3)
    monkeypatch.setattr(directory_walk, "STEP_DIRECTORIES", 4)
    for nth in range(40):
        make(root / "many" / str(nth % 7) / str(nth))
    wanted = settings(root)
    steps = 0

    class Interrupted(Exception):
        pass

    def interrupt(_: Registration) -> None:
        raise Interrupted

    while steps < 100:
        steps += 1
        try:
            register_files(catalog, wanted, on_progress=interrupt if steps % 3 else lambda _: None)
            break
        except Interrupted:
            continue
    assert places_where(catalog) == on_disk(root)
    shutil.rmtree(root / "many" / "3")
    with pytest.raises(Interrupted):
        register_files(catalog, wanted, whole=True, on_progress=interrupt)
    rest = register_files(catalog, wanted)
    assert 7 < rest.rows < 47
    assert places_where(catalog) == on_disk(root)


@pytest.fixture
def divided(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of more files than are listed together."""
    for name, value in (("MOST_UNDIVIDED", 30), ("PART_NAMES", 4), ("STEP_PARTS", 4)):
        monkeypatch.setattr(directory_walk, name, value)
    for nth in range(100):
        make(root / "many" / f"img-{nth}.jpg")
    make(root / "many" / "x-tywjgwy")
    # A part begins between each of these and what is in them.
    for name in ("img", "img-1", "img-42"):
        make(root / "many" / name / "inside")
    return root / "many"


def test_of_a_large_directory_only_parts_are_listed_again(
    catalog: Connection, root: Path, divided: Path
) -> None:
    wanted = settings(root)
    register_files(catalog, wanted)
    assert places_where(catalog) == on_disk(root)
    read_all(catalog, root)
    assert register_files(catalog, wanted).rows == 0
    make(divided / "img-42.new")
    (divided / "img-7.jpg").unlink()
    make(root / "replaced", b"longer")
    (root / "replaced").rename(divided / "img-90.jpg")
    shutil.rmtree(divided / "img-42")
    found = register_files(catalog, wanted)
    assert (found.registered, found.gone, found.changed) == (1, 2, 1)
    assert 0 < found.rows < 60
    assert places_where(catalog) == on_disk(root)
    make(divided / "img-1" / "more")
    assert register_files(catalog, wanted).rows == 2
    (divided / "x-tywjgwy").rename(divided / "x-gduswuv")  # The names have the same CRC-32.
    found = register_files(catalog, wanted)
    assert (found.registered, found.gone) == (1, 1)
    whole = register_files(catalog, wanted, whole=True)
    assert (whole.rows, whole.registered, whole.gone) == (len(on_disk(root)), 0, 0)
    assert register_files(catalog, wanted).rows == 0
    # As it is no longer large, nothing counts that was known of its parts.
    names, files = list(divided.iterdir()), len(on_disk(divided))
    for one in names:
        one.rename(root / "d" / one.name)
    assert register_files(catalog, wanted).gone == files
    for one in names:
        (root / "d" / one.name).rename(one)
    assert register_files(catalog, wanted).back == files
    assert places_where(catalog) == on_disk(root)


def test_a_large_directory_that_is_not_mounted_loses_nothing(
    catalog: Connection, root: Path, divided: Path, tmp_path: Path
) -> None:
    wanted = settings(root, "many")
    parts = 0

    class Interrupted(Exception):
        pass

    def interrupt(_: Registration) -> None:
        nonlocal parts
        parts += 1
        if parts == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        register_files(catalog, wanted, on_progress=interrupt)
    before = places_where(catalog)
    assert before < on_disk(root)
    divided.rename(tmp_path / "disk")
    divided.mkdir()
    for _ in range(2):
        register_files(catalog, wanted)
    assert places_where(catalog) == before
    divided.rmdir()
    (tmp_path / "disk").rename(divided)
    register_files(catalog, wanted)
    assert places_where(catalog) == {one for one in on_disk(root) if one.startswith(b"many/")}


def test_an_interrupted_listing_of_a_large_directory_continues(
    catalog: Connection, root: Path, divided: Path
) -> None:
    wanted = settings(root, "many")
    rows = []

    def interrupt(found: Registration) -> None:
        rows.append(found.rows)
        raise InterruptedError

    while len(rows) < 100:
        try:
            register_files(catalog, wanted, on_progress=interrupt)
            break
        except InterruptedError:
            continue
    assert len([1 for one in rows if one]) > 4
    assert places_where(catalog) == {one for one in on_disk(root) if one.startswith(b"many/")}


def test_many_directories_go_in_steps(
    catalog: Connection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_walk, "STEP_DIRECTORIES", 3)
    for nth in range(90):
        make(root / "wide" / f"{nth % 30}" / f"{nth % 7}" / str(nth))
    deep = root / "/".join(map(str, range(100)))
    make(deep / "file")
    make(root / "/".join(map(str, range(200))) / "too-deep")
    found, said = problems(catalog, settings(root))
    assert list(said.values()) == ["its path is too long"]
    expected = {one for one in on_disk(root) if not one.endswith(b"too-deep")}
    assert (found.registered, places_where(catalog)) == (len(expected), expected)
    shutil.rmtree(root / "wide" / "20")
    found, said = problems(catalog, settings(root))
    assert found.gone == 3


@pytest.mark.parametrize("other", [{"url": "host=/nowhere"}, {"query": "select 1 as wrong"}])
def test_no_directory_waits_for_the_database_of_an_application(
    catalog: Connection,
    catalog_url: str,
    root: Path,
    application: Application,
    other: dict[str, str],
) -> None:
    listed = {"url": application.url, "query": "select path from files", **other}
    walked = settings(root).model_dump(include={"source": {"root"}, "files": True})
    for channel in (None, "files"):
        make(root / f"new {channel}")
        catalog.execute("update ntt_backup.origins set ended_at = ended_at - interval '1 day'")
        origins = {"catalog": {"url": catalog_url, "from": {**listed, "channel": channel}}}
        with pytest.raises(CatalogError, match=r"catalog\.from"):
            register_due(
                StoreConfig.model_validate({**walked, **origins}), lambda _: None, stays=True
            )
        assert places_where(catalog) == on_disk(root)


def test_a_file_belongs_to_the_origin_that_gave_it_first(
    catalog: Connection, root: Path, application: Application
) -> None:
    application.add("a/1", "elsewhere")
    both = {
        "catalog": {"from": {"url": application.url, "query": "select path from files"}},
        "source": {"root": str(root)},
        "files": {
            "one": {"paths": [str(root / "a")]},
            "two": {"paths": [str(root)]},
        },
    }
    wanted = StoreConfig.model_validate(both)
    for _ in range(2):
        register_files(catalog, wanted, whole=True)
        owners = catalog.execute("select path, origin from ntt_backup.places").fetchall()
        assert dict(owners) == {
            b"a/1": "", b"a/2": "one", b"a/b/3": "one", b"a/b/c/4": "one",
            b"a-b/5": "two", b"d/6": "two", b"7": "two", b"elsewhere": "",
        }  # fmt: skip
    # What the first one no longer gives, another one may have; also if the first one is not used.
    application.owner.execute("delete from files where path = 'a/1'")
    del both["files"]["one"]  # type: ignore[attr-defined]
    register_files(catalog, StoreConfig.model_validate(both), whole=True)
    assert places_where(catalog, f"origin = 'two' and {LISTED}") == on_disk(root)
    assert places_where(catalog, "origin <> 'two'") == {b"elsewhere"}
