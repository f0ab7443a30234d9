"""A session for files has messages: what a client may do with the files in one area of the target.

HELLO names the area (see `stored_names`), and a file goes by its name in the area, whose form leads
nowhere else. Functions are named as in `write_messages`. `docs/protocol.md` says who may send what
when.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

from ntt_backup.wire import framing, read_messages, write_messages
from ntt_backup.wire.framing import (
    DIGEST_BYTES,
    MAX_CHUNK,
    MAX_TEXT,
    Buffer,
    ProtocolError,
    frame,
    plain,
    short,
)
from ntt_backup.wire.stored_names import read_arrival, require_below, require_name

GIVEN, MISSING, TAKEN, UNREADABLE = range(4)

# Names in one frame.
MAX_NAMES = 500
# Files that one session writes at the same time.
MAX_OPEN = 4

_MAX_NAME = 128
_RANGE = struct.Struct("!QQ")
# Of a file: its size in bytes, and when it came.
_FACTS = struct.Struct("!Qq")
_SUM = struct.Struct(f"!Q{DIGEST_BYTES}s")
_SLOT = struct.Struct("!B")
_NEWLINE = b"\n"
_NAMES = (1, MAX_NAMES * (_MAX_NAME + 1))

# The shortest and the longest payload of each kind that a receiver takes in such a session.
TO_RECEIVER = {
    **read_messages.TO_RECEIVER,
    framing.FILES: (0, _MAX_NAME),
    framing.FILE_DATA: (_SLOT.size + 1, _SLOT.size + MAX_CHUNK),
    framing.FILE_END: (_SLOT.size, _SLOT.size),
    framing.PUBLISH: (_SLOT.size + 1, _SLOT.size + _MAX_NAME),
    framing.DISCARD: (_SLOT.size, _SLOT.size),
    framing.READ: (_RANGE.size + 1, _RANGE.size + _MAX_NAME),
    framing.REMOVE: _NAMES,
}
_OF_OTHERS = (*read_messages.OF_ALL, framing.PIECE, framing.BLOB_END)
# ... and a client.
TO_CLIENT = {
    **{kind: read_messages.TO_CLIENT[kind] for kind in _OF_OTHERS},
    framing.FILE_NAMES: (_FACTS.size, MAX_NAMES * _FACTS.size + _NAMES[1]),
    framing.FILE_SUM: (_SUM.size, _SUM.size),
    framing.FILE_SAID: (1, 1 + MAX_TEXT),
    framing.DONE: (4, 4),
}


def listing(below: str) -> bytes:
    """Returns a FILES. below: what the names begin with, see `stored_names.require_below`."""
    return frame(framing.FILES, below.encode("ascii"))


def file_data(slot: int, data: Buffer) -> bytes:
    """Returns a FILE_DATA: the next bytes of the file in a slot, from 0 to MAX_OPEN - 1."""
    return frame(framing.FILE_DATA, _SLOT.pack(slot), data)


def file_end(slot: int) -> bytes:
    return frame(framing.FILE_END, _SLOT.pack(slot))


def publishing(slot: int, name: str) -> bytes:
    return frame(framing.PUBLISH, _SLOT.pack(slot), name.encode("ascii"))


def discarding(slot: int) -> bytes:
    return frame(framing.DISCARD, _SLOT.pack(slot))


def reading(name: str, start: int, length: int) -> bytes:
    return frame(framing.READ, _RANGE.pack(start, length), name.encode("ascii"))


def removing(names: Iterable[str]) -> bytes:
    """Returns a REMOVE of at most MAX_NAMES."""
    return frame(framing.REMOVE, "\n".join(names).encode("ascii"))


def names(files: Iterable[tuple[str, int, int]]) -> bytes:
    """Returns a FILE_NAMES.

    Args:
        files: At most MAX_NAMES files, each as (name, size in bytes, arrived_us). arrived_us: when
            the file got its name, in microseconds since 1970, as the file system of the receiver
            knows it.
    """
    parts = (
        _FACTS.pack(size, arrived_us) + name.encode("ascii") + _NEWLINE
        for name, size, arrived_us in files
    )
    return frame(framing.FILE_NAMES, *parts)


def file_sum(size: int, digest: bytes) -> bytes:
    return frame(framing.FILE_SUM, _SUM.pack(size, digest))


def said(status: int, text: str = "") -> bytes:
    return frame(framing.FILE_SAID, bytes([status]), short(text, MAX_TEXT))


def done(count: int) -> bytes:
    return write_messages.numbered(framing.DONE, count)


def read_below(area: str, payload: Buffer) -> str:
    """Returns what the names begin with that a FILES asks for."""
    return _checked(require_below, area, payload)


def read_name(area: str, payload: Buffer) -> str:
    return _checked(require_name, area, payload)


def read_slot(payload: memoryview) -> tuple[int, memoryview]:
    """Returns (slot, the rest) of a FILE_DATA, FILE_END, PUBLISH or DISCARD."""
    if payload[0] >= MAX_OPEN:
        raise ProtocolError(f"a slot of {payload[0]}")
    return payload[0], payload[_SLOT.size :]


def read_reading(area: str, payload: memoryview) -> tuple[str, int, int]:
    """Returns (name, start, length) of a READ."""
    start, length = _RANGE.unpack_from(payload)
    return read_name(area, payload[_RANGE.size :]), start, length


def read_removing(area: str, payload: Buffer) -> list[str]:
    return [read_name(area, name) for name in bytes(payload).split(_NEWLINE)]


def read_names(area: str, payload: Buffer) -> Iterator[tuple[str, int, datetime]]:
    """Yields (name, size in bytes, arrival) of each file of a FILE_NAMES."""
    data, at = bytes(payload), 0
    while at < len(data):
        stop = data.find(_NEWLINE, at + _FACTS.size)
        if stop < 0:
            raise ProtocolError("a name that is cut short")
        size, arrived_us = _FACTS.unpack_from(data, at)
        name = read_name(area, data[at + _FACTS.size : stop])
        try:
            yield name, size, read_arrival(arrived_us)
        except ValueError as problem:
            raise ProtocolError(str(problem)) from None
        at = stop + 1


def read_file_sum(payload: Buffer) -> tuple[int, bytes]:
    """Returns (size, SHA-256) of a FILE_SUM."""
    size, digest = _SUM.unpack(payload)
    return size, digest


def read_said(payload: Buffer) -> tuple[int, str]:
    """Returns (status, why)."""
    data = bytes(payload)
    if data[0] > UNREADABLE:
        raise ProtocolError("an unknown answer about a file")
    return data[0], plain(data[1:])


def _checked(require: Callable[[str, str], str], area: str, payload: Buffer) -> str:
    try:
        return require(area, bytes(payload).decode("ascii", "replace"))
    except ValueError as problem:
        raise ProtocolError(str(problem)[:200]) from None
