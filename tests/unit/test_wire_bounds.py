"""Each bound of a message: what lies on it comes back as it went, what lies beyond is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ntt_backup.wire import messages, stored_names, tails
from ntt_backup.wire.framing import (
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
from ntt_backup.wire.messages import (
    MAX_OPEN,
    Batch,
    BlobHash,
    Exceptional,
    Large,
    Listed,
    Range,
    Receipt,
)
from ntt_backup.wire.stored_names import DUMPS, SNAPSHOTS

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


def of(area: str, read: Callable[..., Any]) -> Callable[[Any], Any]:
    """Reads what is said about the files of an area."""
    return lambda payload: read(payload, area)


def listed_of(payload: Any, area: str) -> list[Any]:
    return list(messages.FILE_NAMES.read(payload, area))


def slotted(payload: memoryview) -> tuple[int, bytes]:
    slot, rest = messages.FILE_DATA.read(payload)
    return slot, bytes(rest)


def name_of(payload: Any, area: str) -> Any:
    return messages.PUBLISH.read(b"\0" + bytes(payload), area)[1]


def pack(*sizes: int, extra: int = 0) -> memoryview:
    table = messages.table([A] * len(sizes), sizes)
    return memoryview(table + bytes(sum(sizes) + extra))


def receipt(outcome: int = 0, hashed: int = 0, stored: int = 1, *some: Exceptional) -> Receipt:
    return Receipt(7, outcome, hashed, stored, list(some))


def contents_of(payload: memoryview) -> list[tuple[bytes, bytes]]:
    return [(digest, bytes(one)) for digest, one in messages.CONTENTS.read(payload)]


RIGHT: list[tuple[Callable[[Any], Any], bytes, Any]] = [
    (messages.BATCH.read, messages.BATCH.frame(3, 1, 0), Batch(3, 1, 0)),
    (
        messages.BATCH.read,
        messages.BATCH.frame(3, MAX_BLOBS, MAX_BLOB),
        Batch(3, MAX_BLOBS, MAX_BLOB),
    ),
    (
        messages.LARGE.read,
        messages.LARGE.frame(A, MAX_BLOB, MAX_BLOB),
        Large(A, MAX_BLOB, MAX_BLOB),
    ),
    (messages.END.read, messages.END.frame(0), (0, b"")),
    (messages.END.read, messages.END.frame(1, A), (1, A)),
    (messages.COMMIT.read, messages.COMMIT.frame(2**32 - 1), 2**32 - 1),
    (messages.ASK_OFFSET.read, messages.ASK_OFFSET.frame(A, MAX_BLOB), (A, MAX_BLOB)),
    (messages.PLACE.read, messages.PLACE.frame(), b""),
    (messages.PLACE.read, messages.PLACE.frame(A[:16]), A[:16]),
    (messages.OFFSET.read, messages.OFFSET.frame(9, B), (9, B)),
    (
        messages.ERROR.read,
        messages.ERROR.frame("c" * (MAX_CODE + 1), "t" * (MAX_TEXT + 1)),
        ("c" * MAX_CODE, "t" * MAX_TEXT),
    ),
    (
        messages.RECEIPT.read,
        messages.RECEIPT.frame(*receipt(1, 1, MAX_BLOBS, Exceptional(0, 5, "x" * MAX_TEXT))),
        receipt(1, 1, MAX_BLOBS, Exceptional(0, 5, "x" * MAX_TEXT)),
    ),
    (
        messages.RECEIPT.read,
        messages.RECEIPT.frame(*receipt(0, 0, 0, Exceptional(2**32 - 1, 1, ""))),
        receipt(0, 0, 0, Exceptional(2**32 - 1, 1, "")),
    ),
    (messages.LIST.read, messages.LIST.frame(A, B, 2**32 - 1), Range(A, B, 2**32 - 1)),
    (
        messages.VERIFY.read,
        messages.VERIFY.frame(messages.SHA256, B, [A, B]),
        messages.SumQuestion(messages.SHA256, B, [A, B]),
    ),
    (
        messages.HASH.read,
        messages.HASH.frame(messages.BLAKE3, [B]),
        messages.HashQuestion(messages.BLAKE3, [B]),
    ),
    (messages.GET.read, messages.GET.frame(9, [A]), (9, [A])),
    (messages.GET.read, messages.GET.frame(0, [A, B]), (0, [A, B])),
    (listed(messages.NAMES.read), messages.NAMES.frame([(A, 1), (B, 2)]), [(A, 1), (B, 2)]),
    (messages.STRAY.read, messages.STRAY.frame(2, "aa/b\n"), (2, "aa/b")),
    (
        messages.LISTED.read,
        messages.LISTED.frame(*Listed(1, 2, 3, True)),
        Listed(1, 2, 3, True),
    ),
    (
        messages.HASHED.read,
        messages.HASHED.frame([BlobHash(0, 2**60, A), BlobHash(3, 0, B, "why")]),
        [BlobHash(0, 2**60, A), BlobHash(3, 0, B, "why")],
    ),
    (
        messages.SUMS.read,
        messages.SUMS.frame([(0, A[:12]), (3, B[:12])]),
        [(0, A[:12]), (3, B[:12])],
    ),
    (contents_of, messages.contents([A, B], [2, 0], [b"xy"]), [(A, b"xy"), (B, b"")]),
    (bytes, messages.piece(b"x"), b"\0\0\0\0\1x"),
    (messages.PIECE.read, messages.piece(bytes(MAX_CHUNK)), bytes(MAX_CHUNK)),
    (messages.BLOB_END.read, messages.BLOB_END.frame(1, "gone"), (1, "gone")),
    (messages.NOT_GIVEN.read, messages.NOT_GIVEN.frame(A, 3, "why"), (A, 3, "why")),
    (of(DUMPS, messages.FILES.read), messages.FILES.frame(""), ""),
    *(
        (of(SNAPSHOTS, messages.FILES.read), messages.FILES.frame(below), below)
        for below in ("", "etc/", f"{VERSION}/")
    ),
    *(
        (of(area, name_of), messages.FILES.frame(name), name)
        for area, names in NAMES.items()
        for name in names
    ),
    (slotted, messages.FILE_DATA.frame(0, b"x"), (0, b"x")),
    (slotted, messages.FILE_DATA.frame(MAX_OPEN - 1, bytes(MAX_CHUNK)), (3, bytes(MAX_CHUNK))),
    (messages.FILE_END.read, messages.FILE_END.frame(1), 1),
    (slotted, messages.PUBLISH.frame(1, FILE), (1, FILE.encode())),
    (messages.DISCARD.read, messages.DISCARD.frame(1), 1),
    (messages.FILE_SUM.read, messages.FILE_SUM.frame(2**64 - 1, A), (2**64 - 1, A)),
    (
        messages.FILE_SAID.read,
        messages.FILE_SAID.frame(messages.UNREADABLE, "why"),
        (messages.UNREADABLE, "why"),
    ),
    *(
        (
            of(area, messages.READ.read),
            messages.READ.frame(2**64 - 1, 4, names[0]),
            (2**64 - 1, 4, names[0]),
        )
        for area, names in NAMES.items()
    ),
    *(
        (of(area, messages.REMOVE.read), messages.REMOVE.frame(names), names)
        for area, names in NAMES.items()
    ),
    *(
        (
            of(area, listed_of),
            messages.FILE_NAMES.frame(
                [(name, 7, 0), (name, 2**64 - 1, stored_names.arrival_us(10**30))]
            ),
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
    (messages.BATCH.read, said(messages.BATCH.frame(3, 0, 0)), "a batch of 0 blobs"),
    (messages.BATCH.read, said(messages.BATCH.frame(3, MAX_BLOBS + 1, 0)), "a batch of"),
    (messages.BATCH.read, said(messages.BATCH.frame(3, 1, MAX_BLOB + 1)), "a batch of"),
    (messages.PACK.read, packed("!BI", 0, 0), "0 bytes in a part"),
    (messages.PACK.read, packed("!BI", 0, MAX_RAW + 1), f"{MAX_RAW + 1} bytes in a part"),
    (messages.DATA.read, packed("!BI", 0, 0), "0 bytes in a part"),
    (messages.DATA.read, packed("!BI", 0, MAX_CHUNK + 1), f"{MAX_CHUNK + 1} bytes in a part"),
    (messages.read_table, memoryview(b"\0\0\0"), "without a table"),
    (messages.read_table, packed("!I", 0), "cannot hold 0"),
    (
        messages.read_table,
        packed("!I", MAX_BLOBS + 1, rest=bytes(36 * MAX_BLOBS + 36)),
        "hold",
    ),
    (messages.read_table, pack(1, 2)[:-4], "cannot hold|add up"),
    (messages.read_table, packed("!I", 1, rest=A), "cannot hold 1"),
    (messages.read_table, pack(1, 2, extra=1), "add up"),
    (messages.read_table, pack(1, 2)[:-1], "add up"),
    (messages.read_table, pack(PACK_BYTES + 1), "a blob of"),
    (messages.LARGE.read, packed("!32sQQ", A, MAX_BLOB + 1, 0), "a blob of"),
    (messages.LARGE.read, packed("!32sQQ", A, 5, 6), "a blob of 5 bytes from 6"),
    (messages.END.read, memoryview(b"\2"), "says nothing"),
    (messages.END.read, memoryview(b"\0x"), "says nothing"),
    (messages.END.read, memoryview(b"\0" + A + b"x"), "says nothing"),
    (messages.ASK_OFFSET.read, packed("!32sQ", A, MAX_BLOB + 1), "a blob of"),
    (messages.PLACE.read, memoryview(A[:15]), "cut short"),
    (messages.PLACE.read, memoryview(A[:1]), "cut short"),
    (messages.RECEIPT.read, packed("!IBBII", 7, 2, 0, 0, 0), "unknown outcome"),
    (messages.RECEIPT.read, packed("!IBBII", 7, 0, 2, 0, 0), "unknown outcome"),
    (messages.RECEIPT.read, packed("!IBBII", 7, 0, 0, MAX_BLOBS + 1, 0), "too many"),
    (messages.RECEIPT.read, packed("!IBBII", 7, 0, 0, 0, MAX_BLOBS + 1), "too many"),
    (messages.RECEIPT.read, packed("!IBBII", 7, 0, 0, 0, 1), "more or less"),
    (
        messages.RECEIPT.read,
        packed("!IBBIIIBH", 7, 0, 0, 0, 0, 0, 1, 0),
        "more or less",
    ),
    (messages.RECEIPT.read, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 0, 0), "verdict"),
    (messages.RECEIPT.read, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 6, 0), "verdict"),
    (messages.RECEIPT.read, packed("!IBBIIIB", 7, 0, 0, 0, 1, 0, 1), "entry that is cut"),
    (messages.RECEIPT.read, packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 1, 1), "text that is cut"),
    (
        messages.RECEIPT.read,
        packed("!IBBIIIBH", 7, 0, 0, 0, 1, 0, 1, MAX_TEXT + 1, rest=bytes(MAX_TEXT + 1)),
        "text that is cut",
    ),
    (messages.VERIFY.read, packed("!B", 0, rest=A + A + b"x"), "digest that is cut"),
    (messages.VERIFY.read, packed("!B", 2, rest=A + A), "unknown hash"),
    (messages.HASH.read, packed("!B", 2, rest=A), "unknown hash"),
    (messages.GET.read, packed("!Q", 1, rest=A + B), "offset for several"),
    (messages.NAMES.read, memoryview(A), "row that is cut"),
    (messages.HASHED.read, said(messages.HASHED.frame([BlobHash(4, 0, A)])), "unknown state"),
    (messages.SUMS.read, said(messages.SUMS.frame([(4, A[:12])])), "unknown state"),
    (messages.SUMS.read, memoryview(bytes(14)), "row that is cut"),
    (contents_of, packed("!BI", 1, 41, rest=bytes(pack(1))), "as long as it says"),
    (contents_of, packed("!BI", 0, 40, rest=bytes(pack(1))), "as long as it says"),
    (contents_of, packed("!BI", 0, MAX_RAW + 1), "bytes in a part"),
    (messages.PIECE.read, packed("!BI", 0, 0), "0 bytes in a part"),
    (messages.PIECE.read, packed("!BI", 0, MAX_CHUNK + 1), "bytes in a part"),
    (messages.BLOB_END.read, memoryview(b"\2"), "says nothing"),
    (messages.NOT_GIVEN.read, packed("!32sB", A, 0), "unknown verdict"),
    (messages.NOT_GIVEN.read, packed("!32sB", A, 4), "unknown verdict"),
    *(
        (of(SNAPSHOTS, messages.FILES.read), memoryview(below.encode()), "is no directory of")
        for below in ("/", "../", "etc/map/", f"{VERSION}/map/", f"/{VERSION}/", "etc//")
    ),
    *(
        (of(DUMPS, messages.FILES.read), memoryview(below), "is no directory of")
        for below in (b"etc/", b"/", b"20260102T030405Z-01234567/")
    ),
    *(
        (of(SNAPSHOTS, name_of), memoryview(name.encode()), "is not a")
        for name in (
            "",
            "etc/map",
            f"{FILE}/x",
            FILE.replace("map", ".."),
            FILE.replace("0102", "1302"),
            f"../{FILE[4:]}",
            f"{FILE}.json",
            f"{FILE}.age.age",
            f"etc/../{FILE}",
            f"/{FILE}",
            f"{FILE}/",
            f"{FILE}\0",
            f"ETC{FILE[3:]}",
            f"{'x' * 32}{FILE[3:]}",
            f"{VERSION}/.incoming",
            f"{VERSION}/pack-1",
            f"{VERSION}/pack-\u0661\u0661\u0661\u0661\u0661",
            DUMP,
        )
    ),
    *(
        (of(DUMPS, name_of), memoryview(name.encode()), "is not the name of a")
        for name in (
            "",
            "x" * len(DUMP),
            f"{DUMP}\n",
            f"/{DUMP}",
            f"{DUMP}.json.age",
            f"{DUMP}.age.json",
            f"{DUMP}.age.age",
            f"{DUMP}.sealed",
            DUMP[:-1],
            DUMP.upper(),
            "\0" * len(DUMP),
            f"../pgdump/{DUMP}",
            ".incoming-00000000",
            f"{DUMP[:-5]}/dump",
            DUMP.replace("2", "\u0662"),
            FILE,
        )
    ),
    (of(DUMPS, name_of), memoryview(DUMP.replace("0102", "1302").encode()), "time"),
    (of(DUMPS, messages.REMOVE.read), memoryview(f"{DUMP}\n".encode()), "is not the name"),
    (of(DUMPS, messages.REMOVE.read), memoryview(DUMP.encode() * 2), "is not the name"),
    (slotted, memoryview(bytes([MAX_OPEN])), "a slot of 4"),
    (slotted, memoryview(b"\xffcontent"), "a slot of 255"),
    (messages.FILE_END.read, memoryview(bytes([MAX_OPEN])), "a slot of 4"),
    (messages.DISCARD.read, memoryview(bytes([MAX_OPEN])), "a slot of 4"),
    (of(SNAPSHOTS, messages.PUBLISH.read), memoryview(b"\4" + FILE.encode()), "a slot of 4"),
    (messages.FILE_SAID.read, memoryview(bytes([messages.UNREADABLE + 1])), "unknown answer"),
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
    count = tails.RECEIPT_TEXTS // MAX_TEXT + 2
    some = [Exceptional(nth, 3, "x" * MAX_TEXT) for nth in range(count)]

    found = messages.RECEIPT.read(said(messages.RECEIPT.frame(*receipt(0, 0, 0, *some))))

    lengths = [len(each.text) for each in found.exceptions]
    assert sum(lengths) <= tails.RECEIPT_TEXTS < sum(lengths) + 2 * MAX_TEXT
    assert set(lengths[count - 1 :]) == {0}
