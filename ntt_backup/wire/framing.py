"""Frames have a header, kinds and limits, and are cut from a stream of bytes by a buffer.

A frame is a length, a kind and a payload. Everything is bounded, and a length is judged as soon as
the header has arrived: a peer that announces too much is refused at once and costs no memory. What
carries content is checked on its way to the disk; every other frame ends with a CRC-32, so that a
flipped bit in a verdict or a name cannot pass for another one. `docs/protocol.md` is the contract.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Union

PROTOCOL = 1

HEADER = struct.Struct("!IB")
_CRC = struct.Struct("!I")
CRC_BYTES = _CRC.size
DIGEST_BYTES = 32

# A pack is cut at 1 MiB, or later where it compresses: large enough that a frame costs little,
# small enough that a few are in memory at both ends. What a peer may send is bounded wider, so that
# the sending end alone can tune the cut.
PACK_BYTES = 1 << 20
MAX_RAW = 8 << 20
MAX_CHUNK = 1 << 20
MAX_PAYLOAD = MAX_RAW + 4096
MAX_FIELDS = 64 << 10
MAX_BLOBS = 100_000
MAX_BLOB = 1 << 60
MAX_TEXT = 300
MAX_CODE = 32

# The marker in the root of a target that has the layout `packs`.
FORMAT = "format.json"
# The marker in the root of a target that has plain files. Either has the identity of the target.
IDENTITY = ".ntt-target.json"
IDENTITY_BYTES = 16

# The kinds without a CRC-32: PACK and DATA, see `messages`.
CONTENT = frozenset((3, 5))

_SMALL = 1 << 16

Buffer = Union[bytes, bytearray, memoryview]


class ProtocolError(Exception):
    """The peer has sent what the protocol does not allow."""


def frame(kind: int, *parts: Buffer) -> bytes:
    """Returns a whole frame, for what is small; large payloads are written after `head`."""
    payload = b"".join(parts)
    check = b"" if kind in CONTENT else _CRC.pack(zlib.crc32(payload, kind))
    return HEADER.pack(len(payload) + len(check), kind) + payload + check


def around(kind: int, head: bytes, data: Buffer) -> tuple[bytes, bytes]:
    """Returns what a frame of head and data has before the data, and after it.

    A mebibyte is so written from where it is. A frame of it takes three copies.
    """
    check = b"" if kind in CONTENT else _CRC.pack(zlib.crc32(data, zlib.crc32(head, kind)))
    return HEADER.pack(len(head) + len(data) + len(check), kind) + head, check


def head(kind: int, length: int) -> bytes:
    """Returns the header of a frame of CONTENT, whose payload of that length is sent separately."""
    return HEADER.pack(length, kind)


def banner_sum(line: bytes) -> str:
    """Returns the CRC-32 of a banner's line, which the banner ends with as its `sum`."""
    return f"{zlib.crc32(line):08x}"


def short(text: str, limit: int) -> bytes:
    """Returns text as one line of UTF-8 in at most limit bytes, cut between characters."""
    words = " ".join(text.split()).encode("utf-8", "backslashreplace")
    return words[:limit].decode("utf-8", "ignore").encode("utf-8")


def plain(data: bytes) -> str:
    """Returns text of the peer without characters that would control a terminal."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "?" for char in text)


class Inbox:
    """A bounded buffer: bytes go in, whole frames come out.

    lengths: the shortest and the longest payload of each kind that may come. Read into `space()`
    and report the count to `filled()`; then call `next()` until it returns None. A payload is a
    view into the buffer, and is valid until the next `space()`.
    """

    __slots__ = ("_begin", "_end", "_lengths", "_view")

    def __init__(self, lengths: dict[int, tuple[int, int]]) -> None:
        self.admit(lengths)
        longest = max(most for _, most in lengths.values())
        # One frame and one more read. Mapped, so that pages which are never used take no memory.
        self._view = memoryview(mmap.mmap(-1, HEADER.size + longest + CRC_BYTES + MAX_CHUNK))
        self._begin = 0
        self._end = 0

    def admit(self, lengths: dict[int, tuple[int, int]]) -> None:
        """Takes these kinds from now on; none may be longer than the longest of the first ones."""
        self._lengths = lengths

    def space(self) -> memoryview:
        """Returns where the next bytes go; it is never empty."""
        rest = self._end - self._begin
        # Moved while it is little: a buffer of which little is used stays in the processor's cache.
        if self._begin and (rest < _SMALL or len(self._view) - self._end < MAX_CHUNK // 2):
            self._view[:rest] = self._view[self._begin : self._end]
            self._begin, self._end = 0, rest
        return self._view[self._end :]

    def filled(self, count: int) -> None:
        self._end += count

    @property
    def waiting(self) -> int:
        """Returns the number of bytes that are not returned as a frame yet."""
        return self._end - self._begin

    def next(self) -> tuple[int, memoryview] | None:
        """Returns the kind and payload of the next frame, None while it is incomplete.

        Raises ProtocolError for a frame that is not allowed, or was altered on its way.
        """
        begin = self._begin
        if self._end - begin < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._view, begin)
        bounds = self._lengths.get(kind)
        if bounds is None:
            raise ProtocolError(f"a frame of unknown type {kind}")
        check = 0 if kind in CONTENT else CRC_BYTES
        if not bounds[0] + check <= length <= bounds[1] + check:
            raise ProtocolError(f"a frame of type {kind} with {length} bytes")
        begin += HEADER.size
        if self._end - begin < length:
            return None
        self._begin = end = begin + length
        payload = self._view[begin : end - check]
        if check and zlib.crc32(payload, kind) != _CRC.unpack(self._view[end - check : end])[0]:
            raise ProtocolError(f"a frame of type {kind} was altered on its way")
        return kind, payload
