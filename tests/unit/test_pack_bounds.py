"""Each bound of a pack: what lies on it is read, what lies beyond is refused, writers keep it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from ntt_backup.pack import reader as packs
from ntt_backup.pack import writer
from ntt_backup.pack.format import (
    _TRAILER,
    BLOCK,
    DENSE_BELOW,
    DENSE_MEMBER_BYTES,
    ENTRY_BYTES,
    MAX_DICTIONARY,
    MAX_ENTRIES,
    MAX_PACK,
    MAX_RAW,
    RAW,
    TAIL_BYTES,
    VERSION,
    ZSTD,
    ZSTD_DICTIONARY,
    Entry,
    Member,
    PackError,
    Table,
    Trailer,
    read_header,
    read_trailer,
    write_block,
    write_entry,
    write_header,
    write_table,
)
from ntt_backup.pack.reader import PackFile, PackReader, _Tail, find_members
from ntt_backup.pack.writer import Dense, PackWriter
from tests.helpers.blobs import noise, pack, reader, text

ID = bytes(16)
A, B = b"\x01" * 32, b"\x02" * 32
NAME = "by-hash/01/01/" + A.hex()
FULL = MAX_ENTRIES * ENTRY_BYTES


def tail(
    *,
    version: int = VERSION,
    codecs: int = ZSTD_DICTIONARY,
    entries: int = 0,
    table: int = 0,
    table_bytes: int | None = None,
    words: int = 0,
    words_bytes: int = 0,
) -> bytes:
    """The last bytes of a pack whose trailer says this."""
    length = entries * ENTRY_BYTES if table_bytes is None else table_bytes
    sums = (A, ID, ID, bytes(8), bytes(32))
    fields = _TRAILER.pack(codecs, entries, table, length, words, words_bytes, *sums)
    return write_block(version, fields) + bytes(2 * BLOCK)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (tail(), TAIL_BYTES),
        (tail(), TAIL_BYTES + BLOCK - 1),
        (tail(table=MAX_PACK - TAIL_BYTES), MAX_PACK),
        (tail(entries=MAX_ENTRIES), TAIL_BYTES + FULL),
        (tail(table=2, words=1, words_bytes=1), TAIL_BYTES + 2),
        (tail(table=MAX_DICTIONARY, words_bytes=MAX_DICTIONARY), TAIL_BYTES + MAX_DICTIONARY),
        (tail(codecs=RAW), TAIL_BYTES),
        (b"before" + tail(), TAIL_BYTES),
    ],
)
def test_a_trailer_on_its_bounds_is_read(said: bytes, size: int) -> None:
    assert read_trailer(said, size).table_sum == A


@pytest.mark.parametrize(
    ("said", "size", "why"),
    [
        (tail(), TAIL_BYTES - 1, "too short"),
        (tail()[1:], TAIL_BYTES, "too short"),
        (tail(table=MAX_PACK - TAIL_BYTES + 1), MAX_PACK + 1, "too long"),
        (tail(), TAIL_BYTES + BLOCK, "inconsistent"),
        (tail(table=1), TAIL_BYTES, "inconsistent"),
        (tail(entries=MAX_ENTRIES + 1), TAIL_BYTES + FULL + ENTRY_BYTES, "inconsistent"),
        (tail(entries=1, table_bytes=0), TAIL_BYTES, "inconsistent"),
        (tail(table_bytes=ENTRY_BYTES), TAIL_BYTES + ENTRY_BYTES, "inconsistent"),
        (tail(table=2, words=1, words_bytes=2), TAIL_BYTES + 2, "inconsistent"),
        (
            tail(table=MAX_DICTIONARY + 1, words_bytes=MAX_DICTIONARY + 1),
            TAIL_BYTES + MAX_DICTIONARY + 1,
            "inconsistent",
        ),
        (tail(codecs=ZSTD_DICTIONARY + 1), TAIL_BYTES, "has version"),
        (tail(version=0), TAIL_BYTES, "has version 0"),
        (tail(version=3), TAIL_BYTES, "has version 3"),
    ],
)
def test_a_trailer_beyond_a_bound_is_refused(said: bytes, size: int, why: str) -> None:
    with pytest.raises(PackError, match=why):
        read_trailer(said, size)


def table_of(*entries: Entry, limit: int = 1000) -> Table:
    data = b"".join(map(write_entry, entries))
    trailer = Trailer(len(entries), limit, 0, 0, blake3(data).digest(), ID, ID)
    return Table(data, trailer)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(A, 0, 1000, 1000, RAW),
        Entry(A, 1000, 0, 0, RAW),
        Entry(A, 999, 1, 2, ZSTD),
        Entry(A, 999, 1, MAX_RAW, ZSTD_DICTIONARY),
    ],
)
def test_an_entry_on_its_bounds_is_read(entry: Entry) -> None:
    table = table_of(entry)
    assert [*table] == [table[0]] == [table.find(A)] == [entry]


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry(A, 0, 1001, 1001, RAW)], "outside"),
        ([Entry(A, 1001, 0, 0, RAW)], "outside"),
        ([Entry(A, 1 << 32, 0, 0, RAW)], "outside"),
        ([Entry(A, 0, 1 << 32, 1 << 32, RAW)], "outside"),
        ([Entry(A, 0, 9, 9, ZSTD)], "invalid entry"),
        ([Entry(A, 0, 9, 8, ZSTD)], "invalid entry"),
        ([Entry(A, 0, 9, MAX_RAW + 1, ZSTD)], "invalid entry"),
        ([Entry(A, 0, 9, 10, ZSTD_DICTIONARY + 1)], "invalid entry"),
        ([Entry(B, 0, 1, 1, RAW), Entry(A, 1, 1, 1, RAW)], "not in order"),
        ([Entry(A, 0, 1, 1, RAW), Entry(A, 1, 1, 1, RAW)], "not in order"),
        ([Entry(A, 0, 1000, 1000, RAW), Entry(B, 999, 1, 1, RAW)], "overlap"),
    ],
)
def test_an_entry_beyond_a_bound_is_refused(entries: list[Entry], why: str) -> None:
    with pytest.raises(PackError, match=why):
        table_of(*entries)


def test_an_entry_far_behind_is_read_as_it_was_written() -> None:
    far = Entry(A, 3 << 32 | 4, 5 << 32 | 6, 5 << 32 | 6, RAW)
    table = table_of(far, limit=far.offset + far.stored)
    assert [*table] == [table[0]] == [far]


def test_blobs_may_fill_a_pack_to_the_last_byte() -> None:
    assert len(table_of(Entry(A, 0, 600, 600, RAW), Entry(B, 600, 400, 400, RAW))) == 2


def test_a_blob_is_found_among_any_number_of_others_and_none_that_is_not_there() -> None:
    digests = [bytes([2 * n + 1]) * 32 for n in range(9)]
    for count in range(10):
        table = table_of(*(Entry(one, 0, 0, 0, RAW) for one in digests[:count]))
        for number, one in enumerate(digests[:count]):
            found = table.find(one)
            assert found is not None
            assert (found.digest, table.position(one)) == (one, number)
        between = [bytes([2 * n]) * 32 for n in range(11)]
        assert [table.find(one) for one in between] == [None] * 11
        assert [table.position(one) for one in between] == [min(n, count) for n in range(11)]


@pytest.mark.parametrize("content", [b"x", b""])
def test_a_table_of_another_length_or_content_is_refused(content: bytes) -> None:
    trailer = Trailer(0, 0, 0, 0, blake3(content).digest(), ID, ID)
    with pytest.raises(PackError, match="was altered"):
        Table(b"x", trailer)
    with pytest.raises(PackError, match="was altered"):
        Table(b"", replace(trailer, table_sum=A))


def test_an_entry_is_written_as_the_document_says() -> None:
    raw = write_entry(Entry(A, 3 << 32 | 4, 5 << 32 | 6, 5 << 32 | 6, RAW))
    assert raw.hex() == A.hex() + "00030000000405000000060000000000"
    packed = write_entry(Entry(A, 4, 6, 7, ZSTD))
    assert packed.hex() == A.hex() + "00000000000400000000060000000701"


def test_a_table_is_put_in_order_and_has_no_blob_twice() -> None:
    one, two = (write_entry(Entry(digest, 0, 0, 0, RAW)) for digest in (A, B))
    assert write_table(two + one) == one + two == write_table(one + two)
    for twice in (one + one, two + one + two):
        with pytest.raises(ValueError, match="twice"):
            write_table(twice)


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11, 1 << 80])
def test_a_header_comes_back_whatever_the_size(size: int) -> None:
    assert read_header(write_header(NAME, size)) == Member(NAME, size)


@pytest.mark.parametrize("at", [0, 123, 124, 135, 153, 155, 257, 262, 511])
def test_a_header_with_a_byte_altered_is_none(at: int) -> None:
    block = bytearray(write_header(NAME, 5))
    # What ends a number is no part of it, and the checksum does not count itself.
    block[at] ^= 0x10 if at != 155 else 0x40
    assert read_header(bytes(block)) is None


@pytest.mark.parametrize("digits", [b"+0000000005", b"0_000000005", b"-0000000005", b"0000000 005"])
def test_a_header_whose_size_is_no_digits_is_none(digits: bytes) -> None:
    block = bytearray(write_header(NAME, 5))
    block[124:135] = digits
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert read_header(bytes(block)) is None


def members(data: bytes, size: int | None = None) -> list[Entry]:
    """What is found in a file with that content, of that size when it was looked at."""
    fd = os.memfd_create("pack")
    try:
        os.write(fd, data)
        return [*find_members(fd, len(data) if size is None else size)]
    finally:
        os.close(fd)


HEAD = write_header(NAME, 0)
SECOND = write_header("by-hash/02/02/" + B.hex(), 3)


@pytest.mark.parametrize(
    ("data", "size", "found"),
    [
        (HEAD, None, [Entry(A, BLOCK, 0, 0, RAW)]),
        (HEAD[:-1], None, []),
        (HEAD[:-1], BLOCK, []),
        (SECOND + b"abc", None, [Entry(B, BLOCK, 3, 3, RAW)]),
        (SECOND + b"ab", None, []),
        (
            SECOND + b"abc".ljust(BLOCK, b"\0") + HEAD,
            None,
            [Entry(B, BLOCK, 3, 3, RAW), Entry(A, 3 * BLOCK, 0, 0, RAW)],
        ),
        (bytes(BLOCK) + HEAD, None, [Entry(A, 2 * BLOCK, 0, 0, RAW)]),
        (write_header(NAME.replace("by-hash", "by-name"), 0), None, []),
        (write_header(NAME.replace("01/01", "01/02", 1), 0), None, []),
        (write_header(NAME[:-1], 0), None, []),
        (bytes(1 << 20) + HEAD, None, [Entry(A, (1 << 20) + BLOCK, 0, 0, RAW)]),
        (bytes((1 << 20) - BLOCK) + HEAD, None, [Entry(A, 1 << 20, 0, 0, RAW)]),
    ],
)
def test_members_are_found_up_to_the_last_byte(
    data: bytes, size: int | None, found: list[Entry]
) -> None:
    assert members(data, size) == found


def test_a_writer_takes_as_many_blobs_as_a_pack_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_ENTRIES", 3)
    for contents in (b"x", bytes(DENSE_BELOW)):
        full = PackWriter(lambda _: None, ID, ID)
        for number in range(3):
            full.add(bytes([number]) * 32, contents)
        with pytest.raises(ValueError, match="at most 3 blobs"):
            full.add(b"\xff" * 32, contents)
        full.close()


def test_blobs_are_dense_below_a_bound_only() -> None:
    for size in (DENSE_BELOW - 1, DENSE_BELOW, DENSE_BELOW + 1):
        content = noise(size, size)
        data = pack([content])
        name = blake3(content).hexdigest().encode()
        assert (name in data) == (size >= DENSE_BELOW)
        (entry,) = reader(data).table
        assert reader(data).read_blob(entry) == content


def test_a_dense_member_is_full_at_its_bound() -> None:
    dense = Dense(compress=False)
    while (left := DENSE_MEMBER_BYTES - dense._bytes) >= DENSE_BELOW:
        dense.add(A, bytes(DENSE_BELOW - 1))
    dense.add(A, bytes(left - 1))
    assert not dense.full
    dense.add(A, b"x")
    assert dense.full


def test_the_end_of_a_pack_is_read_once_and_what_is_before_it_as_it_is_needed() -> None:
    data = noise(1000, 1)
    asked: list[tuple[int, int]] = []

    def read(start: int, length: int) -> bytes:
        asked.append((start, length))
        return data[start : start + length]

    end = _Tail(read, len(data), 100, b"")
    assert end.read(900, 100) == data[900:]
    assert end.read(950, 10) == data[950:960]
    assert asked == [(900, 100)]
    assert end.read(800, 99) == data[800:899]
    assert end.data == data[900:]  # A place of its own is not kept.
    assert end.read(850, 50) == data[850:900]
    assert end.data == data[850:]
    assert asked == [(900, 100), (800, 99), (850, 50)]
    assert _Tail(read, len(data), 5000, b"").data == data
    assert _Tail(read, len(data), 100, data[700:]).data == data[700:]
    assert asked[3:] == [(0, 1000)]


@pytest.mark.parametrize("pieces", [19_999, 20_000, 20_001, 5_000])
def test_a_blob_is_checked_to_its_last_byte(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(packs, "_PIECE", pieces)
    data = bytearray(pack([noise(20_000, 1)]))
    monkeypatch.setattr(packs, "_FIRST_READ", 2048)
    found = PackReader(lambda at, length: bytes(data[at : at + length]), len(data))
    (entry,) = found.table
    found.check(entry)
    for at in (0, pieces % 20_000, 19_999):
        data[entry.offset + at] ^= 1
        with pytest.raises(PackError, match="other content"):
            found.check(entry)
        data[entry.offset + at] ^= 1
    del data[entry.offset + 19_999 :]
    with pytest.raises(PackError, match="cut off"):
        found.check(entry)


def test_a_compressed_blob_of_any_length_is_checked_by_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another writer may compress larger ones than ours does."""
    monkeypatch.setattr(packs, "_PIECE", 100)
    data = pack([text(n, 8000) for n in range(8)])
    found = reader(data)
    assert {one.codec for one in found.table} == {ZSTD}
    for entry in found.table:
        assert entry.stored > 100
        found.check(entry)
    spoilt = bytearray(data)
    spoilt[entry.offset + 50] ^= 1
    with pytest.raises(PackError):
        reader(bytes(spoilt)).check(entry)


def test_nothing_stands_behind_a_compressed_blob() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    entry = Entry(blake3(bytes(1000)).digest(), 0, len(frame), 1000, ZSTD)
    found = reader(pack([b""]))
    assert found.content(entry, frame) == bytes(1000)
    with pytest.raises(PackError, match="cannot be decompressed"):
        found.content(entry, frame + b"x")


def test_a_pack_without_a_dictionary_says_so() -> None:
    trailer = reader(pack([b"x", noise(20_000, 1)])).trailer
    assert (trailer.dictionary_offset, trailer.dictionary_bytes) == (0, 0)


def test_no_dictionary_is_looked_for_where_nothing_is_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(zstandard, "train_dictionary", lambda *_, **__: tried.append(1))
    data = pack([noise(2000, seed) for seed in range(100)])
    assert {one.codec for one in reader(data).table} == {RAW}
    assert tried == []


def test_a_pack_in_a_file_is_closed_also_where_it_is_none(tmp_path: Path) -> None:
    path, before = tmp_path / "pack", len(os.listdir("/proc/self/fd"))
    path.write_bytes(pack([b"x"]))
    with PackFile(path) as found:
        assert [found.read_blob(one) for one in found.table] == [b"x"]
    path.write_bytes(b"none")
    with pytest.raises(PackError):
        PackFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
