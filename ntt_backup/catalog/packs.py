"""The packs of a bucket that the ledger knows, one row each.

The ledger knows which packs there are and not where each blob lies: that is the packs' own word.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Final

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import fragment, statement
from ntt_backup.catalog.selection import Choice
from ntt_backup.model import StoredPack

_PAGE: Final = 1000


def insert_packs(conn: Connection, target: str, packs: Sequence[StoredPack]) -> None:
    """Notes packs as they are now, in the caller's transaction. One that is noted already is noted
    anew, as not checked yet.
    """
    for pack in packs:
        conn.execute(statement("insert_pack"), {"target": target, **asdict(pack)})


def forget_packs(
    conn: Connection, target: str, pack_ids: Iterable[str], since: datetime | None = None
) -> None:
    """Takes packs off the list, in the caller's transaction: those that are gone, or not right.
    since: those that were noted anew since then stay, as they are other ones.
    """
    values = {"target": target, "pack_ids": list(pack_ids), "since": since}
    conn.execute(statement("forget_packs"), values)


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


def newest_pack(conn: Connection, target: str) -> tuple[StoredPack, datetime] | None:
    """Returns the pack that was noted last, and when; None where there is none."""
    with translated("tell the newest pack"):
        row = conn.execute(statement("newest_pack"), {"target": target}).fetchone()
    return (StoredPack(*row[:-1]), row[-1]) if row is not None else None


class PackChecks:
    """Lists the packs to check, those first that were checked longest ago. blobs: how many they
    hold; began: when the list was made.
    """

    def __init__(self, conn: Connection, target: str, choice: Choice) -> None:
        self._conn = conn
        self._past: tuple[object, str] = ("-infinity", "")
        with translated("list the packs to check"):
            bound = conn.execute(statement("check_bound"), {"older_than": choice.older_than or 0})
            before, self.began = bound.fetchall()[0]
            self._values = {
                "target": target,
                "first": choice.prefix.ljust(64, "0"),
                "last": choice.prefix.ljust(64, "f"),
                "fraction": choice.fraction,
                "seed": secrets.token_hex(4),
                "before": before,
            }
            query = statement("count_packs_to_check", chosen=fragment("packs_to_check"))
            self.blobs = int(conn.execute(query, self._values).fetchall()[0][0])

    def next(self, count: int) -> list[StoredPack]:
        """Returns the next packs; none at the end."""
        checked, key = self._past
        query = statement("next_packs_to_check", chosen=fragment("packs_to_check"))
        values = {**self._values, "past_checked": checked, "past_key": key, "limit": count}
        with translated("list the packs to check"):
            rows = self._conn.execute(query, values).fetchall()
        if rows:
            self._past = (rows[-1][-1] or "-infinity", rows[-1][1])
        return [StoredPack(*row[:-1]) for row in rows]
