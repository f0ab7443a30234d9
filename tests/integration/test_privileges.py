"""What a role may not do is known beforehand, and named; the SQL shown grants it, and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from subprocess import DEVNULL, PIPE

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog import privileges
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.history import latest_runs
from ntt_backup.catalog.ledger import Ledger, begin_scan, record_checks, register_blobs, requeue
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.schema import make_plan
from ntt_backup.catalog.schema_check import OWN_TABLES, verify_schema
from ntt_backup.catalog.stats import exact_totals
from ntt_backup.errors import CatalogRefused, DumpFailed
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.postgres import Postgres, session
from tests.integration.catalogs import assert_usable


@pytest.fixture
def name(role: Callable[[], str]) -> str:
    """A new role without any privilege."""
    return role()


@pytest.fixture
def conn(catalog: Connection, catalog_url: str, name: str) -> Iterator[Connection]:
    """A connection of that role to the catalog."""
    with session(make_conninfo(catalog_url, user=name), "test") as conn:
        yield conn


def grant(postgres: Postgres, conn: Connection) -> None:
    """Have a superuser run the scripts that this session would print."""
    done = postgres.psql(make_plan(conn, "remote").script(), postgres.url(conn.info.dbname))
    assert done.returncode == 0, done.stderr


def assert_works(conn: Connection) -> None:
    """A run and a scan do what they do, with one pending blob `ab`."""
    assert_usable(conn)
    assert [blob for blob, _ in Claims(conn, "remote", range(256)).take(9)] == [Blob("ab")]
    Ledger(conn, "remote").record([Blob("ab", 2)], [])
    assert register_blobs(conn, [Blob("cd", 3)]) == 1
    assert exact_totals(conn, "remote").copied == 1


def test_a_role_without_privileges_gets_the_grants_it_needs(
    catalog: Connection, conn: Connection, postgres: Postgres
) -> None:
    catalog.execute("insert into blobs (blobid) values ('ab')")
    with pytest.raises(CatalogRefused, match="may not do what `scan` does") as caught:
        verify_schema(conn, "remote", "scan")
    with pytest.raises(CatalogRefused, match="permission denied") as at_work:
        Claims(conn, "remote", range(256)).take(1)
    assert "init-db --print-sql" in caught.value.hint
    assert "init-db --print-sql" in at_work.value.hint

    grant(postgres, conn)

    assert_works(conn)
    begin_scan(conn, "/store")
    assert requeue(conn, "remote") == 0
    assert latest_runs(conn, "remote") == []
    record_checks(conn, "remote", [], [Failure("ab", Reason.REMOTE_MISSING)])
    for change in ("update blobs set blobid = 'ef'", "delete from blobs", "truncate blobs"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(sql.SQL(change))


@pytest.mark.parametrize(
    ("revoked", "command", "lack"),
    [
        ("update on blobs", "run", "update (size, remote_copied, remote_last_checked, "),
        ("select on blobs", "status", "select (blobid, size, remote_copied, "),
        ("insert on blobs", "scan", "insert (blobid, size) on blobs"),
        ("usage on schema ntt_backup", "reconcile", "usage on schema ntt_backup"),
        ("update on ntt_backup.failures", "verify", "update on ntt_backup.failures"),
        ("select on ntt_backup.schema_version", "check", "select on ntt_backup.schema_version"),
    ],
)
def test_a_privilege_that_a_command_lacks_is_named(
    catalog: Connection,
    conn: Connection,
    postgres: Postgres,
    name: str,
    revoked: str,
    command: str,
    lack: str,
) -> None:
    grant(postgres, conn)
    catalog.execute(sql.SQL(f"revoke {revoked} from {name}"))

    with pytest.raises(CatalogRefused, match=f"may not do what `{command}` does") as caught:
        verify_schema(conn, "remote", command)

    assert caught.value.detail.startswith(f"it lacks {lack}")
    grant(postgres, conn)
    assert verify_schema(conn, "remote", command) == []


def test_temporary_tables_are_a_privilege_too(
    catalog: Connection, conn: Connection, postgres: Postgres
) -> None:
    database = sql.Identifier(catalog.info.dbname)
    catalog.execute(sql.SQL("revoke temporary on database {} from public").format(database))
    with pytest.raises(CatalogRefused) as caught:
        verify_schema(conn, "remote", "scan")
    assert "temporary on the database" in caught.value.detail

    grant(postgres, conn)

    assert register_blobs(conn, [Blob("cd", 3)]) == 1


@pytest.mark.parametrize(
    ("right", "columns"),
    [("select", "blobid"), ("update", "size, remote_copy_failed"), ("insert", "size")],
)
def test_privileges_on_single_columns_are_enough_and_named(
    catalog: Connection,
    conn: Connection,
    postgres: Postgres,
    name: str,
    right: str,
    columns: str,
) -> None:
    ours = "size, remote_copied, remote_last_checked, remote_copy_failed"
    for text in (
        f"grant select (blobid, {ours}), update ({ours}), insert (blobid, size) on blobs to {name}",
        f"grant usage on schema ntt_backup to {name}",
        f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}",
        "insert into blobs (blobid) values ('ab')",
    ):
        catalog.execute(sql.SQL(text))
    assert_works(conn)
    catalog.execute(sql.SQL(f"revoke {right} ({columns}) on blobs from {name}"))

    with pytest.raises(CatalogRefused) as caught:
        verify_schema(conn, "remote", "scan" if right == "insert" else "run")

    assert caught.value.detail == f"it lacks {right} ({columns}) on blobs"
    grant(postgres, conn)
    assert_usable(conn)


def test_every_table_of_ours_is_needed_by_a_command() -> None:
    needed = [one for command in privileges.NEEDS for one in privileges.needs(command)]

    used = {name for kind, _, name in needed if kind == "table"} | {"schema_version"}
    assert used == {name for name in OWN_TABLES if "." not in name}


# --- what pg_dump needs ---------------------------------------------------------------------------


OTHERS = {
    "a table": ("create table of_others (name text)", "public.of_others"),
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
HARMLESS = """
    create view a_view as select 1;
    create materialized view a_materialized_view as select 1;
    create function a_function() returns int language sql as 'select 1';
    create schema theirs;
    create table a_table (n int); grant select on a_table to public;
    select lo_create(4711); grant select on large object 4711 to public
"""


@pytest.fixture
def reader(catalog: Connection, catalog_url: str, name: str) -> str:
    """The connection string of a role that may read what init-db made."""
    for text in (
        f"grant select on blobs to {name}",
        f"grant usage on schema ntt_backup to {name}",
        f"grant select on all tables in schema ntt_backup to {name}",
    ):
        catalog.execute(sql.SQL(text))
    return make_conninfo(catalog_url, user=name)


def pg_dump(postgres: Postgres, url: str) -> str:
    """What pg_dump complains about."""
    program = postgres.programs / "pg_dump"
    argv = [str(program), "--format=custom", f"--dbname={url}"]
    done = subprocess.run(argv, stdout=DEVNULL, stderr=PIPE, text=True, check=False)
    return done.stderr


def require_dumpable(url: str) -> None:
    with session(url, "test") as conn:
        privileges.require_dumpable(conn)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_may_not_be_dumped_is_named_and_the_sql_shown_mends_it(
    postgres: Postgres, catalog: Connection, reader: str, kind: str
) -> None:
    made, named = OTHERS[kind]
    assert pg_dump(postgres, reader) == ""
    catalog.execute(sql.SQL(made))
    assert pg_dump(postgres, reader) != ""

    with pytest.raises(DumpFailed) as caught:
        require_dumpable(reader)

    assert caught.value.detail == named
    # What that role reads has no end, and drills refuse it.
    assert "pg_read_all_data" not in caught.value.hint
    catalog.execute(sql.SQL(caught.value.hint.removeprefix("as a superuser: ")))
    assert pg_dump(postgres, reader) == ""
    require_dumpable(reader)


def test_what_pg_dump_does_not_read_is_no_trouble(
    postgres: Postgres, catalog: Connection, reader: str
) -> None:
    catalog.execute(sql.SQL(HARMLESS))
    assert pg_dump(postgres, reader) == ""
    require_dumpable(reader)


def test_the_sql_shown_covers_partitions_that_are_added_later(
    postgres: Postgres, catalog: Connection, reader: str, role: Callable[[], str]
) -> None:
    app = role()
    theirs = (
        f"create schema theirs authorization {app}; set role {app};"
        "create table theirs.inode (medium text) partition by list (medium)"
    )
    catalog.execute(sql.SQL(theirs))
    catalog.execute("reset role")
    with pytest.raises(DumpFailed) as caught:
        require_dumpable(reader)
    catalog.execute(sql.SQL(caught.value.hint.removeprefix("as a superuser: ")))

    added = "create table theirs.inode_p_1 partition of theirs.inode for values in ('1')"
    catalog.execute(sql.SQL(f"set role {app}; {added}; create table theirs.path (n serial)"))
    catalog.execute("reset role")
    assert pg_dump(postgres, reader) == ""
    require_dumpable(reader)
