"""The bytes of every message stay as they were recorded: both ends may have different versions."""

from __future__ import annotations

from pathlib import Path

from ntt_backup.wire import file_messages, framing, read_messages, write_messages
from ntt_backup.wire.read_messages import BadBlob, Listed, Verdicts
from ntt_backup.wire.write_messages import Exceptional, Receipt

# One frame a line, in hexadecimal, in the order of FRAMES.
RECORDED = Path(__file__).with_name("wire_frames.txt")

A, B = bytes(range(32)), b"\xff" * 32
FILE = "etc/20260102T030405Z-01234567/map"
DUMP = "20260102T030405Z-db000001.dump"
SOME = [
    Exceptional(0, 1, ""),
    Exceptional(70_000, 4, "EIO: b\u00e4d\n sector"),
    Exceptional(2, 3, "x"),
]
BAD = [BadBlob(2, 1, 0, bytes(32), ""), BadBlob(0, 3, 2**40, B, "EIO: b\u00e4d")]
TABLE = write_messages.table([A, B], [2, 3])

FRAMES = [
    write_messages.fields(framing.HELLO, {"protocol": 1, "root": "/srv/\u00e4", "slot": "w0"}),
    write_messages.batch(3, 100_000, 2**60),
    framing.frame(framing.PACK, write_messages.part_prefix(0, len(TABLE) + 5), TABLE, b"xxyyy"),
    framing.frame(framing.PACK, write_messages.part_prefix(2, 81, A), b"packed"),
    framing.head(framing.PACK, 1 << 20),
    write_messages.large(A, 2**60, 2**40),
    framing.frame(framing.DATA, write_messages.part_prefix(3, 1 << 20), b"packed"),
    write_messages.end(write_messages.COMPLETE),
    write_messages.end(write_messages.COMPLETE, A),
    write_messages.end(write_messages.WITHDRAWN),
    write_messages.numbered(framing.COMMIT, 2**32 - 1),
    write_messages.numbered(framing.ABORT, 7),
    write_messages.ask_offset(A, 2**60),
    framing.frame(framing.PING, b"12345678"),
    framing.frame(framing.BYE),
    framing.frame(framing.PLACE),
    write_messages.fields(framing.READY, {"free_bytes": 2**62, "free_inodes": -1, "sync": "fsync"}),
    write_messages.receipt(Receipt(7, 0, 1, 99_997, SOME)),
    write_messages.receipt(Receipt(8, 1, 0, 0, SOME[1:2])),
    write_messages.receipt(Receipt(9, 0, 1, 100_000, [])),
    write_messages.numbered(framing.ABORTED, 7),
    write_messages.offset(2**40, B),
    framing.frame(framing.PONG, b"12345678"),
    framing.frame(framing.BUSY),
    write_messages.error("storage" * 9, "E\u00c4O:\tbad\n sector" * 40),
    framing.frame(framing.LEFT),
    read_messages.listing(A, B, 2**32 - 1),
    read_messages.verifying([A, B]),
    read_messages.getting([A], 2**40),
    read_messages.getting([A, B]),
    read_messages.names([(A, 1), (B, 2**60)]),
    read_messages.stray(2, "aa/b\u00e4\n"),
    read_messages.listed(Listed(1, 2**60, 3, True)),
    read_messages.verdicts(Verdicts(3, 1, 2**50, BAD)),
    read_messages.contents([A, B], [2, 0], [b"xy", b""]),
    read_messages.blob(A, 2**60, 9),
    read_messages.piece(b"xyz"),
    read_messages.blob_end(read_messages.COMPLETE),
    read_messages.blob_end(read_messages.BROKEN, "EIO: b\u00e4d"),
    read_messages.not_given(A, read_messages.UNREADABLE, "EIO"),
    read_messages.given(4096),
    file_messages.listing(""),
    file_messages.listing("etc/"),
    file_messages.file_data(3, b"content"),
    file_messages.file_end(1),
    file_messages.publishing(1, FILE),
    file_messages.discarding(2),
    file_messages.reading(FILE, 2**40, 2**41),
    file_messages.removing([DUMP, f"{DUMP}.json"]),
    file_messages.names([(FILE, 2**40, 1_700_000_000_000_000), (f"{FILE}.age", 0, 0)]),
    file_messages.file_sum(2**40, A),
    file_messages.said(file_messages.GIVEN),
    file_messages.said(file_messages.UNREADABLE, "EIO: b\u00e4d"),
    file_messages.done(500),
]


def test_the_bytes_of_every_message_are_those_that_were_recorded() -> None:
    assert [frame.hex() for frame in FRAMES] == RECORDED.read_text("ascii").split()


def test_every_message_was_recorded() -> None:
    kinds = {bytes.fromhex(line)[4] for line in RECORDED.read_text("ascii").split()}
    assert kinds == {
        *(*range(1, 13), *range(129, 137), *range(32, 35)),
        *(*range(160, 170), *range(64, 71), *range(192, 196)),
    }
