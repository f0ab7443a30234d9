"""`restore --as-paths`: files that go by their paths come back, with and without a database."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard
from blake3 import blake3

from ntt_backup.dump.places_file import PlacesWriter, read_places
from ntt_backup.model import ListedFile
from ntt_backup.restore import as_paths as by_paths
from tests.helpers.application import Application
from tests.helpers.blobs import Person, files_with_looks
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import RemoteDir
from tests.power.disks import call, unmount

NAMES = (
    b"a/one",
    b"a/b/two words",
    b"line\nend/\xc3\xbc",
    b"no\xffutf8/\xfe\xfd",
    b"a/same",
    b"copy",
)
QUERY = "select path, size from files"
SOME_NS = 1_500_000_000_123_456_789


def content_of(name: bytes) -> bytes:
    return b"equal" * 999 if name in (b"a/one", b"a/same", b"copy") else name * 5000


def add(env: Environment, application: Application, *names: bytes) -> None:
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(uploads(env)), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content_of(name))
        os.chmod(path, (0o640, 0o444, 0o755)[number % 3])
        os.utime(path, ns=(0, SOME_NS + 1000 * number))
        application.owner.execute("insert into files (path, size) values (%s, null)", (name,))


def uploads(env: Environment) -> Path:
    return env.root / "uploads"


@pytest.fixture
def listed(env: Environment, application: Application, postgres: Postgres) -> Environment:
    """Files that an application lists by the bytes of their paths; nothing is backed up yet."""
    application.owner.execute("alter table files alter column path type bytea using path::bytea")
    add(env, application, *NAMES)
    env.write_config(
        source={"root": str(uploads(env))},
        dump={"bin": str(postgres.programs)},
        **{"catalog.from": {"url": application.url, "query": QUERY}},
    )
    return env


def on_disk(env: Environment, **remote: str) -> None:
    place = env.root / "disk"
    place.mkdir()
    env.remote = RemoteDir(str(place), place)
    env.settings["remote"] = {"url": f"file://{place}", **remote}
    env.write_config()


def sealed(env: Environment) -> None:
    owner = Person.new()
    key = owner.file(env.root / "backup.key")
    env.write_config(pack={"recipients": [owner.public], "identity_file": str(key)})


def restore(env: Environment, *options: str, code: int = 0, to: str = "back") -> dict[str, Any]:
    some = ("--json", "--workers", "1", "--to", str(env.root / to))
    done = env.call("restore", "--as-paths", *some, *options)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return {"error": done.stdout + done.stderr} if "error" in found else found


def counts(found: dict[str, Any]) -> tuple[int, int, int]:
    return found["files"], found["kept"], found["replaced"]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("ssh", marks=pytest.mark.long),
        "file",
        pytest.param("packs", marks=pytest.mark.long),
        "sealed packs",
    ],
)
def test_trees_are_equal_with_the_catalog_and_with_nothing_but_the_target(
    listed: Environment, application: Application, database_url: str, way: str
) -> None:
    env = listed
    if way != "ssh":
        on_disk(env, layout="packs" if "packs" in way else "files")
    if "sealed" in way:
        sealed(env)
    env.call("run", expect=0)
    env.call("dump", expect=0)
    wanted = files_with_looks(uploads(env))

    found = restore(env)
    assert counts(found) == (len(NAMES), 0, 0)
    assert found["restored"] == len({content_of(name) for name in NAMES})
    assert files_with_looks(env.root / "back") == wanted
    assert counts(restore(env)) == (0, len(NAMES), 0)

    # The worst day: there is no database, and the files are lost. Then there is an empty one.
    shutil.rmtree(uploads(env))
    env.write_config(catalog={"url": "postgresql:///no_such_database?host=/nonexistent"})
    assert counts(restore(env, "--places", "latest", to="without")) == (len(NAMES), 0, 0)
    assert files_with_looks(env.root / "without") == wanted
    application.owner.execute("drop table files")
    env.write_config(catalog={"url": database_url})
    env.call("restore", "--catalog", "--allow-superuser", expect=0)
    assert counts(restore(env, to="again")) == (len(NAMES), 0, 0)
    assert files_with_looks(env.root / "again") == wanted


def test_a_places_file_is_read_without_this_program_and_goes_with_its_dump(
    listed: Environment,
) -> None:
    env = listed
    on_disk(env)
    env.write_config(dump={"keep_last": 1, "keep_daily": 0, "keep_weekly": 0})
    env.call("run", expect=0)
    for _ in range(2):
        env.call("dump", "--force", expect=0)
    stored = sorted(path.name for path in (env.remote.local / "pgdump").iterdir())
    assert [name.partition(".")[2] for name in stored] == [
        "dump",
        "dump.json",
        "dump.places.jsonl.zst",
    ]
    file = env.remote.local / "pgdump" / stored[2]
    text = zstandard.ZstdDecompressor().stream_reader(file.open("rb")).readall()
    files = {}
    for line in map(json.loads, text.splitlines()):
        path = line["path"].encode() if "path" in line else base64.b64decode(line["path_base64"])
        content = content_of(path)
        assert (line["blobid"], line["size"]) == (blake3(content).hexdigest(), len(content))
        files[path] = (content, line["mtime_ns"], int(line["mode"], 8))
    assert files == files_with_looks(uploads(env))

    # A local copy will do, also one that was edited.
    plain = env.root / "some.jsonl"
    plain.write_bytes(b"".join(one for one in text.splitlines(True) if b'"a/' in one))
    assert counts(restore(env, "--places", str(plain))) == (3, 0, 0)
    shutil.copy(file, env.root / "copy.zst")
    assert counts(restore(env, "--places", str(env.root / "copy.zst"))) == (len(NAMES) - 3, 3, 0)

    # A damaged one is told, and not used.
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    done = restore(env, "--places", "latest", code=7, to="nothing")
    assert "its SHA-256 differs from its record" in done["error"]
    assert not (env.root / "nothing").exists()


def test_what_is_chosen_comes_back_and_what_is_wrong_there_is_replaced(
    listed: Environment, application: Application
) -> None:
    env, back = listed, listed.root / "back"
    on_disk(env)
    env.call("run", expect=0)
    assert counts(restore(env, "--path", "/a")) == (3, 0, 0)
    wanted = files_with_looks(uploads(env))
    assert files_with_looks(back) == {
        name: wanted[name] for name in NAMES if name.startswith(b"a/")
    }
    assert counts(restore(env, "--path", "tw?*", to="two")) == (1, 0, 0)
    assert "none of the listed files" in restore(env, "--path", "none", code=2, to="none")["error"]

    (back / "a/one").write_bytes(b"w" * 4995)
    (back / "copy").symlink_to("/etc/passwd")
    (back / "a/same").chmod(0o600)
    os.utime(back / "a/same", (1, 1))
    assert counts(restore(env)) == (4, 2, 2)
    assert files_with_looks(back) == wanted

    # What is gone comes back on request, and what was never read is told.
    application.owner.execute("delete from files where path = 'copy'")
    application.owner.execute("insert into files (path, size) values ('missing', 1)")
    env.call("scan", "--restart", expect=0)
    few = "select blobid from blobs"
    found = restore(env, "--query", few, to="few")
    assert counts(found) == (len(NAMES) - 1, 0, 0)
    found = restore(env, to="listed", code=7)
    assert counts(found) == (len(NAMES) - 1, 0, 0)
    assert found["failures"] == [
        {"blobid": "missing", "reason": "missing", "detail": "it was never backed up"}
    ]
    restore(env, "--with-gone", to="gone", code=7)
    assert files_with_looks(env.root / "gone") == wanted


def test_the_list_beside_an_older_dump_brings_back_the_files_of_that_time(
    listed: Environment, application: Application
) -> None:
    env = listed
    on_disk(env)
    env.write_config(**{"catalog.from": {"on_change": "version"}})
    env.call("run", expect=0)
    env.call("dump", expect=0)
    (older,) = (env.remote.local / "pgdump").glob("*.dump")
    before = files_with_looks(uploads(env))
    (uploads(env) / "copy").write_bytes(b"another version")
    application.owner.execute("update files set size = 15 where path = 'copy'")
    (uploads(env) / "a/one").unlink()
    application.owner.execute("delete from files where path = 'a/one'")
    add(env, application, b"new")
    env.call("run", expect=0)
    env.call("dump", "--force", expect=0)
    after = files_with_looks(uploads(env))

    back = env.root / "back"
    assert counts(restore(env, "--places", "latest")) == (len(after), 0, 0)
    assert files_with_looks(back) == after
    # What came later stays, and what is another version by now is replaced.
    assert counts(restore(env, "--places", older.name)) == (2, len(before) - 2, 1)
    assert files_with_looks(back) == {**after, **before}


def test_a_thousand_equal_files_cost_one_blob(
    listed: Environment, application: Application
) -> None:
    env = listed
    on_disk(env)
    names = [b"many/%d" % number for number in range(1000)]
    with application.owner.cursor() as cursor:
        cursor.execute("delete from files")
        cursor.executemany("insert into files (path) values (%s)", [(name,) for name in names])
    (uploads(env) / "many").mkdir()
    for name in names:
        (uploads(env) / os.fsdecode(name)).write_bytes(b"same" * 1000)
    env.call("run", expect=0)
    for options, links in (((), 1), (("--hard-links",), 1000)):
        found = restore(env, *options, to=f"with-{links}")
        assert (counts(found), found["restored"], found["bytes"]) == ((1000, 0, 0), 1, 4000)
        status = {os.stat(env.root / f"with-{links}" / os.fsdecode(name)) for name in names}
        assert {one.st_nlink for one in status} == {links}
        assert {one.st_size for one in status} == {4000}


def test_more_equal_files_than_a_file_may_have_links(
    listed: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, link = listed, os.link
    on_disk(env)
    env.call("run", expect=0)

    def at_most_three(old: str, *args: Any, src_dir_fd: int, **how: Any) -> None:
        if os.stat(old, dir_fd=src_dir_fd).st_nlink > 3:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(old, *args, src_dir_fd=src_dir_fd, **how)

    monkeypatch.setattr(os, "link", at_most_three)
    blobid = blake3(content_of(b"copy")).hexdigest()
    lines = [{**LINE, "size": 4995, "blobid": blobid, "path": f"{n}"} for n in range(10)]
    found = restore(env, "--hard-links", "--places", str(places(env, *lines)))
    assert (counts(found), found["restored"]) == ((10, 0, 0), 1)
    files = [path.stat() for path in (env.root / "back").iterdir()]
    assert len({one.st_ino for one in files}) == 4
    assert {(one.st_size, one.st_mtime, one.st_mode & 0o777) for one in files} == {
        (4995, 0.0, 0o644)
    }


@contextmanager
def image(env: Environment, mkfs: str, mount: str = "mount") -> Iterator[Path]:
    """A file system of 320 MB in an image."""
    for program in (mkfs.split()[0], mount.split()[0]):
        if os.geteuid() != 0 or shutil.which(program) is None:
            pytest.skip(f"this needs root and {program}")
    file, where = env.root / "image", env.root / "mnt"
    file.write_bytes(b"")
    os.truncate(file, 320 << 20)
    where.mkdir()
    call(*mkfs.split(), file)
    device = call("losetup", "-f", "--show", file).stdout.decode().strip()
    try:
        if call(*mount.split(), device, where, ok=False).returncode:
            pytest.skip(f"{mkfs} makes what cannot be mounted here")
        try:
            yield where
        finally:
            unmount(where)
    finally:
        call("losetup", "-d", device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mkfs", "mount"),
    [("mkfs.xfs -q -n version=ci", "mount"), ("mkfs.exfat", "mount.exfat-fuse")],
)
def test_names_that_differ_in_case_only_do_not_overwrite_each_other(
    listed: Environment, mkfs: str, mount: str
) -> None:
    env = listed
    on_disk(env)
    env.call("run", expect=0)
    lines = []
    for name, paths in (
        (b"copy", ("Name", "Dir/x", "alone", "both")),
        (b"a/b/two words", ("name", "dir/x", "dir/y", "BOTH")),
    ):
        content = content_of(name)
        line = {**LINE, "size": len(content), "blobid": blake3(content).hexdigest()}
        lines += [{**line, "path": path} for path in paths]
    file = places(env, *sorted(lines, key=lambda line: str(line["blobid"])))
    with image(env, mkfs, mount) as where:
        first = restore(env, "--places", str(file), to="mnt/back", code=7)
        assert counts(first) == (5, 0, 0)
        assert "differs in case only" in first["failures"][0]["detail"]
        found = files_with_looks(where / "back")
        assert len(found) == 5
        # Nor does a second restore, when all are there before it begins.
        second = restore(env, "--places", str(file), to="mnt/back", code=7)
        assert (counts(second), second["failures"]) == ((0, 5, 0), first["failures"])
        assert files_with_looks(where / "back") == found
        # What is wrong there is still replaced.
        (where / "back/alone").write_bytes(b"wrong")
        os.utime(where / "back/alone", (0, 0))  # exFAT has times of two seconds, and no other.
        assert counts(restore(env, "--places", str(file), to="mnt/back", code=7)) == (1, 4, 1)
        assert files_with_looks(where / "back") == found


@pytest.mark.long
@pytest.mark.parametrize("mkfs", ["mkfs.ext4 -q -F", "mkfs.xfs -q", "mkfs.btrfs -q"])
def test_equal_files_of_more_bytes_than_the_disk_has(
    listed: Environment, application: Application, mkfs: str
) -> None:
    """Where the file system shares no blocks, it gets full; hard links continue from there."""
    env = listed
    on_disk(env)
    (uploads(env) / "large").write_bytes(content := os.urandom(4 << 20))
    application.owner.execute("insert into files (path) values ('large')")
    env.call("run", expect=0)
    blobid = blake3(content).hexdigest()
    lines = [{**LINE, "size": 4 << 20, "blobid": blobid, "path": f"{n:04}"} for n in range(150)]
    file = str(places(env, *lines))
    with image(env, mkfs) as where:
        shares = "ext4" not in mkfs
        found = restore(env, "--places", file, to="mnt/back", code=0 if shares else 6)
        if not shares:
            assert "No space left on device" in found["error"]
            already = len([*(where / "back").glob("0*")])
            found = restore(env, "--hard-links", "--places", file, to="mnt/back")
            assert counts(found) == (150 - already, already, 0)
        assert len({path.stat().st_ino for path in (where / "back").iterdir()}) == (
            150 if shares else already + 1
        )
        assert all(path.read_bytes() == content for path in (where / "back").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--hard-links",)])
def test_a_million_equal_files(listed: Environment, options: tuple[str, ...]) -> None:
    env = listed
    on_disk(env)
    env.call("run", expect=0)
    blobid, content = blake3(content_of(b"copy")).hexdigest(), content_of(b"copy")
    line = {**LINE, "size": len(content), "blobid": blobid}
    text = (json.dumps({**line, "path": f"{n % 1000}/{n}"}) + "\n" for n in range(1_000_000))
    file = env.root / "million.jsonl"
    file.write_text("".join(text))
    began = time.monotonic()
    found = restore(env, "--places", str(file), *options)
    print(f"a million equal files {options}: {time.monotonic() - began:.0f} s")
    assert (counts(found), found["restored"]) == ((1_000_000, 0, 0), 1)
    names = [name for number in range(1000) for name in os.listdir(env.root / f"back/{number}")]
    assert len(names) == 1_000_000
    shutil.rmtree(env.root / "back")


def test_a_disk_that_gets_full_ends_the_restore_and_room_lets_it_continue(
    listed: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = listed
    on_disk(env)
    env.call("run", expect=0)
    wanted = files_with_looks(uploads(env))

    def full(old: int, new: int) -> None:
        os.pwrite(new, b"half", 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(by_paths, "copy_content", full)
        said = restore(env, code=6)["error"]
    assert "No space left on device" in said
    assert str(env.root / "back") in said
    found = restore(env)
    assert found["restored"] == 0
    assert files_with_looks(env.root / "back") == wanted


LINE = {"size": 5, "mtime_ns": 0, "mode": "0644", "origin": ""}


def places(env: Environment, *lines: dict[str, Any]) -> Path:
    file = env.root / "hostile.jsonl.zst"
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file.write_bytes(zstandard.compress(text))
    return file


def test_no_path_leads_out_of_the_directory_and_the_others_come(listed: Environment) -> None:
    env, back = listed, listed.root / "back"
    on_disk(env)
    env.call("run", expect=0)
    blobid = blake3(content_of(b"copy")).hexdigest()
    outside = env.root / "outside"
    outside.mkdir()
    back.mkdir()
    (back / "led").symlink_to(outside)
    (back / "taken").mkdir()
    bad = [
        "../outside/a",
        "led/a",
        "x/../../outside/b",
        "/",
        "",
        "a\0b",
        "n" * 300,
        "/".join("d" * 200),
        "x//y",
        ".ntt-restore/blobs/x",
        "taken",
        "f/below",
        "twice",
    ]
    good = ["f", "twice", "/abs/olute", "back\\slash"]
    lines = [{**LINE, "blobid": blobid, "path": path} for path in (*good, *bad)]
    lines.append({**LINE, "blobid": "f" * 64, "path": "lost"})
    found = restore(env, "--places", str(places(env, *lines)), code=7)
    assert counts(found) == (len(good), 0, 0)
    assert len(found["failures"]) == len(bad) + 2  # The blob that is missing, and its file.
    assert sorted(files_with_looks(back)) == [b"abs/olute", b"back\\slash", b"f", b"twice"]
    assert list(outside.iterdir()) == []
    assert not (back / ".ntt-restore").exists()


def test_what_is_written_into_a_list_is_read_again(tmp_path: Path) -> None:
    """Also long paths that are alike, which shrink as those of a bomb do, and absurd sizes."""
    above = "/".join(["\x1b" * 255] * 9)
    files = [
        ListedFile("a" * 64, f"{above}/{nth}".encode(), 0, SOME_NS, 0o644, "", False)
        for nth in range(300)
    ]
    files.append(ListedFile(None, b"a", 1 << 62, None, None, "", True))
    with (tmp_path / "places").open("w+b") as file:
        writer = PlacesWriter(file.write)
        for one in files:
            writer.add(one)
        writer.finish()
        file.seek(0)
        files[-1] = files[-1]._replace(size=None)
        assert list(read_places(file, "places")) == files


def test_a_places_file_that_is_a_bomb_or_nonsense_is_refused(listed: Environment) -> None:
    env = listed
    on_disk(env)
    env.call("run", expect=0)
    blobid = blake3(content_of(b"copy")).hexdigest()
    line = json.dumps({**LINE, "blobid": blobid, "path": "a"}).encode() + b"\n"
    file = env.root / "hostile"
    wrong = {
        b"{}\n": "near line 1",
        line[:-5]: "not complete",
        line.replace(b'"0644"', b'"9"'): "mode",
        line.replace(b'"a"', b"7"): "path",
        line.replace(blobid[:2].encode(), b"zz"): "blobid",
        line + line.replace(blobid.encode(), b"0" * 64): "before that of the line above",
        b"[" * 100_000: "too long",
        zstandard.compress(b" " * (1 << 24)): "expands to more",
        zstandard.compress(line * 100_000): "expands to more",
        zstandard.compress(line)[:-9]: "not complete",
    }
    for content, why in wrong.items():
        file.write_bytes(content)
        done = restore(env, "--places", str(file), code=7)
        assert why in done["error"], (content[:40], done)
        assert not (env.root / "back").exists()


def killed_behind(env: Environment, moves: int) -> None:
    """A restore that dies, without any clean-up, once so many files have got their names."""
    numbers, move = itertools.count(), by_paths._move

    def die(*args: Any, **how: Any) -> None:
        if next(numbers) == moves:
            os._exit(9)
        move(*args, **how)

    def work() -> None:
        with mock.patch.object(by_paths, "_move", die):
            env.call("restore", "--as-paths", "--to", str(env.root / "back"), "--workers", "1")

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 9


def test_a_killed_restore_continues_with_what_was_fetched(
    listed: Environment, application: Application
) -> None:
    env, back = listed, listed.root / "back"
    on_disk(env)
    add(env, application, *(b"n/%d" % number for number in range(20)))
    env.call("run", expect=0)
    wanted = files_with_looks(uploads(env))
    for moves in (0, 3, 14):
        killed_behind(env, moves)
    assert {path.name for path in back.iterdir()} > {".ntt-restore", "n"}
    found = restore(env)
    assert (found["restored"], counts(found)) == (0, (len(wanted) - 17, 17, 0))
    assert files_with_looks(back) == wanted
