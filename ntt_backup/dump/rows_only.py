"""Of a dump that nobody vouches for only rows come back, and only those of tables that are ours.

Who may write to a target can plant a dump, and whatever it makes of tables, triggers, constraints
and functions would run later, as whoever uses them. So nothing of it is executed: init-db makes the
tables, and the rows of `blobs` and of the schema `ntt_backup` are read out of the dump and copied
into the columns that these tables have. What such rows may still say wrong, `reconcile` and
`verify` find. All else is named, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from ntt_backup.catalog.restorer import BLOBS, OWN_SCHEMA, NewTables, new_tables
from ntt_backup.dump import toc
from ntt_backup.dump.toc import DumpDamaged, Entry, Toc
from ntt_backup.errors import CatalogRefused

# The kinds of entries of which nothing is lost: settings, and what init-db makes.
_NOTHING: Final = frozenset({"ENCODING", "STDSTRINGS", "SEARCHPATH", "DATABASE"})
_DATA: Final = "TABLE DATA"
_TARGET: Final = re.compile(r"([a-z][a-z0-9_]{0,30})_copied", re.ASCII)
_MOST_TARGETS: Final = 20
_NULL: Final = b"\\N"


def restore_rows(
    head: bytes, pieces: Iterable[bytes], url: str, application: str, target: str
) -> list[str]:
    """Makes our tables in an empty database, and copies the rows of a dump into them.

    Args:
        head: the beginning of the dump, with its table of contents.
        pieces: the whole dump; what they raise ends it, and leaves the database empty.
        url: of the database.
        application: what pg_stat_activity shows.
        target: the target of the settings; others that the dump knows come back as well.

    Returns:
        The entries of the dump that were left out.

    Raises:
        DumpDamaged: The dump cannot be read, or has no table `blobs`.
        CatalogError: The server does not take the rows, or does not answer.
    """
    try:
        contents = toc.read(head)
    except toc.TocUnreadable as error:
        raise DumpDamaged(str(error)) from error
    tables = _tables(contents)
    blobs = next((one for one in tables if one.schema != OWN_SCHEMA), None)
    if blobs is None:
        raise DumpDamaged(f"it does not hold one table {BLOBS}")
    found = [match[1] for match in map(_TARGET.fullmatch, blobs.columns) if match is not None]
    targets = dict.fromkeys([target, *found[:_MOST_TARGETS]])
    with new_tables(url, application, targets) as new:
        wanted: dict[int, Callable[[Iterator[bytes]], None]] = {}
        places = {(table[0] == OWN_SCHEMA, table[1]): table for table in new.columns}
        for one in tables:
            if table := places.get((one.schema == OWN_SCHEMA, one.name)):
                wanted[one.number] = partial(_copy, new, table, one, contents.encoding)
        toc.copy_rows(pieces, contents, wanted)
    taken = {(one.schema, one.name) for one in tables}
    return [str(one) for one in contents.entries if _is_lost(one, taken)]


def _tables(contents: Toc) -> list[Entry]:
    """Returns the rows that may be taken: of blobs, where only one schema has it, and of ours."""
    data = [one for one in contents.entries if one.kind == _DATA]
    blobs = [one for one in data if one.name == BLOBS and one.schema != OWN_SCHEMA]
    chosen = [one for one in blobs if one.schema == "public"] if len(blobs) > 1 else blobs
    return [*chosen[:1], *{one.name: one for one in data if one.schema == OWN_SCHEMA}.values()]


def _is_lost(one: Entry, taken: set[tuple[str, str]]) -> bool:
    """Returns whether nothing of an entry comes back, though something of it should be known."""
    ours = one.schema == OWN_SCHEMA or (one.kind == "SCHEMA" and one.name == OWN_SCHEMA)
    made = one.kind in ("TABLE", _DATA) and (one.schema, one.name) in taken
    return one.kind not in _NOTHING and not (ours and one.kind != "FUNCTION") and not made


def _copy(
    new: NewTables, table: tuple[str, str], one: Entry, encoding: str, rows: Iterator[bytes]
) -> None:
    columns = one.columns
    places = [place for place, name in enumerate(columns) if name in new.columns[table]]
    if not places or len(set(columns)) < len(columns):
        raise DumpDamaged(f"the columns of {one} cannot be told")
    names = [columns[place] for place in places]
    needed = names.index("blobid") if one.name == BLOBS and "blobid" in names else None
    try:
        new.copy(table, names, encoding, _chosen(rows, places, len(columns), needed))
    except CatalogRefused as error:
        raise DumpDamaged(str(error)) from error


def _chosen(
    rows: Iterator[bytes], places: Sequence[int], count: int, needed: int | None
) -> Iterator[bytes]:
    """Yields the wanted columns of each row; not of one whose needed column is null."""
    for row in rows:
        fields = row[:-1].split(b"\t")
        if len(fields) != count:
            raise DumpDamaged("a row has not as many columns as its table")
        chosen = [fields[place] for place in places]
        if needed is None or chosen[needed] != _NULL:
            yield b"\t".join(chosen) + b"\n"
