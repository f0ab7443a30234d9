"""The frames of the `stream` protocol: their numbers, limits and layouts, for both ends.

A frame is a length, a type and a payload. Everything is bounded, and lengths are judged when the
header has come, before a byte of payload is waited for: a peer that announces too much is refused
at once and costs no memory. Payloads are fixed binary layouts (no pickle, nothing evaluated); the
two that are read once a session, HELLO and READY, are flat JSON objects of bounded size, so that a
later version can add a field.

Pure: bytes in, values out; whatever is not as described raises `ProtocolError`. `docs/protocol.md`
says who may send what when.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Union

PROTOCOL = 1

HEADER = struct.Struct("!IB")
_SUM = struct.Struct("!I")
SUM_BYTES = _SUM.size
DIGEST_BYTES = 32

# A pack is cut at 1 MiB: large enough that a frame's own cost vanishes, small enough that a few are
# in memory at both ends. What a peer may send is bounded wider, so that the cut can be tuned at the
# sending end alone.
PACK_BYTES = 1 << 20
MAX_RAW = 8 << 20
MAX_CHUNK = 1 << 20
MAX_PAYLOAD = MAX_RAW + 4096
MAX_FIELDS = 64 << 10
MAX_BLOBS = 100_000
MAX_UNSETTLED = 8
MAX_BLOB = 1 << 60
MAX_TEXT = 300
MAX_CODE = 32
# A blob larger than this keeps what has arrived of it when the link drops.
RESUMABLE = 64 << 20

# client -> receiver
HELLO, BATCH, PACK, LARGE, DATA, END, COMMIT, ABORT, ASK_OFFSET, PING, BYE, PLACE = range(1, 13)
# receiver -> client
READY, RECEIPT, ABORTED, OFFSET, PONG, BUSY, ERROR, LEFT = range(129, 137)
# 32-63 and 160-191 are those of a session that reads: see `asking`.

RAW, ZLIB, ZSTD = range(3)
CODECS = {"zlib": ZLIB, "zstd": ZSTD}

COMPLETE, WITHDRAWN = range(2)

STORED, PRESENT, REPLACED, MISMATCH, REFUSED, WITHDREW = range(6)
SETTLED, FAILED = range(2)

SHA256, BLAKE3 = range(2)
HASHES = {"sha256": SHA256, "blake3": BLAKE3}

_BATCH = struct.Struct("!IIQ")
_PACK = struct.Struct("!BI")
_LARGE = struct.Struct("!32sQQ")
_ASK_OFFSET = struct.Struct("!32sQ")
_OFFSET = struct.Struct("!Q32s")
_NUMBER = struct.Struct("!I")
_RECEIPT = struct.Struct("!IBBII")
_EXCEPTION = struct.Struct("!IBH")
_COUNT = struct.Struct("!I")

# What carries content has checks of its own, all the way to the disk. Every other frame ends with a
# CRC-32: a bit that flips in a verdict or a name must not pass for another one.
CONTENT = frozenset((PACK, DATA))

# Shortest and longest payload of every type a receiver takes.
TO_RECEIVER = {
    HELLO: (2, MAX_FIELDS),
    BATCH: (_BATCH.size, _BATCH.size),
    PACK: (_PACK.size + _COUNT.size, MAX_PAYLOAD),
    LARGE: (_LARGE.size, _LARGE.size),
    DATA: (_PACK.size + 1, MAX_CHUNK + 4096),
    END: (1, 1 + DIGEST_BYTES),
    COMMIT: (_NUMBER.size, _NUMBER.size),
    ABORT: (_NUMBER.size, _NUMBER.size),
    ASK_OFFSET: (_ASK_OFFSET.size, _ASK_OFFSET.size),
    PING: (8, 8),
    BYE: (0, 0),
    PLACE: (0, 0),
}
# ... and a client.
TO_CLIENT = {
    READY: (2, MAX_FIELDS),
    RECEIPT: (_RECEIPT.size, MAX_PAYLOAD),
    ABORTED: (_NUMBER.size, _NUMBER.size),
    OFFSET: (_OFFSET.size, _OFFSET.size),
    PONG: (8, 8),
    BUSY: (0, 0),
    LEFT: (0, 0),
    ERROR: (2, 2 + MAX_CODE + MAX_TEXT),
}

# Texts of exceptions are kept as long as all of them together stay under this, then left empty; so
# a receipt fits its frame whatever happened to a batch.
_RECEIPT_TEXTS = 4 << 20

# What names a session on the remote. No dot: the scratch directory's name is joined with dots.
NAME_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_")

Buffer = Union[bytes, bytearray, memoryview]
Field = Union[str, int]


class ProtocolError(Exception):
    """The peer said something that the protocol does not know."""


class Batch(NamedTuple):
    """BATCH: what follows until its COMMIT or ABORT belongs to it."""

    number: int
    blobs: int
    bytes: int


class Large(NamedTuple):
    """LARGE: one blob that travels in pieces, from offset on."""

    digest: bytes
    size: int
    offset: int


class Exceptional(NamedTuple):
    """What happened to a blob that was not simply stored. position counts the batch's blobs from 0
    in the order they were sent.
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


def frame(kind: int, *parts: Buffer) -> bytes:
    """A whole frame, for what is small; large payloads are written after `head`."""
    payload = b"".join(parts)
    check = b"" if kind in CONTENT else _SUM.pack(zlib.crc32(payload, kind))
    return HEADER.pack(len(payload) + len(check), kind) + payload + check


def banner_sum(line: bytes) -> str:
    """What a banner ends with, as its `sum`: the CRC-32 of all before it."""
    return f"{zlib.crc32(line):08x}"


def require_sum(kind: int, payload: memoryview, check: memoryview) -> None:
    """Raise ProtocolError unless check is what `frame` has put behind this payload."""
    if zlib.crc32(payload, kind) != _SUM.unpack(check)[0]:
        raise ProtocolError(f"a frame of type {kind} was altered on its way")


def head(kind: int, length: int) -> bytes:
    """The header of a frame of CONTENT whose payload of that length follows by other means."""
    return HEADER.pack(length, kind)


def fields(kind: int, values: dict[str, Field]) -> bytes:
    """A HELLO or READY frame."""
    return frame(kind, json.dumps(values, separators=(",", ":")).encode("ascii"))


def batch(number: int, blobs: int, size: int) -> bytes:
    return frame(BATCH, _BATCH.pack(number, blobs, size))


def table(digests: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """What a pack's raw part begins with; the contents follow back to back in the same order."""
    count = len(sizes)
    return b"".join([_COUNT.pack(count), *digests, struct.pack(f"!{count}I", *sizes)])


def part_prefix(codec: int, raw_length: int, checksum: bytes = b"") -> bytes:
    """What PACK and DATA begin with. checksum: SHA-256 of a pack's raw part where the session's
    hash is sha256; a DATA frame has none.
    """
    return _PACK.pack(codec, raw_length) + checksum


def large(digest: bytes, size: int, offset: int) -> bytes:
    return frame(LARGE, _LARGE.pack(digest, size, offset))


def end(status: int, checksum: bytes = b"") -> bytes:
    """checksum: SHA-256 of the blob's whole content where the session's hash is sha256."""
    return frame(END, bytes([status]), checksum)


def numbered(kind: int, number: int) -> bytes:
    """A COMMIT, ABORT or ABORTED frame."""
    return frame(kind, _NUMBER.pack(number))


def ask_offset(digest: bytes, size: int) -> bytes:
    return frame(ASK_OFFSET, _ASK_OFFSET.pack(digest, size))


def offset(value: int, checksum: bytes) -> bytes:
    return frame(OFFSET, _OFFSET.pack(value, checksum))


def error(code: str, text: str) -> bytes:
    return frame(ERROR, short(code, MAX_CODE), b"\0", short(text, MAX_TEXT))


def receipt(answer: Receipt) -> bytes:
    """A RECEIPT frame; texts are cut to what a frame may hold."""
    parts: list[bytes] = []
    room = _RECEIPT_TEXTS
    for position, verdict, text in answer.exceptions:
        words = short(text, MAX_TEXT)
        if len(words) > room:
            words = b""
        room -= len(words)
        parts += (_EXCEPTION.pack(position, verdict, len(words)), words)
    return frame(
        RECEIPT,
        _RECEIPT.pack(
            answer.number, answer.outcome, answer.hash, answer.stored, len(answer.exceptions)
        ),
        *parts,
    )


def read_fields(payload: Buffer) -> dict[str, Field]:
    """The flat object of a HELLO or READY: names, and strings or whole numbers."""
    try:
        values = json.loads(
            bytes(payload).decode("ascii"),
            parse_int=_whole,
            parse_float=_no_number,
            parse_constant=_no_number,
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
    """(codec, raw length, the rest) of a PACK or DATA; raw length is at most limit."""
    codec, raw_length = _PACK.unpack_from(payload)
    if not 1 <= raw_length <= limit:
        raise ProtocolError(f"{raw_length} bytes in a part of at most {limit}")
    return codec, raw_length, payload[_PACK.size :]


def read_table(raw: memoryview) -> tuple[bytes, tuple[int, ...], int]:
    """(all digests joined, sizes, where the contents begin) of a pack's raw part."""
    length = len(raw)
    if length < _COUNT.size:
        raise ProtocolError("a pack without a table")
    (count,) = _COUNT.unpack_from(raw)
    sizes_at = _COUNT.size + count * DIGEST_BYTES
    begin = sizes_at + count * 4
    if not 1 <= count <= MAX_BLOBS or begin > length:
        raise ProtocolError(f"a pack of {length} bytes cannot hold {count} blobs")
    sizes = struct.unpack_from(f"!{count}I", raw, sizes_at)
    if begin + sum(sizes) != length:
        raise ProtocolError("the sizes in a pack do not add up to its length")
    if max(sizes) > PACK_BYTES:
        raise ProtocolError(f"a blob of {max(sizes)} bytes in a pack")
    return bytes(raw[_COUNT.size : sizes_at]), sizes, begin


def read_large(payload: Buffer) -> Large:
    found = Large(*_LARGE.unpack(payload))
    if found.size > MAX_BLOB or found.offset > found.size:
        raise ProtocolError(f"a blob of {found.size} bytes from {found.offset}")
    return found


def read_end(payload: Buffer) -> tuple[int, bytes]:
    """(status, checksum or nothing)."""
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
    """(code, text)."""
    code, _, text = bytes(payload).partition(b"\0")
    return plain(code)[:MAX_CODE], plain(text)


def read_receipt(payload: Buffer) -> Receipt:
    data = bytes(payload)
    number, outcome, hashed, stored, count = _RECEIPT.unpack_from(data)
    if outcome not in (SETTLED, FAILED) or hashed not in (SHA256, BLAKE3):
        raise ProtocolError("a receipt with an unknown outcome or hash")
    if count > MAX_BLOBS or stored > MAX_BLOBS:
        raise ProtocolError("a receipt for too many blobs")
    found: list[Exceptional] = []
    at = _RECEIPT.size
    for _ in range(count):
        if at + _EXCEPTION.size > len(data):
            raise ProtocolError("a receipt that is cut short")
        position, verdict, length = _EXCEPTION.unpack_from(data, at)
        at += _EXCEPTION.size
        if not PRESENT <= verdict <= WITHDREW or length > MAX_TEXT or at + length > len(data):
            raise ProtocolError("a receipt with an unknown verdict or a text cut short")
        found.append(Exceptional(position, verdict, plain(data[at : at + length])))
        at += length
    if at != len(data):
        raise ProtocolError("a receipt with more than it announces")
    return Receipt(number, outcome, hashed, stored, found)


def short(text: str, limit: int) -> bytes:
    """text in at most limit bytes of one line of UTF-8, cut between characters."""
    words = " ".join(text.split()).encode("utf-8", "backslashreplace")
    return words[:limit].decode("utf-8", "ignore").encode("utf-8")


def plain(data: bytes) -> str:
    """Text of the peer: whatever it sent, without what would move a terminal's cursor."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _whole(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number that is too long")
    return int(text)


def _no_number(text: str) -> int:
    raise ValueError(f"not a whole number: {text[:20]}")


def _no_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name[:40]!r} is given twice")
        values[name] = value
    return values
