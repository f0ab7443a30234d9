"""The bytes of every message stay as they were recorded: both ends may have different versions."""

from __future__ import annotations

from pathlib import Path

from ntt_backup.wire import framing, messages
from ntt_backup.wire.messages import BlobHash, Exceptional

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
FOUND = [BlobHash(0, 2**60, A), BlobHash(1, 0, bytes(32)), BlobHash(3, 2**40, B, "EIO: b\u00e4d")]
TABLE = messages.table([A, B], [2, 3])

FRAMES = [
    messages.HELLO.frame({"protocol": 1, "root": "/srv/\u00e4", "slot": "w0"}),
    messages.BATCH.frame(3, 100_000, 2**60),
    messages.PACK.frame(0, len(TABLE) + 5, TABLE + b"xxyyy"),
    messages.PACK.frame(2, 81, A + b"packed"),
    framing.head(messages.PACK, 1 << 20),
    messages.LARGE.frame(A, 2**60, 2**40),
    messages.DATA.frame(3, 1 << 20, b"packed"),
    messages.END.frame(messages.COMPLETE),
    messages.END.frame(messages.COMPLETE, A),
    messages.END.frame(messages.WITHDRAWN),
    messages.COMMIT.frame(2**32 - 1),
    messages.ABORT.frame(7),
    messages.ASK_OFFSET.frame(A, 2**60),
    messages.PING.frame(b"12345678"),
    messages.BYE.frame(),
    messages.PLACE.frame(b""),
    messages.PLACE.frame(A[:16]),
    messages.READY.frame({"free_bytes": 2**62, "free_inodes": -1, "sync": "fsync"}),
    messages.RECEIPT.frame(7, 0, 1, 99_997, SOME),
    messages.RECEIPT.frame(8, 1, 0, 0, SOME[1:2]),
    messages.RECEIPT.frame(9, 0, 1, 100_000, []),
    messages.ABORTED.frame(7),
    messages.OFFSET.frame(2**40, B),
    messages.PONG.frame(b"12345678"),
    messages.BUSY.frame(),
    messages.ERROR.frame("storage" * 9, "E\u00c4O:\tbad\n sector" * 40),
    messages.LEFT.frame(),
    messages.LIST.frame(A, B, 2**32 - 1),
    messages.VERIFY.frame(messages.SHA256, B, [A, B]),
    messages.HASH.frame(messages.BLAKE3, [A]),
    messages.GET.frame(2**40, [A]),
    messages.GET.frame(0, [A, B]),
    messages.NAMES.frame([(A, 1), (B, 2**60)]),
    messages.STRAY.frame(2, "aa/b\u00e4\n"),
    messages.LISTED.frame(1, 2**60, 3, True),
    messages.SUMS.frame([(0, A[:12]), (1, bytes(12))]),
    messages.HASHED.frame(FOUND),
    messages.contents([A, B], [2, 0], [b"xy", b""]),
    messages.BLOB.frame(A, 2**60, 9),
    messages.piece(b"xyz"),
    messages.BLOB_END.frame(messages.COMPLETE),
    messages.BLOB_END.frame(messages.BROKEN, "EIO: b\u00e4d"),
    messages.NOT_GIVEN.frame(A, messages.UNREADABLE, "EIO"),
    messages.GIVEN.frame(4096),
    messages.FILES.frame(""),
    messages.FILES.frame("etc/"),
    messages.FILE_DATA.frame(3, b"content"),
    messages.FILE_END.frame(1),
    messages.PUBLISH.frame(1, FILE),
    messages.DISCARD.frame(2),
    messages.READ.frame(2**40, 2**41, FILE),
    messages.PROVE.frame(messages.BLAKE3, FILE),
    messages.REMOVE.frame([DUMP, f"{DUMP}.json"]),
    messages.FILE_NAMES.frame([(FILE, 2**40, 1_700_000_000_000_000), (f"{FILE}.age", 0, 0)]),
    messages.FILE_SUM.frame(2**40, A),
    messages.FILE_SAID.frame(messages.SUCCEEDED),
    messages.FILE_SAID.frame(messages.UNREADABLE, "EIO: b\u00e4d"),
    messages.DONE.frame(500),
]


def test_the_bytes_of_every_message_are_those_that_were_recorded() -> None:
    assert [frame.hex() for frame in FRAMES] == RECORDED.read_text("ascii").split()


def test_every_message_was_recorded() -> None:
    kinds = {bytes.fromhex(line)[4] for line in RECORDED.read_text("ascii").split()}
    assert kinds == {*messages.to_receiver(messages.ANY), *messages.to_client(messages.ANY)}
    assert len(kinds) == 47
    assert frozenset({messages.PACK, messages.DATA}) == framing.CONTENT


def test_what_is_around_data_makes_a_frame_of_it() -> None:
    before, after = messages.FILE_DATA.around(b"content", 2)
    assert before + b"content" + after == messages.FILE_DATA.frame(2, b"content")
