"""What a mounted version's tree has, and what is fetched for it."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.errors import RemoteUnreachable
from ntt_backup.mount.version import OpenFile, SuperBlockCache, VersionTree, write_lines
from ntt_backup.snapshot.format.entry import FILE, HARD_LINK, Entry, Extent, order
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.names import SnapshotDamaged, pack_name
from ntt_backup.snapshot.versions import choose, open_manifest
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import VERSION, directory, put_version

HEADER = Header("etc", VERSION, "", (VERSION,), "00" * 32, ("/srv",))


def tree_of(repository: MemoryStore, at: Path) -> VersionTree:
    manifest = open_manifest(repository, choose(repository, "etc"))
    with at.open("wb") as file:
        starts = write_lines(manifest, file)
    return VersionTree(at, starts)


def tree_of_paths(at: Path, paths: set[str]) -> VersionTree:
    repository = put_version(MemoryStore(), [(Entry(path, FILE, size=1), ()) for path in paths])
    return tree_of(repository, at)


NAME = st.text("ab-\x01~\udcff/", min_size=1, max_size=9)


@given(st.sets(NAME.filter(lambda path: all(path.split("/"))), min_size=1))
def test_a_directory_has_what_lies_right_below_it(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str]
) -> None:
    tree = tree_of_paths(tmp_path_factory.getbasetemp() / "lines", paths)
    for above in ("", *paths):
        begin = f"{above}/" if above else ""
        below = {path[len(begin) :] for path in paths if path.startswith(begin)}
        names = [name for name in below if "/" not in name]
        assert list(tree.names(above)) == sorted(names, key=order)
    for path in paths:
        found = tree.find(path)
        assert found is not None
        assert (found.path, found.size) == (path, 1)
        assert tree.find(path + "\x00") is None


def test_names_that_lead_elsewhere_are_not_shown(tmp_path: Path) -> None:
    tree = tree_of_paths(tmp_path / "lines", {"ok", "..", ".", "x" * 256, "a/..", "a/../b"})
    assert list(tree.names("")) == ["ok"]
    assert list(tree.names("a")) == []


def test_a_hard_link_is_its_file_and_a_loop_of_them_is_nothing(tmp_path: Path) -> None:
    file = Entry("srv/file", FILE, 0o600, size=5), [(0, b"hello")]
    links = {"srv/a": "srv/file", "srv/b": "srv/c", "srv/c": "srv/b", "srv/d": "srv/none"}
    named = [(Entry(path, HARD_LINK, target=target), ()) for path, target in links.items()]
    repository = put_version(MemoryStore(), [directory("srv"), file, *named])
    tree = tree_of(repository, tmp_path / "lines")
    found = [tree.find(path, whole=True) for path in links]
    assert found == [file[0], None, None, None]


def test_a_file_of_many_extents_is_described_without_them(tmp_path: Path) -> None:
    extents = [Extent(at * 10, 5, 0, 1, 8, 100, at) for at in range(5000)]
    repository = put_version(
        MemoryStore(), [(Entry('srv"', FILE, 0o644, 1, 2, -3, 4, 5, 50_000, extents=extents), ())]
    )
    tree = tree_of(repository, tmp_path / "lines")
    found = tree.find('srv"')
    assert found == Entry('srv"', FILE, 0o644, 1, 2, -3, 4, 5, 50_000)
    whole = tree.find('srv"', whole=True)
    assert whole is not None
    assert len(whole.extents) == 5000


def test_any_part_of_a_sparse_file_is_read_as_it_is() -> None:
    chance = random.Random(1)
    repository, data = MemoryStore(), bytearray(7_000_000)
    pieces = [
        (at, chance.randbytes(length))
        for at, length in ((5, 1), (9000, 3_500_000), (5_000_000, 1_900_000))
    ]
    for at, piece in pieces:
        data[at : at + len(piece)] = piece
    entry = Entry("f", FILE, size=len(data))
    put_version(repository, [(entry, pieces)])
    content = SuperBlockCache(HEADER, lambda: repository)
    for _ in range(50):
        start, length = chance.randrange(len(data) + 10), chance.randrange(500_000)
        found = content.read(entry, start, length, ahead=chance.random() < 0.5)
        assert found == data[start : start + length]
    assert repository.requests["read"] <= 7
    assert content.read(entry, 0, len(data), ahead=False) == data
    content.close()


def test_what_is_read_on_is_fetched_ahead_and_a_lost_connection_made_anew() -> None:
    entry = Entry("f", FILE, size=4 << 20)
    repository = put_version(MemoryStore(), [(entry, [(0, random.Random(1).randbytes(4 << 20))])])
    opened: list[int] = []

    def open_store() -> MemoryStore:
        opened.append(1)
        repository.closed = False
        return repository

    def away(verb: str, name: str) -> None:
        raise RemoteUnreachable("away")

    content = SuperBlockCache(HEADER, open_store)
    file = OpenFile(entry)
    repository.before = away
    with pytest.raises(RemoteUnreachable):
        file.read(content, 0, 10)
    repository.before = lambda verb, name: None
    file.read(content, 0, 10)
    assert len(opened) == 2
    assert repository.requests["read"] == 1 + 4
    file.read(content, 10, (4 << 20) - 10)
    assert repository.requests["read"] == 1 + 4
    content.close()


def test_what_is_damaged_ahead_of_what_is_read_is_no_error() -> None:
    data = random.Random(1).randbytes(4 << 20)
    entry = Entry("f", FILE, size=len(data))
    repository = put_version(MemoryStore(), [(entry, [(0, data)])])
    name = pack_name("etc", VERSION, 1)
    repository.files[name] = repository.files[name][:-1]

    def open_store() -> MemoryStore:
        repository.closed = False
        return repository

    content = SuperBlockCache(HEADER, open_store)
    with closing(content):
        assert content.read(entry, 0, 10, ahead=True) == data[:10]
        with pytest.raises(SnapshotDamaged):
            content.read(entry, len(data) - 10, 10, ahead=True)


@pytest.mark.parametrize("change", [{"skip": 1}, {"skip": 1 << 40}, {"offset": 9}, {"stored": 7}])
def test_an_extent_that_lies_is_an_error(change: dict[str, int]) -> None:
    entry = Entry("f", FILE, size=100)
    repository = put_version(MemoryStore(), [(entry, [(0, bytes(range(100)))])])
    entry.extents[0] = entry.extents[0]._replace(**change)
    content = SuperBlockCache(HEADER, lambda: repository)
    with closing(content), pytest.raises(SnapshotDamaged):
        content.read(entry, 0, 100, ahead=False)
