"""One table comes back out of a dump of the catalog, beside what is there now."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

# Whatever is in a string, in a quoted name or in another schema keeps its name.
TABLES = """
create schema app;
create type app.kind as enum ('file', 'app.inode');
create function app.stamp() returns trigger language plpgsql as 'begin return new; end';
create table app.medium (name text primary key);
create table app.inode (
    medium text not null references app.medium, ino serial, kind app.kind default 'app.inode',
    "app.inode" text default 'app.inode', check ("app.inode" <> 'app.path'),
    primary key (medium, ino)
) partition by list (medium);
create table app.inode_p_1 partition of app.inode for values in ('one');
create table app."inode ""p.2" partition of app.inode for values in ('two')
    partition by range (ino);
create table app.inode_p_3 partition of app."inode ""p.2" for values from (0) to (1000000);
create index inode_upper on app.inode (upper("app.inode")) where kind = 'app.inode';
create table app.path (ino bigint generated always as identity, path bytea);
create trigger stamp before insert on app.inode_p_1 for each row execute function app.stamp();
insert into app.medium values ('one'), ('two');
insert into app.inode (medium, kind)
    select (array['one', 'two'])[1 + n % 2], 'file' from generate_series(1, 2000) as n;
insert into app.path (path) values ('\\x00ff');
"""
ROWS = 'select medium, ino, kind::text, "app.inode" from {}.inode order by 1, 2'


@pytest.fixture(params=["full", pytest.param("series", marks=pytest.mark.long)])
def dumped(
    request: pytest.FixtureRequest,
    env: Environment,
    postgres: Postgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Environment:
    """A database with tables of another program, and its dump; of a series it is the second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    env.write_config(
        run={"skip_pgdump": False}, dump={"bin": str(postgres.programs), "mode": request.param}
    )
    env.query(TABLES)
    for _ in range(1 + (request.param == "series")):
        env.run("dump", "--force", expect=0)
    return env


def rows(url: str, schema: str = "app") -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(ROWS.format(schema).encode()).fetchall()


def relations(url: str) -> set[str]:
    """All relations that are not the server's, and whether an index is valid."""
    query = (
        "select c.oid::regclass || ' ' || coalesce(indisvalid, true) from pg_class c left join"
        " pg_index i on indexrelid = c.oid where relnamespace::regnamespace::text !~"
        " '^(pg_|information_schema)'"
    )
    with psycopg.connect(url) as conn:
        return {name for (name,) in conn.execute(query.encode())}


def as_ordinary(env: Environment, role: Callable[[], str], *grants: str) -> None:
    """Has commands work as a role that was granted so much."""
    name = role()
    env.query(f"grant usage on schema app to {name}")
    for grant in grants:
        env.query(f"grant {grant} to {name}")
    env.write_config(catalog={"url": make_conninfo(env.url, user=name)})


def test_a_table_comes_back_beside_the_damaged_one(
    dumped: Environment, role: Callable[[], str]
) -> None:
    before, there = rows(dumped.url), relations(dumped.url)
    dumped.query("update app.inode set kind = 'app.inode' where ino % 3 = 0")
    dumped.query("delete from app.inode where ino % 5 = 0")
    damaged = rows(dumped.url)
    wanted = ("restore", "--catalog", "--table", "app.inode")
    # Code in the tables would run as a superuser, in a database that others use.
    refused = dumped.run(*wanted, "--schema", "kept", expect=7)
    assert "postgres is, or may become, a superuser" in refused.stderr
    as_ordinary(
        dumped, role, f"create on database {dumped.query('select current_database()')[0][0]}"
    )

    refused = dumped.run(*wanted, "--schema", "app", expect=7)
    assert "the database has a table app.inode: nothing is overwritten" in refused.stderr
    assert "--schema NAME restores it beside that one" in refused.stderr
    done = dumped.run(*wanted, "--schema", "kept", expect=0)
    assert "restored kept.inode of " in done.stdout
    again = dumped.run(*wanted, "--schema", "kept", expect=7)
    assert "nothing is overwritten" in again.stderr

    assert (rows(dumped.url, "kept"), rows(dumped.url)) == (before, damaged)
    new = {name.replace("kept.", "app.") for name in relations(dumped.url) - there}
    # All but the sequences: with the partitions, their keys and their indexes, and all are valid.
    assert new == {name for name in there if "inode" in name and "_seq" not in name}
    assert (
        dumped.query(
            "select conname from pg_constraint where contype = 'f'"
            " and conrelid = 'kept.inode'::regclass"
        )
        == []
    )


def test_a_table_that_was_dropped_comes_back_into_its_place(
    dumped: Environment, postgres: Postgres, role: Callable[[], str]
) -> None:
    """The newest dump lacks the table: it was made after that."""
    before, there = rows(dumped.url), relations(dumped.url)
    dumped.query("drop table app.inode cascade")
    dumped.run("dump", "--force", expect=0)
    wanted = ("restore", "--catalog", "--table", "app.inode", "--schema", "app")
    as_ordinary(dumped, role)
    denied = dumped.run(*wanted, expect=7)
    assert "create schema NAME authorization ROLE" in denied.stderr
    as_ordinary(dumped, role, "create on schema app")

    done = dumped.run(*wanted, expect=0)
    assert "has no table app.inode" in done.stderr
    assert rows(dumped.url) == before
    *_, script = done.stdout.partition("for a superuser:\n")
    assert postgres.psql(f"\\set ON_ERROR_STOP 1\n{script}", dumped.url).returncode == 0
    assert relations(dumped.url) == there
    dumped.query("insert into app.inode (medium) values ('one')")
    assert rows(dumped.url)[1000][1] == 2001
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        dumped.query("delete from app.medium")


def test_a_table_comes_into_a_database_of_its_own(
    dumped: Environment, postgres: Postgres, database_url: str, role: Callable[[], str]
) -> None:
    """It gets what the table needs, such as types, and nothing else."""
    there = relations(dumped.url)
    done = dumped.run(
        "restore", "--catalog", "--table", "app.inode", "--table", "app.path", expect=0
    )
    (name,) = re.findall(r"into the database (\w+_tables_[0-9a-f]{16}); ", done.stdout)
    try:
        url = make_conninfo(dumped.url, dbname=name)
        assert rows(url) == rows(dumped.url)
        assert "app.medium true" not in relations(url)
        assert relations(dumped.url) == there
    finally:
        postgres.execute(sql.SQL("drop database {}").format(sql.Identifier(name)))
    # One that was made for it.
    wanted = ("restore", "--catalog", "--table", "app.inode")
    dumped.run(*wanted, "--database", database_url, expect=0)
    assert rows(database_url) == rows(dumped.url)
    # What fails leaves no database.
    before = dumped.query("select datname from pg_database")
    failed = dumped.run("restore", "--catalog", "--table", "app.nothing", expect=7)
    assert "no good dump of this host has the table app.nothing" in failed.stderr
    user = role()
    dumped.write_config(catalog={"url": make_conninfo(dumped.url, user=user)})
    denied = dumped.run(*wanted, expect=4)
    assert "--database" in denied.stderr
    assert dumped.query("select datname from pg_database") == before


@pytest.mark.parametrize(
    "options",
    [
        ("--schema", "x"),
        ("--table", "t", "--trust-target"),
        ("--table", "t", "--no-refresh"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    env: Environment, options: tuple[str, ...]
) -> None:
    env.run("restore", "--catalog", *options, expect=2)
