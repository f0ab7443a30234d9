"""Each bound of a message: what lies on it comes back as it went, what lies beyond is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ntt_backup.wire import dump_messages, file_messages, read_messages, write_messages
from ntt_backup.wire.framing import (
    COMMIT,
    CRC_BYTES,
    HEADER,
    MAX_BLOB,
    MAX_BLOBS,
    MAX_CHUNK,
    MAX_CODE,
    MAX_RAW,
    MAX_TEXT,
    PACK_BYTES,
    ProtocolError,
)
from ntt_backup.wire.read_messages import BadBlob, Listed, Range, Verdicts
from ntt_backup.wire.write_messages import Batch, Exceptional, Large, Receipt

A, B = bytes(range(32)), b"\xff" * 32
DUMP = "20260102T030405Z-db000001.dump"
FILE = "etc/20260102T030405Z-01234567/map"
VERSION = "etc/20260102T030405Z-01234567"
LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


def said(frame: bytes) -> memoryview:
    """The payload of a frame that was made here."""
    return memoryview(frame)[HEADER.size : -CRC_BYTES]


def packed(layout: str, *values: Any, rest: bytes = b"") -> memoryview:
    return memoryview(struct.pack(layout, *values) + rest)


def listed(read: Callable[[Any], Iterator[Any]]) -> Callable[[Any], list[Any]]:
    return lambda payload: list(read(payload))


def part_within(limit: int) -> Callable[[Any], Any]:
    return lambda payload: write_messages.read_part(payload, limit)


def pack(*sizes: int, extra: int = 0) -> memoryview:
    table = write_messages.table([A] * len(sizes), sizes)
    return memoryview(table + bytes(sum(sizes) + extra))


def receipt(outcome: int = 0, hashed: int = 0, stored: int = 1, *some: Exceptional) -> Receipt:
    return Receipt(7, outcome, hashed, stored, list(some))


def bad(position: int, verdict: int = read_messages.WRONG, text: str = "why") -> BadBlob:
    return BadBlob(position, verdict, 5, B, text)


def contents_of(payload: memoryview) -> list[tuple[bytes, bytes]]:
    return [(digest, bytes(one)) for digest, one in read_messages.read_contents(payload)]


RIGHT: list[tuple[Callable[[Any], Any], bytes, Any]] = [
    (write_messages.read_batch, write_messages.batch(3, 1, 0), Batch(3, 1, 0)),
    (
        write_messages.read_batch,
        write_messages.batch(3, MAX_BLOBS, MAX_BLOB),
        Batch(3, MAX_BLOBS, MAX_BLOB),
    ),
    (
        write_messages.read_large,
        write_messages.large(A, MAX_BLOB, MAX_BLOB),
        Large(A, MAX_BLOB, MAX_BLOB),
    ),
    (write_messages.read_end, write_messages.end(0), (0, b"")),
    (write_messages.read_end, write_messages.end(1, A), (1, A)),
    (write_messages.read_number, write_messages.numbered(COMMIT, 2**32 - 1), 2**32 - 1),
    (write_messages.read_ask_offset, write_messages.ask_offset(A, MAX_BLOB), (A, MAX_BLOB)),
    (write_messages.read_offset, write_messages.offset(9, B), (9, B)),
    (
        write_messages.read_error,
        write_messages.error("c" * (MAX_CODE + 1), "t" * (MAX_TEXT + 1)),
        ("c" * MAX_CODE, "t" * MAX_TEXT),
    ),
    (
        write_messages.read_receipt,
        write_messages.receipt(receipt(1, 1, MAX_BLOBS, Exceptional(0, 5, "x" * MAX_TEXT))),
        receipt(1, 1, MAX_BLOBS, Exceptional(0, 5, "x" * MAX_TEXT)),
    ),
    (
        write_messages.read_receipt,
        write_messages.receipt(receipt(0, 0, 0, Exceptional(2**32 - 1, 1, ""))),
        receipt(0, 0, 0, Exceptional(2**32 - 1, 1, "")),
    ),
    (read_messages.read_listing, read_messages.listing(A, B, 2**32 - 1), Range(A, B, 2**32 - 1)),
    (read_messages.read_digests, read_messages.verifying([A, B]), [A, B]),
    (read_messages.read_getting, read_messages.getting([A], 9), (9, [A])),
    (read_messages.read_getting, read_messages.getting([A, B]), (0, [A, B])),
    (listed(read_messages.read_names), read_messages.names([(A, 1), (B, 2)]), [(A, 1), (B, 2)]),
    (read_messages.read_stray, read_messages.stray(2, "aa/b\n"), (2, "aa/b")),
    (
        read_messages.read_listed,
        read_messages.listed(Listed(1, 2, 3, True)),
        Listed(1, 2, 3, True),
    ),
    (
        read_messages.read_verdicts,
        read_messages.verdicts(Verdicts(3, 1, 9, [bad(2, 1), bad(0, 3, "")])),
        Verdicts(3, 1, 9, [bad(2, 1), bad(0, 3, "")]),
    ),
    (contents_of, read_messages.contents([A, B], [2, 0], [b"xy"]), [(A, b"xy"), (B, b"")]),
    (bytes, read_messages.piece(b"x"), b"\0\0\0\0\1x"),
    (read_messages.read_piece, read_messages.piece(bytes(MAX_CHUNK)), bytes(MAX_CHUNK)),
    (read_messages.read_blob_end, read_messages.blob_end(1, "gone"), (1, "gone")),
    (read_messages.read_not_given, read_messages.not_given(A, 3, "why"), (A, 3, "why")),
    (
        dump_messages.read_dump,
        dump_messages.dump(DUMP, 0, 1, b"{}"),
        (DUMP, 0, datetime(1970, 1, 1, 0, 0, 0, 1, UTC), b"{}"),
    ),
    (dump_messages.read_dump, dump_messages.dump(DUMP, None, 1, b""), (DUMP, None, None, b"")),
    (dump_messages.read_names, dump_messages.named(1, DUMP, DUMP), [DUMP, DUMP]),
    (dump_messages.read_dump_sum, dump_messages.dump_sum(8, A), (8, A)),
    (file_messages.read_below, file_messages.listing(""), ("", "")),
    (file_messages.read_below, file_messages.listing("etc/"), ("etc", "")),
    (file_messages.read_below, file_messages.listing(f"{VERSION}/"), tuple(VERSION.split("/"))),
    (file_messages.read_end, file_messages.end(FILE, A), (FILE, A)),
    (
        file_messages.read_said,
        file_messages.said(file_messages.UNREADABLE, "why"),
        (file_messages.UNREADABLE, "why"),
    ),
    (file_messages.read_reading, file_messages.reading(FILE, 3, 4), (FILE, 3, 4)),
    (file_messages.read_removing, file_messages.removing([FILE, FILE]), [FILE, FILE]),
    (
        listed(file_messages.read_names),
        file_messages.names([(FILE, 7, 0), (FILE, 8, dump_messages.arrival_us(10**30))]),
        [(FILE, 7, datetime(1970, 1, 1, tzinfo=UTC)), (FILE, 8, LAST)],
    ),
]


@pytest.mark.parametrize(("read", "frame", "meant"), RIGHT)
def test_a_message_comes_back_as_it_went(
    read: Callable[[Any], Any], frame: bytes, meant: Any
) -> None:
    assert read(said(frame)) == meant


WRONG: list[tuple[Callable[[Any], Any], memoryview, str]] = [
    (write_messages.read_batch, said(write_messages.batch(3, 0, 0)), "a batch of 0 blobs"),
    (write_messages.read_batch, said(write_messages.batch(3, MAX_BLOBS + 1, 0)), "a batch of"),
    (write_messages.read_batch, said(write_messages.batch(3, 1, MAX_BLOB + 1)), "a batch of"),
    (part_within(9), packed("!BI", 0, 0), "0 bytes in a part"),
    (part_within(9), packed("!BI", 0, 10), "10 bytes in a part"),
    (write_messages.read_table, memoryview(b"\0\0\0"), "without a table"),
    (write_messages.read_table, packed("!I", 0), "cannot hold 0"),
    (
        write_messages.read_table,
        packed("!I", MAX_BLOBS + 1, rest=bytes(36 * MAX_BLOBS + 36)),
        "hold",
    ),
    (write_messages.read_table, pack(1, 2)[:-4], "cannot hold|add up"),
    (write_messages.read_table, packed("!I", 1, rest=A), "cannot hold 1"),
    (write_messages.read_table, pack(1, 2, extra=1), "add up"),
    (write_messages.read_table, pack(1, 2)[:-1], "add up"),
    (write_messages.read_table, pack(PACK_BYTES + 1), "a blob of"),
    (write_messages.read_large, packed("!32sQQ", A, MAX_BLOB + 1, 0), "a blob of"),
    (write_messages.read_large, packed("!32sQQ", A, 5, 6), "a blob of 5 bytes from 6"),
    (write_messages.read_end, memoryview(b"\2"), "says nothing"),
    (write_messages.read_end, memoryview(b"\0x"), "says nothing"),
    (write_messages.read_end, memoryview(b"\0" + A + b"x"), "says nothing"),
    (write_messages.read_ask_offset, packed("!32sQ", A, MAX_BLOB + 1), "a blob of"),
    (write_messages.read_receipt, packed("!IBBII", 7, 2, 0, 0, 0), "unknown outcome"),
    (write_messages.read_receipt, packed("!IBBII", 7, 0, 2, 0, 0), "unknown outcome"),
    (write_messages.read_receipt, packed("!IBBII", 7, 0, 0, MAX_BLOBS + 1, 0), "too many"),
    (write_messages.read_receipt, packed("!IBBII", 7, 0, 0, 0, MAX_BLOBS + 1), "too many"),
    (write_messages.read_receipt, packed("!IBBII", 7, 0, 0, 0, 1), "more or less"),
    (
        write_messages.read_receipt,
        packed("!IBBIIIBH", 7, 0, 0, 0, 0, 0, 1, 0),
        "more or less",
    ),
    (write_messages.read_receipt, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 0, 0), "verdict"),
    (write_messages.read_receipt, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 6, 0), "verdict"),
    (write_messages.read_receipt, packed("!IBBIIIB", 7, 0, 0, 0, 1, 0, 1), "entry that is cut"),
    (write_messages.read_receipt, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 1, 1), "text that is cut"),
    (
        write_messages.read_receipt,
        packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 1, MAX_TEXT + 1, rest=bytes(MAX_TEXT + 1)),
        "text that is cut",
    ),
    (read_messages.read_digests, memoryview(A + b"x"), "digest that is cut"),
    (read_messages.read_getting, packed("!Q", 1, rest=A + B), "offset for several"),
    (read_messages.read_names, memoryview(A), "name that is cut"),
    (
        read_messages.read_verdicts,
        said(read_messages.verdicts(Verdicts(1, 0, 0, [bad(0, 0)]))),
        "unknown verdict",
    ),
    (
        read_messages.read_verdicts,
        said(read_messages.verdicts(Verdicts(1, 0, 0, [bad(0, 4)]))),
        "unknown verdict",
    ),
    (
        read_messages.read_verdicts,
        said(read_messages.verdicts(Verdicts(1, 0, 0, [bad(1)]))),
        "not asked for",
    ),
    (
        read_messages.read_verdicts,
        said(read_messages.verdicts(Verdicts(2, 0, 0, [bad(0)]))),
        "add up",
    ),
    (
        read_messages.read_verdicts,
        said(read_messages.verdicts(Verdicts(3, 1, 0, [bad(0), bad(0)]))),
        "add up",
    ),
    (contents_of, packed("!BI", 1, 41, rest=bytes(pack(1))), "as long as it says"),
    (contents_of, packed("!BI", 0, 40, rest=bytes(pack(1))), "as long as it says"),
    (contents_of, packed("!BI", 0, MAX_RAW + 1), "bytes in a part"),
    (read_messages.read_piece, packed("!BI", 0, 0), "0 bytes in a part"),
    (read_messages.read_piece, packed("!BI", 0, MAX_CHUNK + 1), "bytes in a part"),
    (read_messages.read_blob_end, memoryview(b"\2"), "says nothing"),
    (read_messages.read_not_given, packed("!32sB", A, 0), "unknown verdict"),
    (read_messages.read_not_given, packed("!32sB", A, 4), "unknown verdict"),
    (dump_messages.read_named, memoryview(b"x" * len(DUMP)), "name of a dump"),
    (dump_messages.read_named, memoryview(DUMP.replace("0102", "1302").encode()), "name of a dump"),
    (dump_messages.read_names, memoryview(DUMP.encode() * 2)[:-1], "name of a dump"),
    (dump_messages.read_arrival, -1, "no clock"),  # type: ignore[list-item]
    (dump_messages.read_arrival, dump_messages.arrival_us(10**30) + 1, "no clock"),  # type: ignore[list-item]
    (file_messages.read_below, memoryview(b"etc"), "neither"),
    (file_messages.read_below, memoryview(b"/"), "neither"),
    (file_messages.read_below, memoryview(b"../"), "neither"),
    (file_messages.read_below, memoryview(b"etc/map/"), "neither"),
    (file_messages.read_below, memoryview(f"{VERSION}/map/".encode()), "neither"),
    (file_messages.read_name, memoryview(b"etc/map"), "file of a snapshot"),
    (file_messages.read_name, memoryview(f"{FILE}/x".encode()), "file of a snapshot"),
    (file_messages.read_name, memoryview(FILE.replace("map", "..").encode()), "file of a"),
    (file_messages.read_name, memoryview(f"../{FILE[4:]}".encode()), "file of a snapshot"),
    (file_messages.read_said, memoryview(bytes([file_messages.UNREADABLE + 1])), "unknown answer"),
    (listed(file_messages.read_names), packed("!Qq", 7, 0, rest=FILE.encode()), "cut short"),
]


@pytest.mark.parametrize(("read", "payload", "why"), WRONG)
def test_what_cannot_be_is_refused(
    read: Callable[[Any], Any], payload: memoryview, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        read(payload)


def test_a_file_from_before_1970_has_arrived_then() -> None:
    assert dump_messages.arrival_us(-1) == 0
    assert dump_messages.arrival_us(2000) == 2
    assert dump_messages.read_arrival(dump_messages.arrival_us(10**30)) == LAST


def test_the_texts_of_a_receipt_are_left_out_once_there_are_too_many() -> None:
    count = write_messages._RECEIPT_TEXTS // MAX_TEXT + 2
    some = [Exceptional(nth, 3, "x" * MAX_TEXT) for nth in range(count)]

    found = write_messages.read_receipt(said(write_messages.receipt(receipt(0, 0, 0, *some))))

    lengths = [len(each.text) for each in found.exceptions]
    assert sum(lengths) <= write_messages._RECEIPT_TEXTS < sum(lengths) + 2 * MAX_TEXT
    assert set(lengths[count - 1 :]) == {0}
