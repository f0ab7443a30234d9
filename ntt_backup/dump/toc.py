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
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, cast

import zstandard

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
_WINDOW: Final = 8 << 20  # What pg_dump needs at its levels is less; a stranger may ask for more.
_LONGEST_LINE: Final = 8 << 20
_END_OF_ROWS: Final = b"\\."

# What pg_restore gives an owner: of the other kinds the owner is that of what they belong to.
_OWNED: Final = re.compile(
    r"AGGREGATE|COLLATION|CONVERSION|DOMAIN|EVENT TRIGGER|FOREIGN DATA WRAPPER|FOREIGN TABLE"
    r"|FUNCTION|MATERIALIZED VIEW|OPERATOR|OPERATOR CLASS|OPERATOR FAMILY|PROCEDURAL LANGUAGE"
    r"|PROCEDURE|PUBLICATION|SCHEMA|SEQUENCE|SERVER|STATISTICS|SUBSCRIPTION|TABLE"
    r"|TEXT SEARCH (CONFIGURATION|DICTIONARY)|TYPE|VIEW"
)
# The computation of a materialized view, as its entry is called.
VIEW_DATA: Final = "MATERIALIZED VIEW DATA"
EXTENSION: Final = "EXTENSION"
TABLE: Final = "TABLE"
SEQUENCE: Final = "SEQUENCE"
_SET: Final = "SEQUENCE SET"
# What comes back with a table. Whatever else belongs to it may change other tables, or run code.
_ATTACH: Final = frozenset({"TABLE ATTACH", "INDEX ATTACH"})
_WITH_A_TABLE: Final = frozenset(
    {"TABLE DATA", "CONSTRAINT", "CHECK CONSTRAINT", "INDEX", *_ATTACH}
)
_GRANTS: Final = ("ACL", "DEFAULT ACL")
# A statement ends with the first semicolon that is in no quoted name and in no string.
_STATEMENT: Final = re.compile(r"""(?:[^;"']|"[^"]*"|'[^']*')+;""")
_RIGHT: Final = re.compile(r"\s*((?:GRANT|REVOKE|ALTER DEFAULT PRIVILEGES)\s.*;)", re.DOTALL)
_COPY: Final = re.compile(r"COPY \S.* \(([^()]*)\) FROM stdin;\n?", re.DOTALL)
_NAME: Final = r'("(?:[^"]|"")+"|[a-z_][a-z0-9_$]*)'
# A name with its schema, but for what only looks so in a string or in a quoted name.
_QUALIFIED: Final = re.compile(rf"""'(?:[^']|'')*'|{_NAME}\.{_NAME}|"(?:[^"]|"")+\"""")
_PARTITION: Final = re.compile(
    rf"ALTER TABLE ONLY {_NAME}\.{_NAME} ATTACH PARTITION {_NAME}\.{_NAME} "
)
_COLUMN: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([a-z_][a-z0-9_$]*))\s*(?:,|$)')
_ENCODING: Final = re.compile(r"SET client_encoding = '(\w+)';\n", re.ASCII)


class DumpDamaged(Exception):
    """The bytes of a dump are not as its format demands, or cannot be read here."""


class PieceReader:
    """Reads pieces in the lengths that are asked for, without ever holding more than a piece."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = b""
        self._at = 0
        self.passed = 0  # Bytes.

    def at_end(self) -> bool:
        while self._at == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._held, self._at = piece, 0
        return False

    def parts(self, size: int) -> Iterator[bytes]:
        """Yields so many bytes, in pieces."""
        while size:
            if self.at_end():
                raise DumpDamaged("it ends within its data")
            data = self._held[self._at : self._at + size]
            self._at += len(data)
            self.passed += len(data)
            size -= len(data)
            yield data

    def take(self, size: int) -> bytes:
        return b"".join(self.parts(size))


def drain(pieces: Iterable[bytes]) -> None:
    """Reads pieces to their end, and forgets them."""
    deque(pieces, maxlen=0)


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
        needs: The numbers of the entries that must be restored before.
        place: Where definition, drop, copy and schema begin and end in the head of the dump.
    """

    number: int
    kind: str
    schema: str
    name: str
    owner: str
    definition: str
    drop: str
    copy: str
    needs: tuple[int, ...] = ()
    place: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.schema}.{self.name}" if self.schema else f"{self.kind} {self.name}"
        )

    @property
    def full_name(self) -> tuple[str, str]:
        return self.schema, self.name

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

    def names_of(self, kind: str) -> list[str]:
        """Returns the names of all entries of a kind, as SQL."""
        of_kind = (one for one in self.entries if one.kind == kind)
        return [".".join(map(_quoted, filter(None, one.full_name))) for one in of_kind]

    def listing(self, *, without: Container[str], refresh: bool = True) -> str:
        """Returns the entries as a list for pg_restore.

        Args:
            without: The comments that are left out.
            refresh: Whether materialized views are computed.
        """
        chosen = (
            one
            for one in self.entries
            if not (one.kind == "COMMENT" and one.name in without)
            and (refresh or one.kind != VIEW_DATA)
        )
        return "".join(f"{one.number};\n" for one in chosen)

    def of_tables(self, names: Iterable[tuple[str, str]]) -> tuple[list[Entry], ...]:
        """Returns the entries of tables, those that these need, and the rest of what tables have.

        Of a table and its partitions come definition, rows, keys, checks and indexes; they need
        types or sequences. names: Schema and name of each table.
        """
        known = {one.number: one for one in self.entries}
        of_tables = (one for one in self.entries if one.kind in (TABLE, "TABLE ATTACH"))
        found = [_PARTITION.search(one.definition) for one in of_tables]
        parts = [tuple(map(_plain_name, one.groups())) for one in found if one is not None]
        ours: set[tuple[str, ...]] = set(names)
        while more := {one[2:] for one in parts if one[:2] in ours} - ours:
            ours |= more  # Partitions may have partitions.
        tables = {n for n, one in known.items() if one.kind == TABLE and one.full_name in ours}
        chosen = set(tables)
        for number, one in known.items():
            of_table = one.kind in _WITH_A_TABLE and not tables.isdisjoint(one.needs)
            if of_table and (one.kind not in _ATTACH or chosen.issuperset(one.needs)):
                chosen.add(number)
        needed, left = set(chosen), [*chosen]
        while left:
            new = known.keys() & set(known[left.pop()].needs) - needed
            needed |= new
            left += new
        rest = {n for n, one in known.items() if not tables.isdisjoint(one.needs)} - chosen
        uses = (n for one in chosen | rest for n in known.keys() & set(known[one].needs))
        rest |= {n for n in uses if known[n].kind == SEQUENCE}
        rest |= {n for n, one in known.items() if one.kind == _SET and rest & set(one.needs)}
        kinds = chosen, needed - chosen, rest
        return tuple([one for n, one in known.items() if n in kind] for kind in kinds)

    def moved(self, head: bytes, chosen: Sequence[Entry], schema: str, *, make: bool) -> bytes:
        """Returns the head of a dump with the chosen entries of tables in another schema.

        make: Whether the schema is made before the first table.
        """
        names = {one.full_name for one in chosen if one.kind in (TABLE, "INDEX")}
        place = '"' + schema.replace('"', '""') + '"'
        first = f"CREATE SCHEMA {place};\n" if make else ""
        parts, at = [], 0
        for one in chosen:
            ours = None if one.kind in _ATTACH else names
            definition, copy = (_moved(text, ours, place) for text in (one.definition, one.copy))
            begin, end = one.place
            texts = first + definition, one.drop, copy, schema
            parts += [head[at:begin], *map(self._stored, texts)]
            first, at = "", end
        return b"".join([*parts, head[at : self.size]])

    def _stored(self, text: str) -> bytes:
        """Returns a text as it stands in the head of a dump."""
        data = text.encode("utf-8", "surrogateescape")
        return b"\0" + len(data).to_bytes(self.integer, "little") + data

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


class _Archive(PieceReader):
    """Reads the fields of an archive of pg_dump. integer: the bytes of an integer in it."""

    integer = 0

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        sign = self.byte()
        number = int.from_bytes(self.take(self.integer), "little")
        return -number if sign else number

    def count(self) -> int:
        if (number := self.number()) < 0:
            raise DumpDamaged("a number is negative")
        return number

    def text(self) -> str | None:
        size = self.number()
        return None if size < 0 else self.take(size).decode("utf-8", "surrogateescape")

    def texts(self, count: int) -> list[str]:
        return [self.text() or "" for _ in range(count)]

    def chunks(self) -> Iterator[bytes]:
        """Yields the data of a block, in pieces."""
        while size := self.count():
            yield from self.parts(size)


def read(head: bytes) -> Toc:
    """Returns the table of contents at the beginning of a dump. Raises DumpDamaged."""
    file = _Archive([head])
    if file.take(len(_MAGIC)) != _MAGIC:
        raise DumpDamaged("it is no dump of pg_dump in the custom format")
    version = (file.byte(), file.byte())
    file.byte()  # The revision.
    if not _OLDEST <= version <= _NEWEST:
        raise DumpDamaged(f"its format {version[0]}.{version[1]} is unknown to this program")
    file.integer, offset, kind = file.take(3)
    if file.integer not in (4, 8) or offset not in (4, 8) or kind != _CUSTOM:
        raise DumpDamaged("it is no dump of pg_dump in the custom format")
    # Before, it was a level of gzip.
    method = file.byte() if version >= _NAMES_COMPRESSION else int(file.number() != 0)
    if method >= len(_METHODS):
        raise DumpDamaged("its data are compressed in a way that is unknown to this program")
    for _ in range(_DATE_PARTS):
        file.number()
    file.texts(3)  # The database, and the versions of the server and of pg_dump.
    count = file.number()
    if not 0 <= count <= _MOST_ENTRIES:
        raise DumpDamaged(f"it has {count:,} entries")
    entries = tuple(_entry(file, offset, relkind=version >= _HAS_RELKIND) for _ in range(count))
    return Toc(entries, file.passed, file.integer, _METHODS[method])


def _entry(file: _Archive, offset: int, *, relkind: bool) -> Entry:
    number = file.number()
    file.number()  # Whether it has data.
    _, _, name, kind = file.texts(4)  # After the OID of its table, and its own.
    file.number()  # Its section.
    begin = file.passed
    definition, drop, copy, schema = file.texts(4)
    place = begin, file.passed
    file.texts(2)  # The tablespace, and the access method.
    if relkind:
        file.number()
    owner, _ = file.texts(2)  # And whether it has OIDs.
    needs = tuple(int(text[:10]) for text in iter(file.text, None) if text.isdecimal())
    file.take(1 + offset)  # Where its data are, which is not known of a stream.
    return Entry(number, kind, schema, name, owner, definition, drop, copy, needs, place)


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
    pieces = iter(pieces)
    file, left = _Archive(pieces), set(wanted)
    file.integer = toc.integer
    drain(file.parts(toc.size))
    while left and not file.at_end():
        kind, number = file.byte(), file.count()
        if kind == _LARGE_OBJECTS:
            while file.count():
                drain(file.chunks())
        elif kind == _TABLE:
            chunks = file.chunks()
            if number in left:
                left.discard(number)
                wanted[number](_lines(_plain(chunks, toc.method)))
            drain(chunks)  # For one, what stands behind the end of the rows.
        else:
            raise DumpDamaged("there is no block of data where one must begin")
    if left:
        raise DumpDamaged("a table that it lists has no rows in it")
    drain(pieces)  # The sum of all is still to be proved.


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
    elif method == "zstd":
        try:
            unpack = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
            yield from unpack.read_to_iter(cast(IO[bytes], _Chunks(chunks)), write_size=_PIECE)
        except zstandard.ZstdError as error:
            raise DumpDamaged(str(error)) from error
    else:
        raise DumpDamaged(f"its rows are compressed by {method}")


class _Chunks:
    """Reads chunks as from a file. One that is longer than what was asked for comes in parts."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._held:
            self._held = memoryview(next(self._chunks, b""))
        data, self._held = self._held[:size], self._held[size:]
        return bytes(data)


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


def _moved(text: str, names: Container[tuple[str, ...]] | None, schema: str) -> str:
    """Returns a statement in which names (None: all) are in another schema, which is quoted."""

    def moved(match: re.Match[str]) -> str:
        if match[1] and (names is None or tuple(map(_plain_name, match.groups())) in names):
            return f"{schema}.{match[2]}"
        return match[0]

    return _QUALIFIED.sub(moved, text)


def _plain_name(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _quoted(name: str) -> str:
    if re.fullmatch(r"[a-z_][a-z0-9_]*", name, re.ASCII):
        return name
    return '"' + name.replace('"', '""') + '"'
