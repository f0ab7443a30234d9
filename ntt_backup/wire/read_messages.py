"""The frames of a reading session: what a client may ask of what lies below `by-hash`, and what it
is told.

Kept apart from `frames`, which are those of a session that puts: neither may speak the other's
words, and what only reads can then be seen to be unable to write. Content has a CRC-32 here too,
although the client checks every blob against its name: a bit that flips on the way must cost a
second try, and may not pass for a blob that is corrupt on the remote.

Pure: bytes in, values out; whatever is not as described raises `ProtocolError`. `docs/protocol.md`
says who may send what when.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ntt_backup.wire import write_messages
from ntt_backup.wire.write_messages import DIGEST_BYTES, MAX_TEXT, Buffer, ProtocolError

# client -> receiver
LIST, VERIFY, GET, SUMS, BLOCKS = range(32, 37)
# receiver -> client
NAMES, STRAY, LISTED, VERDICTS, CONTENTS, LARGE, PIECE, END, NOT_GIVEN, GIVEN = range(160, 170)
BLOCK_SUMS = 170

RIGHT, MISSING, WRONG, UNREADABLE = range(4)
COMPLETE, BROKEN = range(2)

MAX_DIGESTS = 4096
MAX_NAMES = 8192
# Further ones are counted only, but for directories that cannot be read: what is not listed may
# be there.
MAX_STRAYS = 1000
MAX_DIRECTORIES = 256 + 256 * 256
# How finely a large blob that is wrong is mended.
BLOCK_BYTES = 256 << 10
SUM_BYTES = 16
MAX_SUMS = 16_384

_LIST = struct.Struct("!32s32sI")
_NAME = struct.Struct("!32sQ")
_LISTED = struct.Struct("!QQQ?")
_VERDICTS = struct.Struct("!IIQ")
_EXCEPTION = struct.Struct("!IBQ32sH")
_OFFSET = struct.Struct("!Q")
_LARGE = struct.Struct("!32sQQ")
_NOT_GIVEN = struct.Struct("!32sB")
_COUNT = struct.Struct("!I")

_DIGESTS = (DIGEST_BYTES, MAX_DIGESTS * DIGEST_BYTES)

# Shortest and longest payload of every type a receiver takes.
TO_RECEIVER = {
    **write_messages.TO_RECEIVER,
    LIST: (_LIST.size, _LIST.size),
    VERIFY: _DIGESTS,
    GET: (_OFFSET.size + DIGEST_BYTES, _OFFSET.size + _DIGESTS[1]),
    SUMS: (DIGEST_BYTES, DIGEST_BYTES),
    BLOCKS: (DIGEST_BYTES + _COUNT.size, DIGEST_BYTES + MAX_DIGESTS * _COUNT.size),
}
# ... and a client that reads.
TO_CLIENT = {
    **{
        kind: write_messages.TO_CLIENT[kind]
        for kind in (
            write_messages.READY,
            write_messages.PONG,
            write_messages.BUSY,
            write_messages.LEFT,
        )
    },
    write_messages.ERROR: write_messages.TO_CLIENT[write_messages.ERROR],
    NAMES: (_NAME.size, _NAME.size * MAX_NAMES),
    STRAY: (2, 1 + MAX_TEXT),
    LISTED: (_LISTED.size, _LISTED.size),
    VERDICTS: (_VERDICTS.size, _VERDICTS.size + MAX_DIGESTS * (_EXCEPTION.size + MAX_TEXT)),
    CONTENTS: (9, write_messages.MAX_PAYLOAD),
    LARGE: (_LARGE.size, _LARGE.size),
    PIECE: (6, write_messages.MAX_CHUNK + 4096),
    END: (1, 1 + MAX_TEXT),
    NOT_GIVEN: (_NOT_GIVEN.size, _NOT_GIVEN.size + MAX_TEXT),
    GIVEN: (_COUNT.size, _COUNT.size),
    BLOCK_SUMS: (_OFFSET.size, _OFFSET.size + MAX_SUMS * SUM_BYTES),
}


class Range(NamedTuple):
    """LIST: the names from low to high, both included, at most so many of them (0: all)."""

    low: bytes
    high: bytes
    most: int


class Listed(NamedTuple):
    """LISTED: what a LIST came to. more: there are names that `most` left out."""

    names: int
    bytes: int
    strays: int
    more: bool


class Exceptional(NamedTuple):
    """A blob that is not right. position counts the digests that were asked for, from 0; found is
    what its content hashes to, of size bytes; zeros where nothing was read to its end.
    """

    position: int
    verdict: int
    size: int
    found: bytes
    text: str


class Verdicts(NamedTuple):
    """VERDICTS: the answer for one VERIFY of so many blobs. bytes: what was hashed."""

    asked: int
    right: int
    bytes: int
    exceptions: Sequence[Exceptional]


class Large(NamedTuple):
    """LARGE: one blob that comes in pieces, from offset on."""

    digest: bytes
    size: int
    offset: int


def listing(low: bytes, high: bytes, most: int) -> bytes:
    return write_messages.frame(LIST, _LIST.pack(low, high, most))


def verifying(digests: Iterable[bytes]) -> bytes:
    return write_messages.frame(VERIFY, *digests)


def getting(digests: Iterable[bytes], offset: int = 0) -> bytes:
    """offset: where to begin; for a single blob only."""
    return write_messages.frame(GET, _OFFSET.pack(offset), *digests)


def summing(digest: bytes) -> bytes:
    return write_messages.frame(SUMS, digest)


def getting_blocks(digest: bytes, numbers: Sequence[int]) -> bytes:
    """numbers count the blocks of BLOCK_BYTES from 0."""
    return write_messages.frame(BLOCKS, digest, struct.pack(f"!{len(numbers)}I", *numbers))


def names(entries: Iterable[tuple[bytes, int]]) -> bytes:
    return write_messages.frame(NAMES, *(_NAME.pack(digest, size) for digest, size in entries))


def stray(kind: int, path: str) -> bytes:
    return write_messages.frame(STRAY, bytes([kind]), _text(path))


def listed(answer: Listed) -> bytes:
    return write_messages.frame(LISTED, _LISTED.pack(*answer))


def verdicts(answer: Verdicts) -> bytes:
    parts = [_VERDICTS.pack(answer.asked, answer.right, answer.bytes)]
    for position, verdict, size, found, text in answer.exceptions:
        words = _text(text)
        parts += (_EXCEPTION.pack(position, verdict, size, found, len(words)), words)
    return write_messages.frame(VERDICTS, *parts)


def contents(digests: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Buffer]) -> bytes:
    """Whole blobs, laid out like a PACK without a checksum."""
    table = write_messages.table(digests, sizes)
    prefix = write_messages.part_prefix(write_messages.RAW, len(table) + sum(sizes))
    return write_messages.frame(CONTENTS, prefix, table, *parts)


def large(digest: bytes, size: int, offset: int) -> bytes:
    return write_messages.frame(LARGE, _LARGE.pack(digest, size, offset))


def piece(data: Buffer) -> bytes:
    return write_messages.frame(
        PIECE, write_messages.part_prefix(write_messages.RAW, len(data)), data
    )


def end(status: int, text: str = "") -> bytes:
    return write_messages.frame(END, bytes([status]), _text(text))


def not_given(digest: bytes, verdict: int, text: str) -> bytes:
    return write_messages.frame(NOT_GIVEN, _NOT_GIVEN.pack(digest, verdict), _text(text))


def given(count: int) -> bytes:
    return write_messages.frame(GIVEN, _COUNT.pack(count))


def block_sums(size: int, sums: Sequence[bytes]) -> bytes:
    """size: of the whole blob."""
    return write_messages.frame(BLOCK_SUMS, _OFFSET.pack(size), *sums)


def read_listing(payload: Buffer) -> Range:
    return Range(*_LIST.unpack(payload))


def read_digests(payload: Buffer) -> list[bytes]:
    """What VERIFY asks for."""
    data = bytes(payload)
    if len(data) % DIGEST_BYTES:
        raise ProtocolError("a digest that is cut short")
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def read_getting(payload: memoryview) -> tuple[int, list[bytes]]:
    """(offset, digests) of a GET."""
    (offset,) = _OFFSET.unpack_from(payload)
    digests = read_digests(payload[_OFFSET.size :])
    if offset and len(digests) > 1:
        raise ProtocolError("an offset for several blobs")
    return offset, digests


def read_getting_blocks(payload: Buffer) -> tuple[bytes, Sequence[int]]:
    """(digest, numbers) of a BLOCKS."""
    data = bytes(payload)
    if (len(data) - DIGEST_BYTES) % _COUNT.size:
        raise ProtocolError("a number that is cut short")
    count = (len(data) - DIGEST_BYTES) // _COUNT.size
    return data[:DIGEST_BYTES], struct.unpack_from(f"!{count}I", data, DIGEST_BYTES)


def read_names(payload: Buffer) -> Iterator[tuple[bytes, int]]:
    if len(payload) % _NAME.size:
        raise ProtocolError("a name that is cut short")
    return _NAME.iter_unpack(payload)


def read_stray(payload: Buffer) -> tuple[int, str]:
    """(kind, path below by-hash)."""
    data = bytes(payload)
    return data[0], write_messages.plain(data[1:])


def read_listed(payload: Buffer) -> Listed:
    return Listed(*_LISTED.unpack(payload))


def read_verdicts(payload: Buffer) -> Verdicts:
    data = bytes(payload)
    count, right, size = _VERDICTS.unpack_from(data)
    found: list[Exceptional] = []
    at = _VERDICTS.size
    while at < len(data):
        if at + _EXCEPTION.size > len(data):
            raise ProtocolError("verdicts that are cut short")
        position, verdict, there, digest, length = _EXCEPTION.unpack_from(data, at)
        at += _EXCEPTION.size
        known = MISSING <= verdict <= UNREADABLE
        if not known or position >= count or length > MAX_TEXT or at + length > len(data):
            raise ProtocolError("an unknown verdict, or a text cut short")
        text = write_messages.plain(data[at : at + length])
        found.append(Exceptional(position, verdict, there, digest, text))
        at += length
    if right + len({one.position for one in found}) != count or len(found) != count - right:
        raise ProtocolError("verdicts that do not add up")
    return Verdicts(count, right, size, found)


def read_contents(payload: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """(digest, content) of each blob; views that hold as long as the payload does."""
    raw = _part(payload, write_messages.MAX_RAW)
    digests, sizes, at = write_messages.read_table(raw)
    for number, size in enumerate(sizes):
        first = number * DIGEST_BYTES
        yield digests[first : first + DIGEST_BYTES], raw[at : at + size]
        at += size


def read_large(payload: Buffer) -> Large:
    found = Large(*_LARGE.unpack(payload))
    if found.size > write_messages.MAX_BLOB or found.offset > found.size:
        raise ProtocolError(f"a blob of {found.size} bytes from {found.offset}")
    return found


def read_piece(payload: memoryview) -> memoryview:
    return _part(payload, write_messages.MAX_CHUNK)


def read_end(payload: Buffer) -> tuple[int, str]:
    """(status, what went wrong)."""
    data = bytes(payload)
    if data[0] not in (COMPLETE, BROKEN):
        raise ProtocolError("an END that says nothing")
    return data[0], write_messages.plain(data[1:])


def read_not_given(payload: Buffer) -> tuple[bytes, int, str]:
    """(digest, verdict, why)."""
    data = bytes(payload)
    digest, verdict = _NOT_GIVEN.unpack_from(data)
    if not MISSING <= verdict <= UNREADABLE:
        raise ProtocolError("an unknown verdict")
    return digest, verdict, write_messages.plain(data[_NOT_GIVEN.size :])


def read_block_sums(payload: Buffer) -> tuple[int, bytes]:
    """(size of the blob, hashes of its next blocks joined)."""
    data = bytes(payload)
    (size,) = _OFFSET.unpack_from(data)
    if size > write_messages.MAX_BLOB or (len(data) - _OFFSET.size) % SUM_BYTES:
        raise ProtocolError("hashes of blocks that cannot be")
    return size, data[_OFFSET.size :]


def _part(payload: memoryview, limit: int) -> memoryview:
    codec, raw_length, part = write_messages.read_part(payload, limit)
    if codec != write_messages.RAW or raw_length != len(part):
        raise ProtocolError("a part that is not as long as it says")
    return part


def _text(text: str) -> bytes:
    return write_messages.short(text, MAX_TEXT)
