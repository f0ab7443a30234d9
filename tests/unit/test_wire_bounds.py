"""Each bound of a message: what lies on it comes back as it went, what lies beyond is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ntt_backup.wire import file_messages, read_messages, stored_names, write_messages
from ntt_backup.wire.file_messages import MAX_OPEN
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
from ntt_backup.wire.stored_names import DUMPS, SNAPSHOTS
from ntt_backup.wire.write_messages import Batch, Exceptional, Large, Receipt

A, B = bytes(range(32)), b"\xff" * 32
DUMP = "20260102T030405Z-db000001.dump"
FILE = "etc/20260102T030405Z-01234567/map"
VERSION = "etc/20260102T030405Z-01234567"
NAMES = {
    SNAPSHOTS: [FILE, f"{FILE}.age", f"{VERSION}/pack-99999"],
    DUMPS: [DUMP, f"{DUMP}.age", f"{DUMP}.json"],
}
LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


def said(frame: bytes) -> memoryview:
    """The payload of a frame that was made here."""
    return memoryview(frame)[HEADER.size : -CRC_BYTES]


def packed(layout: str, *values: Any, rest: bytes = b"") -> memoryview:
    return memoryview(struct.pack(layout, *values) + rest)


def listed(read: Callable[[Any], Iterator[Any]]) -> Callable[[Any], list[Any]]:
    return lambda payload: list(read(payload))


def of(area: str, read: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """Reads what is said about the files of an area."""
    return lambda payload: read(area, payload)


def listed_of(area: str, payload: Any) -> list[Any]:
    return list(file_messages.read_names(area, payload))


def slotted(payload: memoryview) -> tuple[int, bytes]:
    slot, rest = file_messages.read_slot(payload)
    return slot, bytes(rest)


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
    (of(DUMPS, file_messages.read_below), file_messages.listing(""), ""),
    *(
        (of(SNAPSHOTS, file_messages.read_below), file_messages.listing(below), below)
        for below in ("", "etc/", f"{VERSION}/")
    ),
    *(
        (of(area, file_messages.read_name), file_messages.listing(name), name)
        for area, names in NAMES.items()
        for name in names
    ),
    (slotted, file_messages.file_data(0, b"x"), (0, b"x")),
    (slotted, file_messages.file_data(MAX_OPEN - 1, bytes(MAX_CHUNK)), (3, bytes(MAX_CHUNK))),
    (slotted, file_messages.file_end(1), (1, b"")),
    (slotted, file_messages.publishing(1, FILE), (1, FILE.encode())),
    (slotted, file_messages.discarding(1), (1, b"")),
    (file_messages.read_file_sum, file_messages.file_sum(2**64 - 1, A), (2**64 - 1, A)),
    (
        file_messages.read_said,
        file_messages.said(file_messages.UNREADABLE, "why"),
        (file_messages.UNREADABLE, "why"),
    ),
    *(
        (
            of(area, file_messages.read_reading),
            file_messages.reading(names[0], 2**64 - 1, 4),
            (names[0], 2**64 - 1, 4),
        )
        for area, names in NAMES.items()
    ),
    *(
        (of(area, file_messages.read_removing), file_messages.removing(names), names)
        for area, names in NAMES.items()
    ),
    *(
        (
            of(area, listed_of),
            file_messages.names([(name, 7, 0), (name, 2**64 - 1, stored_names.arrival_us(10**30))]),
            [(name, 7, datetime(1970, 1, 1, tzinfo=UTC)), (name, 2**64 - 1, LAST)],
        )
        for area, (name, *_) in NAMES.items()
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
    *(
        (of(SNAPSHOTS, file_messages.read_below), memoryview(below.encode()), "is no directory of")
        for below in ("etc", "/", "../", "etc/map/", f"{VERSION}/map/", f"/{VERSION}/", "etc//")
    ),
    *(
        (of(DUMPS, file_messages.read_below), memoryview(below), "is no directory of")
        for below in (b"etc/", b"/", b"20260102T030405Z-01234567/")
    ),
    *(
        (of(SNAPSHOTS, file_messages.read_name), memoryview(name.encode()), "is not a")
        for name in (
            "",
            "etc/map",
            f"{FILE}/x",
            FILE.replace("map", ".."),
            FILE.replace("0102", "1302"),
            f"../{FILE[4:]}",
            f"{FILE}.json",
            f"{FILE}.age.age",
            DUMP,
        )
    ),
    *(
        (of(DUMPS, file_messages.read_name), memoryview(name.encode()), "is not the name of a")
        for name in (
            "",
            "x" * len(DUMP),
            f"{DUMP}\n",
            f"/{DUMP}",
            f"{DUMP}.json.age",
            f"{DUMP}.age.json",
            f"{DUMP}.age.age",
            f"{DUMP}.sealed",
            DUMP.replace("2", "\u0662"),
            FILE,
        )
    ),
    (of(DUMPS, file_messages.read_name), memoryview(DUMP.replace("0102", "1302").encode()), "time"),
    (of(DUMPS, file_messages.read_removing), memoryview(f"{DUMP}\n".encode()), "is not the name"),
    (of(DUMPS, file_messages.read_removing), memoryview(DUMP.encode() * 2), "is not the name"),
    (slotted, memoryview(bytes([MAX_OPEN])), "a slot of 4"),
    (slotted, memoryview(b"\xffcontent"), "a slot of 255"),
    (file_messages.read_said, memoryview(bytes([file_messages.UNREADABLE + 1])), "unknown answer"),
    (of(SNAPSHOTS, listed_of), packed("!Qq", 7, 0, rest=FILE.encode()), "cut short"),
    (of(SNAPSHOTS, listed_of), packed("!Qq", 7, 0, rest=b"\n"), "is not a file of a snapshot"),
    (of(SNAPSHOTS, listed_of), packed("!Qq", 7, 0, rest=f"{FILE}\n\n".encode()), "cut short"),
    *(
        (of(SNAPSHOTS, listed_of), packed("!Qq", 7, when, rest=f"{FILE}\n".encode()), "no clock")
        for when in (-1, -(2**63), stored_names.arrival_us(10**30) + 1, 2**63 - 1)
    ),
]


@pytest.mark.parametrize(("read", "payload", "why"), WRONG)
def test_what_cannot_be_is_refused(
    read: Callable[[Any], Any], payload: memoryview, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        read(payload)


def test_a_file_from_before_1970_has_arrived_then() -> None:
    assert stored_names.arrival_us(-1) == 0
    assert stored_names.arrival_us(2000) == 2
    assert stored_names.read_arrival(stored_names.arrival_us(10**30)) == LAST


def test_the_texts_of_a_receipt_are_left_out_once_there_are_too_many() -> None:
    count = write_messages._RECEIPT_TEXTS // MAX_TEXT + 2
    some = [Exceptional(nth, 3, "x" * MAX_TEXT) for nth in range(count)]

    found = write_messages.read_receipt(said(write_messages.receipt(receipt(0, 0, 0, *some))))

    lengths = [len(each.text) for each in found.exceptions]
    assert sum(lengths) <= write_messages._RECEIPT_TEXTS < sum(lengths) + 2 * MAX_TEXT
    assert set(lengths[count - 1 :]) == {0}
