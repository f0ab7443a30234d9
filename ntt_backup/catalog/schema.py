"""init-db: makes the catalog, or adds what we need to a table that another program owns and uses.

It carries out those steps of the plan (see `schema_plan`) that are the operator's. On a live table
of 42 million rows a plain ALTER TABLE is an outage: while it waits for its exclusive lock behind
one long transaction, everybody else queues behind it. So locks are asked for briefly and again.
What exists is not touched, so init-db can be repeated, and two at once take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg import errors

from ntt_backup.catalog import privileges
from ntt_backup.catalog.connection import (
    Connection,
    code_of_others,
    configure,
    shortened,
    translated,
)
from ntt_backup.catalog.queries import pasted
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.catalog.schema_check import PRINT_SQL, existing_table, warnings
from ntt_backup.catalog.schema_plan import GENERATES, Step, Who, make_plan
from ntt_backup.errors import CatalogRefused, CatalogUnavailable

BRIEF_LOCK_MS = 1000
LOCK_ATTEMPTS = 10
_PAUSE_S = 0.5
_SHOWN = 5
_LOCK = {"class": lock_class("init-db/"), "key": 0}  # No target's name has a slash.

Report = Callable[[str], object]


def init_db(
    conn: Connection, target: str, *, notify: bool = False, report: Report = lambda line: None
) -> list[str]:
    """Creates or completes the catalog for a target, as far as this session may.

    report gets a line for each step, wait and warning. notify: also have inserts wake the daemon
    at once. Returns what this session may not do yet although it may run, a command each. Raises
    CatalogRefused where the table cannot be used, or with all that is left for others to do;
    CatalogUnavailable where a lock was not to be had. The session's time limits may be changed.
    """
    with translated("prepare its schema"), _one_at_a_time(conn, report):
        privileges.require_writing(conn)
        for step in make_plan(conn, target, notify=notify).steps:
            if step.who is Who.OPERATOR and not step.by_hand:
                report(step.text)
                if step.unhurried:
                    _build_index(conn, step)
                else:
                    _with_brief_lock(conn, step, report)
        left = make_plan(conn, target, notify=notify)
        if left.needed:
            raise CatalogRefused(
                f"the catalog is not ready for {conn.info.user}",
                detail=f"missing is: {left}",
                hint=PRINT_SQL,
            )
        for warning in warnings(conn, existing_table(conn, target)):
            report(f"warning: {warning}")
        if found := code_of_others(conn):
            report(
                f"warning: commands that use the tables will refuse {conn.info.user}, which has"
                f" rights beyond this database: {shortened(found)}. Let catalog.url name an"
                " ordinary role: `ntt-backup-remote init-db --role NAME` prints its grants"
            )
        return _not_yet(conn, target)


def _not_yet(conn: Connection, target: str) -> list[str]:
    lacks = {command: privileges.lacking(conn, target, [command]) for command in privileges.NEEDS}
    unread = [f"{schema}.{name}" for schema, name in privileges.unreadable(conn)]
    lacks["dump"] += [privileges.Lack("select", name) for name in unread[:_SHOWN]]
    return [
        f"`{command}` (it lacks {', '.join(map(str, these))})"
        for command, these in lacks.items()
        if these
    ]


@contextmanager
def _one_at_a_time(conn: Connection, report: Report) -> Iterator[None]:
    waiting = False
    while not conn.rows("try_lock", _LOCK)[0][0]:
        if not waiting:
            report("waiting for another init-db")
        waiting = True
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        if not conn.closed:
            conn.rows("unlock", _LOCK)


def _execute(conn: Connection, step: Step) -> None:
    for text in step.statements:
        query = text.removesuffix(GENERATES)
        rows = conn.execute(pasted("init-db", query))
        if query != text:
            for (generated,) in rows.fetchall():
                conn.execute(pasted("init-db", generated))


def _build_index(conn: Connection, step: Step) -> None:
    """Executes the step without time limits, unless another session is building an index."""
    if builders := conn.rows("building"):
        raise CatalogUnavailable(
            "another session is building an index on blobs",
            detail=f"pid {', '.join(str(pid) for (pid,) in builders)}",
            hint="run init-db again when it is done: select * from pg_stat_progress_create_index;",
        )
    configure(conn, "lock_timeout", 0)
    configure(conn, "statement_timeout", 0)
    _execute(conn, step)


def _with_brief_lock(conn: Connection, step: Step, report: Report) -> None:
    """Executes a step, never waiting for a lock long enough for a queue behind us."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            with conn.transaction():
                configure(conn, "lock_timeout", BRIEF_LOCK_MS, local=True)
                _execute(conn, step)
            return
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            holders = conn.rows("lock_holders")
            named = ", ".join(f"pid {pid} ({application})" for pid, application in holders)
            report(f"waiting for a lock on blobs; held by {named or 'nobody any more'}")
            time.sleep(_PAUSE_S)
    raise CatalogUnavailable(
        "the table blobs is locked by others",
        detail=f"held by {named or 'changing sessions'}",
        hint="run init-db again when their transactions have ended",
    )
