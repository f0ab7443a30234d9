"""Rows of a dump go into tables that are made for them, or the database is left empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import restore_role
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.restore_role import new_tables
from ntt_backup.catalog.schema import init_db
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.errors import CatalogRefused

BLOBS = ("public", "blobs")
LEFT = """
    select relname::text from pg_class join pg_namespace as n on n.oid = relnamespace
    where relkind = 'r' and nspname in ('public', 'ntt_backup') union
    select nspname::text from pg_namespace where nspname = 'ntt_backup'
"""


def left(url: str) -> list[str]:
    with psycopg.connect(url) as conn:
        return sorted(name for (name,) in conn.execute(LEFT))


@pytest.mark.parametrize("at_once", [1, 6, 1 << 16])
def test_rows_come_into_tables_that_can_be_used_at_once(
    database_url: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_role, "_AT_ONCE", at_once)
    rows = [b"%02x\t%d\n" % (number, number) for number in range(100)]
    with new_tables(database_url, "test", ["remote", "usb"]) as new:
        assert {"blobid", "size", "remote_copied", "usb_copied"} <= new.columns[BLOBS]
        assert ("ntt_backup", "schema_version") not in new.columns
        assert ("ntt_backup", "runs") in new.columns
        new.copy(BLOBS, ["blobid", "size"], "UTF8", iter(rows))
        # Nobody sees them before all is right.
        with psycopg.connect(database_url) as conn:
            assert conn.execute("select count(*) from blobs").fetchall() == [(0,)]
    with connect(database_url, "test") as conn:
        found = conn.execute("select blobid, size from public.blobs order by blobid").fetchall()
        assert found == [(f"{number:02x}", number) for number in range(100)]
        for target in ("remote", "usb"):
            verify_schema(conn, target)


def test_a_row_that_does_not_fit_leaves_the_database_empty(database_url: str) -> None:
    with pytest.raises(CatalogRefused), new_tables(database_url, "test", ["remote"]) as new:
        new.copy(BLOBS, ["blobid", "size"], "UTF8", [b"aa\tmany\n"])
    assert left(database_url) == []


def test_an_error_in_the_midst_leaves_the_database_empty(database_url: str) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"aa\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), new_tables(database_url, "test", ["remote"]) as new:
        new.copy(BLOBS, ["blobid"], "UTF8", interrupted())
    assert left(database_url) == []


def test_tables_that_were_not_finished_go_as_well(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(conn: Connection, target: str) -> None:
        if target == "usb":
            raise CatalogRefused("no")
        init_db(conn, target)

    monkeypatch.setattr(restore_role, "init_db", fail)
    with pytest.raises(CatalogRefused), new_tables(database_url, "test", ["remote", "usb"]):
        raise AssertionError
    assert left(database_url) == []


def test_what_others_have_in_the_database_stays_and_is_not_used(
    database_url: str, role: Callable[[], str]
) -> None:
    other = role()
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create schema s")
        conn.execute("create table s.blobs (n int)")
        conn.execute(f"alter table s.blobs owner to {other}".encode())
        conn.execute(f"grant create on schema public to {other}".encode())
        # A superuser would run code that this role can put into a table of its own.
        conn.execute(b"create function public.f() returns int language sql as 'select 1'")
    with psycopg.connect(make_conninfo(database_url, user=other), autocommit=True) as conn:
        conn.execute("create table public.blobs (blobid text primary key, size bigint)")
    with pytest.raises(CatalogRefused), new_tables(database_url, "test", ["remote"]):
        raise AssertionError
    with psycopg.connect(database_url) as conn:
        for table in ("s.blobs", "public.blobs"):
            assert conn.execute(f"select count(*) from {table}".encode()).fetchall() == [(0,)]
