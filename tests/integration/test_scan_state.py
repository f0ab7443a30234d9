"""What a scan registers, and how far it got, on a real database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.ledger import (
    missing_blobs,
    register_blobs,
)
from ntt_backup.catalog.schema import init_db
from ntt_backup.errors import CatalogRefused
from ntt_backup.model import Blob
from tests.helpers.postgres import TARGET, session
from tests.integration.catalogs import add, rows, state


def test_registering_adds_what_is_missing_and_leaves_the_rest(catalog: Connection) -> None:
    add(catalog, "known", size=1)
    odd = ["tab\tand\\N", "line\nbreak", ""]
    found = [Blob("known", 2), Blob("new", 3), Blob("new", 3), *(Blob(one) for one in odd)]

    assert missing_blobs(catalog, [blob.blobid for blob in found]) == ({"new", *odd}, set())
    assert register_blobs(catalog, found) == 4

    assert missing_blobs(catalog, [blob.blobid for blob in found]) == (set(), set(odd))
    assert register_blobs(catalog, found) == 0
    assert register_blobs(catalog, []) == 0
    assert state(catalog)["known"] == (None, False, None, 1)
    assert state(catalog)["new"] == (None, False, None, 3)


def test_names_that_are_compared_as_a_whole_hide_no_difference(catalog: Connection) -> None:
    names = [f"{number:064x}" for number in range(5)]
    add(catalog, *names, size=1)
    assert missing_blobs(catalog, names[::-1]) == (set(), set())
    catalog.execute("update blobs set size = null where blobid = %s", [names[2]])
    assert missing_blobs(catalog, names) == (set(), {names[2]})
    catalog.execute("update blobs set blobid = %s where blobid = %s", [f"{names[1]}é", names[1]])
    assert missing_blobs(catalog, names) == ({names[1]}, {names[2]})
    assert missing_blobs(catalog, names[3:]) == missing_blobs(catalog, []) == (set(), set())


def test_registering_while_another_program_inserts(catalog: Connection, catalog_url: str) -> None:
    with (
        session(catalog_url, "other") as other,
        session(catalog_url, "scan") as scan,
        ThreadPoolExecutor(1) as threads,
    ):
        other.execute("begin")
        add(other, "both")
        added = threads.submit(register_blobs, scan, [Blob("both", 1), Blob("ours", 1)])
        while not rows(catalog, "select 1 from pg_locks where not granted"):
            pass
        other.execute("commit")
        assert added.result() == 1

    assert set(state(catalog)) == {"both", "ours"}


def test_registering_without_a_unique_index_repeats_nothing(database: Connection) -> None:
    database.execute("create table blobs (blobid text)")
    init_db(database, TARGET)

    assert register_blobs(database, [Blob("a", 1)]) == 1
    assert register_blobs(database, [Blob("a", 1), Blob("b", 1), Blob("b", 2)]) == 1


def test_a_foreign_column_that_needs_a_value_is_named(catalog: Connection) -> None:
    catalog.execute("alter table blobs add n_hardlinks int not null")

    with pytest.raises(CatalogRefused, match="not-null") as caught:
        register_blobs(catalog, [Blob("a", 1)])

    assert "n_hardlinks" in caught.value.hint
