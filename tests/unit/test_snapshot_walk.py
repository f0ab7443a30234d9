"""Sets, and the walk of one: the order of a manifest, no symlink followed below what is named."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import SnapshotSettings
from ntt_backup.errors import ConfigError
from ntt_backup.snapshot.format.entry import order
from ntt_backup.snapshot.patterns import matcher
from ntt_backup.snapshot.take.walk import SnapshotSet, find_set, walk


def found(*paths: Path | str, exclude: list[str] | None = None) -> tuple[list[str], list[str]]:
    """The paths of a walk that lie below the first one's parent, and those of its problems."""
    problems: list[str] = []
    names = [
        one.path
        for one in walk([*map(str, paths)], exclude or [], lambda *p: problems.append(p[0]))
    ]
    below = str(Path(paths[0]).parent)[1:]
    return [one[len(below) + 1 :] for one in names if one.startswith(f"{below}/")], problems


def test_nasty_names_come_in_the_order_of_a_manifest(tmp_path: Path) -> None:
    nasty = [
        b"a",
        b"a-b",
        b"a\x01",
        b"a.d",
        b"A",
        b"\xff",
        b"\xc3\xa4",
        b"\xf0\x9f\x98\x80",
        b'"',
        b"\n",
    ]
    root = os.fsencode(tmp_path / "root")
    for one in nasty:
        os.makedirs(os.path.join(root, one, one))
        for other in nasty:
            Path(os.fsdecode(os.path.join(root, one, b"f" + other))).touch()
    names = [one.path for one in walk([str(tmp_path / "root")], [], print)]
    assert len(names) == len(set(names)) > 10 * 12
    assert names == sorted(names, key=order)


def test_parents_are_entries_and_a_path_within_another_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "beside").touch()
    (tmp_path / "z").touch()
    roots = [f"{tmp_path}/{one}" for one in ("a/b/c/", "z", "a/b")]
    names = [one.path for one in walk(roots, [], print)]
    here = str(tmp_path)[1:]
    parents = [str(one)[1:] for one in reversed(tmp_path.parents)][1:]
    assert names == [*parents, here, *(f"{here}/{one}" for one in ("a", "a/b", "a/b/c", "z"))]


def test_a_symlink_is_followed_where_it_is_named_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "real" / "d").mkdir(parents=True)
    (tmp_path / "real" / "file").touch()
    (tmp_path / "real" / "link").symlink_to("d")
    (tmp_path / "named").symlink_to("real")
    assert found(tmp_path / "named") == (
        ["named", "named/d", "named/file", "named/link"],
        [],
    )
    names, _ = found(tmp_path / "named" / "link")
    assert names == ["link"]


def test_a_named_path_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, problems = found(tmp_path / "file" / "below", tmp_path / "none", tmp_path / "x" / "y")
    assert problems == [f"{tmp_path}/{one}"[1:] for one in ("file", "none", "x")]


def test_a_directory_that_goes_while_it_is_walked_is_told_and_left(tmp_path: Path) -> None:
    for one in "abc":
        (tmp_path / one).mkdir()
        (tmp_path / one / "file").touch()
    names, problems = [], []
    for found_ in walk([str(tmp_path)], [], lambda path, _: problems.append(path)):
        names.append(found_.path)
        if found_.name == "a":
            (tmp_path / "b" / "file").unlink()
            (tmp_path / "b").rmdir()
            (tmp_path / "c").rename(tmp_path / "d")
            (tmp_path / "c").symlink_to("d")
    assert [one for one in names if one.endswith("file")] == [f"{tmp_path}/a/file"[1:]]
    assert problems == []


@pytest.mark.parametrize("call", ["open", "listdir"])
def test_a_directory_that_cannot_be_read_is_told_and_closed_and_is_still_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").touch()
    before = len(os.listdir("/proc/self/fd"))
    really = getattr(os, call)

    def failing(what: str | int, *more: int, **others: int) -> Any:
        if what == "a" or (
            call == "listdir" and Path(f"/proc/self/fd/{what}").readlink().name == "a"
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(what, *more, **others)

    monkeypatch.setattr(os, call, failing)
    told: list[tuple[str, str]] = []
    paths = [one.path for one in walk([str(tmp_path)], [], lambda *one: told.append(one))]
    monkeypatch.undo()
    assert paths[-2:] == [f"{tmp_path}/a"[1:], f"{tmp_path}/b"[1:]]
    assert told == [(f"{tmp_path}/a"[1:], os.strerror(errno.EIO))]
    given_up = walk([str(tmp_path)], [], print)
    assert any(one.name == "a" for one in given_up)
    given_up.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("*.tmp", ["a.tmp", "x/y/a.tmp", ".tmp"], ["a.tmp/b", "a.tmpx", "tmp"]),
        ("/srv/*", ["srv/a"], ["srv", "srv/a/b", "x/srv/a"]),
        ("/srv/**", ["srv/a", "srv/a/b"], ["srv", "srvx/a"]),
        ("/srv/**/cache", ["srv/cache", "srv/a/b/cache"], ["srv/acache", "cache"]),
        ("cache/", ["cache", "x/cache"], ["cache/x", "xcache"]),
        ("a?c", ["abc", "x/a\nc"], ["a/c", "ac"]),
        ("[a-c]x[!0-9]", ["bxy", "d/cx_"], ["dxy", "ax5", "ax/"]),
        ("a[.]b(+|$", ["a.b(+|$"], ["aXb(+|$"]),
        ("[", ["["], ["x"]),
    ],
)
def test_a_pattern_fits(pattern: str, fitting: list[str], others: list[str]) -> None:
    fits = matcher([pattern])
    assert fits is not None
    assert [one for one in [*fitting, *others] if fits(one)] == fitting


def test_a_pattern_that_cannot_be_read_is_named() -> None:
    assert matcher([]) is None
    with pytest.raises(ConfigError, match=r"cannot be read: \[z-a\]"):
        matcher(["[z-a]"])


@pytest.mark.filterwarnings("error")
@example("[a-b--z]")
@given(st.text(alphabet="[]!*?/ab-z\\^&~|().{}+$\n", max_size=12))
def test_any_pattern_is_read_or_refused(pattern: str) -> None:
    try:
        fits = matcher([pattern])
    except ConfigError:
        return
    assert fits is not None
    fits("a/b")


def test_nothing_of_an_excluded_directory_is_walked_but_what_is_named(tmp_path: Path) -> None:
    for one in ("keep/cache/x", "cache/y"):
        (tmp_path / one).mkdir(parents=True)
    names, _ = found(tmp_path / "cache", tmp_path / "keep", exclude=["cache"])
    assert names == ["cache", "cache/y", "keep"]


def test_a_name_that_is_listed_twice_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a tmpfs, where a file is replaced while its directory is listed."""
    (tmp_path / "file").touch()
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: listed(fd) * 2)
    assert found(tmp_path)[0] == [tmp_path.name, f"{tmp_path.name}/file"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("d", "it lies below more than 1,000 directories"),
        ("d" * 255, "its path has more than 65,536 characters"),
    ],
)
def test_what_lies_too_deep_is_told_and_left_out(tmp_path: Path, name: str, why: str) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    problems: list[tuple[str, str]] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        paths = [one.path for one in walk([str(tmp_path)], [], lambda *said: problems.append(said))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        subprocess.run(["rm", "-rf", str(tmp_path / name)], check=True)
    assert (max(path.count("/") for path in paths) == 999) == (name == "d")
    assert max(map(len, paths)) <= 65_536
    assert [said for _, said in problems] == [why]


SETTINGS = CatalogConfig(
    snapshots={"etc": SnapshotSettings(paths=(Path("/etc"),), exclude=("*.key",), full_every=60)}
)


def test_a_set_comes_from_the_settings_or_from_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_settings = SnapshotSet("etc", ("/etc",), ("*.key",), 0, timedelta(seconds=60))
    assert find_set(SETTINGS, "etc") == of_settings
    monkeypatch.chdir(tmp_path)
    given = find_set(SETTINGS, "home", ["notes", "/srv"], ["*.swp"])
    assert given == SnapshotSet("home", (f"{tmp_path}/notes", "/srv"), ("*.swp",))


@pytest.mark.parametrize(
    ("name", "paths", "said"),
    [
        ("home", [], "no set home is in the configuration, and no paths are given"),
        ("etc", ["/srv"], r"the paths of etc are set in \[snapshots.etc\]"),
        ("../etc", ["/srv"], "is not the name of a snapshot set"),
        ("home", ["/srv/../etc"], "may mean two directories"),
        ("home", ["/srv", ""], "a path is empty"),
    ],
)
def test_a_set_that_is_not_clear_is_refused(name: str, paths: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_set(SETTINGS, name, paths)
