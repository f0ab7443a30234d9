"""A session for snapshots has messages: what a client may do with files below `snapshots/`.

A file goes by its name alone, `<set>/<version>/<file>`, whose form leads nowhere else. Functions
are named as in `write_messages`. `docs/protocol.md` says who may send what when.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from datetime import datetime

from ntt_backup.wire import dump_messages, framing, read_messages
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
from ntt_backup.wire.snapshot_names import is_set, is_version, parts_of

GIVEN, MISSING, TAKEN, DIFFERENT, UNREADABLE = range(5)

# So many sets lie on a remote at most, so many versions in each, and so many files in a version as
# there are names.
MAX_SETS = 1000
MAX_VERSIONS = 10_000
# Names in one frame.
MAX_NAMES = 500

# Of a name.
_SHORTEST = len("a/20260102T030405Z-01234567/map")
_LONGEST = 31 + len("/20260102T030405Z-01234567/pack-00001")

_RANGE = struct.Struct("!QQ")
# Of a file: bytes, and when it came.
_FACTS = struct.Struct("!Qq")
_NEWLINE = b"\n"
_NAMES = (_SHORTEST, MAX_NAMES * (_LONGEST + 1))

# The shortest and the longest payload of each kind that a receiver takes in such a session.
TO_RECEIVER = {
    **dump_messages.TO_RECEIVER,
    framing.FILES: (0, _LONGEST),
    framing.FILE_DATA: (1, MAX_CHUNK),
    framing.FILE_END: (DIGEST_BYTES + _SHORTEST, DIGEST_BYTES + _LONGEST),
    framing.FORGET: (0, 0),
    framing.READ: (_RANGE.size + _SHORTEST, _RANGE.size + _LONGEST),
    framing.REMOVE: _NAMES,
}
_OF_OTHERS = (*read_messages.OF_ALL, framing.PIECE, framing.BLOB_END)
# ... and a client in a session for snapshots.
TO_CLIENT = {
    **{kind: read_messages.TO_CLIENT[kind] for kind in _OF_OTHERS},
    framing.DONE: dump_messages.TO_CLIENT[framing.DONE],
    framing.FILE_NAMES: (_FACTS.size, MAX_NAMES * _FACTS.size + _NAMES[1]),
    framing.FILE_SAID: (1, 1 + MAX_TEXT),
}


def listing(below: str) -> bytes:
    """Returns a FILES. below: "", `<set>/` or `<set>/<version>/`."""
    return frame(framing.FILES, below.encode("ascii"))


def end(name: str, digest: bytes) -> bytes:
    """Returns a FILE_END. digest: SHA-256 of all that was sent."""
    return frame(framing.FILE_END, digest, name.encode("ascii"))


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


def said(status: int, text: str = "") -> bytes:
    return frame(framing.FILE_SAID, bytes([status]), short(text, MAX_TEXT))


def read_below(payload: Buffer) -> tuple[str, str]:
    """Returns set and version of a FILES, "" where it asks for all."""
    text = _text(payload)
    parts = text.split("/")
    fits = parts[-1] == "" and len(parts) <= 3
    of_set, version = (*parts[:-1], "", "")[:2]
    if not fits or not (is_set(of_set) or not text) or not (is_version(version) or not version):
        raise ProtocolError("neither a set nor a version")
    return of_set, version


def read_name(payload: Buffer) -> str:
    name = _text(payload)
    try:
        parts_of(name)
    except ValueError:
        raise ProtocolError("not the name of a file of a snapshot") from None
    return name


def read_end(payload: memoryview) -> tuple[str, bytes]:
    """Returns (name, SHA-256) of a FILE_END."""
    return read_name(payload[DIGEST_BYTES:]), bytes(payload[:DIGEST_BYTES])


def read_reading(payload: memoryview) -> tuple[str, int, int]:
    """Returns (name, start, length) of a READ."""
    start, length = _RANGE.unpack_from(payload)
    return read_name(payload[_RANGE.size :]), start, length


def read_removing(payload: Buffer) -> list[str]:
    return [read_name(name) for name in bytes(payload).split(_NEWLINE)]


def read_names(payload: Buffer) -> Iterator[tuple[str, int, datetime]]:
    """Yields (name, size in bytes, arrival) of each file of a FILE_NAMES."""
    data, at = bytes(payload), 0
    while at < len(data):
        stop = data.find(_NEWLINE, at + _FACTS.size)
        if stop < 0:
            raise ProtocolError("a name that is cut short")
        size, arrived_us = _FACTS.unpack_from(data, at)
        name = read_name(data[at + _FACTS.size : stop])
        yield name, size, dump_messages.read_arrival(arrived_us)
        at = stop + 1


def read_said(payload: Buffer) -> tuple[int, str]:
    """Returns (status, why)."""
    data = bytes(payload)
    if data[0] > UNREADABLE:
        raise ProtocolError("an unknown answer about a file")
    return data[0], plain(data[1:])


def _text(payload: Buffer) -> str:
    return bytes(payload).decode("ascii", "replace")
