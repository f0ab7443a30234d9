"""Selections of blobs: in order, in pages, or as a fair sample."""

from __future__ import annotations

from collections import Counter

import pytest
from blake3 import blake3

from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.failures import iter_failed
from ntt_backup.catalog.ledger import Ledger, register_blobs, requeue
from ntt_backup.catalog.range_locks import prefix_ranges
from ntt_backup.catalog.selection import first_pending, rows_in, sample
from ntt_backup.catalog.stats import pending_estimate, still_failed
from ntt_backup.model import Blob
from tests.helpers.postgres import TARGET
from tests.integration.catalogs import MALFORMED, add, add_hashes, allow_null, rows


def blobs(count: int) -> list[Blob]:
    return [Blob(blake3(str(number).encode()).hexdigest(), number % 7) for number in range(count)]


def test_a_small_catalog_is_its_own_sample(catalog: Connection) -> None:
    assert sample(catalog, TARGET, 1000) == []
    wanted = blobs(20)
    register_blobs(catalog, wanted)
    assert sorted(sample(catalog, TARGET, 64_000), key=lambda one: one.blobid) == sorted(
        wanted, key=lambda one: one.blobid
    )


def test_a_large_one_is_sampled_evenly_and_within_the_limit(catalog: Connection) -> None:
    register_blobs(catalog, blobs(20_000))
    found = sample(catalog, TARGET, 2000)
    assert len({blob.blobid for blob in found}) == len(found) == pytest.approx(2000, rel=0.05)
    quarters = Counter(int(blob.blobid[0], 16) // 4 for blob in found)
    assert all(count == pytest.approx(500, rel=0.1) for count in quarters.values())
    assert all(blob.size is not None for blob in found)


def test_copied_blobs_are_in_it_and_failed_ones_are_not(catalog: Connection) -> None:
    copied, failed, pending = blobs(3)
    register_blobs(catalog, [copied, failed, pending])
    catalog.execute("update blobs set remote_copied = true where blobid = %s", [copied.blobid])
    catalog.execute("update blobs set remote_copy_failed = true where blobid = %s", [failed.blobid])
    assert {blob.blobid for blob in sample(catalog, TARGET, 64)} == {copied.blobid, pending.blobid}


def test_a_session_that_may_only_read_can_draw_it(catalog: Connection) -> None:
    register_blobs(catalog, blobs(5))
    catalog.execute("set default_transaction_read_only = on")
    assert len(sample(catalog, TARGET, 64)) == 5


def test_the_first_pending_blobs_are_found_in_order(catalog: Connection) -> None:
    allow_null(catalog)
    add_hashes(catalog, 70)
    add(catalog, *MALFORMED, None, "stored", size=3)
    Ledger(catalog, TARGET).record([Blob("stored")], [])

    found = first_pending(catalog, TARGET, 75, 60_000)

    expected = rows(
        catalog,
        "select blobid, size from blobs where blobid is not null and remote_copied is not true"
        " order by blobid",
    )
    assert found is not None
    assert len(found) == 75 < len(expected)
    assert [(blob.blobid, blob.size) for blob in found] == expected[:75]


def test_a_search_for_the_first_pending_blob_ends_with_its_time(
    catalog: Connection, catalog_url: str
) -> None:
    add_hashes(catalog, 10)
    with connect(catalog_url, "blocker") as blocker, blocker.transaction():
        blocker.execute("lock table public.blobs")
        for milliseconds in (50, 0):
            assert first_pending(catalog, TARGET, 1, milliseconds) is None

    assert first_pending(catalog, TARGET, 100, 60_000) != []
    assert catalog.execute("show statement_timeout").fetchall() == [("0",)]


def test_whoever_reads_leaves_the_session_as_it_was(catalog: Connection) -> None:
    add_hashes(catalog, 3)
    changed = "select name, setting from pg_settings where source = 'session' order by 1"
    scans = "select seq_scan from pg_stat_user_tables where relname = 'blobs'"
    before = rows(catalog, changed)
    catalog.execute("analyze blobs")
    for read in (
        lambda: first_pending(catalog, TARGET, 1, 60_000),
        lambda: rows_in(catalog, TARGET, prefix_ranges()[0]),
        lambda: sample(catalog, TARGET, 64),
        lambda: list(iter_failed(catalog, TARGET)),
        lambda: requeue(catalog, TARGET),
        lambda: pending_estimate(catalog, TARGET, 60_000),
        lambda: still_failed(catalog, TARGET),
    ):
        catalog.execute("select pg_stat_force_next_flush()")
        scanned = rows(catalog, scans)
        read()
        assert rows(catalog, changed) == before
        # Nor does it read the table, as small as that is.
        catalog.execute("select pg_stat_force_next_flush()")
        assert rows(catalog, scans) == scanned
