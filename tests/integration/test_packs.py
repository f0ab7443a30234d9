"""The packs of a bucket in a real database: noted with their blobs, or not at all."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ntt_backup.catalog import privileges
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import (
    Ledger,
    forget_packs,
    iter_packs,
    mark_packs_checked,
    newest_pack,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.errors import CatalogRefused
from ntt_backup.model import Blob, StoredPack
from tests.integration.catalogs import add, state, stubborn

TARGET = "remote"
WITH_PACKS = privileges.of("run", packs=True)


def pack(number: int) -> StoredPack:
    name = f"{number:032x}"
    return StoredPack(name, f"packs/aa/{name}.tar", "aa" * 32, "ab" * 32, 2, 1024, "sum-1")


def checked(conn: Connection) -> dict[str, bool]:
    """Pack to whether it was checked."""
    rows = conn.execute("select pack_id, checked_at is not null from ntt_backup.packs")
    return dict(rows.fetchall())


def test_packs_are_noted_once_and_with_their_blobs(catalog: Connection) -> None:
    add(catalog, "ab", "stubborn")
    book = Ledger(catalog, TARGET)
    anew = replace(pack(1), size=99, checksum="sum-2")

    for _ in range(2):
        book.record([Blob("ab", 3)], [], [pack(1), pack(2)])
    mark_packs_checked(catalog, TARGET, [pack(1).pack_id, pack(2).pack_id])
    book.record([Blob("ab", 3)], [], [anew])
    stubborn(catalog, "return null;")
    with pytest.raises(CatalogRefused):
        book.record([Blob("stubborn", 3)], [], [pack(3)])

    assert state(catalog)["ab"] == (True, True, False, 3)
    assert list(iter_packs(catalog, TARGET)) == [anew, pack(2)]
    assert checked(catalog) == {pack(1).pack_id: False, pack(2).pack_id: True}
    assert list(iter_packs(catalog, "other")) == []
    assert newest_pack(catalog, "other") is None
    newest = newest_pack(catalog, TARGET)
    assert newest is not None
    assert newest[0] == anew
    assert abs(datetime.now(UTC) - newest[1]) < timedelta(minutes=5)


def test_packs_are_listed_in_pages_and_forgotten(catalog: Connection) -> None:
    packs = [pack(number) for number in range(2000)]
    Ledger(catalog, TARGET).record([], [], packs)

    assert list(iter_packs(catalog, TARGET)) == packs
    forget_packs(catalog, TARGET, [one.pack_id for one in packs[1:]])
    forget_packs(catalog, "other", [packs[0].pack_id])
    assert list(iter_packs(catalog, TARGET)) == packs[:1]


def test_a_catalog_from_before_packs_serves_all_but_buckets(catalog: Connection) -> None:
    catalog.execute("drop table ntt_backup.packs")

    assert verify_schema(catalog, TARGET, privileges.of("run", packs=False)) == []
    Ledger(catalog, TARGET).record([Blob("ab", 3)], [])
    with pytest.raises(CatalogRefused, match="lacks packs") as caught:
        verify_schema(catalog, TARGET, WITH_PACKS)
    assert "`ntt-backup-remote init-db`" in caught.value.hint

    lines: list[str] = []
    assert init_db(catalog, TARGET, report=lines.append) == []
    assert lines == ["add to ntt_backup packs"]
    assert verify_schema(catalog, TARGET, WITH_PACKS) == []
