"""Super blocks are fetched once each as long as they are kept, and what is kept is bounded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
import zstandard

from ntt_backup.filestore.contract import Range
from ntt_backup.snapshot.format.entry import Extent
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.names import SnapshotDamaged, pack_name
from ntt_backup.snapshot.restore import fetch
from ntt_backup.snapshot.restore.fetch import Fetcher
from tests.helpers.memory_store import MemoryStore
from tests.helpers.snapshots import VERSION

HEADER = Header("etc", VERSION, "", (VERSION,), "00" * 32, ("/srv",))
SIZE = 1000


class Pack:
    """A pack of super blocks, and what was fetched of it. gap: bytes before each block. missing:
    each block lies in a pack of its own, of which these are missing.
    """

    def __init__(self, count: int, gap: int = 0, missing: Sequence[int] | None = None) -> None:
        self.contents = [random.Random(n).randbytes(SIZE) for n in range(count)]
        self.extents: list[Extent] = []
        self.repository = MemoryStore()
        self.fetcher = Fetcher[int](self.repository, HEADER)
        self.held: list[int] = []
        data, files = bytearray(), self.repository.files
        for number, content in enumerate(self.contents):
            data += bytes(gap)
            stored = zstandard.ZstdCompressor(write_checksum=True).compress(content)
            pack, at = (1, len(data)) if missing is None else (number + 1, 0)
            self.extents.append(Extent(0, SIZE, 0, pack, at, len(stored), 0))
            data += stored
            if missing is None:
                files[pack_name("etc", VERSION, 1)] = bytes(data)
            elif number not in missing:
                files[pack_name("etc", VERSION, pack)] = stored
        self.stored = len(stored)

    def read(self, *items: Sequence[int]) -> None:
        """Reads items, each of some blocks, and proves their content."""
        wanted = [(n, [self.extents[block] for block in item]) for n, item in enumerate(items)]
        content: dict[int, bytes] = {}
        ended: list[int] = []
        for item, pieces, last in self.fetcher.read(wanted):
            assert all(whole for _, _, whole in pieces)
            content[item] = content.get(item, b"") + b"".join(data for _, data, _ in pieces)
            ended += [item] if last else []
            self.held.append(self.fetcher._read_bytes)
        expected = [b"".join(self.contents[block] for block in item) for item in items]
        assert [content[n] for n in range(len(items))] == expected
        assert ended == list(range(len(items)))

    @property
    def fetched(self) -> int:
        """How many super blocks were fetched."""
        assert self.fetcher.fetched % self.stored == 0
        return self.fetcher.fetched // self.stored


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window has one item."""
    monkeypatch.setattr(fetch, "_WINDOW_ITEMS", 1)


@pytest.mark.parametrize(("kept", "fetched"), [(3 * SIZE, 3), (2 * SIZE, 6)])
def test_what_was_used_last_is_kept_up_to_a_size(
    windows: None, monkeypatch: pytest.MonkeyPatch, kept: int, fetched: int
) -> None:
    monkeypatch.setattr(fetch, "_KEPT", kept)
    pack = Pack(3)
    pack.read([0], [1], [2], [0], [1], [2])
    assert pack.fetched == fetched
    assert max(pack.held) == kept


def test_what_is_used_again_is_kept_longest(windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_KEPT", 2 * SIZE)
    pack = Pack(3)
    pack.read([0], [1], [0], [2], [0])
    assert pack.fetched == 3


def test_what_is_needed_and_cannot_be_read_again_stays(
    windows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_KEPT", 1)
    pack = Pack(5)
    pack.read([0], [1, 2, 3, 4, 0], [1], [0, 0])
    assert max(pack.held) <= 3 * SIZE


def test_a_block_that_many_need_is_decompressed_again_where_that_saves_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "_KEPT", SIZE)
    pack = Pack(4)
    pack.read([0], [1], [2], [0], [3], [2, 1, 0], [3])
    assert pack.fetched == 4
    assert max(pack.held) == SIZE


def test_no_more_is_fetched_than_a_window_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_WINDOW_BYTES", 2 * SIZE)
    monkeypatch.setattr(fetch, "_KEPT", SIZE)
    pack = Pack(9)
    items = [list(range(9)), [8, 0]]
    pack.read(*items)
    assert pack.fetched == 10
    assert max(pack.held) <= 3 * SIZE


@pytest.mark.parametrize(("gap", "requests"), [(0, 1), (100, 1), (5000, 8)])
def test_neighbours_come_in_one_range_and_others_do_not(gap: int, requests: int) -> None:
    pack = Pack(8, gap)
    pack.read([3, 1], [0, 2, 7], [4], [5, 6])
    assert pack.repository.requests["read"] == requests


def test_a_range_is_no_longer_than_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Pack(8)
    monkeypatch.setattr(fetch, "_LARGEST_RANGE", 4 * pack.stored)
    pack.read(range(8))
    assert pack.repository.requests["read"] == 2
    monkeypatch.setattr(fetch, "_LARGEST_RANGE", 4 * pack.stored - 1)
    pack = Pack(8)
    pack.read(range(8))
    assert pack.repository.requests["read"] == 3


def test_what_lies_in_other_packs_comes_where_some_are_missing() -> None:
    pack = Pack(6, missing=(1, 2, 5))
    came = list(pack.fetcher.read((n, [one]) for n, one in enumerate(pack.extents)))
    assert [bytes(data) for _, [(_, data, _)], _ in came] == [
        b"" if n in (1, 2, 5) else content for n, content in enumerate(pack.contents)
    ]
    assert [whole for _, [(_, _, whole)], _ in came] == [True, False, False, True, True, False]
    assert pack.fetched == 3


def test_a_super_block_that_is_refused_by_itself_is_left_out_and_those_beside_it_come() -> None:
    pack = Pack(3)
    asked: list[str] = []

    def before(_: str, name: str) -> None:
        asked.append(name)
        if len(asked) in (1, 3):  # All in one range; then the second one by itself.
            raise SnapshotDamaged("it is not what was asked for")

    pack.repository.before = before
    came = pack.fetcher.read((n, [one]) for n, one in enumerate(pack.extents))
    assert [(bytes(data), whole) for _, [(_, data, whole)], _ in came] == [
        (pack.contents[0], True),
        (b"", False),
        (pack.contents[2], True),
    ]
    assert len(asked) == 4


def test_what_is_damaged_behind_all_ranges_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = Pack(2)
    read = pack.repository.read

    def more(ranges: Iterable[Range]) -> Iterator[bytes]:
        yield from read(ranges)
        raise SnapshotDamaged("more came than was asked for")

    monkeypatch.setattr(pack.repository, "read", more)
    with pytest.raises(SnapshotDamaged, match="more came than was asked for"):
        pack.read([0], [1])


def test_what_ends_the_items_is_told_in_its_own_words() -> None:
    pack = Pack(2)

    def items() -> Iterator[tuple[int, list[Extent]]]:
        yield 0, [pack.extents[0]]
        raise SnapshotDamaged("line 7 is no entry")

    with pytest.raises(SnapshotDamaged, match="line 7 is no entry"):
        list(pack.fetcher.read(items()))


def test_no_more_is_planned_ahead_where_packs_are_missing(windows: None) -> None:
    pack = Pack(9, missing=range(9))
    taken: list[int] = []

    def items() -> Iterator[tuple[int, list[Extent]]]:
        for n, one in enumerate(pack.extents):
            taken.append(n)
            yield n, [one]

    ahead = [len(taken) - item for item, _, _ in pack.fetcher.read(items())]
    assert ahead == [1] * 9


@pytest.mark.parametrize(("more", "parts"), [(0, [2, 2, 2]), (1, [3, 3])])
def test_a_window_is_as_long_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, more: int, parts: list[int]
) -> None:
    pack = Pack(6)
    monkeypatch.setattr(fetch, "_WINDOW_BYTES", 2 * pack.stored + more)
    items = [(0, pack.extents)]
    assert [len(pieces) for _, pieces, _ in pack.fetcher.read(items)] == parts
