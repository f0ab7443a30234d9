"""The table of messages: each is declared once, with its number, sessions, layout and bounds.

A payload is a head, which is a fixed binary layout, and a tail of variable length (nothing of it is
evaluated). `BATCH.frame(...)` returns the frame of a message for these values, and
`BATCH.read(payload)` returns the values of a payload. Both follow from the layout, as do the bounds
that an `Inbox` holds frames to. A payload that is not as `docs/protocol.md` describes it raises
ProtocolError. HELLO and READY, once a session, are flat JSON objects of bounded size, so that a
later version can add a field.

Content that is read has a CRC-32 too, although the client checks every blob against its name: a bit
that flips on the way must cost a second try, and may not pass for a blob that is corrupt on the
remote.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ntt_backup.wire.framing import (
    DIGEST_BYTES,
    IDENTITY_BYTES,
    MAX_BLOB,
    MAX_BLOBS,
    MAX_CHUNK,
    MAX_CODE,
    MAX_FIELDS,
    MAX_PAYLOAD,
    MAX_RAW,
    MAX_TEXT,
    PACK_BYTES,
    Buffer,
    ProtocolError,
    around,
    frame,
)
from ntt_backup.wire.tails import (
    NUMBER,
    BelowName,
    CodeAndText,
    Digests,
    EntriesWithText,
    FileName,
    FileNameList,
    FlatObject,
    FoundFileList,
    Rest,
    Rows,
    ShortText,
)
from ntt_backup.wire.tails import Field as Field

if TYPE_CHECKING:
    from datetime import datetime

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
NAMES_OF_HASHES = {number: name for name, number in HASHES.items()}

# The status of an END, and of a BLOB_END.
COMPLETE = 0
WITHDRAWN = BROKEN = 1
# The verdicts and outcomes of a RECEIPT.
STORED, PRESENT, REPLACED, MISMATCH, REFUSED, WITHDREW = range(6)
SETTLED, FAILED = range(2)
# What is told of a blob by SUMS, HASHED and NOT_GIVEN: WHOLE says that it was read to its end.
WHOLE, MISSING, WRONG, UNREADABLE = range(4)
KEY_BYTES = 32
# The first bytes of a sum under a key: as many as nobody guesses.
SUM_BYTES = 12
# The status of a FILE_SAID; MISSING and UNREADABLE are others.
SUCCEEDED, TAKEN = 0, 2

# The number of digests in a question, and of names in a NAMES.
MAX_DIGESTS = 4096
MAX_NAMES = 8192
# Further strays are only counted, except directories that cannot be read: what is not listed may
# be in one of them.
MAX_STRAYS = 1000
MAX_DIRECTORIES = 256 + 256 * 256
# Names of files in one frame, and the length of each.
MAX_FILE_NAMES = 500
_MAX_FILE_NAME = 128
# Files that one session writes at the same time.
MAX_OPEN = 4

_PART = struct.Struct("!BI")

T = TypeVar("T")


# --- what messages hold


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


class BlobHash(NamedTuple):
    """What a receiver found of one blob. hash and size: of its content, where state is WHOLE; both
    are zero where it is MISSING, WRONG (no file) or UNREADABLE.
    """

    state: int
    size: int
    hash: bytes
    text: str = ""


class SumQuestion(NamedTuple):
    """VERIFY: asks for a sum of each blob under a key: keyed BLAKE3, or HMAC-SHA-256."""

    hash: int
    key: bytes
    digests: Sequence[bytes]


class HashQuestion(NamedTuple):
    """HASH: asks for the hash of each blob, which needs no key."""

    hash: int
    digests: Sequence[bytes]


# --- checks of what messages hold; each returns the value of a payload


def _batch(number: int, blobs: int, size: int) -> Batch:
    if not 1 <= blobs <= MAX_BLOBS:
        raise ProtocolError(f"a batch of {blobs} blobs")
    if size > MAX_BLOB:
        raise ProtocolError(f"a batch of {size} bytes")
    return Batch(number, blobs, size)


def _part(codec: int, raw_length: int, rest: Any, limit: int = MAX_RAW) -> tuple[int, int, Any]:
    if not 1 <= raw_length <= limit:
        raise ProtocolError(f"{raw_length} bytes in a part of at most {limit}")
    return codec, raw_length, rest


def _chunk(codec: int, raw_length: int, rest: Any) -> tuple[int, int, Any]:
    return _part(codec, raw_length, rest, MAX_CHUNK)


def _raw(codec: int, raw_length: int, rest: memoryview, limit: int = MAX_CHUNK) -> memoryview:
    _part(codec, raw_length, rest, limit)
    if codec != RAW or raw_length != len(rest):
        raise ProtocolError("a part that is not as long as it says")
    return rest


def _contents(codec: int, raw_length: int, rest: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    raw = _raw(codec, raw_length, rest, MAX_RAW)
    digests, sizes, at = read_table(raw)
    for number, size in enumerate(sizes):
        first = number * DIGEST_BYTES
        yield digests[first : first + DIGEST_BYTES], raw[at : at + size]
        at += size


def _large(digest: bytes, size: int, offset: int) -> Large:
    if size > MAX_BLOB or offset > size:
        raise ProtocolError(f"a blob of {size} bytes from {offset}")
    return Large(digest, size, offset)


def _end(status: int, checksum: Buffer) -> tuple[int, bytes]:
    if status not in (COMPLETE, WITHDRAWN) or len(checksum) not in (0, DIGEST_BYTES):
        raise ProtocolError("an END that says nothing")
    return status, bytes(checksum)


def _place(identity: Buffer) -> bytes:
    if len(identity) not in (0, IDENTITY_BYTES):
        raise ProtocolError("an identity that is cut short")
    return bytes(identity)


def _ask_offset(digest: bytes, size: int) -> tuple[bytes, int]:
    if size > MAX_BLOB:
        raise ProtocolError(f"a blob of {size} bytes")
    return digest, size


def _receipt(
    number: int, outcome: int, hashed: int, stored: int, exceptions: list[Exceptional]
) -> Receipt:
    if outcome not in (SETTLED, FAILED) or hashed not in (SHA256, BLAKE3):
        raise ProtocolError("a receipt with an unknown outcome or hash")
    if stored > MAX_BLOBS:
        raise ProtocolError("a receipt for too many blobs")
    if not all(PRESENT <= each.verdict <= WITHDREW for each in exceptions):
        raise ProtocolError("a receipt with an unknown verdict")
    return Receipt(number, outcome, hashed, stored, exceptions)


def _get(offset: int, digests: list[bytes]) -> tuple[int, list[bytes]]:
    if offset and len(digests) > 1:
        raise ProtocolError("an offset for several blobs")
    return offset, digests


def _verify(hashed: int, key: bytes, digests: list[bytes]) -> SumQuestion:
    return SumQuestion(_known_hash(hashed), key, digests)


def _hash(hashed: int, digests: list[bytes]) -> HashQuestion:
    return HashQuestion(_known_hash(hashed), digests)


def _known_hash(hashed: int) -> int:
    if hashed not in (SHA256, BLAKE3):
        raise ProtocolError("a sum by an unknown hash")
    return hashed


def _states(rows: Iterable[Any]) -> list[Any]:
    found = list(rows)
    if any(one[0] > UNREADABLE for one in found):
        raise ProtocolError("an unknown state of a blob")
    return found


def _blob_end(status: int, why: str) -> tuple[int, str]:
    if status not in (COMPLETE, BROKEN):
        raise ProtocolError("a BLOB_END that says nothing")
    return status, why


def _not_given(digest: bytes, verdict: int, why: str) -> tuple[bytes, int, str]:
    if not MISSING <= verdict <= UNREADABLE:
        raise ProtocolError("an unknown verdict")
    return digest, verdict, why


def _slot(slot: int) -> int:
    if slot >= MAX_OPEN:
        raise ProtocolError(f"a slot of {slot}")
    return slot


def _in_slot(slot: int, rest: Any) -> tuple[int, Any]:
    return _slot(slot), rest


def _prove(hashed: int, name: str) -> tuple[int, str]:
    return _known_hash(hashed), name


def _file_said(status: int, why: str) -> tuple[int, str]:
    if status > UNREADABLE:
        raise ProtocolError("an unknown answer about a file")
    return status, why


# --- the table

# The kinds of session, of which a message belongs to one or several. A session for files has a
# HELLO with `files`, one that reads has a HELLO with `reading`.
WRITING, READING, WITH_FILES = 1, 2, 4
ANY = WRITING | READING | WITH_FILES
# Messages from this number on are the receiver's, the others are the client's.
_OF_RECEIVER = 128

_MESSAGES: list[Message[Any]] = []


class Message(int, Generic[T]):
    """A message is the number that stands in the header of its frames.

    Args:
        number: The number.
        sessions: The kinds of session that the message belongs to.
        head: The layout of the head, as `struct` describes it.
        make: Checks the values of head and tail, and returns the value of the payload. None where
            that is the only one of the values, or the tuple of them.
        tail: The layout of the tail.

    Attributes:
        sessions: The kinds of session that the message belongs to.
        bounds: The shortest and the longest length of a payload in bytes.
    """

    sessions: int
    bounds: tuple[int, int]
    _head: struct.Struct
    _fields: int
    _make: Callable[..., T] | None
    _tail: Rest | None

    def __new__(
        cls,
        number: int,
        sessions: int,
        head: str = "",
        make: Callable[..., T] | None = None,
        tail: Rest | None = None,
    ) -> Message[T]:
        message = super().__new__(cls, number)
        layout = struct.Struct(f"!{head}")
        message.sessions = sessions
        least, most = (tail.least, tail.most) if tail else (0, 0)
        message.bounds = layout.size + least, layout.size + most
        message._head = layout
        message._fields = len(layout.unpack(bytes(layout.size)))
        message._make = make
        message._tail = tail
        _MESSAGES.append(message)
        return message

    def frame(self, *values: Any) -> bytes:
        """Returns the frame for the values of the head, and the value of the tail."""
        head, tail, count = self._head, self._tail, self._fields
        if tail is None:
            return frame(self, head.pack(*values))
        return frame(self, head.pack(*values[:count]), *tail.parts(*values[count:]))

    def around(self, data: Buffer, *values: Any) -> tuple[bytes, bytes]:
        """Returns the frame's bytes before and after data, its tail, which is not copied."""
        return around(self, self._head.pack(*values), data)

    def read(self, payload: Any, *area: str) -> T:
        """Returns the value of a payload. area: the area of a message with names of files."""
        head, tail, make = self._head, self._tail, self._make
        if tail is None:
            values = head.unpack(payload)
        else:
            values = (*head.unpack_from(payload), tail.read(payload[head.size :], *area))
        if make is not None:
            return make(*values)
        value: Any = values[0] if len(values) == 1 else values
        return value  # type: ignore[no-any-return]


def to_receiver(sessions: int) -> dict[int, tuple[int, int]]:
    """Returns the bounds of each message that a receiver takes in these kinds of session."""
    found = (one for one in _MESSAGES if one < _OF_RECEIVER and one.sessions & sessions)
    return {int(one): one.bounds for one in found}


def to_client(sessions: int) -> dict[int, tuple[int, int]]:
    """Returns the bounds of each message that a client takes in these kinds of session."""
    found = (one for one in _MESSAGES if one >= _OF_RECEIVER and one.sessions & sessions)
    return {int(one): one.bounds for one in found}


_SAYS = ShortText(0, MAX_TEXT)
_OBJECT = FlatObject(2, MAX_FIELDS)
_DIGESTS = Digests(DIGEST_BYTES, MAX_DIGESTS * DIGEST_BYTES)
# Compressed content may be longer than what it unpacks to.
_CHUNK = Rest(1, MAX_CHUNK + 4096 - _PART.size)
_PACKED = Rest(NUMBER.size, MAX_PAYLOAD - _PART.size)
_FILE_NAME = FileName(1, _MAX_FILE_NAME)
_ALL_NAMES = MAX_FILE_NAMES * (_MAX_FILE_NAME + 1)
_EXCEPTIONS = EntriesWithText("!IBH", Exceptional, MAX_PAYLOAD - 10, counted=True)
_HASHED = EntriesWithText("!BQ32sH", BlobHash, MAX_DIGESTS * (43 + MAX_TEXT))
_SUMS = Rows(f"!B{SUM_BYTES}s", MAX_DIGESTS)
_FOUND = FoundFileList(16, MAX_FILE_NAMES * 16 + _ALL_NAMES)

HELLO: Message[dict[str, Field]] = Message(1, ANY, tail=_OBJECT)
BATCH = Message(2, WRITING, "IIQ", _batch)
# Where the hash of the session is sha256, the SHA-256 of the raw part stands before the part.
PACK = Message(3, WRITING, "BI", _part, _PACKED)
LARGE = Message(4, WRITING, "32sQQ", _large)
DATA = Message(5, WRITING, "BI", _chunk, _CHUNK)
# Where the hash of the session is sha256, with the SHA-256 of the digest and the whole content.
END = Message(6, WRITING, "B", _end, Rest(0, DIGEST_BYTES))
COMMIT: Message[int] = Message(7, WRITING, "I")
ABORT: Message[int] = Message(8, WRITING, "I")
ASK_OFFSET = Message(9, WRITING, "32sQ", _ask_offset)
PING: Message[bytes] = Message(10, ANY, "8s")
BYE: Message[tuple[()]] = Message(11, ANY)
# With the identity that the target gets where it has none; without one, only by-hash is made.
PLACE: Message[bytes] = Message(12, WRITING, make=_place, tail=Rest(0, IDENTITY_BYTES))

LIST = Message(32, READING, "32s32sI", Range)
VERIFY = Message(33, READING, "B32s", _verify, _DIGESTS)
GET = Message(34, READING, "Q", _get, _DIGESTS)
HASH = Message(35, READING, "B", _hash, _DIGESTS)

FILES: Message[str] = Message(64, WITH_FILES, tail=BelowName(0, _MAX_FILE_NAME))
FILE_DATA = Message(65, WITH_FILES, "B", _in_slot, Rest(1, MAX_CHUNK))
FILE_END = Message(66, WITH_FILES, "B", _slot)
PUBLISH = Message(67, WITH_FILES, "B", _in_slot, _FILE_NAME)
DISCARD = Message(68, WITH_FILES, "B", _slot)
READ: Message[tuple[int, int, str]] = Message(69, WITH_FILES, "QQ", tail=_FILE_NAME)
PROVE = Message(71, WITH_FILES, "B", _prove, _FILE_NAME)
REMOVE: Message[list[str]] = Message(70, WITH_FILES, tail=FileNameList(1, _ALL_NAMES))

READY: Message[dict[str, Field]] = Message(129, ANY, tail=_OBJECT)
RECEIPT = Message(130, WRITING, "IBBI", _receipt, _EXCEPTIONS)
ABORTED: Message[int] = Message(131, WRITING, "I")
OFFSET: Message[tuple[int, bytes]] = Message(132, WRITING, "Q32s")
PONG: Message[bytes] = Message(133, ANY, "8s")
BUSY: Message[tuple[()]] = Message(134, ANY)
ERROR: Message[tuple[str, str]] = Message(135, ANY, tail=CodeAndText(2, 2 + MAX_CODE + MAX_TEXT))
LEFT: Message[tuple[()]] = Message(136, ANY)

NAMES: Message[Iterator[tuple[bytes, int]]] = Message(160, READING, tail=Rows("!32sQ", MAX_NAMES))
STRAY: Message[tuple[int, str]] = Message(161, READING, "B", tail=ShortText(1, MAX_TEXT))
LISTED = Message(162, READING, "QQQ?", Listed)
SUMS: Message[list[tuple[int, bytes]]] = Message(163, READING, make=_states, tail=_SUMS)
CONTENTS = Message(164, READING, "BI", _contents, _PACKED)
BLOB = Message(165, READING, "32sQQ", _large)
PIECE = Message(166, READING | WITH_FILES, "BI", _raw, _CHUNK)
BLOB_END = Message(167, READING | WITH_FILES, "B", _blob_end, _SAYS)
NOT_GIVEN = Message(168, READING, "32sB", _not_given, _SAYS)
GIVEN: Message[int] = Message(169, READING, "I")
HASHED: Message[list[BlobHash]] = Message(170, READING, make=_states, tail=_HASHED)

FILE_NAMES: Message[Iterator[tuple[str, int, datetime]]] = Message(192, WITH_FILES, tail=_FOUND)
FILE_SUM: Message[tuple[int, bytes]] = Message(193, WITH_FILES, "Q32s")
FILE_SAID = Message(194, WITH_FILES, "B", _file_said, _SAYS)
DONE: Message[int] = Message(195, WITH_FILES, "I")


# --- content, whose frames are written in parts


def part_prefix(codec: int, raw_length: int, checksum: bytes = b"") -> bytes:
    """Returns the beginning of a PACK or DATA. checksum: SHA-256 of a pack's raw part where the
    session's hash is sha256; a DATA has none.
    """
    return _PART.pack(codec, raw_length) + checksum


def table(digests: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Returns the beginning of a pack's raw part; the contents follow back to back, in order."""
    count = len(sizes)
    return b"".join([NUMBER.pack(count), *digests, struct.pack(f"!{count}I", *sizes)])


def read_table(raw: memoryview) -> tuple[bytes, tuple[int, ...], int]:
    """Returns (all digests joined, sizes, where the contents begin) of a pack's raw part."""
    length = len(raw)
    if length < NUMBER.size:
        raise ProtocolError("a pack without a table")
    (count,) = NUMBER.unpack_from(raw)
    sizes_at = NUMBER.size + count * DIGEST_BYTES
    begin = sizes_at + count * 4
    if not 1 <= count <= MAX_BLOBS or begin > length:
        raise ProtocolError(f"a pack of {length} bytes cannot hold {count} blobs")
    sizes = struct.unpack_from(f"!{count}I", raw, sizes_at)
    if begin + sum(sizes) != length:
        raise ProtocolError("the sizes in a pack do not add up to its length")
    if max(sizes) > PACK_BYTES:
        raise ProtocolError(f"a blob of {max(sizes)} bytes in a pack")
    return bytes(raw[NUMBER.size : sizes_at]), sizes, begin


def contents(digests: Sequence[bytes], sizes: Sequence[int], parts: Sequence[Buffer]) -> bytes:
    """Returns a CONTENTS of whole blobs, in the layout of a PACK without a checksum."""
    beginning = table(digests, sizes)
    raw_length = len(beginning) + sum(sizes)
    return frame(CONTENTS, part_prefix(RAW, raw_length), beginning, *parts)


def piece(data: Buffer) -> bytes:
    """Returns a PIECE."""
    return PIECE.frame(RAW, len(data), data)
