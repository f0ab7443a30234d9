"""The table of contents of a dump says what is in it. It is read here; nothing of it is executed.

A dump is a program: pg_restore sends the statements that stand in it to the server, whatever kind
of object they claim to make, and the list that `pg_restore --list` prints is of those claims. So
what is told of a dump (its owners and grants), and which rows are taken from one that nobody
vouches for, is decided by the fields of its entries, never by lines of a script in which a function
or a name may play another line.

The format is PostgreSQL's own: `pg_backup_archiver.c`, ReadHead and ReadToc, of the custom format.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

# Versions of the archive: of PostgreSQL 12 to 18. Since 1.15 it names the way of compression, and
# since 1.16 the kind of each relation.
_OLDEST: Final = (1, 14)
_NEWEST: Final = (1, 16)
_NAMES_COMPRESSION: Final = (1, 15)
_HAS_RELKIND: Final = (1, 16)
_MAGIC: Final = b"PGDMP"
_CUSTOM: Final = 1
_MOST_ENTRIES: Final = 200_000
_DATE_PARTS: Final = 7
_METHODS: Final = ("none", "gzip", "lz4", "zstd")

# A block of data: of a table, or of large objects.
_TABLE: Final = 1
_LARGE_OBJECTS: Final = 3
_PIECE: Final = 1 << 18
_LONGEST_LINE: Final = 8 << 20
_END_OF_ROWS: Final = b"\\."

# What pg_restore gives an owner: of the other kinds the owner is that of what they belong to.
_OWNED: Final = re.compile(
    r"AGGREGATE|COLLATION|CONVERSION|DOMAIN|EVENT TRIGGER|FOREIGN DATA WRAPPER|FOREIGN TABLE"
    r"|FUNCTION|MATERIALIZED VIEW|OPERATOR|OPERATOR CLASS|OPERATOR FAMILY|PROCEDURAL LANGUAGE"
    r"|PROCEDURE|PUBLICATION|SCHEMA|SEQUENCE|SERVER|STATISTICS|SUBSCRIPTION|TABLE"
    r"|TEXT SEARCH (CONFIGURATION|DICTIONARY)|TYPE|VIEW"
)
_GRANTS: Final = ("ACL", "DEFAULT ACL")
# A statement ends with the first semicolon that is in no quoted name and in no string.
_STATEMENT: Final = re.compile(r"""(?:[^;"']|"[^"]*"|'[^']*')+;""")
_RIGHT: Final = re.compile(r"\s*((?:GRANT|REVOKE|ALTER DEFAULT PRIVILEGES)\s.*;)", re.DOTALL)
_COPY: Final = re.compile(r"COPY \S.* \(([^()]*)\) FROM stdin;\n?", re.DOTALL)
_COLUMN: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([a-z_][a-z0-9_$]*))\s*(?:,|$)')
_ENCODING: Final = re.compile(r"SET client_encoding = '(\w+)';\n", re.ASCII)


class TocUnreadable(Exception):
    """A dump has no table of contents that can be read here."""


class DumpDamaged(Exception):
    """The data of a dump are not as the format demands."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a dump. All texts are whatever somebody wrote.

    Attributes:
        number: Of the entry in its dump.
        kind: As `TABLE`, `TABLE DATA` or `ACL`.
        schema: The schema that the object is in; "" where it is in none.
        name: Of the object.
        owner: The role that owned the object.
        definition: The statements that make the object.
        drop: The statement that drops the object.
        copy: The statement that copies the rows of a table.
    """

    number: int
    kind: str
    schema: str
    name: str
    owner: str
    definition: str
    drop: str
    copy: str

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.schema}.{self.name}" if self.schema else f"{self.kind} {self.name}"
        )

    @property
    def columns(self) -> list[str]:
        """The columns of which a table's rows consist; none where that cannot be told."""
        match, found, at = _COPY.fullmatch(self.copy), [], 0
        text = match[1] if match is not None else ""
        while at < len(text):
            column = _COLUMN.match(text, at)
            if column is None:
                return []
            found.append(column[2] or column[1].replace('""', '"'))
            at = column.end()
        return found


@dataclass(frozen=True, slots=True)
class Toc:
    """The table of contents of a dump.

    Attributes:
        entries: What is in the dump, in the order of its restore.
        size: The bytes of the head of the dump; the data follow.
        integer: The bytes of an integer in the dump, without its sign.
        method: How the data are compressed: "none", "gzip", "lz4" or "zstd".
    """

    entries: tuple[Entry, ...]
    size: int
    integer: int
    method: str

    @property
    def encoding(self) -> str:
        """The encoding of the rows, as the server calls it."""
        for one in self.entries:
            if one.kind == "ENCODING" and (match := _ENCODING.fullmatch(one.definition)):
                return match[1]
        return "UTF8"

    def rights(self, user: str) -> Iterator[str]:
        """Yields the statements that give back owners and grants, except for user as the owner."""
        for one in self.entries:
            if _OWNED.fullmatch(one.kind) and one.owner not in ("", user):
                what = one.drop.strip().removeprefix("DROP ").removesuffix(";")
                if what.startswith(f"{one.kind} "):
                    yield f"ALTER {what} OWNER TO {_quoted(one.owner)};"
        for one in self.entries:
            if one.kind in _GRANTS:
                for said in _STATEMENT.findall(one.definition):
                    if match := _RIGHT.fullmatch(said):
                        yield match[1]


def read(head: bytes) -> Toc:
    """Returns the table of contents at the beginning of a dump. Raises TocUnreadable."""
    try:
        return _Head(head).toc()
    except (IndexError, ValueError) as error:
        raise TocUnreadable(f"it cannot be read: {error}") from error


class _Head:
    """Reads a head field by field. Raises IndexError at its end, ValueError for nonsense."""

    _integer: int  # As the head says, before the first of them.

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def toc(self) -> Toc:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise TocUnreadable("it is no dump of pg_dump in the custom format")
        version = (self._byte(), self._byte())
        self._byte()  # The revision.
        if not _OLDEST <= version <= _NEWEST:
            raise TocUnreadable(f"its format {version[0]}.{version[1]} is not known here")
        self._integer, offset = self._byte(), self._byte()
        if self._integer not in (4, 8) or offset not in (4, 8) or self._byte() != _CUSTOM:
            raise TocUnreadable("it is no dump of pg_dump in the custom format")
        if version >= _NAMES_COMPRESSION:
            method = _METHODS[self._byte()]
        else:
            method = "gzip" if self._number() else "none"
        for _ in range(_DATE_PARTS):
            self._number()
        for _ in ("database", "version of the server", "version of pg_dump"):
            self._text()
        count = self._number()
        if not 0 <= count <= _MOST_ENTRIES:
            raise TocUnreadable(f"it has {count:,} entries")
        entries = tuple(self._entry(offset, relkind=version >= _HAS_RELKIND) for _ in range(count))
        return Toc(entries, self._at, self._integer, method)

    def _entry(self, offset: int, *, relkind: bool) -> Entry:
        number = self._number()
        self._number()  # Whether it has data.
        self._text()  # The OID of its table, and its own.
        self._text()
        name, kind = self._text(), self._text()
        self._number()  # Its section.
        definition, drop, copy, schema = (self._text() for _ in range(4))
        self._text()  # The tablespace, and the access method.
        self._text()
        if relkind:
            self._number()
        owner = self._text()
        self._text()  # Whether it has OIDs.
        while self._text_or_none() is not None:
            continue  # What it depends on.
        self._take(1 + offset)  # Where its data are, which is not known of a stream.
        return Entry(number, kind, schema, name, owner, definition, drop, copy)

    def _take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        if len(data) < size:
            raise IndexError("it ends within its table of contents")
        self._at += size
        return data

    def _byte(self) -> int:
        return self._take(1)[0]

    def _number(self) -> int:
        sign = self._byte()
        number = int.from_bytes(self._take(self._integer), "little")
        return -number if sign else number

    def _text_or_none(self) -> str | None:
        size = self._number()
        return None if size < 0 else self._take(size).decode("utf-8", "surrogateescape")

    def _text(self) -> str:
        return self._text_or_none() or ""


def copy_rows(
    pieces: Iterable[bytes], toc: Toc, wanted: Mapping[int, Callable[[Iterator[bytes]], None]]
) -> None:
    """Gives the rows of some tables to whoever wants them, in the order of the dump.

    Args:
        pieces: the whole dump.
        toc: its table of contents.
        wanted: by the number of an entry, what takes its lines, each with its line feed.

    Raises:
        DumpDamaged: The data are not as the format demands.
    """
    data, left = _Data(pieces, toc), set(wanted)
    data.skip(toc.size)
    while left and (kind := data.block()) is not None:
        number = data.number()
        if kind == _TABLE and number in left:
            left.discard(number)
            chunks = data.chunks()
            wanted[number](_lines(_plain(chunks, toc.method)))
            for _ in chunks:
                continue  # What stands behind the end of the rows.
        elif kind == _TABLE:
            for _ in data.chunks():
                continue
        else:
            while data.number():
                for _ in data.chunks():
                    continue
    if left:
        raise DumpDamaged("a table that it lists has no rows in it")
    data.drain()  # The sum of all is still to be proved.


class _Data:
    """Reads the data of a dump, without ever holding more than a piece of it."""

    def __init__(self, pieces: Iterable[bytes], toc: Toc) -> None:
        self._pieces = iter(pieces)
        self._integer = toc.integer
        self._held = b""
        self._at = 0

    def block(self) -> int | None:
        """Returns the kind of the next block; None at the end."""
        kind = next(iter(self._some(1)), None)
        if kind is not None and kind not in (_TABLE, _LARGE_OBJECTS):
            raise DumpDamaged("there is no block of data where one must begin")
        return kind

    def number(self) -> int:
        data = b"".join(self._parts(1 + self._integer))
        number = int.from_bytes(data[1:], "little")
        if data[0] and number:
            raise DumpDamaged("a number is negative")
        return number

    def chunks(self) -> Iterator[bytes]:
        """Yields the data of a block, in pieces."""
        while size := self.number():
            yield from self._parts(size)

    def drain(self) -> None:
        """Reads what is left, whatever it is."""
        for _ in self._pieces:
            continue

    def skip(self, size: int) -> None:
        for _ in self._parts(size):
            continue

    def _parts(self, size: int) -> Iterator[bytes]:
        while size:
            data = self._some(size)
            if not data:
                raise DumpDamaged("it ends within its data")
            size -= len(data)
            yield data

    def _some(self, most: int) -> bytes:
        """Returns one byte at least, and not more than so many; nothing at the end."""
        while self._at == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._held, self._at = piece, 0
        data = self._held[self._at : self._at + most]
        self._at += len(data)
        return data


def _plain(chunks: Iterator[bytes], method: str) -> Iterator[bytes]:
    """Yields what was compressed, in pieces of a bounded size."""
    if method == "none":
        for chunk in chunks:  # Not `yield from`, which would end chunks together with this.
            yield chunk
    elif method == "gzip":
        gzip = zlib.decompressobj()
        try:
            for chunk in chunks:
                left = chunk
                while left:
                    yield gzip.decompress(left, _PIECE)
                    left = gzip.unconsumed_tail
        except zlib.error as error:
            raise DumpDamaged(str(error)) from error
    else:
        raise DumpDamaged(f"its rows are compressed by {method}")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the rows of a table, each with its line feed, up to the line that ends them."""
    held = b""
    for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        if len(held) > _LONGEST_LINE:
            raise DumpDamaged("a row is too long")
        for line in whole:
            if line == _END_OF_ROWS:
                return
            yield line + b"\n"
    raise DumpDamaged("the end of a table's rows is missing")


def _quoted(name: str) -> str:
    if re.fullmatch(r"[a-z_][a-z0-9_]*", name, re.ASCII):
        return name
    return '"' + name.replace('"', '""') + '"'
