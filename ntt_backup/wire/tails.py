"""The tails of payloads: what stands behind the fixed layout of a message, of variable length.

Nothing of it is evaluated, and nothing is longer than its bounds say.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Union

from ntt_backup.wire.framing import (
    DIGEST_BYTES,
    MAX_BLOBS,
    MAX_CODE,
    MAX_TEXT,
    Buffer,
    ProtocolError,
    plain,
    short,
)

if TYPE_CHECKING:
    from datetime import datetime

# The texts of a receipt are left out once they exceed this together, so that it fits a frame.
RECEIPT_TEXTS = 4 << 20

NUMBER = struct.Struct("!I")
_NEWLINE = b"\n"

Field = Union[str, int]


class Rest:
    """A tail of bytes as they are, and the base of other tails.

    Attributes:
        least: The shortest length in bytes.
        most: The longest length in bytes.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most

    def parts(self, *values: Any, **_: Any) -> Iterable[Buffer]:
        """Returns the parts of the tail for a value. Other tails take values of their own."""
        return values

    def read(self, data: Any, *_: Any, **__: Any) -> Any:
        """Returns the value of a tail. Names of files also need the area that they are in."""
        return data


class FlatObject(Rest):
    """A flat object: names, and strings or whole numbers."""

    def parts(self, values: dict[str, Field]) -> Iterable[Buffer]:
        return (json.dumps(values, separators=(",", ":")).encode("ascii"),)

    def read(self, data: Buffer) -> dict[str, Field]:
        try:
            values = json.loads(
                bytes(data).decode("ascii"), parse_int=_whole, object_pairs_hook=_no_repeats
            )
        except (ValueError, RecursionError) as problem:
            raise ProtocolError(f"not a flat object: {problem}") from None
        if not isinstance(values, dict):
            raise ProtocolError("not a flat object")
        for name, value in values.items():
            if not isinstance(value, (str, int)):
                raise ProtocolError(f"{name[:40]!r} is neither text nor a whole number")
        return values


class ShortText(Rest):
    def parts(self, text: str = "") -> Iterable[Buffer]:
        return (short(text, MAX_TEXT),)

    def read(self, data: Buffer) -> str:
        return plain(bytes(data))


class CodeAndText(Rest):
    def parts(self, code: str, text: str) -> Iterable[Buffer]:
        return short(code, MAX_CODE), b"\0", short(text, MAX_TEXT)

    def read(self, data: Buffer) -> tuple[str, str]:
        code, _, text = bytes(data).partition(b"\0")
        return plain(code)[:MAX_CODE], plain(text)


class Digests(Rest):
    def parts(self, digests: Iterable[bytes]) -> Iterable[Buffer]:
        return digests

    def read(self, payload: Buffer) -> list[bytes]:
        data = bytes(payload)
        if len(data) % DIGEST_BYTES:
            raise ProtocolError("a digest that is cut short")
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


class Rows(Rest):
    """Rows of one layout: digests with sizes in bytes, or a state and a sum for each digest."""

    def __init__(self, layout: str, most: int) -> None:
        self.row = struct.Struct(layout)
        super().__init__(self.row.size, most * self.row.size)

    def parts(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[Buffer]:
        return (self.row.pack(*row) for row in rows)

    def read(self, data: Buffer) -> Iterator[tuple[Any, ...]]:
        if len(data) % self.row.size:
            raise ProtocolError("a row that is cut short")
        return self.row.iter_unpack(data)


class EntriesWithText(Rest):
    """Entries with a text behind each, whose length is the last field of the layout.

    Args:
        layout: The layout of an entry.
        make: Makes an entry of its fields and its text.
        most: The longest length of the tail in bytes.
        counted: Whether the number of entries stands before them.
    """

    def __init__(
        self, layout: str, make: Callable[..., Any], most: int, counted: bool = False
    ) -> None:
        super().__init__(NUMBER.size if counted else 0, most)
        self.entry = struct.Struct(layout)
        self.make = make
        self.counted = counted

    def parts(self, entries: Sequence[Any]) -> Iterable[Buffer]:
        parts = [NUMBER.pack(len(entries))] if self.counted else []
        room = RECEIPT_TEXTS
        pack = self.entry.pack
        for entry in entries:
            text = entry[-1]
            words = short(text, MAX_TEXT) if text else b""
            if len(words) > room:
                words = b""
            room -= len(words)
            parts += (pack(*entry[:-1], len(words)), words)
        return parts

    def read(self, payload: Buffer) -> list[Any]:
        data = bytes(payload)
        if not self.counted:
            return [self.make(*entry) for entry in self._entries(data, 0)]
        (count,) = NUMBER.unpack_from(data)
        if count > MAX_BLOBS:
            raise ProtocolError("a receipt for too many blobs")
        entries = self._entries(data, NUMBER.size)
        found = [self.make(*entry) for entry in islice(entries, count + 1)]
        if len(found) != count:
            raise ProtocolError("a receipt with more or less than it announces")
        return found

    def _entries(self, data: bytes, at: int) -> Iterator[list[Any]]:
        layout = self.entry
        while at < len(data):
            if at + layout.size > len(data):
                raise ProtocolError("an entry that is cut short")
            *entry, length = layout.unpack_from(data, at)
            at += layout.size + length
            if length > MAX_TEXT or at > len(data):
                raise ProtocolError("a text that is cut short")
            yield [*entry, plain(data[at - length : at])]


# The names of files are checked against the forms of names in the area of the session. The module
# of the forms is loaded with the first such message: source that travels is compiled each time.


class FileName(Rest):
    """A name, or the beginning of names, whose form a function of `stored_names` requires."""

    form = "require_name"

    def parts(self, name: Any) -> Iterable[Buffer]:
        return (name.encode("ascii"),)

    def read(self, data: Buffer, area: str) -> Any:
        from ntt_backup.wire import stored_names

        try:
            text = bytes(data).decode("ascii", "replace")
            return getattr(stored_names, self.form)(area, text)
        except ValueError as problem:
            raise ProtocolError(str(problem)[:200]) from None


class BelowName(FileName):
    form = "require_below"


class FileNameList(FileName):
    def parts(self, names: Any) -> Iterable[Buffer]:
        return super().parts("\n".join(names))

    def read(self, data: Buffer, area: str) -> list[str]:
        read = super().read
        return [read(name, area) for name in bytes(data).split(_NEWLINE)]


class FoundFileList(FileName):
    """At most MAX_FILE_NAMES files, each as (name, size in bytes, arrival).

    arrival: When the file got its name, as the file system of the receiver knows it: written as
    microseconds since 1970, read as a datetime.
    """

    facts = struct.Struct("!Qq")

    def parts(self, files: Iterable[tuple[str, int, int]]) -> Iterable[Buffer]:
        return (
            self.facts.pack(size, arrived_us) + name.encode("ascii") + _NEWLINE
            for name, size, arrived_us in files
        )

    def read(self, payload: Buffer, area: str) -> Iterator[tuple[str, int, datetime]]:
        from ntt_backup.wire.stored_names import read_arrival

        data, at = bytes(payload), 0
        while at < len(data):
            begin = at + self.facts.size
            stop = data.find(_NEWLINE, begin)
            if stop < 0:
                raise ProtocolError("a name that is cut short")
            size, arrived_us = self.facts.unpack_from(data, at)
            name = super().read(data[begin:stop], area)
            try:
                yield name, size, read_arrival(arrived_us)
            except ValueError as problem:
                raise ProtocolError(str(problem)) from None
            at = stop + 1


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
