"""The catalog's database comes back from the remote, into an empty one.

The obvious way, a dump copied here and given to pg_restore, needs room for it on the day on which a
disk has died. So what the remote sends goes straight into pg_restore; and since nothing proves the
bytes before the last of them has come, the whole is one transaction, and the end of the input is
held back until its SHA-256 is right. A damaged dump is reported, and the one before it is
taken.

A dump is a program, and whoever may write to the target can plant one. So dumps are told apart by
who made them (see `record`):

- A dump of this host comes back whole. The record has the SHA-256 of its beginning, where all
  statements stand: these are proved before the first of them is executed, by a role that can do
  nothing else (see `catalog.restore_role`).
- Any other one is taken only where that is asked for, and then nothing of it is executed: whatever
  it makes of tables, triggers, constraints and functions would run later, as whoever uses them. So
  init-db makes the tables, and the rows of `blobs` and of the schema `ntt_backup` are read out of
  the dump and copied into the columns that these tables have. What such rows may still say wrong,
  `reconcile` and `verify` find. All else is named, and left out.

Owners and grants are left out: the roles of the lost server may not exist here, and one that is
missing would end the whole restore. They stand in the dump's table of contents, and are handed out
as SQL.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from ntt_backup.catalog import connection, history
from ntt_backup.catalog.restore_role import (
    BLOBS,
    OWN_SCHEMA,
    NewTables,
    given_extensions,
    new_tables,
    relations_there,
    require_extensions,
    restorer,
)
from ntt_backup.config import RemoteConfig, application_name
from ntt_backup.config.signing_key import Origin, SigningKeys
from ntt_backup.dump import pg_programs, toc
from ntt_backup.dump.record import DumpRecord, Stored
from ntt_backup.dump.store import BaseUnusable, DumpText, list_dumps, needed_by, open_dumps
from ntt_backup.dump.toc import DumpDamaged, Entry, Toc, drain
from ntt_backup.errors import CatalogRefused, ConfigError, DumpFailed
from ntt_backup.formatting import many
from ntt_backup.process.spawn import Child, start, wait_for, write

# More than pg_restore needs to see that there is more to come: a dump ends within its last table.
_HELD: Final = 64 * 1024
_TOO_NEW: Final = "unsupported version"
_TOO_OLD_SERVER: Final = "unrecognized configuration parameter"
_DENIED: Final = re.compile(r"permission denied|must be superuser|must be owner")
_WAIT_SECONDS: Final = 1.0
_TOLD: Final = 10  # Of dumps that nobody vouches for.
_SHOWN: Final = 500
# The kinds of entries of which nothing is lost: settings, and what init-db makes.
_NOTHING: Final = frozenset({"ENCODING", "STDSTRINGS", "SEARCHPATH", "DATABASE"})
_DATA: Final = "TABLE DATA"
_TARGET: Final = re.compile(r"([a-z][a-z0-9_]{0,30})_copied", re.ASCII)
_MOST_TARGETS: Final = 20
_NULL: Final = b"\\N"


class _NoTable(Exception):
    """A dump lacks a table. The message says which."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """The dump that came back.

    Attributes:
        dump: As it lies on the remote.
        origin: Who made the dump.
        user: Who owns what came back.
        rights: The SQL that gives back the owners and grants which others had in it, and of tables
            that were restored alone what else they had.
        others: Further databases of which the target has dumps.
        left_out: What else is in a dump of which only rows came back.
        views: The materialized views that were left empty, as SQL.
        new_owner: The user is a role that was made for what came back, and cannot log in.
    """

    dump: Stored
    origin: Origin
    user: str
    rights: tuple[str, ...]
    others: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    new_owner: bool = False


def restore_catalog(
    settings: RemoteConfig,
    warn: Callable[[str], None],
    tell: Callable[[str], None] | None = None,
    *,
    name: str | None = None,
    trust_target: bool = False,
    allow_superuser: bool = False,
    refresh: bool = True,
    database: str = "",
    on_wait: Callable[[], None] = lambda: None,
    tables: Sequence[tuple[str, str]] = (),
    schema: str = "",
) -> Recalled:
    """Fills the empty database of catalog.url from the newest good dump of this host.

    Of tables that are restored alone it is the newest one that has them all, and the database may
    have others. Only if it is empty, it gets what the tables need, such as types.

    Where several databases have dumps for the target, it is the newest of the one of that name, if
    there is any: those of another are as good, but may be what others have made.

    Args:
        settings: name the target and the database.
        warn: is told of each dump that cannot come back, and why.
        tell: is told of each dump that nobody vouches for; None: as warn is.
        name: of the dump to take, in place of the newest.
        trust_target: take a dump of which nothing proves who made it, where none is of this host:
            of that, rows alone.
        allow_superuser: restore as the user of catalog.url, whatever that user may do.
        refresh: compute materialized views.
        database: the name of the database that was lost; "": that of catalog.url.
        on_wait: is called while the dump comes and PostgreSQL works, and may raise.
        tables: schema and name of the tables that are restored alone, of a dump of this host.
        schema: the schema that these get; "": their own.

    Raises:
        DumpFailed: No dump can be restored; the database is as it was.
        OtherIdentities: No sealed dump can be opened; the database is as it was.
        BackupError: Anything else is away, or refuses; the database is as it was.
    """
    keys = SigningKeys.of(settings)
    url, application = settings.catalog.url, application_name("restore")
    with connection.connect(url, application, no_tables=True) as conn:
        version, user = conn.info.server_version, conn.info.user
        database, empty = database or conn.info.dbname, True
        try:
            history.require_empty(conn)
        except ConfigError as error:
            if empty := not tables:
                raise DumpFailed(
                    error.message,
                    detail=error.detail,
                    hint="create an empty database (createdb), and name it in catalog.url",
                ) from error
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_dumps(settings)))
        ours = [
            (one, one.record)
            for one in list_dumps(store)
            if one.record is not None and one.record.target == settings.target
        ]
        databases = {record.database for _, record in ours}
        chosen = [one for one, _ in ours if name in (None, one.name)]
        of_host = [(one, record) for one, record in ours if one.origin(keys) is Origin.OURS]
        mine = [one for one, _ in of_host]
        strangers = [one for one in chosen if one not in mine]
        # A forged dump is taken only where it was asked for by its name.
        forged = [one for one in strangers if name is None and one.origin(keys) is Origin.FORGED]
        trusted = [one for one in strangers if trust_target and one not in forged]
        _tell_of([one for one in strangers if one not in trusted], keys, tell or warn)
        same = [one for one, record in of_host if record.database == database]
        wanted = chosen if name is not None or not same else same
        tries = [one for one in reversed(mine) if one in wanted]
        # In the order of arrival, which no record can claim.
        tries += sorted(trusted, key=lambda one: (one.arrived or one.begun, one.age), reverse=True)
        damaged = lacking = ""
        for one in tries:
            assert one.record is not None
            if not one.whole:
                warn(f"{one.name} {one.torn}")
                continue
            try:
                known = mine if one in mine else [other for other, _ in ours]
                needed = needed_by(one, {other.name: other for other in known})
            except BaseUnusable as error:
                warn(f"{one.name} cannot be read: {error}")
                continue
            if damaged in (member.name for member in needed):
                warn(f"{one.name} cannot be read: {damaged} is damaged")
                continue
            text = DumpText(store, needed, on_wait)
            others = tuple(sorted(databases - {one.record.database}))
            try:
                if one not in mine:
                    left_out = _rows(settings, text)
                    return Recalled(one, one.origin(keys), user, (), others, left_out)
                owner, rights, views = _whole(
                    settings,
                    text,
                    one.record,
                    (version, user),
                    tell or warn,
                    allow_superuser=allow_superuser,
                    refresh=refresh,
                    on_wait=on_wait,
                    tables=(tables, schema, empty),
                )
                new = owner != user
                return Recalled(one, Origin.OURS, owner, rights, others, views=views, new_owner=new)
            except _NoTable as error:
                lacking = str(error)
                warn(f"{one.name} has no table {lacking}")
                # What was asked of the target is not read to its end.
                stack.close()
                store = stack.enter_context(closing(open_dumps(settings)))
            except DumpDamaged:
                damaged = text.damaged or one.name
                why = "" if damaged == one.name else f" cannot be read: {damaged}"
                warn(f"{one.name}{why} is damaged: {text.why}")
    if strangers and not tries:
        raise nobody_vouches(settings.target, keys, strangers, name, trust_target=trust_target)
    if lacking:
        raise DumpFailed(
            f"no good dump of this host has the table {lacking}",
            hint="name it as in the database, SCHEMA.NAME. Views are restored with all else",
        )
    if name is not None:
        raise DumpFailed(
            f"the dump {name} is damaged" if chosen else f"there is no dump {name} on the remote",
            detail=f"there are {', '.join(one.name for one, _ in ours) or 'none'}",
            hint="restore another one; without --dump it is the newest that is good",
        )
    raise DumpFailed(
        "there is no good dump of the catalog on the remote",
        detail=f"looked at {many(len(ours), 'dump')} of target {settings.target} in"
        f" {settings.remote.path}/pgdump",
        hint="blobs are restored without a catalog: ntt-backup-remote restore --to DIR;"
        " ntt-backup-remote init-db; ntt-backup-remote scan",
    )


def _tell_of(dumps: list[Stored], keys: SigningKeys, tell: Callable[[str], None]) -> None:
    """Names dumps that are passed over, the newest first; whoever plants them may plant many."""
    for one in dumps[: -_TOLD - 1 : -1]:
        origin = one.origin(keys)
        tell(f"{one.name} is passed over, since it is {origin.text}: {origin.why}")
    if len(dumps) > _TOLD:
        tell(f"{len(dumps) - _TOLD:,} more are passed over: `ntt-backup-remote dumps` lists them")


def nobody_vouches(
    target: str, keys: SigningKeys, strangers: list[Stored], name: str | None, *, trust_target: bool
) -> DumpFailed:
    """Returns why no dump came back where none that was asked for is of this host.

    strangers: the dumps that were asked for. name: of the only one that was; None for any.
    trust_target: whether dumps of others were asked for, too: then all of them are forged.
    """
    found = f"{many(len(strangers), 'dump')} of target {target}"
    if trust_target:
        return DumpFailed(
            "all dumps on the remote are FORGED",
            detail=f"{found}: each names a key of this host, which did not sign it",
            hint="somebody who may write to the target has made them; to take the rows of one all"
            " the same, name it: --dump NAME --trust-target",
        )
    said, why = "no dump on the remote is known to be of this host", found
    if name is not None:
        origin = strangers[0].origin(keys)
        said, why = f"the dump {name} is {origin.text}", origin.why
    elif not keys.problem:
        why += f"; no key in {keys.path} has signed any of them"
    return DumpFailed(
        said,
        detail=f"{why}; {keys.problem}" if keys.problem else why,
        hint=f"copy the host key of the lost machine to {keys.path} (init-db makes one for dumps to"
        " come); or call it with --trust-target: then nothing proves who made the dump, and only"
        " rows of blobs and of the schema ntt_backup come back",
    )


def _whole(
    settings: RemoteConfig,
    text: DumpText,
    record: DumpRecord,
    session: tuple[int, str],
    tell: Callable[[str], None],
    *,
    allow_superuser: bool,
    refresh: bool,
    on_wait: Callable[[], None] = lambda: None,
    tables: tuple[Sequence[tuple[str, str]], str, bool] = ((), "", True),
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Restores a dump that this host made, or some tables of it, into the database of the settings.

    session: The version of its server, and its user. tables: As in `restore_catalog`: their names,
    their schema, and whether the database is empty.

    Returns:
        The role that owns the restored objects, the SQL of `Recalled.rights`, and the materialized
        views that were left empty.

    Raises:
        DumpDamaged: The content of the dump is not right; the database is unchanged.
        _NoTable: The dump lacks one of the tables; the database is unchanged.
    """
    version, user = session
    pg_restore = pg_programs.find_restore(
        settings.dump.bin, version, pg_programs.major_of(record.program)
    )
    url, application = settings.catalog.url, application_name("restore")
    with _opened(text, record.head_bytes) as (head, pieces):
        if hashlib.sha256(head[: record.head_bytes]).hexdigest() != record.head_sha256:
            raise DumpDamaged("its SHA-256 differs from its record")
        chosen: Sequence[Entry] = ()
        if tables[0]:
            pieces, chosen, rest = _only(pieces, head, *tables, url)
        with restorer(url, application, allow_superuser=allow_superuser, empty=tables[2]) as who:
            place, secret = connection.for_program(who.url, application)
            with NamedTemporaryFile("w", prefix="ntt-entries-") as entries:
                options = ["--no-owner", "--no-privileges", f"--dbname={place}"]
                views: list[str] = []
                listing = "".join(f"{one.number};\n" for one in chosen)
                with suppress(DumpDamaged):  # As of a PostgreSQL that is unknown to this program.
                    contents = toc.read(head)
                    some = chosen or contents.entries
                    wanted = [one.name for one in some if one.kind == toc.EXTENSION]
                    require_extensions(who.url, application, wanted)
                    if not chosen and (views := contents.names_of(toc.VIEW_DATA)):
                        tell(_of_views(views, refresh=refresh))
                    # Nobody but its owner may comment on an extension.
                    given = given_extensions(who.url, application)
                    if not chosen and (given or not refresh):
                        comments = {f"EXTENSION {name}" for name in given}
                        listing = contents.listing(without=comments, refresh=refresh)
                if listing:
                    entries.write(listing)
                    entries.flush()
                    options.append(f"--use-list={entries.name}")
                _pour(pieces, pg_restore, record, options, secret, on_wait)
            who.done = True
    if not chosen:
        return who.owner, _rights(head, user, tell), () if refresh else tuple(views)
    owners = replace(toc.read(head), entries=tuple(chosen)).rights(user)
    return who.owner, (*(one.definition for one in rest if one.definition), *owners), ()


def _only(
    pieces: Iterator[bytes],
    head: bytes,
    tables: Sequence[tuple[str, str]],
    schema: str,
    empty: bool,
    url: str,
) -> tuple[Iterator[bytes], list[Entry], list[Entry]]:
    """Returns the pieces of a dump for a database, the entries of tables, and what else these had.

    Raises:
        _NoTable: The dump lacks a table.
        DumpFailed: The database has one of the tables.
    """
    contents = toc.read(head)
    there = {one.full_name for one in contents.entries if one.kind == toc.TABLE}
    for name in tables:
        if name not in there:
            raise _NoTable(".".join(name))
    chosen, needed, rest = contents.of_tables(tables)
    new = {(schema or one.schema, one.name) for one in chosen if one.kind == toc.TABLE}
    asked = new | {one.full_name for one in needed}
    found = relations_there(url, application_name("restore"), asked)
    for taken in sorted(new & found):
        raise DumpFailed(
            f"the database has a table {'.'.join(taken)}",
            detail="nothing is overwritten, and the database is as it was",
            hint="--schema NAME restores it beside that one, in another schema",
        )
    if not empty:  # What tables share with others is there; what they owned was dropped with them.
        needed = [one for one in needed if one.kind == toc.SEQUENCE and one.full_name not in found]
    if schema:
        make, passed = schema not in (name for name, _ in found), 0
        while passed < len(head):  # It is made of whole pieces.
            passed += len(next(pieces))
        moved = contents.moved(head, chosen, schema, make=make)
        pieces = chain([moved, head[contents.size :]], pieces)
    chosen = sorted([*chosen, *needed], key=lambda one: one.place)
    numbers = {one.number for one in chosen}
    return pieces, chosen, [one for one in rest if one.number not in numbers]


def _of_views(views: Sequence[str], *, refresh: bool) -> str:
    named = ", ".join(views[:_TOLD]) + (", ..." if len(views) > _TOLD else "")
    said = f"the dump has {many(len(views), 'materialized view')}: {named}; "
    if refresh:
        return said + "PostgreSQL computes them within the restore. --no-refresh leaves them empty"
    return said + "they are left empty, as --no-refresh says"


def _rows(settings: RemoteConfig, text: DumpText) -> tuple[str, ...]:
    """Restores the rows of a dump whose origin is not proved; returns what was left out.

    Raises:
        DumpDamaged: The content of the dump is not right; the database is unchanged.
    """
    url, application = settings.catalog.url, application_name("restore")
    with _opened(text, pg_programs.HEAD_BYTES) as (head, pieces):
        return tuple(restore_rows(head, pieces, url, application, settings.target))


@contextmanager
def _opened(text: DumpText, size: int) -> Iterator[tuple[bytes, Iterator[bytes]]]:
    """Yields the first bytes of a dump, if it has as many, and all of it in pieces.

    The pieces end with DumpDamaged where they are not what was dumped. Where that comes earlier,
    out of the block, the dump is read to its end: it may tell more, and the session gives nothing
    else before.
    """
    with closing(iter(text)) as pieces:
        begun = []
        while size > 0 and (data := next(pieces, None)) is not None:
            begun.append(data)
            size -= len(data)
        try:
            if text.damaged:
                raise DumpDamaged(text.why)
            yield b"".join(begun), _or_damaged(text, chain(begun, pieces))
        except DumpDamaged as error:
            drain(pieces)
            text.why = text.why or str(error)
            raise


def _or_damaged(text: DumpText, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield from pieces
    if text.damaged:
        raise DumpDamaged(text.why)


def _pour(
    pieces: Iterator[bytes],
    pg_restore: Path,
    record: DumpRecord,
    options: Sequence[str],
    secret: dict[str, str],
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Restores a dump. What the pieces or on_wait raise leaves the database as it was."""
    argv = [str(pg_restore), "--single-transaction", "--exit-on-error", "--no-password", *options]
    child = start(argv, env={**os.environ, **secret, "LC_ALL": "C"})
    failed = partial(_failed, child, pg_restore, record)
    try:
        held, ended = b"", False
        for data in pieces:
            if not ended:
                held += data
                # What pg_restore stumbles over may be damage: the end will tell.
                try:
                    _feed(child, held[:-_HELD], failed, on_wait)
                except DumpFailed:
                    ended = True
                held = held[-_HELD:]
        _feed(child, held, failed, on_wait)
        child.close_stdin()
        while (status := child.wait(_WAIT_SECONDS)) is None:
            on_wait()  # Building the indexes of millions of rows takes as long as it takes.
        if status != 0:
            raise failed()
    finally:
        child.kill()


def _rights(head: bytes, user: str, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Returns the statements on owners and grants in a dump, except for user as the owner."""
    try:
        return tuple(toc.read(head).rights(user))
    except DumpDamaged as error:
        warn(f"owners and grants could not be read from the dump: {error}")
        return ()


def _feed(
    child: Child, data: bytes, failed: Callable[[], DumpFailed], on_wait: Callable[[], None]
) -> None:
    rest = memoryview(data)
    while rest:
        on_wait()
        child.drain_stderr()
        wait_for(reading=child.fds, writing=[child.stdin_fd], timeout=_WAIT_SECONDS)
        try:
            rest = rest[write(child.stdin_fd, rest) :]
        except BrokenPipeError:
            raise failed() from None


def _failed(child: Child, pg_restore: Path, record: DumpRecord) -> DumpFailed:
    status = child.wait(_WAIT_SECONDS)
    said = "; ".join(child.stderr.text.splitlines())[:_SHOWN] or f"status {status}"
    if _TOO_NEW in said:
        made = pg_programs.major_of(record.program) or "N"
        return DumpFailed(
            f"{pg_restore} is too old for this dump",
            detail=f"pg_dump {record.program} made it; {said}",
            hint=f"apt-get install postgresql-client-{made}, or set dump.bin (NTT_PG_BIN)",
        )
    if _TOO_OLD_SERVER in said:
        return DumpFailed(
            f"{pg_restore} is too new for this server, and the database is as it was",
            detail=said,
            hint="set dump.bin (NTT_PG_BIN) to the programs of the server's version; a dump that"
            " these cannot read needs a server as new as the pg_dump that made it",
        )
    hint = "pg_restore has to be as new as the server, and the database empty"
    if _DENIED.search(said):
        hint = "it is restored by a role that may do nothing else: have a superuser create the"
        hint += " extensions in the empty database first (create extension NAME), or the schema of"
        hint += " a table (create schema NAME authorization ROLE), or call it with"
        hint += " --allow-superuser"
    return DumpFailed("pg_restore failed, and the database is as it was", detail=said, hint=hint)


# --- the rows of a dump that nobody vouches for ---------------------------------------------------


def restore_rows(
    head: bytes, pieces: Iterable[bytes], url: str, application: str, target: str
) -> list[str]:
    """Makes our tables in an empty database, and copies the rows of a dump into them.

    Targets that the dump knows come back beside `target`. Whatever `pieces`, the whole dump, raise
    leaves the database empty.

    Returns:
        The entries of the dump that were left out.

    Raises:
        DumpDamaged: The dump cannot be read, or has no table `blobs`.
        CatalogError: The server does not take the rows, or does not answer.
    """
    contents = toc.read(head)
    tables = _tables(contents)
    blobs = next((one for one in tables if one.schema != OWN_SCHEMA), None)
    if blobs is None:
        raise DumpDamaged(f"it has no table {BLOBS}, or several")
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
        raise DumpDamaged(f"the columns of {one} cannot be determined")
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
            raise DumpDamaged("a row has another number of columns than its table")
        chosen = [fields[place] for place in places]
        if needed is None or chosen[needed] != _NULL:
            yield b"\t".join(chosen) + b"\n"
