"""What a hostile or damaged pack can do: be refused, by one kind of error, in little memory."""

from __future__ import annotations

import os
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ntt_backup.pack.format import (
    _SELF_AT,
    BLOCK,
    MAX_ENTRIES,
    RAW,
    TAIL_BYTES,
    ZSTD,
    ZSTD_DICTIONARY,
    Entry,
    PackError,
    Trailer,
    write_entry,
    write_header,
    write_trailer,
)
from ntt_backup.pack.reader import PackReader, find_members
from ntt_backup.restore.unpack import unpack
from tests.helpers.blobs import noise, pack, reader, text, tree

SMALL = [noise(20_000, 1), *(text(n, 1500) for n in range(400)), b""]
GOOD = pack(SMALL)
FOUND = reader(GOOD)
ID = bytes(16)


def forged(content: bytes, listed: list[Entry], /, **changed: object) -> bytes:
    """A pack whose sums are right, with that table over that content."""
    table = b"".join(map(write_entry, listed))
    trailer = Trailer(len(listed), len(content), 0, 0, blake3(table).digest(), ID, ID)
    pad = bytes(-len(content + table) % 512)
    return content + table + pad + write_trailer(replace(trailer, **changed)) + bytes(1024)  # type: ignore[arg-type]


def read_all(data: bytes) -> int:
    """How many blobs of a pack are right. Anything but PackError fails the test."""
    right = 0
    try:
        found = reader(data)
    except PackError:
        return 0
    for entry in found.table:
        try:
            content = found.read_blob(entry)
        except PackError:
            continue
        assert blake3(content).digest() == entry.digest
        right += 1
    return right


@given(st.binary(max_size=4096))
def test_random_bytes_are_no_pack(data: bytes) -> None:
    with pytest.raises(PackError):
        reader(data)


@given(st.integers(0, len(GOOD) - 1))
@example(0)
@example(TAIL_BYTES)
def test_a_pack_that_is_cut_is_no_pack(length: int) -> None:
    with pytest.raises(PackError):
        reader(GOOD[:length])


def test_a_trailer_of_another_format_is_none_though_its_sum_is_right() -> None:
    data = bytearray(GOOD)
    at = len(GOOD) - TAIL_BYTES
    data[at] ^= 1
    data[at + _SELF_AT : at + BLOCK] = blake3(data[at : at + _SELF_AT]).digest()
    with pytest.raises(PackError, match="no trailer"):
        reader(bytes(data))


REGIONS = {
    "members": (0, FOUND.trailer.table_offset),
    "dictionary": (
        FOUND.trailer.dictionary_offset,
        FOUND.trailer.dictionary_offset + FOUND.trailer.dictionary_bytes,
    ),
    "table": (FOUND.trailer.table_offset, FOUND.trailer.table_offset + FOUND.trailer.table_bytes),
    "trailer": (len(GOOD) - TAIL_BYTES, len(GOOD) - TAIL_BYTES + 512),
}


@pytest.mark.parametrize("region", REGIONS)
@given(data=st.data())
def test_flipped_bits_cost_what_they_hit(region: str, data: st.DataObject) -> None:
    low, high = REGIONS[region]
    changed = bytearray(GOOD)
    places = data.draw(
        st.lists(st.integers(low * 8, high * 8 - 1), min_size=1, max_size=8, unique=True)
    )
    for place in places:
        changed[place // 8] ^= 1 << place % 8
    right = read_all(bytes(changed))
    if region == "members":
        assert right >= len(SMALL) - len(places) or FOUND.trailer.dictionary_bytes
    elif region != "dictionary":
        assert right == 0


ENTRIES = st.builds(
    Entry,
    st.binary(min_size=32, max_size=32),
    st.one_of(st.integers(0, 3000), st.integers(0, (1 << 48) - 1)),
    st.one_of(st.integers(0, 3000), st.integers(0, (1 << 40) - 1)),
    st.one_of(st.integers(0, 5000), st.integers(0, (1 << 32) - 1)),
    st.integers(0, 4),
)


@given(st.lists(ENTRIES, max_size=5), st.binary(max_size=2000), st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_hostile_table_is_refused_or_leads_to_nothing(
    entries: list[Entry], content: bytes, in_order: bool
) -> None:
    if in_order:
        entries = sorted(entries)
    assert read_all(forged(content, entries)) == 0


@given(
    st.tuples(*[st.one_of(st.integers(0, 4000), st.integers(0, (1 << 64) - 1))] * 3),
    st.one_of(st.integers(0, 3), st.integers(0, (1 << 32) - 1)),
)
def test_a_hostile_trailer_is_refused_or_leads_to_nothing(
    places: tuple[int, int, int], entries: int
) -> None:
    at, words_at, words = places
    data = forged(
        bytes(2000),
        [],
        entries=entries,
        table_offset=at,
        dictionary_offset=words_at,
        dictionary_bytes=words,
    )
    assert read_all(data) == 0


def test_more_entries_than_a_pack_may_have_are_not_even_read() -> None:
    asked: list[int] = []
    data = forged(bytes(2000), [], entries=MAX_ENTRIES + 1)

    def read(start: int, length: int) -> bytes:
        asked.append(length)
        return data[start : start + length]

    with pytest.raises(PackError):
        PackReader(read, len(data))
    assert sum(asked) == len(data)


def test_a_table_far_before_the_end_is_refused_and_not_kept_with_all_behind_it() -> None:
    end = forged(b"", [])[-TAIL_BYTES:]

    def read(start: int, length: int) -> bytes:
        assert length < 1 << 20
        return end.rjust(length, b"\0")

    with pytest.raises(PackError, match="is inconsistent"):
        PackReader(read, 1 << 40)


def test_a_compressed_blob_of_another_writer_may_be_large(tmp_path: Path) -> None:
    content = noise(3_000_000, 1) + bytes(3_000_000)
    frame = zstandard.ZstdCompressor().compress(content)
    entry = Entry(blake3(content).digest(), 0, len(frame), len(content), ZSTD)
    data = forged(frame, [entry])
    assert reader(data).read_blob(entry) == content
    file, to = tmp_path / "in.tar", tmp_path / "to"
    file.write_bytes(data)
    unpack([file], to, jobs=1, verify=True, on_progress=lambda _: None)
    assert list(tree(to).values()) == [content]


def bomb(says: int | None) -> bytes:
    """A few bytes that decompress to 256 MiB. says: what its header says it holds."""
    compressor = zstandard.ZstdCompressor(write_content_size=says is not None)
    frame = compressor.compress(bytes(256 << 20))
    if says is not None:
        frame = frame.replace(struct.pack("<I", 256 << 20), struct.pack("<I", says), 1)
    return frame


@pytest.mark.parametrize("says", [None, 256 << 20, 100_000, (1 << 32) - 1])
def test_a_zstd_bomb_gets_no_more_memory_than_its_entry_says(says: int | None) -> None:
    frame = bomb(says)
    entry = Entry(bytes(32), 0, len(frame), 100_000, ZSTD)
    found = reader(forged(frame, [entry]))
    tracemalloc.start()
    try:
        with pytest.raises(PackError):
            found.content(found.table[0], frame)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [RAW, ZSTD])
@pytest.mark.parametrize("less", [1, 999])
def test_a_blob_that_is_shorter_than_its_entry_says_is_refused(codec: int, less: int) -> None:
    content = noise(1000, 1)[less:]
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    stored = content if codec == RAW else frame
    size = 1000 if codec == RAW else len(stored)
    entry = Entry(blake3(content).digest(), 0, size, 1200, codec)
    found = reader(forged(bytes(2000), [entry]))
    with pytest.raises(PackError, match=r"has not the 1[02]00 bytes"):
        found.content(found.table[0], stored)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x37\xa4\x30\xec" + bytes(100))
def test_a_hostile_dictionary_is_a_pack_error(words: bytes) -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    content = words + frame
    entry = Entry(blake3(b"?").digest(), len(words), len(frame), 1000, ZSTD_DICTIONARY)
    assert read_all(forged(content, [entry], dictionary_bytes=len(words))) == 0


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_written_outside_of_the_directory(tmp_path: Path, data: st.DataObject) -> None:
    changed = bytearray(GOOD)
    if data.draw(st.booleans()):
        name = data.draw(
            st.sampled_from(["../../evil", "/evil", "by-hash/../../../../evil", "by-hash/aa/bb/.."])
        )
        changed[:512] = write_header(name, 20_000)
        changed[FOUND.trailer.table_offset] ^= 1
    for place in data.draw(st.lists(st.integers(0, len(GOOD) - 1), max_size=20)):
        changed[place] = data.draw(st.integers(0, 255))
    file, to = tmp_path / "in.tar", tmp_path / "to"
    file.write_bytes(changed)
    unpack([file], to, jobs=1, verify=True, on_progress=lambda _: None)
    assert {one.name for one in tmp_path.iterdir()} <= {"in.tar", "to"}
    for path in to.rglob("*") if to.exists() else ():
        if path.is_file():
            assert blake3(path.read_bytes()).hexdigest() == path.name


@given(st.lists(st.one_of(st.binary(max_size=700), st.integers(0, 1 << 66)), max_size=6))
def test_salvage_ends_whatever_the_bytes_are(parts: list[bytes | int]) -> None:
    name = "by-hash/00/00/" + "0" * 64
    data = b"".join(
        one if isinstance(one, bytes) else write_header(name, one) + bytes(one % 1024)
        for one in parts
    )
    fd = os.memfd_create("pack")
    try:
        os.write(fd, data)
        for entry in find_members(fd, len(data)):
            assert entry.offset + entry.stored <= len(data)
    finally:
        os.close(fd)
