"""A session that writes has these messages, and some that both kinds of session have.

A payload is a fixed binary layout (nothing of it is evaluated). HELLO and READY, once a session,
are flat JSON objects of bounded size, so that a later version can add a field. Functions named
after a message return its frame; `read_...` return what a payload holds, and raise ProtocolError
for one that is not as `docs/protocol.md` describes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Union

from ntt_backup.wire import framing
from ntt_backup.wire.framing import (
    DIGEST_BYTES,
    MAX_BLOB,
    MAX_BLOBS,
    MAX_CHUNK,
    MAX_CODE,
    MAX_FIELDS,
    MAX_PAYLOAD,
    MAX_TEXT,
    PACK_BYTES,
    Buffer,
    ProtocolError,
    frame,
    plain,
    short,
)

# As many batches may wait for their receipts.
MAX_UNSETTLED = 8
# A blob larger than this keeps what has arrived of it when the connection is lost.
RESUMABLE = 64 << 20

RAW, ZLIB, ZSTD, ZSTD_STREAM = range(4)
CODECS = {"zlib": ZLIB, "zstd": ZSTD, "zstd-stream": ZSTD_STREAM}
# The longest window of a ZSTD_STREAM: 16 MiB. A receiver keeps as much of what it has decompressed.
STREAM_WINDOW_LOG = 24

SHA256, BLAKE3 = range(2)
HASHES = {"sha256": SHA256, "blake3": BLAKE3}

COMPLETE, WITHDRAWN = range(2)
STORED, PRESENT, REPLACED, MISMATCH, REFUSED, WITHDREW = range(6)
SETTLED, FAILED = range(2)

_BATCH = struct.Struct("!IIQ")
_PART = struct.Struct("!BI")
_LARGE = struct.Struct("!32sQQ")
_ASK_OFFSET = struct.Struct("!32sQ")
_OFFSET = struct.Struct("!Q32s")
_NUMBER = struct.Struct("!I")
_RECEIPT = struct.Struct("!IBBII")
_EXCEPTION = struct.Struct("!IBH")

# The shortest and the longest payload of each kind that a receiver takes.
TO_RECEIVER = {
    framing.HELLO: (2, MAX_FIELDS),
    framing.BATCH: (_BATCH.size, _BATCH.size),
    framing.PACK: (_PART.size + _NUMBER.size, MAX_PAYLOAD),
    framing.LARGE: (_LARGE.size, _LARGE.size),
    framing.DATA: (_PART.size + 1, MAX_CHUNK + 4096),
    framing.END: (1, 1 + DIGEST_BYTES),
    framing.COMMIT: (_NUMBER.size, _NUMBER.size),
    framing.ABORT: (_NUMBER.size, _NUMBER.size),
    framing.ASK_OFFSET: (_ASK_OFFSET.size, _ASK_OFFSET.size),
    framing.PING: (8, 8),
    framing.BYE: (0, 0),
    framing.PLACE: (0, 0),
}
# ... and a client.
TO_CLIENT = {
    framing.READY: (2, MAX_FIELDS),
    framing.RECEIPT: (_RECEIPT.size, MAX_PAYLOAD),
    framing.ABORTED: (_NUMBER.size, _NUMBER.size),
    framing.OFFSET: (_OFFSET.size, _OFFSET.size),
    framing.PONG: (8, 8),
    framing.BUSY: (0, 0),
    framing.LEFT: (0, 0),
    framing.ERROR: (2, 2 + MAX_CODE + MAX_TEXT),
}

# The texts of a receipt are left out once they exceed this together, so that it fits a frame.
_RECEIPT_TEXTS = 4 << 20

Field = Union[str, int]


class Batch(NamedTuple):
    """BATCH: at most so many blobs and bytes follow, up to the COMMIT or ABORT of this number."""

    number: int
    blobs: int
    bytes: int


class Large(NamedTuple):
    """LARGE and BLOB: one blob follows in pieces, from offset on."""

    digest: bytes
    size: int
    offset: int


class Exceptional(NamedTuple):
    """The verdict on a blob that was not simply stored. position counts the blobs of the batch
    from 0, in the order they were sent.
    """

    position: int
    verdict: int
    text: str


class Receipt(NamedTuple):
    """RECEIPT: the one answer for a batch.

    outcome SETTLED: every blob that is not among the exceptions is stored, durable. FAILED: nothing
    of the batch may be taken as stored, and the one exception (position 0, verdict REFUSED) says
    why: an errno's name, a colon, the system's words.
    """

    number: int
    outcome: int
    hash: int
    stored: int
    exceptions: Sequence[Exceptional]


def fields(kind: int, values: dict[str, Field]) -> bytes:
    """Returns a HELLO or READY."""
    return frame(kind, json.dumps(values, separators=(",", ":")).encode("ascii"))


def batch(number: int, blobs: int, size: int) -> bytes:
    return frame(framing.BATCH, _BATCH.pack(number, blobs, size))


def table(digests: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Returns the beginning of a pack's raw part; the contents follow back to back, in order."""
    count = len(sizes)
    return b"".join([_NUMBER.pack(count), *digests, struct.pack(f"!{count}I", *sizes)])


def part_prefix(codec: int, raw_length: int, checksum: bytes = b"") -> bytes:
    """Returns the beginning of a PACK or DATA. checksum: SHA-256 of a pack's raw part where the
    session's hash is sha256; a DATA has none.
    """
    return _PART.pack(codec, raw_length) + checksum


def large(digest: bytes, size: int, offset: int, kind: int = framing.LARGE) -> bytes:
    """Returns a LARGE, or a BLOB."""
    return frame(kind, _LARGE.pack(digest, size, offset))


def end(status: int, checksum: bytes = b"") -> bytes:
    """Returns an END. checksum: SHA-256 of the digest and the whole content where the session's
    hash is sha256.
    """
    return frame(framing.END, bytes([status]), checksum)


def numbered(kind: int, number: int) -> bytes:
    """Returns a COMMIT, ABORT, ABORTED or DONE."""
    return frame(kind, _NUMBER.pack(number))


def ask_offset(digest: bytes, size: int) -> bytes:
    return frame(framing.ASK_OFFSET, _ASK_OFFSET.pack(digest, size))


def offset(value: int, checksum: bytes) -> bytes:
    return frame(framing.OFFSET, _OFFSET.pack(value, checksum))


def error(code: str, text: str) -> bytes:
    return frame(framing.ERROR, short(code, MAX_CODE), b"\0", short(text, MAX_TEXT))


def receipt(answer: Receipt) -> bytes:
    parts: list[bytes] = []
    room = _RECEIPT_TEXTS
    for position, verdict, text in answer.exceptions:
        words = short(text, MAX_TEXT)
        if len(words) > room:
            words = b""
        room -= len(words)
        parts += (_EXCEPTION.pack(position, verdict, len(words)), words)
    head = _RECEIPT.pack(*answer[:4], len(answer.exceptions))
    return frame(framing.RECEIPT, head, *parts)


def read_fields(payload: Buffer) -> dict[str, Field]:
    """Returns the flat object of a HELLO or READY: names, and strings or whole numbers."""
    try:
        values = json.loads(
            bytes(payload).decode("ascii"),
            parse_int=_whole,
            object_pairs_hook=_no_repeats,
        )
    except (ValueError, RecursionError) as problem:
        raise ProtocolError(f"not a flat object: {problem}") from None
    if not isinstance(values, dict):
        raise ProtocolError("not a flat object")
    for name, value in values.items():
        if not isinstance(value, (str, int)):
            raise ProtocolError(f"{name[:40]!r} is neither text nor a whole number")
    return values


def read_batch(payload: Buffer) -> Batch:
    found = Batch(*_BATCH.unpack(payload))
    if not 1 <= found.blobs <= MAX_BLOBS:
        raise ProtocolError(f"a batch of {found.blobs} blobs")
    if found.bytes > MAX_BLOB:
        raise ProtocolError(f"a batch of {found.bytes} bytes")
    return found


def read_part(payload: memoryview, limit: int) -> tuple[int, int, memoryview]:
    """Returns (codec, raw length, the rest) of a PACK or DATA; raw length is at most limit."""
    codec, raw_length = _PART.unpack_from(payload)
    if not 1 <= raw_length <= limit:
        raise ProtocolError(f"{raw_length} bytes in a part of at most {limit}")
    return codec, raw_length, payload[_PART.size :]


def read_table(raw: memoryview) -> tuple[bytes, tuple[int, ...], int]:
    """Returns (all digests joined, sizes, where the contents begin) of a pack's raw part."""
    length = len(raw)
    if length < _NUMBER.size:
        raise ProtocolError("a pack without a table")
    (count,) = _NUMBER.unpack_from(raw)
    sizes_at = _NUMBER.size + count * DIGEST_BYTES
    begin = sizes_at + count * 4
    if not 1 <= count <= MAX_BLOBS or begin > length:
        raise ProtocolError(f"a pack of {length} bytes cannot hold {count} blobs")
    sizes = struct.unpack_from(f"!{count}I", raw, sizes_at)
    if begin + sum(sizes) != length:
        raise ProtocolError("the sizes in a pack do not add up to its length")
    if max(sizes) > PACK_BYTES:
        raise ProtocolError(f"a blob of {max(sizes)} bytes in a pack")
    return bytes(raw[_NUMBER.size : sizes_at]), sizes, begin


def read_large(payload: Buffer) -> Large:
    """Returns what a LARGE or BLOB holds."""
    found = Large(*_LARGE.unpack(payload))
    if found.size > MAX_BLOB or found.offset > found.size:
        raise ProtocolError(f"a blob of {found.size} bytes from {found.offset}")
    return found


def read_end(payload: Buffer) -> tuple[int, bytes]:
    """Returns (status, checksum or nothing)."""
    data = bytes(payload)
    if data[0] not in (COMPLETE, WITHDRAWN) or len(data) not in (1, 1 + DIGEST_BYTES):
        raise ProtocolError("an END that says nothing")
    return data[0], data[1:]


def read_number(payload: Buffer) -> int:
    return int(_NUMBER.unpack(payload)[0])


def read_ask_offset(payload: Buffer) -> tuple[bytes, int]:
    digest, size = _ASK_OFFSET.unpack(payload)
    if size > MAX_BLOB:
        raise ProtocolError(f"a blob of {size} bytes")
    return digest, size


def read_offset(payload: Buffer) -> tuple[int, bytes]:
    value, checksum = _OFFSET.unpack(payload)
    return value, checksum


def read_error(payload: Buffer) -> tuple[str, str]:
    """Returns (code, text)."""
    code, _, text = bytes(payload).partition(b"\0")
    return plain(code)[:MAX_CODE], plain(text)


def read_receipt(payload: Buffer) -> Receipt:
    data = bytes(payload)
    number, outcome, hashed, stored, count = _RECEIPT.unpack_from(data)
    if outcome not in (SETTLED, FAILED) or hashed not in (SHA256, BLAKE3):
        raise ProtocolError("a receipt with an unknown outcome or hash")
    if count > MAX_BLOBS or stored > MAX_BLOBS:
        raise ProtocolError("a receipt for too many blobs")
    entries = read_entries(data, _RECEIPT.size, _EXCEPTION)
    found = [Exceptional(*entry) for entry in islice(entries, count + 1)]
    if len(found) != count:
        raise ProtocolError("a receipt with more or less than it announces")
    if not all(PRESENT <= each.verdict <= WITHDREW for each in found):
        raise ProtocolError("a receipt with an unknown verdict")
    return Receipt(number, outcome, hashed, stored, found)


def read_entries(data: bytes, at: int, layout: struct.Struct) -> Iterator[list[Any]]:
    """Yields what stands from `at` to the end of data: the fields of layout, and the text behind
    them, whose length is the layout's last field.
    """
    while at < len(data):
        if at + layout.size > len(data):
            raise ProtocolError("an entry that is cut short")
        *entry, length = layout.unpack_from(data, at)
        at += layout.size + length
        if length > MAX_TEXT or at > len(data):
            raise ProtocolError("a text that is cut short")
        yield [*entry, plain(data[at - length : at])]


def _whole(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number that is too long")
    return int(text)


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name[:40]!r} is given twice")
        values[name] = value
    return values
