"""The history of checks says when `verify`, `reconcile`, `drill` and `restore` ended, and how.

No check needs it. A catalog that has not got the table yet, or a role that may not read it, has a
history without an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import errors

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.ledger import storable
from ntt_backup.catalog.queries import statement


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One call of a command. blobs: those that were looked at, or restored; bytes: of their
    content, what was read; wrong: blobs that are lost or not right. detail: which part was asked
    for, or why the command ended early.
    """

    command: str
    started_at: datetime
    ended_at: datetime
    exit_code: int
    blobs: int
    bytes: int
    wrong: int
    detail: str


def note_check(
    conn: Connection,
    target: str,
    command: str,
    *,
    lasted: float,
    exit_code: int,
    blobs: int,
    bytes: int,
    wrong: int,
    detail: str = "",
) -> None:
    """Notes a check that ends at this moment and took so many seconds. Raises CatalogError."""
    found = {"exit_code": exit_code, "blobs": blobs, "bytes": bytes, "wrong": wrong}
    about = {"target": target, "command": command, "lasted": lasted, "detail": storable(detail)}
    with translated("note the check"):
        conn.execute(statement("note_check"), {**about, **found})


def last_checks(conn: Connection, target: str) -> list[CheckRun]:
    """Returns of each command its last call, and the last one that found all right."""
    with translated("read the history of checks"):
        try:
            with conn.transaction():
                rows = conn.execute(statement("last_checks"), {"target": target}).fetchall()
        except (errors.UndefinedTable, errors.InsufficientPrivilege):
            return []
    return [CheckRun(*row) for row in rows]
