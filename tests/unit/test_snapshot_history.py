"""Histories of a set: every version of it comes back byte for byte, whatever happened meanwhile."""

from __future__ import annotations

import os
import random
import re
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory, mkdtemp

import pytest
import zstandard
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ntt_backup.errors import BackupError
from ntt_backup.snapshot.format import super_blocks
from ntt_backup.snapshot.format.super_blocks import ZstdStream
from ntt_backup.snapshot.names import SnapshotDamaged
from ntt_backup.snapshot.restore.files import RestoreOptions
from ntt_backup.snapshot.restore.version import restore
from ntt_backup.snapshot.take import changed_file
from ntt_backup.snapshot.take.last_version import Copies
from ntt_backup.snapshot.take.walk import SnapshotSet
from tests.helpers.memory_store import MemoryStore
from tests.unit.taker import KEYS, Taker, rewrite

NAMES = ["a", "a-b", "d/x", "d/y\udcff", "e"]
BLOCK = 4096
SMALL = 20_000
MOST = 150_000

_Change = tuple[str, int, int, int, int]


class History(Taker):
    """A tree, the versions that were taken of it, and what it had then."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "tree", directory / "host")
        (self.root / "d").mkdir()
        self.keys = KEYS
        self.set = SnapshotSet("s", (str(self.root),), block_size=BLOCK)
        self.had: dict[str, dict[str, bytes]] = {}

    def another_host(self) -> None:
        """Lets the next take have no copies of manifests and maps."""
        self.copies = Copies(Path(mkdtemp(dir=self.root.parent)))

    def grow(self, **how: bool) -> None:
        """Takes a version, and notes what the tree has."""
        taken = self.take(**how)
        assert (taken.exit_code, self.problems) == (0, {})
        self.had[taken.version] = contents(self.root)

    def restore(self, version: str, to: Path, options: RestoreOptions) -> dict[str, bytes]:
        done = restore(self.open, f"s@{version}", to, options, trust=True)
        assert (done.exit_code, done.problems) == (0, [])
        return contents(to / str(self.root)[1:])

    def open(self) -> MemoryStore:
        repository = MemoryStore()
        repository.files = self.repository.files
        return repository


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()
    }


def change(tree: Path, how: str, which: int, at: int, length: int, seed: int) -> None:
    """Changes a file of the tree, or does nothing where that is not there."""
    path, other = tree / NAMES[which], tree / NAMES[(which + 1 + seed) % len(NAMES)]
    if how in ("write", "zeros"):
        noise = random.Random(seed).randbytes(length // 4 + 1) * 4
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(fd, bytes(length) if how == "zeros" else noise[:length], at)
        os.close(fd)
        return
    with suppress(FileNotFoundError, FileExistsError):
        match how:
            case "truncate":
                os.truncate(path, at)
            case "hole":  # Where there was content before.
                data = path.read_bytes()
                path.unlink()
                with path.open("wb") as file:
                    file.write(data[:at])
                    file.seek(min(at + length, len(data)))
                    file.write(data[at + length :])
                    file.truncate(len(data))
            case "rename":
                path.rename(other)
            case "exchange":
                other.rename(tree / "kept")
                path.rename(other)
                (tree / "kept").rename(path)
            case "link":
                other.hardlink_to(path)
            case "remove":
                path.unlink()
            case "touch":
                os.utime(path)


HOW = ["write", "zeros", "truncate", "hole", "rename", "exchange", "link", "remove", "touch"]
changes: st.SearchStrategy[_Change] = st.tuples(
    st.sampled_from(["write", "write", *HOW]),
    st.integers(0, len(NAMES) - 1),
    st.integers(0, MOST) | st.integers(0, MOST // BLOCK).map(lambda block: block * BLOCK),
    st.integers(0, MOST) | st.sampled_from([1, BLOCK, 3 * BLOCK]),
    st.integers(0, 3),
)
takes = st.sampled_from([{}, {}, {}, {}, {"paranoid": True}, {"full": True}])
versions = st.tuples(st.lists(changes, max_size=6), takes, st.booleans())
options = st.builds(RestoreOptions, delta=st.booleans(), in_place=st.booleans())


@contextmanager
def small_parts() -> Iterator[None]:
    """Makes what is small in files, super blocks and packs smaller, so that all of it is met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed_file, "SMALL", SMALL)
        patch.setattr(changed_file, "_PIECE", 8 * BLOCK)
        patch.setattr(super_blocks, "FULL", 30_000)
        patch.setattr(super_blocks, "INCREMENT", 10_000)
        patch.setattr(super_blocks, "MAX_PACK", 50_000)
        yield


def every_version_comes_back(tmp_path: Path, data: st.DataObject, least: int, most: int) -> None:
    with small_parts(), TemporaryDirectory(dir=tmp_path) as directory:
        history = History(Path(directory))
        for edits, how, elsewhere in data.draw(st.lists(versions, min_size=least, max_size=most)):
            for edit in edits:
                change(history.root, *edit)
            if elsewhere:
                history.another_host()
            history.grow(**how)
        over = Path(directory) / "over"
        order = data.draw(st.permutations(list(history.had)))
        for version in order:
            wanted = history.had[version]
            fresh = Path(directory) / version
            assert history.restore(version, fresh, RestoreOptions()) == wanted
            found = history.restore(version, over, data.draw(options))
            assert {name: found[name] for name in wanted} == wanted


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A history of five versions."""
    with small_parts():
        history = History(tmp_path / "history")
        for number in range(len(NAMES)):
            change(history.root, "write", number, number * 9_000, 30_000, number)
            change(history.root, "link", number, 0, 0, 0)
            history.grow()
        yield history


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 30), st.integers(0, 7), options)
def test_nothing_wrong_comes_of_a_flipped_bit(
    tmp_path: Path, history: History, where: int, bit: int, options: RestoreOptions
) -> None:
    """Where a bit of any file of a chain is wrong, each file that is restored is right."""
    files, version = history.repository.files, max(history.had)
    ends = list(accumulate(map(len, files.values())))
    at = where % ends[-1]
    number = bisect(ends, at)
    name = list(files)[number]
    good = files[name]
    at -= ends[number] - len(good)
    files[name] = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
    try:
        with TemporaryDirectory(dir=tmp_path) as to:
            below = Path(to) / str(history.root)[1:]
            copytree(history.root, below)
            change(below, "write", 0, 10, 30_000, 2)
            with suppress(SnapshotDamaged):
                done = restore(history.open, f"s@{version}", Path(to), options, trust=True)
                told = {str(Path("/", path).relative_to(history.root)) for path, _ in done.problems}
                assert (done.exit_code == 7) == bool(told)
                wanted, found = history.had[version], contents(below)
                assert all(found[one] == wanted[one] for one in wanted.keys() - told)
    finally:
        files[name] = good


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_version_of_a_history_comes_back(tmp_path: Path, data: st.DataObject) -> None:
    every_version_comes_back(tmp_path, data, 2, 7)


@pytest.mark.long
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_version_of_a_history_of_fifty_comes_back(
    tmp_path: Path, data: st.DataObject
) -> None:
    every_version_comes_back(tmp_path, data, 50, 50)


TOKENS = [b"..", b"../..", b"/", b"//", b".", b"a/..", b"-1", b"0", b"9" * 13, b"[]", b"{}", b","]
TOKENS += [b'"%b"' % kind for kind in (b"l", b"h", b"d", b"p", b"f")]
TOKENS += [b'"to":"../../../out",', b'"x":[0,1,0,1,8,9,0],', b"16777216", b"4096"]
PLACES = re.compile(rb'"[a-z0-9]*"|[0-9]+|[a-z-]+|/|,|[\[\]{}]')
edits = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.sampled_from(TOKENS)), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits, options, st.booleans())
def test_nothing_is_written_elsewhere_whatever_a_sealed_manifest_says(
    tmp_path: Path,
    history: History,
    edits: list[tuple[int, bytes]],
    options: RestoreOptions,
    existing: bool,
) -> None:
    version = max(history.had)
    name, repository = f"s/{version}/manifest", history.open()
    text = ZstdStream([repository.files[name]]).read(1 << 20)
    text = text[: text.rindex(b"{")]
    for at, token in edits:
        repositories = list(PLACES.finditer(text))
        one = repositories[at % len(repositories)]
        text = text[: one.start()] + token + text[one.end() :]
    text += b'{"blake3":"%b"}\n' % blake3(text).hexdigest().encode()
    repository.files = {**repository.files, name: zstandard.ZstdCompressor().compress(text)}
    with TemporaryDirectory(dir=tmp_path) as around:
        to = Path(around) / "in/to"
        to.mkdir(parents=True)
        if existing:
            restore(history.open, f"s@{version}", to, RestoreOptions(), trust=True)
        with suppress(BackupError):
            assert restore(
                lambda: repository, f"s@{version}", to, options, trust=True
            ).exit_code in (0, 7)
        assert os.listdir(around) == ["in"]
        assert os.listdir(to.parent) == ["to"]


def test_one_percent_of_changed_pages_is_stored_in_a_third_of_a_percent(tmp_path: Path) -> None:
    """Pages of 8 KiB that compress 7:1, as a database has them. All files of a version count."""
    rng = random.Random(1)
    same = rng.randbytes(700) * 11
    pages = 8192

    def page() -> bytes:
        return (rng.randbytes(1100) + same)[:8192]

    taker = Taker(tmp_path / "tree", tmp_path / "copies")
    file = taker.write("16384", b"".join(page() for _ in range(pages)))
    sizes: list[int] = []
    at_random, stretch = rng.sample(range(pages), pages // 100), range(4000, 4000 + pages // 100)
    for changed in ([], at_random, stretch):
        for one in changed:
            rewrite(file, one * 8192, page())
        taker.take()
        sizes.append(taker.repository.size - sum(sizes))
    raw = pages * 8192
    assert sizes[0] / raw < 1 / 5
    assert sizes[1] / raw < 0.0035
    assert sizes[2] / raw < 0.0030
