"""init-db: make the catalog, or add what we need to a table that another program owns and uses.

On a live table of 42 million rows the obvious ALTER TABLE is an outage: while it waits for its
exclusive lock behind one long transaction, everybody else queues behind it. So locks are asked for
briefly and again; columns come without a default, so that nothing is rewritten; the index is built
CONCURRENTLY, and one that an interruption left unfinished is replaced. What is there already is not
touched, so init-db can be repeated, and two at once take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg import errors, sql

from ntt_backup.catalog import dump_history, privileges
from ntt_backup.catalog.connection import Connection, configure, translated
from ntt_backup.catalog.found_schema import (
    Place,
    add_columns,
    choose_index,
    find_table,
    rows_and_time,
    surroundings,
    trigger_state,
)
from ntt_backup.catalog.pending import columns
from ntt_backup.catalog.queries import fragment, shown, statement
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.catalog.schema_check import (
    CREATE_OWN,
    PRINT_SQL,
    SCHEMA_VERSION,
    Table,
    check_one_table,
    check_table,
    check_version,
    existing_table,
    read_table,
    warnings,
)
from ntt_backup.catalog.schema_plan import look
from ntt_backup.errors import CatalogRefused, CatalogUnavailable

BRIEF_LOCK_MS = 1000
LOCK_ATTEMPTS = 10
_PAUSE_S = 0.5
_SHOWN = 5
_LOCK = {"class": lock_class("init-db/"), "key": 0}  # no target's name has a slash

Report = Callable[[str], object]


def init_db(
    conn: Connection, target: str, *, notify: bool = False, report: Report = lambda line: None
) -> list[str]:
    """Create or complete the catalog for a target, as far as this session may.

    report gets a line for each change, wait and warning. notify: also have inserts wake the daemon
    at once. Returns what this session may not do yet although it may run, a command each. Raises
    CatalogRefused where the table cannot be used, or with all that is left for others to do;
    CatalogUnavailable where a lock was not to be had.
    """
    with translated(conn, "prepare its schema"), _one_at_a_time(conn, report):
        privileges.require_writing(conn)
        if surroundings(conn).version_readable:
            check_version(conn, older=True)
            check_one_table(conn)
        _prepare_table(conn, target, report)
        place = find_table(conn)
        if place is not None:
            if place.found:
                _prepare_index(conn, existing_table(conn, target), place, target, report)
            ours = _prepare_own_schema(conn, place, report)
            if notify:
                _prepare_trigger(conn, place, ours, report)
        missing = look(conn, target, notify=notify)
        if missing.needed:
            raise CatalogRefused(
                f"the catalog is not ready for {conn.info.user}",
                detail=f"missing is: {missing}",
                hint=PRINT_SQL,
            )
        for warning in warnings(conn, existing_table(conn, target)):
            report(f"warning: {warning}")
        return _not_yet(conn, target)


def _not_yet(conn: Connection, target: str) -> list[str]:
    lacks = {command: privileges.lacking(conn, target, [command]) for command in privileges.NEEDS}
    unread = [f"{schema}.{name}" for schema, name in dump_history.unreadable(conn)]
    lacks["dump"] += [privileges.Lack("select", name) for name in unread[:_SHOWN]]
    return [
        f"`{command}` (it lacks {', '.join(map(str, these))})"
        for command, these in lacks.items()
        if these
    ]


@contextmanager
def _one_at_a_time(conn: Connection, report: Report) -> Iterator[None]:
    waiting = False
    while not conn.execute(statement("try_lock"), _LOCK).fetchall()[0][0]:
        if not waiting:
            report("waiting for another init-db")
        waiting = True
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute(statement("unlock"), _LOCK)


def _prepare_table(conn: Connection, target: str, report: Report) -> None:
    table = read_table(conn)
    if table is None:
        around = surroundings(conn)
        if around.may_create_table and find_table(conn) is None:
            name = sql.Identifier("blobs")
            conn.execute(statement("create_table", table=name, **columns(target)))
            report(
                f"there was no table blobs: made a new, empty one, {around.new_schema}.blobs in"
                f" {around.database}. Where another program keeps its blobs, that is the wrong"
                " database: drop this table, and correct catalog.url (NTT_DB_URL)"
            )
        return
    check_table(conn, table, target)
    change = add_columns(target, list(table.columns))
    if change is None or not table.owned:
        return
    absent, changes = change
    alter = statement("alter_table", table=sql.Identifier("blobs"), changes=changes)
    _with_brief_lock(conn, alter, report)
    report(f"added to blobs: {', '.join(absent)}")


def _prepare_index(
    conn: Connection, table: Table, place: Place, target: str, report: Report
) -> None:
    """Have one valid index of what is pending."""
    chosen = choose_index(conn, target, place.oid)
    if chosen is None or not table.owned:
        return
    name, unfinished = chosen
    parts = {
        "index": sql.Identifier(name),
        "table": sql.Identifier("blobs"),
        "uncopied": fragment("uncopied_is_false", **columns(target)),
    }
    if place.partitioned:
        raise CatalogRefused(
            "blobs is partitioned: its index cannot be built while others write",
            hint=f"run as {table.owner} when writers may wait until it is done (or build it for"
            " each partition and attach it, see CREATE INDEX in PostgreSQL's manual): "
            + shown("mend_partitioned_index", old=parts["index"], **parts),
        )
    builders = [pid for (pid,) in conn.execute(statement("building"))]
    if builders:
        raise CatalogUnavailable(
            "another session is building an index on blobs",
            detail=f"pid {', '.join(map(str, builders))}",
            hint="run init-db again when it is done: select * from pg_stat_progress_create_index;",
        )
    with _unhurried(conn):
        for left in unfinished:
            conn.execute(statement("drop_index", index=sql.Identifier(left)))
            report(f"dropped the unfinished index {left}")
        size = rows_and_time(conn, place.oid)
        over = f" over {size}" if size else ""
        report(f"building the index {name}{over}; reading and writing go on")
        conn.execute(statement("create_index", **parts))
    report(f"built the index {name}")


@contextmanager
def _unhurried(conn: Connection) -> Iterator[None]:
    """Without time limits: an index waits for old transactions, and blocks nobody meanwhile."""
    lock_timeout, statement_timeout = conn.execute(statement("limits")).fetchall()[0]
    configure(conn, "lock_timeout", 0)
    configure(conn, "statement_timeout", 0)
    try:
        yield
    finally:
        if not conn.closed:
            configure(conn, "lock_timeout", lock_timeout)
            configure(conn, "statement_timeout", statement_timeout)


def _prepare_own_schema(conn: Connection, place: Place, report: Report) -> bool:
    """Make or complete our schema; whether that was ours to do: who owns it, or may make one."""
    there, ours = conn.execute(statement("own_schema")).fetchall()[0]
    if not ours:
        return False
    noted = {"version": sql.Literal(SCHEMA_VERSION), "schema": sql.Literal(place.schema)}
    with conn.transaction():
        if not there:
            conn.execute(statement("create_schema"))
            report("created the schema ntt_backup")
        for name in CREATE_OWN:
            conn.execute(statement(name))
        conn.execute(statement("set_version", **noted))
    return True


def _prepare_trigger(conn: Connection, place: Place, ours: bool, report: Report) -> None:
    state = trigger_state(conn, place.oid)
    if state.there or not (state.may_add and (state.function or ours)):
        return
    if ours:
        conn.execute(statement("create_notify"))
    _with_brief_lock(conn, statement("create_trigger", table=place.name), report)
    report("inserts into blobs now wake the daemon")


def _with_brief_lock(conn: Connection, change: sql.Composed, report: Report) -> None:
    """Execute a change that locks the table, never waiting long enough for a queue behind us."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            with conn.transaction():
                configure(conn, "lock_timeout", BRIEF_LOCK_MS, local=True)
                conn.execute(change)
            return
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            holders = conn.execute(statement("lock_holders")).fetchall()
            named = ", ".join(f"pid {pid} ({application})" for pid, application in holders)
            report(f"waiting for a lock on blobs; held by {named or 'nobody any more'}")
            time.sleep(_PAUSE_S)
    raise CatalogUnavailable(
        "the table blobs is locked by others",
        detail=f"held by {named or 'changing sessions'}",
        hint="run init-db again when their transactions have ended",
    )
