"""Passes over origins register the files that go by their paths.

If the names of files are no hashes, the catalog has a place for each file (the table
`ntt_backup.places`). A pass over an origin (the query of another database, or a walk) registers the
files that the origin lists. A worker reads each of them later, see `unread_files`.

A pass proceeds in steps of one transaction each, and continues where it was interrupted. A pass
that sees all rows also finds the files that are gone. A query with a column `key`, which grows from
row to row, need not return all rows each time: a pass then begins at the last key of a pass that
ended at least an hour ago, since rows become visible some time after they get their keys.

A walk has directories in place of rows: a pass takes the known ones, in the table
`ntt_backup.directories`, in the order of their paths. A directory that was listed as a whole shows
which of its files are gone: those in it, and below none of its subdirectories, that the listing
does not have.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import datetime, timedelta
from operator import add
from typing import Final, NamedTuple

from ntt_backup.catalog.connection import Connection, configure
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.catalog.statements import statement
from ntt_backup.catalog.unread_files import NUMBERING, bigint, note_returned

# A row may become visible so long after it has got its key: that long its transaction lasted.
_LATE: Final = timedelta(hours=1)
# No name of a file is as long.
_LAST_PATH: Final = b"\xff" * 4097
# A binary COPY begins and ends with these, and is sent in blocks.
_COPY_BEGINS: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_ENDS: Final = b"\xff\xff"
_BLOCK: Final = 256 * 1024
_NULL: Final = b"\xff\xff\xff\xff"
# Of the one session that registers files.
REGISTERING: Final = {"class": lock_class("origins/"), "key": 0}
# Of the one daemon that registers files when they are due, and may be notified of new ones.
WATCHING: Final = {"class": lock_class("origins/"), "key": 1}


@dataclass(frozen=True, slots=True)
class Pass:
    """The passes over an origin so far, and the one under way.

    Attributes:
        origin: The name of the origin.
        definition: A hash of what the origin lists; if it changes, the pass begins anew.
        whole: Whether the pass sees all rows.
        began_at: When the pass began, by the clock of the server; None if none is under way.
        seen: The number of rows that the pass has seen and that had a place before.
        key: The key of its last row, or of the last pass.
        mark: The key at which a pass begins that does not see all rows; without keys, a hash of the
            rows of the last pass.
        last_mark: The key that follows as `mark`; last_mark_at: when that was the last key.
        whole_at: When the last pass ended that saw all rows.
        problem: What a walk could not read, in words; None for nothing.
    """

    origin: str
    definition: str
    whole: bool = True
    began_at: datetime | None = None
    seen: int = 0
    key: str | None = None
    mark: str | None = None
    last_mark: str | None = None
    last_mark_at: datetime | None = None
    whole_at: datetime | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """The counts of a step, or of several.

    Attributes:
        rows: The rows that the origins gave.
        registered: The files that are new, or new versions.
        back: The files that were gone.
        changed: The files that were changed since they were read.
        gone: The files that an origin no longer gives, since its last pass that saw all.
        strays: The entries of listed directories that are neither a file nor a directory.
        unreadable: The directories that could not be read, or are missing.
    """

    rows: int = 0
    registered: int = 0
    back: int = 0
    changed: int = 0
    gone: int = 0
    strays: int = 0
    unreadable: int = 0
    duration_s: float = 0.0

    def __add__(self, other: Registration) -> Registration:
        return Registration(*map(add, astuple(self), astuple(other)))


class KnownDirectory(NamedTuple):
    """A directory of a walk.

    Attributes:
        path: Its path below the root of the store.
        mtime_ns: Its modification time when it was listed; None if its times are not trusted. Of a
            part of a large directory a sum of its entries.
        ctime_ns: Its time of change when it was listed; a sum of its entries if its times are not
            trusted, or None if it must be listed again.
        mounted: Whether another file system began there.
    """

    path: bytes
    mtime_ns: int | None = None
    ctime_ns: int | None = None
    mounted: bool = False

    @property
    def below(self) -> tuple[bytes, bytes]:
        """The first path below it, and the first one behind those."""
        if not self.path:
            return b"\0", _LAST_PATH  # The root itself is not below it.
        return self.path + b"/", self.path + b"0"


class WalkedEntry(NamedTuple):
    """A file in a directory; or a directory, with the number of its parent in the step.

    again: Whether a directory is listed again whatever is known of it.
    """

    path: bytes
    size: int = 0
    mtime_ns: int = 0
    parent: int | None = None
    again: bool = False


class ListedDirectory(NamedTuple):
    """A directory, or a range of the paths in it, that was listed in a step of a walk.

    Attributes:
        nth: The number of the directory in the step, which its entries have as their parent. It is
            negative if no entry is given: then only the directory is noted, or its parts end.
        directory: What the directory is now.
        missed: Whether the directory may be the mount point of a disk that is missing, if it had
            any files.
        within: The first path that the listing would have given, and the first one behind; None for
            all that is below the directory.
    """

    nth: int
    directory: KnownDirectory
    missed: bool = False
    within: tuple[bytes, bytes] | None = None


def ages_of_passes(conn: Connection) -> dict[str, float]:
    """Returns how many seconds ago the last pass over each origin ended, if none is under way."""
    return dict(conn.ask("look for files that are due", "ages_of_passes"))


def begin_pass(
    conn: Connection,
    origin: str,
    definition: str,
    *,
    rows: str | None = None,
    whole_every: float,
    whole: bool,
) -> Pass:
    """Returns the pass that was interrupted, or a new one.

    Without keys, none is needed if the rows are those of the last pass: then `began_at` is None.

    Args:
        conn: The connection.
        origin: The name of the origin.
        definition: A hash of what the origin lists.
        rows: Where its rows have no keys, a hash of them. With keys, a pass can be continued, and
            need not see all.
        whole_every: The seconds between the passes that see all rows.
        whole: Whether a new pass must see all rows.

    Raises:
        CatalogError: The catalog refuses, or is unreachable.
    """

    def begin() -> Pass:
        found = conn.rows("load_origin", {"origin": origin})
        before = Pass(origin, *found[0]) if found else Pass(origin, definition)
        if before.definition != definition:
            before = Pass(origin, definition)
        ((now,),) = conn.rows("server_time")
        ((seen,),) = conn.rows("count_seen", {"origin": origin})
        if before.began_at is not None and rows is None and before.seen == seen and not whole:
            return before
        due = before.whole_at is None or abs((now - before.whole_at).total_seconds()) >= whole_every
        if before.began_at is None and before.mark == rows and not (rows is None or whole or due):
            save_pass(conn, before)
            return before
        sees_all = whole or due or rows is not None or before.mark is None
        conn.rows("forget_seen", {"origin": origin})
        key = None if sees_all else before.mark
        begun = replace(
            before,
            whole=sees_all,
            began_at=now,
            seen=0,
            key=key,
            mark=before.mark if rows is None else rows,
            problem=None,
        )
        save_pass(conn, begun)
        return begun

    return conn.in_transaction("begin to register files", begin)


def register(
    conn: Connection,
    current: Pass,
    blocks: Iterable[bytes],
    *,
    versions: bool,
    others: Collection[str] = (),
    listed: list[ListedDirectory] | None = None,
) -> tuple[Pass, Registration]:
    """Registers the next rows of a pass, which the caller then saves.

    Args:
        conn: The connection, in a transaction.
        current: The pass.
        blocks: The rows as a binary COPY: path, size, checksum, key, a number in their order, and
            the time of modification.
        versions: Whether a file that was changed gets a new version, instead of a report.
        others: The other origins that are in use, whose files are theirs.
        listed: Of a walk the directories that were listed, complete once all blocks were read.
            Those that are taken for a missing disk are removed from it.

    Returns:
        The pass so far, and the counts of the step.
    """
    conn.rows("stage")
    with conn.cursor().copy(statement("copy_staged")) as into:
        for block in blocks:
            into.write(block)
    origin = {"origin": current.origin}
    values = {**origin, "versions": versions}
    ((rows, key),) = conn.rows("last_staged")
    # Of all places a step needs few: each is looked up.
    for way in ("enable_hashjoin", "enable_mergejoin"):
        configure(conn, way, "off", local=True)
    conn.rows("number_places", NUMBERING)
    conn.rows("match_staged", {"others": list(others)})
    returned = conn.rows("come_back", origin)
    if blobids := [blobid for (blobid,) in returned if blobid is not None]:
        note_returned(conn, blobids)
    conn.rows("unchanged_again")
    conn.rows("correct_unread")
    conn.rows("note_checksums")
    changed = conn.execute(statement("replace_changed" if versions else "report_changed")).rowcount
    seen = gone = 0
    if listed is not None:
        gone = _compare_listed(conn, current.origin, listed)
    elif current.whole:
        seen = conn.execute(statement("note_seen"), values).rowcount
    new = conn.execute(statement("register_places"), values).rowcount
    after = replace(current, key=key or current.key, seen=current.seen + seen)
    return after, Registration(rows, new, len(returned), changed, gone)


def encode_entries(entries: Iterable[WalkedEntry]) -> Iterator[bytes]:
    """Yields the entries of a walk as a binary COPY for `register`."""
    block = bytearray(_COPY_BEGINS)
    for path, size, mtime_ns, parent, again in entries:
        block += struct.pack(">hi", 6, len(path)) + path
        if parent is None:
            block += struct.pack(">iq", 8, size) + 3 * _NULL
            block += struct.pack(">iq", 8, bigint(mtime_ns))
        else:
            block += struct.pack(">iq", 8, parent) + 2 * _NULL + struct.pack(">iq", 8, -1)
            block += struct.pack(">iq", 8, 0) if again else _NULL
        if len(block) > _BLOCK:
            yield bytes(block)
            block.clear()
    yield bytes(block + _COPY_ENDS)


def _compare_listed(conn: Connection, origin: str, listed: list[ListedDirectory]) -> int:
    """Marks what is missing from listed directories as gone. Returns the number of files."""
    suspects = _ranges(origin, [one for one in listed if one.missed])
    missed = {nth for (nth,) in conn.rows("with_files", suspects)} if suspects["nths"] else set()
    listed[:] = [one for one in listed if one.nth not in missed]
    values = _ranges(origin, listed)
    configure(conn, "enable_hashjoin", "on", local=True)
    conn.rows("find_gaps", {name: values[name] for name in ("nths", "los", "his")})
    # Each range is looked up in the index of places, whatever is estimated, as is what was found.
    conn.rows("index_matched")
    conn.rows("index_staged")
    for way in ("enable_hashjoin", "enable_seqscan", "jit"):
        configure(conn, way, "off", local=True)
    ((gone,),) = conn.rows("mark_gone_from_gaps", {"origin": origin})
    conn.rows("forget_directories", {"origin": origin})
    conn.rows("add_directories", {"origin": origin})
    known = [one.directory for one in listed]
    values = {
        "origin": origin,
        "paths": [one.path for one in known],
        "mtimes": [bigint(one.mtime_ns) for one in known],
        "ctimes": [bigint(one.ctime_ns) for one in known],
        "mounted": [one.mounted for one in known],
    }
    conn.rows("save_directories", values)
    configure(conn, "enable_seqscan", "on", local=True)
    return int(gone)


def has_files(conn: Connection, origin: str) -> bool:
    """Returns whether files of an origin are listed."""
    everywhere = _ranges(origin, [ListedDirectory(0, KnownDirectory(b""))])
    return bool(conn.ask("look for its files", "with_files", **everywhere))


def _ranges(origin: str, listed: Sequence[ListedDirectory]) -> dict[str, object]:
    below = [one.within or one.directory.below for one in listed]
    return {
        "origin": origin,
        "nths": [one.nth for one in listed],
        "los": [lo for lo, _ in below],
        "his": [hi for _, hi in below],
    }


def next_directories(
    conn: Connection, origin: str, roots: Sequence[bytes], past: bytes | None, limit: int
) -> list[KnownDirectory]:
    """Returns the next directories of a walk, in order.

    Args:
        conn: The connection, in a transaction.
        origin: The name of the walk.
        roots: The directories that the walk begins with.
        past: The last directory before them; None for the first ones.
        limit: The most directories that are returned.
    """
    if past is None:
        conn.rows("add_roots", {"origin": origin, "paths": list(roots)})
    values = {"origin": origin, "past": past, "limit": limit}
    return [KnownDirectory(*row) for row in conn.rows("next_directories", values)]


def save_pass(conn: Connection, current: Pass) -> None:
    """Notes how far a pass got, in a transaction."""
    conn.rows("save_origin", {name: getattr(current, name) for name in Pass.__slots__})


def problems(conn: Connection, origins: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the walks whose last pass could not read everything, each with the last problem."""
    rows = conn.ask("look", "problems_of_origins", origins=list(origins))
    return [(origin, said) for origin, said in rows]


def end_pass(conn: Connection, current: Pass, roots: Sequence[bytes] | None = None) -> int:
    """Ends a pass. Returns how many files are gone since the last pass that saw all rows.

    Args:
        conn: The connection.
        current: The pass.
        roots: Of a walk the directories that it began with; what lies in none of them is gone.
    """

    def end() -> int:
        gone = 0
        ((now,),) = conn.rows("server_time")
        if current.whole and roots is not None:
            begun = [ListedDirectory(0, KnownDirectory(path)) for path in roots]
            values = {**_ranges(current.origin, begun), "paths": list(roots)}
            ((gone,),) = conn.rows("mark_outside", values)
        elif current.whole and current.began_at is not None and current.began_at <= now:
            # Were the clock set back meanwhile, new files would look like old ones.
            values = {"origin": current.origin, "began": current.began_at}
            # What was seen has no statistics, and no index: it has to be read once.
            configure(conn, "enable_nestloop", "off", local=True)
            ((gone,),) = conn.rows("mark_gone", values)
            conn.rows("forget_seen", {"origin": current.origin})
        mark = current.key if current.mark is None else current.mark
        whole_at = now if current.whole else current.whole_at
        ended = replace(current, began_at=None, seen=0, mark=mark, whole_at=whole_at)
        if ended.last_mark_at is None or now - ended.last_mark_at >= _LATE:
            mark = ended.last_mark or mark
            ended = replace(ended, mark=mark, last_mark=ended.key, last_mark_at=now)
        save_pass(conn, ended)
        return int(gone)

    return conn.in_transaction("end the registering of files", end)
