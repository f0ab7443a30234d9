"""The packs of a bucket that the ledger knows, one row each.

The ledger knows which packs there are and not where each blob lies: that is the packs' own word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import statement
from ntt_backup.model import StoredPack

_PAGE: Final = 1000


def insert_packs(conn: Connection, target: str, packs: Sequence[StoredPack]) -> None:
    """Notes packs as they are now, in the caller's transaction. One that is noted already is noted
    anew, as not checked yet.
    """
    for pack in packs:
        conn.execute(statement("insert_pack"), {"target": target, **asdict(pack)})


def forget_packs(conn: Connection, target: str, pack_ids: Iterable[str]) -> None:
    """Takes packs off the list, in the caller's transaction: those that are gone, or not right."""
    conn.execute(statement("forget_packs"), {"target": target, "pack_ids": list(pack_ids)})


def mark_packs_checked(conn: Connection, target: str, pack_ids: Iterable[str]) -> None:
    """Notes that packs were found right now, in the caller's transaction."""
    conn.execute(statement("mark_packs_checked"), {"target": target, "pack_ids": list(pack_ids)})


def iter_packs(conn: Connection, target: str) -> Iterator[StoredPack]:
    """Yields the packs in the order of their keys' bytes, as a bucket lists them; in constant
    memory, with no transaction open in between.
    """
    query = statement("next_packs")
    past, found = "", _PAGE
    while found == _PAGE:
        with translated("list packs"):
            values = {"target": target, "past": past, "limit": _PAGE}
            rows = conn.execute(query, values).fetchall()
        yield from (StoredPack(*row) for row in rows)
        found, past = len(rows), rows[-1][1] if rows else ""
