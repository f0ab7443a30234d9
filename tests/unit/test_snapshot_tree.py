"""Whatever paths a manifest has, nothing is written elsewhere, nor over another file."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.errors import DestinationError
from ntt_backup.snapshot.format.entry import FIFO, FILE, HARD_LINK, SYMLINK, Entry
from ntt_backup.snapshot.restore import tree
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.tree import Beside, Level, Refused, open_old
from tests.helpers.blobs import tree as files_of
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import Made, directory, file, put_version, restore


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the destination, with one file."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "secret").write_bytes(b"secret")
    return path


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"


def symlink(path: str, target: Path | str) -> Made:
    return Entry(path, SYMLINK, 0o777, mtime=1, target=str(target)), ()


def hard_link(path: str, target: str) -> Made:
    return Entry(path, HARD_LINK, 0o644, mtime=1, target=target), ()


def fifo(path: str) -> Made:
    return Entry(path, FIFO, 0o644, mtime=1), ()


@pytest.mark.parametrize(
    "path",
    [
        "/x",
        "//x",
        "../x",
        "a/../../outside/x",
        "a/./x",
        "a//x",
        "a/x/",
        ".",
        "..",
        "a/..",
        "n" * 256,
        "ü" * 128,
        f"{'n' * 256}/x",
    ],
)
@pytest.mark.parametrize("kind", ["file", "large", "directory", "symlink", "fifo", "link", "to"])
def test_a_path_that_is_none_is_told_and_the_rest_is_restored(
    tmp_path: Path, to: Path, outside: Path, path: str, kind: str
) -> None:
    made: dict[str, Made] = {
        "file": file(path),
        "large": file(path, bytes(range(256)) * 20_000),
        "directory": directory(path),
        "symlink": symlink(path, outside),
        "fifo": fifo(path),
        "link": hard_link(path, "!"),
        "to": hard_link("~link", path),
    }
    good = [file("!"), file("~")]
    both = [good[0], good[1], made[kind]] if kind == "to" else [good[0], made[kind], good[1]]
    repository = put_version(MemoryStore(), both)
    done = restore(repository, to)
    assert (done.wrong, done.exit_code) == (1, 7)
    assert done.problems[0][0] == ("~link" if kind == "to" else path)
    assert files_of(to) == {"!": b"content", "~": b"content"}
    assert files_of(outside) == {"secret": b"secret"}
    assert sorted(os.listdir(tmp_path)) == ["outside", "to"]


def test_what_is_no_file_any_more_is_not_opened_for_its_content(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "name")
    level = Level("", os.open(tmp_path, os.O_RDONLY))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match="no file any more"):
        open_old(level, "name")
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(level.fd)


def test_a_directory_that_the_disk_cannot_read_is_an_error_with_its_reason(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = put_version(MemoryStore(), [directory("d"), file("d/in", b"a"), file("e", b"b")])
    (to / "d").mkdir(parents=True)
    really = os.open

    def fails(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if path == "d":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(DestinationError, match=os.strerror(errno.EIO)):
        restore(repository, to)


@pytest.mark.parametrize("again", [False, True], ids=["one version", "two restores"])
def test_nothing_is_written_or_linked_through_a_symlink(
    to: Path, outside: Path, again: bool
) -> None:
    link = symlink("d", outside)
    through: list[Made] = [
        file("d/new"),
        file("d/secret", b"overwritten"),
        directory("d/sub"),
        file("d/sub/new"),
        symlink("d/symlink", "x"),
        hard_link("e", "d/secret"),
    ]
    repository = MemoryStore()
    if again:
        put_version(repository, [link])
        restore(repository, to)
        repository.files.clear()
        put_version(repository, [directory("d"), *through])
    else:
        put_version(repository, [link, *through])
    done = restore(repository, to)
    assert done.wrong == len(through) + again
    assert "a symbolic link stands where d should be" in {why for _, why in done.problems}
    assert files_of(outside) == {"secret": b"secret"}
    assert os.listdir(outside) == ["secret"]
    assert os.listdir(to) == ["d"]


def test_two_names_that_the_file_system_takes_for_one_do_not_overwrite_each_other(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that folds cases lists `README`, and opens that for `readme`."""
    to.mkdir()
    for name in ("file", "fifo", "symlink", "link"):
        (to / name).write_bytes(b"of another name")
    monkeypatch.setattr(os, "listdir", lambda _: [])
    entries: list[Made] = [
        fifo("fifo"),
        file("file"),
        hard_link("link", "file"),
        symlink("symlink", "x"),
    ]
    repository = put_version(MemoryStore(), entries)
    done = restore(repository, to)
    assert done.wrong == 4
    monkeypatch.undo()
    assert set(files_of(to).values()) == {b"of another name"}
    assert len(os.listdir(to)) == 4


def test_what_stands_in_the_place_of_a_file_is_replaced_and_a_directory_is_not(
    to: Path, outside: Path
) -> None:
    to.mkdir()
    (to / "a").symlink_to(outside / "secret")
    os.mkfifo(to / "b")
    (to / "c").mkdir()
    (to / "d").write_bytes(b"no directory")
    os.link(outside / "secret", to / "e")
    (to / "f").write_bytes(b"no link")
    (to / "g").write_bytes(b"no FIFO")
    (to / "h").write_bytes(b"no link")
    files = [file("a"), file("b"), file("c"), directory("d"), file("d/x"), file("e")]
    repository = put_version(
        MemoryStore(), [*files, symlink("f", "x"), fifo("g"), hard_link("h", "a")]
    )
    done = restore(repository, to)
    assert {path for path, _ in done.problems} == {"c", "d", "d/x"}
    assert ((to / "f").readlink(), (to / "g").is_fifo()) == (Path("x"), True)
    assert files_of(to) == dict.fromkeys("abeh", b"content") | {"d": b"no directory"}
    assert (to / "a").samefile(to / "h")
    assert not (to / "a").is_symlink()
    assert files_of(outside) == {"secret": b"secret"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can set other owners")
def test_no_file_runs_as_an_owner_that_it_did_not_get(
    to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, others = file("mine", mode=0o6755), file("others", mode=0o6755)
    others[0].uid = 12345
    repository = put_version(MemoryStore(), [mine, others])
    restore(repository, to)
    assert {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()} == {0o6755}
    assert (to / "others").stat().st_uid == 12345
    for path in to.iterdir():
        path.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "chown", refuse)
    done = restore(repository, to)
    assert (done.wrong, len(done.notes)) == (0, 1)
    assert stat.S_IMODE((to / "others").stat().st_mode) == 0o755
    assert stat.S_IMODE((to / "mine").stat().st_mode) == 0o6755


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("whose", [12345, os.getuid()])
def test_without_privileges_nothing_of_a_version_gives_rights(
    to: Path, jobs: int, delta: bool, whose: int
) -> None:
    capability = bytes.fromhex("0100000202200000000000000000000000000000")
    made = [directory("d"), file("d/root", mode=0o6755), file("d/small"), fifo("d/fifo")]
    made.append(file("d/capable"))
    made[-1][0].xattrs = {
        "security.capability": b64encode(capability).decode(),
        "trusted.overlay.opaque": b64encode(b"y").decode(),
        "user.of": b64encode(b"no right").decode(),
    }
    made[0][0].mode = 0o3777
    for entry, _ in made:
        entry.uid = entry.gid = whose
    repository = put_version(MemoryStore(), made)
    for _ in range(2):
        done = restore(repository, to, jobs=jobs, delta=delta, privileges=False)
        assert (done.wrong, done.notes) == (0, [])
        found = {path.name: path.stat() for path in (to / "d", *(to / "d").iterdir())}
        assert {(one.st_uid, one.st_gid) for one in found.values()} == {(os.getuid(), os.getgid())}
        modes = {name: stat.S_IMODE(one.st_mode) for name, one in found.items()}
        kept = {"d": 0o1777, "root": 0o755, "small": 0o644, "fifo": 0o644, "capable": 0o644}
        assert modes == kept
        assert os.listxattr(to / "d" / "capable") == ["user.of"]
        assert not os.listxattr(to / "d" / "root")
        if os.geteuid() == 0:  # Somebody who was root here gave it rights.
            os.setxattr(to / "d" / "capable", "security.capability", capability)
            (to / "d" / "root").chmod(0o4755)
    assert done.files == 0


def test_an_ordinary_user_sets_attributes_of_what_it_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, really = tmp_path / "file", os.setxattr
    path.touch()

    def as_user(fd: int, *values: Any) -> None:
        if not os.fstat(fd).st_mode & 0o200:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        really(fd, *values)

    monkeypatch.setattr(os, "setxattr", as_user)
    status = path.stat()
    entry = Entry("file", FILE, 0o444, status.st_uid, status.st_gid)
    entry.xattrs = {"user.of": b64encode(b"value").decode()}
    attributes = Attributes(privileges=True)
    attributes.user = 1000
    for mode in (0o644, 0o444):
        path.chmod(mode)
        with closing(os.open(path, os.O_RDONLY)) as fd:
            attributes.set(fd, entry)
        assert os.getxattr(path, "user.of") == b"value"
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
        path.chmod(0o644)
        os.removexattr(path, "user.of")
    assert attributes.notes == set()


@pytest.mark.parametrize("name", ["a", "...", " ", "n" * 255, "\udcff" * 255, "ü" * 127])
def test_a_name_is_one_component_of_a_path(name: str) -> None:
    assert tree.checked(name) == name
    assert tree.split(name) == ("", name)
    assert tree.split(f"a/{name}") == ("a", name)


def test_what_a_killed_restore_left_beside_a_file_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with closing(os.open(tmp_path, os.O_RDONLY)) as root:
        level = Level("", root)
        with closing(Beside(level, "file", free=False).open()) as fd:
            os.write(fd, b"of one that was killed")
        with Beside(level, "file", free=False) as beside, closing(beside.open()) as fd:
            os.write(fd, b"new")
            beside.rename()
    assert files_of(tmp_path) == {"file": b"new"}


def test_a_directory_is_entered_from_whichever_is_open(tmp_path: Path) -> None:
    with closing(os.open(tmp_path, os.O_RDONLY)) as root:
        made = tree.DestinationTree(root, make=True)
        paths = ("a", "a-b", "a-b/c", "a", "a/b", "a-b/c/d", "", "x/y")
        for path in paths:
            assert made.enter(path).path == path
        made.close()
    found = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")}
    assert found == {*paths, "x"} - {""}


def test_no_descriptor_of_another_file_system_stays_open() -> None:
    with closing(os.open("/", os.O_RDONLY)) as root:
        before = set(os.listdir("/proc/self/fd"))
        entered = tree.DestinationTree(root, make=False)
        entered.enter("proc")
        assert len(entered.mounted) == 1
        entered.close()
        assert set(os.listdir("/proc/self/fd")) == before


def test_what_a_directory_gives_to_new_files_is_taken_from_them(to: Path) -> None:
    to.mkdir()
    entries = (0x1, 6), (0x4, 4), (0x10, 7), (0x20, 4)
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one, -1) for one in entries)
    acl += struct.pack("<HHi", 0x2, 7, 1234)  # user:1234:rwx
    acl = acl[:12] + acl[-8:] + acl[12:-8]
    try:
        os.setxattr(to, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no ACLs here: {error.strerror}")
    repository = put_version(MemoryStore(), [file("a")])
    assert restore(repository, to).problems == []
    assert os.listxattr(to / "a") == []


def test_a_link_to_what_is_missing_or_a_directory_replaces_nothing(to: Path) -> None:
    to.mkdir()
    (to / "a").write_bytes(b"there before")
    (to / "d").mkdir()
    repository = put_version(
        MemoryStore(), [hard_link("a", "none"), hard_link("b", "d"), hard_link("c", "x/none")]
    )
    done = restore(repository, to)
    why = "the file that it is a link to is missing"
    assert done.problems == [(path, why) for path in "abc"]
    assert files_of(to) == {"a": b"there before"}


def test_a_link_that_takes_the_place_of_an_old_file_is_not_followed(
    to: Path, outside: Path
) -> None:
    to.mkdir(exist_ok=True)
    (to / "old").symlink_to(outside / "secret")
    with closing(os.open(to, os.O_DIRECTORY)) as fd, pytest.raises(OSError, match="symbolic"):
        open_old(Level("", fd), "old", os.O_RDWR)


def test_landlock_permits_no_write_elsewhere(to: Path, outside: Path) -> None:
    to.mkdir()
    script = (
        "import os, sys\n"
        "from ntt_backup.snapshot.restore.tree import confine\n"
        "to, outside = sys.argv[1:]\n"
        "if not confine([to]): sys.exit(77)\n"
        "open(to + '/x', 'w').write('y'); os.rename(to + '/x', to + '/z')\n"
        "open(os.devnull, 'w').write('y'); open(outside + '/secret').read()\n"
        "for what in (lambda: open(outside + '/x', 'w'), lambda: open(outside + '/secret', 'a'),\n"
        "             lambda: os.unlink(outside + '/secret'), lambda: os.mkdir(outside + '/d'),\n"
        "             lambda: os.rename(to + '/z', outside + '/z')):\n"
        "    try: what()\n"
        "    except OSError: continue\n"
        "    sys.exit(1)\n"
    )
    status = subprocess.run([sys.executable, "-c", script, to, outside]).returncode
    if status == 77:
        pytest.skip("this kernel has no Landlock")
    assert status == 0
    assert files_of(outside) == {"secret": b"secret"}


class Kernel:
    """Answers the system calls of Landlock, and notes what was asked of it."""

    def __init__(self, version: int, refuses: str) -> None:
        self.version, self.refuses = version, refuses
        self.privileged = refuses != "the unprivileged"
        self.handled = 0
        self.rules: dict[str, int] = {}
        self.confined = False
        self.files = {*os.listdir("/proc/self/fd")}

    def syscall(self, number: int, *values: Any) -> int:
        if number == 444 and values[2] == 1:
            return self.version
        name = {444: "ruleset", 445: "rule", 446: "confine"}[number]
        if name == self.refuses or (name == "confine" and not self.privileged):
            return -1
        if name == "ruleset":
            assert (values[1].value, values[2]) == (8, 0)
            (self.handled,) = struct.unpack("=Q", values[0])
            return os.open(os.devnull, os.O_RDONLY)
        assert values[0] >= 0
        if name == "rule":
            kind, rule, flags = values[1:]
            assert (kind, flags) == (1, 0)
            allowed, parent = struct.unpack("=Qi", rule)
            path = Path(f"/proc/self/fd/{parent}").readlink()
            self.rules[str(path)] = allowed
        else:
            assert values[1] == 0
            self.confined = True
        return 0

    def prctl(self, *values: int) -> int:
        assert values == (38, 1, 0, 0, 0)
        self.privileged = True
        return 0


@pytest.mark.parametrize(
    ("version", "refuses", "changes"),
    [
        *((1, "", 0x1FF2), (2, "", 0x3FF2), (3, "", 0x7FF2), (4, "", 0x7FF2)),
        (4, "the unprivileged", 0x7FF2),
        *((-1, "", 0), (0, "", 0), (7, "ruleset", 0), (7, "rule", 0), (7, "confine", 0)),
    ],
)
def test_a_kernel_confines_every_change_that_it_knows_to_the_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, refuses: str, changes: int
) -> None:
    kernel = Kernel(version, refuses)
    monkeypatch.setattr(tree, "_libc", kernel)
    (tmp_path / "a").mkdir()
    # A directory that is missing lets nothing in, and keeps no other one out.
    said = tree.confine((tmp_path / "a", tmp_path / "missing", tmp_path))
    assert {*os.listdir("/proc/self/fd")} == kernel.files
    assert said == kernel.confined == bool(changes)
    if changes:
        assert kernel.handled == changes
        programs = dict.fromkeys({"/dev/null", "/dev/tty"} & kernel.rules.keys(), 2)
        assert kernel.rules == {str(tmp_path / "a"): changes, str(tmp_path): changes, **programs}
        assert "/dev/null" in programs


def test_what_makes_a_file_mighty_is_set_for_its_owner_alone() -> None:
    attributes = Attributes(privileges=True)
    attributes.user, attributes._groups = 7, {8}
    may = [(7, 8, True), (7, 9, False), (6, 8, False), (6, 9, False)]
    for user, group, own in may:
        entry = Entry("x", FIFO, 0o6755, mtime=1, uid=user, gid=group)
        assert attributes._may_own(entry) == own
    xattrs = {"security.capability": "AA==", "user.of": "BB=="}
    entry = Entry("x", FIFO, 0o6755, mtime=1, xattrs=xattrs)
    assert attributes._wanted(entry, owned=True) == xattrs
    assert attributes._wanted(entry, owned=False) == {"user.of": "BB=="}
    assert attributes._mode(entry, owned=False) == 0o755
    plain = Attributes(privileges=False)
    assert plain._wanted(entry, owned=True) == {"user.of": "BB=="}


@pytest.mark.parametrize(
    ("path", "listed"),
    [
        ("Dir/Name", True),
        ("Dir/name", False),
        ("dir/Name", False),
        ("Dir/12", True),
        ("Dir/alone", True),  # Nothing else is found by another spelling: no listing is needed.
        ("Dir/LONGNA~1", False),
        ("Dir/cut.", False),
        ("Dir/\u00e9", False),  # It is listed in its other form.
    ],
)
def test_a_name_that_finds_an_entry_of_another_spelling_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, listed: bool
) -> None:
    """As a file system that ignores case has it: each name is found, and one of them is listed."""
    for above in ("Dir", "dir", "DIR"):
        (tmp_path / above).mkdir()
        for name in ("Name", "NAME", "name", "nAME", "12", "alone", "LONGNA~1", "cut.", "\u00e9"):
            (tmp_path / above / name).touch()
    names = ["Dir", "Name", "12", "Long name", "cut", "e\u0301"]
    monkeypatch.setattr(tree, "names_in", lambda fd: names)
    with closing(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)) as root:
        below = tree.DestinationTree(root, make=False)
        above, _, name = path.rpartition("/")
        below.enter(above)
        assert below.is_spelled(name) is listed
        below.close()
