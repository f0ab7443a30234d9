"""init-db: make the catalog, or add what we need to a table that another program owns and uses.

On a live table of 42 million rows the obvious ALTER TABLE is an outage: while it waits for its
exclusive lock behind one long transaction, everybody else queues behind it. So locks are asked for
briefly and again; columns come without a default, so that nothing is rewritten; the index is built
CONCURRENTLY, and one that an interruption left unfinished is replaced. What is there already is not
touched, so init-db can be repeated, and two at once take turns.

Called by the CLI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg import errors, sql

from ntt_backup.catalog.claim import lock_class
from ntt_backup.catalog.db import Connection, configure, translated
from ntt_backup.catalog.pending import columns, index_names, read_indexes
from ntt_backup.catalog.queries import fragment, shown, statement
from ntt_backup.catalog.shape import (
    SCHEMA_VERSION,
    Table,
    check_one_table,
    check_table,
    check_version,
    existing_table,
    our_columns,
    own_tables,
    read_table,
    warnings,
)
from ntt_backup.errors import CatalogRefused, CatalogUnavailable

BRIEF_LOCK_MS = 1000
LOCK_ATTEMPTS = 10
_PAUSE_S = 0.5
_LOCK = {"class": lock_class("init-db/"), "key": 0}  # no target's name has a slash

Report = Callable[[str], object]


def init_db(
    conn: Connection, target: str, *, notify: bool = False, report: Report = lambda line: None
) -> None:
    """Create or complete the catalog for a target. report gets a line for each change, wait
    and warning.

    notify: also have inserts wake the daemon at once. Raises CatalogRefused where the table cannot
    be used or we lack a privilege, CatalogUnavailable where a lock was not to be had.
    """
    with translated(conn, "prepare its schema"), _one_at_a_time(conn, report):
        if "schema_version" in own_tables(conn):
            check_one_table(conn)
        _prepare_table(conn, target, report)
        table = existing_table(conn, target)
        _prepare_index(conn, table, target, report)
        _prepare_own_schema(conn, target, report)
        if notify:
            _prepare_trigger(conn, report)
        for warning in warnings(conn, table):
            report(f"warning: {warning}")


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
        conn.execute(statement("create_table", **columns(target)))
        report("created the table blobs")
        return
    check_table(conn, table, target)
    wanted = {**our_columns(target), "created_at": "timestamptz"}
    absent = [name for name in wanted if name not in table.columns]
    if not absent:
        return
    changes = [
        fragment("add_column", column=sql.Identifier(name), type=sql.SQL(wanted[name]))
        for name in absent
    ]
    if "created_at" in absent:
        changes.append(fragment("default_created_at"))
    parts = {"changes": sql.SQL(", ").join(changes)}
    _require_owner(conn, table, shown("alter_table", **parts))
    _with_brief_lock(conn, statement("alter_table", **parts), report)
    report(f"added to blobs: {', '.join(absent)}")


def _prepare_index(conn: Connection, table: Table, target: str, report: Report) -> None:
    """Have one valid index of what is pending; others' indexes are used as they are."""
    indexes = read_indexes(conn, target)
    if any(index.valid and index.form for index in indexes):
        return
    taken = {index.name for index in indexes if index.valid}
    free = [name for name in index_names(target) if name not in taken]
    if not free:
        spare = sql.Identifier(index_names(target)[1])
        raise CatalogRefused(
            "the names of our index are taken by indexes that do not serve us",
            detail=", ".join(index_names(target)),
            hint=f"rename one, or drop it: {shown('drop_index', index=spare)}",
        )
    name = free[0]
    unfinished = [index.name for index in indexes if index.name in free]
    parts = {
        "index": sql.Identifier(name),
        "uncopied": fragment("uncopied_is_false", **columns(target)),
    }
    if table.partitioned:
        raise CatalogRefused(
            "blobs is partitioned: its index cannot be built while others write",
            hint=f"run as {table.owner} when writers may wait until it is done (or build it for"
            " each partition and attach it, see CREATE INDEX in PostgreSQL's manual): "
            + shown("mend_partitioned_index", **parts),
        )
    _require_owner(conn, table, shown("create_index", **parts))
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
        report(f"building the index {name}; reading and writing go on")
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


def _prepare_own_schema(conn: Connection, target: str, report: Report) -> None:
    there, _, may_create, database, user = conn.execute(statement("own_schema")).fetchall()[0]
    if not (there or may_create):
        names = {"database": sql.Identifier(database), "user": sql.Identifier(user)}
        raise CatalogRefused(
            f"{user} may not create the schema ntt_backup",
            hint=shown("mend_grant_create", **names),
        )
    with conn.transaction():
        if not there:
            conn.execute(statement("create_schema"))
            report("created the schema ntt_backup")
        conn.execute(statement("create_failures"))
        conn.execute(statement("create_runs"))
        conn.execute(statement("create_scans"))
        conn.execute(statement("create_dumps"))
        conn.execute(statement("create_marks"))
        conn.execute(statement("create_version"))
        conn.execute(statement("set_version"), {"version": SCHEMA_VERSION})
    check_version(conn, target)


def _prepare_trigger(conn: Connection, report: Report) -> None:
    if conn.execute(statement("has_trigger")).fetchall()[0][0]:
        return
    conn.execute(statement("create_notify"))
    _with_brief_lock(conn, statement("create_trigger"), report)
    report("inserts into blobs now wake the daemon")


def _require_owner(conn: Connection, table: Table, needed: str) -> None:
    if not table.owned:
        raise CatalogRefused(
            f"{conn.info.user} may not alter the table blobs",
            detail=f"it belongs to {table.owner}",
            hint=f"run init-db as {table.owner}, or as {table.owner}: {needed}",
        )


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
