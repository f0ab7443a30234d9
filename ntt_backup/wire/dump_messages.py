"""A session for dumps of the catalog has messages: what a client may do in `pgdump/`.

A dump goes by its name alone, which has one form and so one length. Functions are named as in
`write_messages`. `docs/protocol.md` says who may send what when.
"""

from __future__ import annotations

import json
import re
import struct
from datetime import datetime, timedelta, timezone
from typing import Any

from ntt_backup.wire import framing, read_messages
from ntt_backup.wire.framing import DIGEST_BYTES, MAX_CHUNK, Buffer, ProtocolError, frame
from ntt_backup.wire.snapshot_names import STAMP

# As many dumps may lie in `pgdump/` when one more gets its name.
MAX_DUMPS = 10_000
MAX_RECORD = 4096

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_US = (datetime.max.replace(tzinfo=timezone.utc) - _EPOCH) // timedelta(microseconds=1)

_NAME = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{8}\.dump", re.ASCII)
_NAME_BYTES = len("20260102T030405Z-01234567.dump")

# Of a dump: bytes, and when it came.
_FACTS = struct.Struct("!qq")
_SUM = struct.Struct(f"!Q{DIGEST_BYTES}s")

# The shortest and the longest payload of each kind that a receiver takes in such a session.
TO_RECEIVER = {
    **read_messages.TO_RECEIVER,
    framing.DUMPS: (0, 0),
    framing.DUMP_DATA: (1, MAX_CHUNK),
    framing.DUMP_END: (0, 0),
    framing.NAME: (_NAME_BYTES + 1, _NAME_BYTES + MAX_RECORD),
    framing.DROP: (_NAME_BYTES, _NAME_BYTES * MAX_DUMPS),
    framing.FETCH: (_NAME_BYTES, _NAME_BYTES),
}
_OF_OTHERS = (*read_messages.OF_ALL, framing.PIECE, framing.BLOB_END)
# ... and a client in a session for dumps.
TO_CLIENT = {
    **{kind: read_messages.TO_CLIENT[kind] for kind in _OF_OTHERS},
    framing.DUMP: (_FACTS.size + _NAME_BYTES, _FACTS.size + _NAME_BYTES + MAX_RECORD),
    framing.DUMP_SUM: (_SUM.size, _SUM.size),
    framing.DONE: (4, 4),
}


def begun(name: str) -> datetime:
    """Returns when the dump of that name was begun. Raises ValueError for another name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a dump")
    return datetime.strptime(match[1], STAMP).replace(tzinfo=timezone.utc)


def is_name(text: str) -> bool:
    """Returns whether text is the name of a dump, and so harmless in a path or a shell."""
    try:
        begun(text)
    except ValueError:
        return False
    return True


def named(kind: int, *names: str, record: bytes = b"") -> bytes:
    """Returns a NAME, a DROP of several dumps, or a FETCH. record: that of a NAME."""
    return frame(kind, "".join(names).encode("ascii"), record)


def dump(name: str, size: int | None, arrived_us: int, record: bytes) -> bytes:
    """Returns a DUMP.

    Args:
        name: The name of the dump.
        size: Its size in bytes; None where only the record of the dump exists.
        arrived_us: When the dump got its name, in microseconds since 1970, as the file system of
            the receiver knows it. Unused where only the record exists.
        record: The record of the dump, JSON.
    """
    facts = _FACTS.pack(-1 if size is None else size, arrived_us)
    return frame(framing.DUMP, facts, name.encode("ascii"), record)


def dump_sum(size: int, digest: bytes) -> bytes:
    return frame(framing.DUMP_SUM, _SUM.pack(size, digest))


def read_named(payload: Buffer) -> tuple[str, bytes]:
    """Returns the name at the beginning of a payload, and what follows it."""
    data = bytes(payload)
    name = data[:_NAME_BYTES].decode("ascii", "replace")
    if not is_name(name):
        raise ProtocolError("not the name of a dump")
    return name, data[_NAME_BYTES:]


def read_names(payload: Buffer) -> list[str]:
    names, rest = [], bytes(payload)
    while rest:
        name, rest = read_named(rest)
        names.append(name)
    return names


def read_dump(payload: Buffer) -> tuple[str, int | None, datetime | None, bytes]:
    """Returns (name, size, arrival, record) of a DUMP. Size and arrival are None where only the
    record of the dump exists.
    """
    size, arrived_us = _FACTS.unpack_from(payload)
    name, record = read_named(memoryview(payload)[_FACTS.size :])
    if size < 0:
        return name, None, None, record
    return name, size, read_arrival(arrived_us), record


def arrival_us(mtime_ns: int) -> int:
    """Returns when a file got its name, in microseconds since 1970.

    Args:
        mtime_ns: The modification time of the file in nanoseconds. A time before 1970 counts as
            1970, one after the year 9999 as the end of that year.
    """
    return min(max(mtime_ns // 1000, 0), _LAST_US)


def read_arrival(arrived_us: int) -> datetime:
    """Returns a time of arrival that a peer has sent. Raises ProtocolError where it lies before
    1970 or after the year 9999.
    """
    if not 0 <= arrived_us <= _LAST_US:
        raise ProtocolError("a time of arrival that no clock has shown")
    return _EPOCH + timedelta(microseconds=arrived_us)


def read_dump_sum(payload: Buffer) -> tuple[int, bytes]:
    """Returns (size, SHA-256)."""
    size, digest = _SUM.unpack(payload)
    return size, digest


def read_record(data: bytes | str) -> dict[str, Any]:
    """Returns the object in the record of a dump; nothing for any other text."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
