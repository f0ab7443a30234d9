"""A session that reads has messages: what a client may ask about `by-hash`, and the answers.

Content has a CRC-32 here too, although the client checks every blob against its name: a bit that
flips on the way must cost a second try, and may not pass for a blob that is corrupt on the remote.
Functions are named as in `write_messages`. `docs/protocol.md` says who may send what when.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import (
    DIGEST_BYTES,
    MAX_CHUNK,
    MAX_PAYLOAD,
    MAX_RAW,
    MAX_TEXT,
    Buffer,
    ProtocolError,
    frame,
    plain,
    short,
)
from ntt_backup.wire.write_messages import RAW, part_prefix

RIGHT, MISSING, WRONG, UNREADABLE = range(4)
COMPLETE, BROKEN = range(2)

MAX_DIGESTS = 4096
MAX_NAMES = 8192
# Further strays are only counted, except directories that cannot be read: what is not listed may
# be in one of them.
MAX_STRAYS = 1000
MAX_DIRECTORIES = 256 + 256 * 256

_LIST = struct.Struct("!32s32sI")
_NAME = struct.Struct("!32sQ")
_LISTED = struct.Struct("!QQQ?")
_VERDICTS = struct.Struct("!IIQ")
_BAD_BLOB = struct.Struct("!IBQ32sH")
_SIZE = struct.Struct("!Q")
_LARGE_BYTES = DIGEST_BYTES + 2 * _SIZE.size
_NOT_GIVEN = struct.Struct("!32sB")
_COUNT = struct.Struct("!I")

_DIGESTS = (DIGEST_BYTES, MAX_DIGESTS * DIGEST_BYTES)

# The shortest and the longest payload of each kind that a receiver takes in such a session.
TO_RECEIVER = {
    **write_messages.TO_RECEIVER,
    framing.LIST: (_LIST.size, _LIST.size),
    framing.VERIFY: _DIGESTS,
    framing.GET: (_SIZE.size + DIGEST_BYTES, _SIZE.size + _DIGESTS[1]),
}
# The kinds that a client takes in any session.
OF_ALL = (framing.READY, framing.PONG, framing.BUSY, framing.ERROR, framing.LEFT)
# ... and a client that reads.
TO_CLIENT = {
    **{kind: write_messages.TO_CLIENT[kind] for kind in OF_ALL},
    framing.NAMES: (_NAME.size, _NAME.size * MAX_NAMES),
    framing.STRAY: (2, 1 + MAX_TEXT),
    framing.LISTED: (_LISTED.size, _LISTED.size),
    framing.VERDICTS: (_VERDICTS.size, _VERDICTS.size + MAX_DIGESTS * (_BAD_BLOB.size + MAX_TEXT)),
    framing.CONTENTS: (9, MAX_PAYLOAD),
    framing.BLOB: (_LARGE_BYTES, _LARGE_BYTES),
    framing.PIECE: (6, MAX_CHUNK + 4096),
    framing.BLOB_END: (1, 1 + MAX_TEXT),
    framing.NOT_GIVEN: (_NOT_GIVEN.size, _NOT_GIVEN.size + MAX_TEXT),
    framing.GIVEN: (_COUNT.size, _COUNT.size),
}


class Range(NamedTuple):
    """LIST: the names from low to high, both included, at most `most` of them (0: all)."""

    low: bytes
    high: bytes
    most: int


class Listed(NamedTuple):
    """LISTED: the totals of a LIST. more: there may be names beyond the `most` of the question."""

    names: int
    bytes: int
    strays: int
    more: bool


class BadBlob(NamedTuple):
    """The verdict on a blob that is not right. position counts the digests of the question from 0;
    found is the hash of its content, size its length: both zero where it was not read to its end.
    """

    position: int
    verdict: int
    size: int
    found: bytes
    text: str


class Verdicts(NamedTuple):
    """VERDICTS: the answer for one VERIFY. asked, right: numbers of blobs. bytes: hashed in all."""

    asked: int
    right: int
    bytes: int
    exceptions: Sequence[BadBlob]


def listing(low: bytes, high: bytes, most: int) -> bytes:
    return frame(framing.LIST, _LIST.pack(low, high, most))


def verifying(digests: Iterable[bytes]) -> bytes:
    return frame(framing.VERIFY, *digests)


def getting(digests: Iterable[bytes], offset: int = 0) -> bytes:
    """Returns a GET. offset: where the content begins; for a single blob only."""
    return frame(framing.GET, _SIZE.pack(offset), *digests)


def names(entries: Iterable[tuple[bytes, int]]) -> bytes:
    return frame(framing.NAMES, *(_NAME.pack(digest, size) for digest, size in entries))


def stray(kind: int, path: str) -> bytes:
    return frame(framing.STRAY, bytes([kind]), short(path, MAX_TEXT))


def listed(answer: Listed) -> bytes:
    return frame(framing.LISTED, _LISTED.pack(*answer))


def verdicts(answer: Verdicts) -> bytes:
    parts = [_VERDICTS.pack(answer.asked, answer.right, answer.bytes)]
    for *entry, text in answer.exceptions:
        words = short(text, MAX_TEXT)
        parts += (_BAD_BLOB.pack(*entry, len(words)), words)
    return frame(framing.VERDICTS, *parts)


def contents(digests: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Buffer]) -> bytes:
    """Returns whole blobs, in the layout of a PACK without a checksum."""
    table = write_messages.table(digests, sizes)
    return frame(framing.CONTENTS, part_prefix(RAW, len(table) + sum(sizes)), table, *parts)


def blob(digest: bytes, size: int, offset: int) -> bytes:
    return write_messages.large(digest, size, offset, framing.BLOB)


def piece(data: Buffer) -> bytes:
    return frame(framing.PIECE, part_prefix(RAW, len(data)), data)


def blob_end(status: int, text: str = "") -> bytes:
    return frame(framing.BLOB_END, bytes([status]), short(text, MAX_TEXT))


def not_given(digest: bytes, verdict: int, text: str) -> bytes:
    return frame(framing.NOT_GIVEN, _NOT_GIVEN.pack(digest, verdict), short(text, MAX_TEXT))


def given(count: int) -> bytes:
    return frame(framing.GIVEN, _COUNT.pack(count))


def read_listing(payload: Buffer) -> Range:
    return Range(*_LIST.unpack(payload))


def read_digests(payload: Buffer) -> list[bytes]:
    """Returns the digests of a VERIFY."""
    data = bytes(payload)
    if len(data) % DIGEST_BYTES:
        raise ProtocolError("a digest that is cut short")
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def read_getting(payload: memoryview) -> tuple[int, list[bytes]]:
    """Returns (offset, digests) of a GET."""
    (offset,) = _SIZE.unpack_from(payload)
    digests = read_digests(payload[_SIZE.size :])
    if offset and len(digests) > 1:
        raise ProtocolError("an offset for several blobs")
    return offset, digests


def read_names(payload: Buffer) -> Iterator[tuple[bytes, int]]:
    if len(payload) % _NAME.size:
        raise ProtocolError("a name that is cut short")
    return _NAME.iter_unpack(payload)


def read_stray(payload: Buffer) -> tuple[int, str]:
    """Returns (kind, path below by-hash)."""
    data = bytes(payload)
    return data[0], plain(data[1:])


def read_listed(payload: Buffer) -> Listed:
    return Listed(*_LISTED.unpack(payload))


def read_verdicts(payload: Buffer) -> Verdicts:
    data = bytes(payload)
    asked, right, size = _VERDICTS.unpack_from(data)
    entries = write_messages.read_entries(data, _VERDICTS.size, _BAD_BLOB)
    found = [BadBlob(*entry) for entry in entries]
    if any(not _is_bad(each.verdict) or each.position >= asked for each in found):
        raise ProtocolError("an unknown verdict, or one on a blob that was not asked for")
    if len(found) != asked - right or len({each.position for each in found}) != len(found):
        raise ProtocolError("verdicts that do not add up")
    return Verdicts(asked, right, size, found)


def read_contents(payload: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yields (digest, content) of each blob; contents are views into the payload."""
    raw = _read_part(payload, MAX_RAW)
    digests, sizes, at = write_messages.read_table(raw)
    for number, size in enumerate(sizes):
        first = number * DIGEST_BYTES
        yield digests[first : first + DIGEST_BYTES], raw[at : at + size]
        at += size


def read_piece(payload: memoryview) -> memoryview:
    return _read_part(payload, MAX_CHUNK)


def read_blob_end(payload: Buffer) -> tuple[int, str]:
    """Returns (status, why it broke off)."""
    data = bytes(payload)
    if data[0] not in (COMPLETE, BROKEN):
        raise ProtocolError("a BLOB_END that says nothing")
    return data[0], plain(data[1:])


def read_not_given(payload: Buffer) -> tuple[bytes, int, str]:
    """Returns (digest, verdict, why)."""
    data = bytes(payload)
    digest, verdict = _NOT_GIVEN.unpack_from(data)
    if not _is_bad(verdict):
        raise ProtocolError("an unknown verdict")
    return digest, verdict, plain(data[_NOT_GIVEN.size :])


def _is_bad(verdict: int) -> bool:
    return MISSING <= verdict <= UNREADABLE


def _read_part(payload: memoryview, limit: int) -> memoryview:
    codec, raw_length, part = write_messages.read_part(payload, limit)
    if codec != RAW or raw_length != len(part):
        raise ProtocolError("a part that is not as long as it says")
    return part
