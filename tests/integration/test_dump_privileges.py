"""What pg_dump may not read is known beforehand, as it finds it itself; the SQL shown mends it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from subprocess import DEVNULL, PIPE

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import dump_history
from ntt_backup.errors import DumpFailed
from tests.postgres import Postgres

OTHERS = {
    "a table": ("create table of_others (name text)", "public.of_others"),
    "a partitioned table": (
        "create table of_others (name text) partition by list (name)",
        "public.of_others",
    ),
    "a sequence": ("create sequence of_others", "public.of_others"),
    "a schema": (
        "create schema theirs; create table theirs.one (n int);"
        "grant select on theirs.one to public",
        "theirs.one",
    ),
    "an odd name": ('create table "Of; Others" (n int)', 'public."Of; Others"'),
    "a column only": (
        "create table of_others (a int, b int); grant select (a) on of_others to public",
        "public.of_others",
    ),
    "a policy": (
        "create table of_others (n int); grant select on of_others to public;"
        "alter table of_others enable row level security",
        "public.of_others",
    ),
    "a large object": ("select lo_create(4711)", "large object 4711"),
}
HARMLESS = [
    "create view of_others as select 1",
    "create materialized view of_others as select 1",
    "create function of_others() returns int language sql as 'select 1'",
    "create schema theirs",
    "create table of_others (n int); grant select on of_others to public",
    "select lo_create(4711); grant select on large object 4711 to public",
]


def reader(postgres: Postgres, url: str, name: str) -> str:
    """The connection string of a role that may read what init-db made."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f"grant select on blobs to {name}".encode())
        conn.execute(f"grant usage on schema ntt_backup to {name}".encode())
        conn.execute(f"grant select on all tables in schema ntt_backup to {name}".encode())
    return make_conninfo(url, user=name)


def execute(url: str, query: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(query.encode())


def pg_dump(postgres: Postgres, url: str) -> str:
    """What pg_dump complains about."""
    program = postgres.programs / "pg_dump"
    argv = [str(program), "--format=custom", f"--dbname={url}"]
    done = subprocess.run(argv, stdout=DEVNULL, stderr=PIPE, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize("kind", OTHERS)
def test_what_may_not_be_read_is_named_and_the_sql_shown_mends_it(
    postgres: Postgres, catalog_url: str, role: Callable[[], str], kind: str
) -> None:
    made, name = OTHERS[kind]
    url = reader(postgres, catalog_url, role())
    assert pg_dump(postgres, url) == ""
    execute(catalog_url, made)
    assert pg_dump(postgres, url) != ""

    with connect(url, "test") as conn, pytest.raises(DumpFailed) as caught:
        dump_history.require_readable(conn)

    assert caught.value.detail == name
    execute(catalog_url, caught.value.hint.removeprefix("as a superuser: "))
    assert pg_dump(postgres, url) == ""
    with connect(url, "test") as conn:
        dump_history.require_readable(conn)


@pytest.mark.parametrize("made", HARMLESS)
def test_what_pg_dump_does_not_read_is_no_trouble(
    postgres: Postgres, catalog_url: str, role: Callable[[], str], made: str
) -> None:
    url = reader(postgres, catalog_url, role())
    execute(catalog_url, made)
    assert pg_dump(postgres, url) == ""
    with connect(url, "test") as conn:
        dump_history.require_readable(conn)


def test_a_role_with_less_than_the_catalog(
    postgres: Postgres, catalog_url: str, role: Callable[[], str]
) -> None:
    url = make_conninfo(catalog_url, user=role())
    with connect(url, "test") as conn, pytest.raises(DumpFailed) as caught:
        dump_history.require_readable(conn)
    assert caught.value.detail.startswith("ntt_backup.dumps, ntt_backup.failures, ")
    assert caught.value.detail.endswith(" more")


def test_before_pg_read_all_data_the_schemas_are_named(
    postgres: Postgres,
    catalog_url: str,
    role: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dump_history, "_READ_ALL", 1_000_000)
    url = reader(postgres, catalog_url, role())
    execute(catalog_url, "create schema theirs; create table theirs.one (n serial)")
    with connect(url, "test") as conn, pytest.raises(DumpFailed) as caught:
        dump_history.require_readable(conn)
    execute(catalog_url, caught.value.hint.removeprefix("as a superuser: "))
    assert pg_dump(postgres, url) == ""
