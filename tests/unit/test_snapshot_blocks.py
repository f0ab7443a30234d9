"""Maps and super blocks: what is written comes back, and nothing but SnapshotDamaged is raised."""

from __future__ import annotations

import random
import threading
import zlib
from hashlib import sha256
from itertools import pairwise

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup.snapshot.format.block_map import SUM, MapReader, MapWriter, differing, sums
from ntt_backup.snapshot.format.entry import MAX_SUPER_BLOCK, Extent
from ntt_backup.snapshot.format.super_blocks import (
    MAGIC,
    SuperBlockWriter,
    read_super_block,
)
from ntt_backup.snapshot.names import SnapshotDamaged
from tests.helpers.memory_store import MemoryStore

KEY = bytes(range(32))
VERSION = "20260102T030405Z-01234567"


def whole(repository: MemoryStore, extents: list[Extent]) -> dict[int, bytes]:
    """The content of extents by their start."""
    found = {}
    for one in extents:
        data = repository.files[f"db/{VERSION}/pack-{one.pack:05}"]
        content = read_super_block(data[one.offset : one.offset + one.stored])
        found[one.start] = content[one.skip : one.skip + one.length]
        assert len(found[one.start]) == one.length
    return found


def test_a_sum_is_the_beginning_of_a_keyed_hash_and_zeros_have_none() -> None:
    data = b"a" * 4096 + bytes(4096) + b"b" * 100
    first, zeros, last = blake3(b"a" * 4096, key=KEY), bytes(SUM), blake3(b"b" * 100, key=KEY)
    wanted = first.digest(SUM) + zeros + last.digest(SUM)
    assert sums(data, 4096, KEY) == sums(memoryview(data), 4096, KEY) == wanted
    assert sums(bytes(5000), 4096, KEY) == bytes(2 * SUM)
    assert sums(b"", 4096, KEY) == b""


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 45))
def test_differing_runs_are_those_of_the_blocks(same: list[bool], old_blocks: int) -> None:
    new = b"".join(n.to_bytes(SUM, "big") for n in range(len(same)))
    old = b"".join((n if s else n + 99).to_bytes(SUM, "big") for n, s in enumerate(same))
    old = (old + bytes(8 * 50))[: old_blocks * SUM]
    runs = list(differing(new, old))
    found = {n for first, end in runs for n in range(first, end)}
    assert found == {n for n, s in enumerate(same) if not s or n >= old_blocks}
    assert all(a[1] < b[0] for a, b in pairwise(runs))


def test_a_map_comes_back_and_one_that_is_cut_or_changed_is_refused() -> None:
    written: list[bytes] = []
    writer = MapWriter(written.append)
    data = random.Random(1).randbytes(80_000) + bytes(80_000)
    writer.add(data[:8000])
    writer.add(memoryview(data)[8000:])
    writer.end()
    stored = b"".join(written)
    assert len(stored) < 81_000
    reader = MapReader(stored[at : at + 999] for at in range(0, len(stored), 999))
    reader.skip(10)
    assert reader.read(19_990) == data[80:]
    with pytest.raises(SnapshotDamaged, match="cut off"):
        reader.read(1)
    reader = MapReader([stored])
    # Of a file of five blocks only two are wanted.
    assert (reader.read(2, 5), reader.read(1)) == (data[:16], data[40:48])
    for bad in (stored[:-40_000], b"", b"no zstd at all", stored[:-1] + b"\0"):
        with pytest.raises(SnapshotDamaged):
            MapReader([bad]).read(20_001)
    with pytest.raises(SnapshotDamaged, match="cut off"):
        MapReader([stored]).read(1 << 50)


@pytest.mark.parametrize("index", [0, 3])
def test_content_comes_back_from_the_packs(index: int) -> None:
    rng = random.Random(index)
    repository = MemoryStore()
    writer = SuperBlockWriter(repository, "db", VERSION, index=index)
    files: dict[int, tuple[dict[int, bytes], list[Extent]]] = {}
    for n in range(200):
        size = rng.choice([1, 8192, 300_000, 1 << 18, 1 << 20])
        pieces = {rng.randrange(1 << 40): rng.randbytes(size // 8) * 8 + b"x"}
        files[n] = pieces, []
        for start, data in pieces.items():
            assert writer.add(start, data, files[n][1]) == n
        for before in range(writer.settled):
            assert sum(one.length for one in files[before][1]) == sum(
                map(len, files[before][0].values())
            )
    writer.flush()
    assert writer.settled == 200
    packs = writer.end()
    assert [f"db/{VERSION}/pack-{n + 1:05}" for n in range(len(packs))] == sorted(repository.files)
    for pack, data in zip(packs, repository.files.values(), strict=True):
        assert data.startswith(MAGIC)
        assert (len(data), sha256(data).hexdigest()) == pack
    for pieces, extents in files.values():
        (start,) = pieces
        assert all(one.version == index for one in extents)
        assert [one.start for one in extents] == sorted(one.start for one in extents)
        assert b"".join(whole(repository, extents).values()) == pieces[start]
        assert extents[0].start == start


def test_neighbours_in_a_super_block_are_one_extent() -> None:
    repository = MemoryStore()
    writer = SuperBlockWriter(repository, "db", VERSION, index=1)
    one: list[Extent] = []
    two: list[Extent] = []
    for at in (0, 8192, 65536):
        writer.add(at, b"1" * 8192, one)
    writer.add(73728, b"2" * 8192, two)
    writer.end()
    assert [(e.start, e.length, e.skip) for e in one] == [(0, 16384, 0), (65536, 8192, 16384)]
    assert [(e.start, e.length, e.skip) for e in two] == [(73728, 8192, 24576)]
    assert repository.requests["write"] == 1


def test_what_is_held_is_stored_before_super_blocks_grow() -> None:
    repository = MemoryStore()
    writer = SuperBlockWriter(repository, "db", VERSION, index=1)
    extents: list[Extent] = []
    parts = [random.Random(n).randbytes(1000) for n in range(3)]
    for number, (part, size) in enumerate(zip(parts, (0, 4 << 20, 4 << 20), strict=True)):
        writer.grow(size)
        writer.add(number * 1000, part, extents)
    writer.end()
    assert len({one.offset for one in extents}) == 2
    assert b"".join(whole(repository, extents).values()) == b"".join(parts)


def test_a_full_pack_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntt_backup.snapshot.format.super_blocks.MAX_PACK", 1_000_000)
    repository = MemoryStore()
    writer = SuperBlockWriter(repository, "db", VERSION, index=1)
    extents: list[Extent] = []
    data = random.Random(2).randbytes(3_000_000)
    writer.add(0, data, extents)
    packs = writer.end()
    assert len(packs) == 4
    assert max(one.size for one in packs) <= 1_000_000
    assert b"".join(whole(repository, extents).values()) == data


def test_no_thread_stays_after_the_end() -> None:
    before = set(threading.enumerate())
    writer = SuperBlockWriter(MemoryStore(), "db", VERSION, index=1)
    writer.add(0, b"content", [])
    writer.end()
    assert set(threading.enumerate()) <= before


def test_giving_up_leaves_no_pack() -> None:
    repository = MemoryStore()
    writer = SuperBlockWriter(repository, "db", VERSION, index=1)
    writer.add(0, bytes(2_000_000), [])
    assert repository.writing
    writer.give_up()
    assert not repository.writing
    assert not repository.files


def test_a_bad_super_block_is_refused_in_little_memory() -> None:
    content = b"some content" * 1000
    good = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    assert read_super_block(good) == content
    unsummed = zstandard.ZstdCompressor().compress(content)
    largest = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(MAX_SUPER_BLOCK))
    assert len(read_super_block(largest)) == MAX_SUPER_BLOCK
    stream = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    huge = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(17 << 20))
    skipped = b"\x50\x2a\x4d\x18\4\0\0\0abcd"
    others = (b"", good[:-1], good[:9], good + b"x", good + good, skipped, skipped + good, content)
    for bad in (*others, zlib.compress(content), unsummed, stream.compress(content), huge):
        with pytest.raises(SnapshotDamaged):
            read_super_block(bad)
