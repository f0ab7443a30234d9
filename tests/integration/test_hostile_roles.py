"""A role of the database prepares code, and waits for a superuser who uses our commands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.restore_role import restorer
from ntt_backup.catalog.schema import init_db, make_plan
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import any_copied
from ntt_backup.errors import CatalogRefused
from tests.helpers.postgres import Postgres
from tests.integration.catalogs import LIVE, rows

# Whoever makes a superuser's session call one of these is a superuser afterwards. The planner calls
# what is immutable.
SPRING = """
    create function {schema}.volatile() returns boolean language plpgsql as $$
    begin
        perform pg_catalog.set_config('role', 'none', false);
        execute 'alter role {role} superuser';
        return true;
    exception when others then
        return true;
    end $$;
    create function {schema}.spring(text) returns boolean immutable language plpgsql as $$
    begin return {schema}.volatile(); end $$;
    create function {schema}.fire() returns trigger language plpgsql as $$
    begin perform {schema}.volatile(); return new; end $$;
"""
VERSION = "ntt_backup.schema_version (singleton bool primary key, version int, blobs_schema text)"
# What a role that may create in the database prepares there.
PREPARED = {
    "nothing": "",
    "a trigger": f"create table {VERSION}; create trigger t before insert on"
    " ntt_backup.schema_version for each row execute function mallory.fire()",
    "a view": "create view ntt_backup.schema_version as select 1 as version, 'public' as"
    " blobs_schema where mallory.volatile()",
    "a rule": f"create table {VERSION}; create rule r as on insert to ntt_backup.schema_version"
    " do also select mallory.volatile()",
    "a default": f"create table {VERSION}; alter table ntt_backup.schema_version add x bool"
    " default mallory.volatile()",
    "a check": f"create table {VERSION}; alter table ntt_backup.schema_version add check"
    " (mallory.volatile())",
    "an index": f"create table {VERSION}; create index on ntt_backup.schema_version (version)"
    " where mallory.spring('x')",
    "a function": "create function ntt_backup.notify_blobs() returns trigger language plpgsql as"
    " $$begin perform mallory.volatile(); return new; end$$",
}
EVENT = (
    "create function mallory.event() returns event_trigger language plpgsql as"
    " $$begin perform mallory.volatile(); end$$;"
    " create event trigger ntt on ddl_command_end execute function mallory.event();"
    " alter event trigger ntt disable; alter function mallory.event() owner to {role};"
    " alter event trigger ntt enable always"
)
# What a superuser has made of blobs, and then the role. A trigger and an index are made when they
# are wanted, so that the right to make one is enough.
OWNED = {
    "the table": (
        "grant create on schema public to {role}; alter table blobs owner to {role}",
        "create index on blobs (blobid) where {x}",
    ),
    "a child": (
        "grant create on schema mallory to postgres; create table mallory.child (like blobs);"
        " alter table mallory.child inherit blobs; alter table mallory.child owner to {role}",
        "create index on mallory.child (blobid) where {x}",
    ),
    "a right to make triggers": ("grant trigger on blobs to {role}", ""),
    "a right of all to make triggers": ("grant trigger on blobs to public", ""),
    "a right to refer to what is deleted": (
        "grant references on ntt_backup.failures to {role}",
        "",
    ),
    "a table that refers to what is deleted": (
        "create table mallory.x (t text, b text, foreign key (t, b) references ntt_backup.failures"
        " on delete cascade); alter table mallory.x owner to {role}",
        "",
    ),
    "the schema": (
        "alter schema public owner to {role}",
        "drop table blobs; create table blobs (blobid text primary key, remote_copied bool);"
        " create index on blobs (blobid) where {x}",
    ),
    "a function of an index": ("create index on blobs (blobid) where {x}", ""),
    "a function of an exclusion": (
        "alter table blobs add exclude using btree (n_hardlinks with =) where ({x})",
        "",
    ),
    "a function of a trigger": (
        "create trigger t after update on blobs execute function mallory.fire()",
        "",
    ),
    "a domain": (
        "create domain mallory.d as text; alter domain mallory.d owner to {role};"
        " alter table blobs add d mallory.d",
        "alter domain mallory.d add check (mallory.volatile()) not valid",
    ),
    "an operator": ("create index on blobs (blobid) where blobid operator(mallory.===) 'x'", ""),
    "statistics": ("create statistics s on (mallory.spring(blobid)), blobid from blobs", ""),
    "a table of ours": ("alter table ntt_backup.runs owner to {role}", ""),
    "a support function of an operator class": (
        "create function mallory.cmp(text, text) returns int immutable language sql as"
        " 'select 0'; alter function mallory.cmp(text, text) owner to {role};"
        " create operator class mallory.c for type text using btree as"
        " operator 1 <, operator 3 =, operator 5 >, function 1 mallory.cmp(text, text);"
        " create index on blobs (blobid mallory.c)",
        "",
    ),
    "a function of a domain's check": (
        "create domain d as text check (mallory.spring(value)); alter table blobs add d d",
        "",
    ),
    "a domain below a domain, in an array": (
        "create domain mallory.d as text; alter domain mallory.d owner to {role};"
        " create domain d as mallory.d; alter table blobs add d d[]",
        "alter domain mallory.d add check (mallory.volatile()) not valid",
    ),
    "a table that a rule writes to": (
        "create table audit (b text); grant trigger on audit to {role};"
        " create rule r as on insert to blobs do also insert into audit values (new.blobid)",
        "create trigger t before insert on audit for each row execute function mallory.fire()",
    ),
    "a trigger of a table that refers to what is deleted": (
        "create table x (t text, b text, foreign key (t, b) references ntt_backup.failures"
        " on delete cascade); create constraint trigger t after delete on x deferrable initially"
        " deferred for each row execute function mallory.fire()",
        "",
    ),
    "a right to refer to columns of what is deleted": (
        "grant references (target, blobid) on ntt_backup.failures to {role}",
        "",
    ),
    "a partitioned table above": (
        "grant create on schema public to {role}; create table mallory.above (blobid text not null,"
        " remote_copied bool) partition by range (blobid);"
        " alter table blobs drop constraint blobs_pkey;"
        " create table other (like mallory.above); alter table blobs rename to old;"
        " alter table other rename to blobs; alter table mallory.above attach partition blobs"
        " default; alter table mallory.above owner to {role}",
        "create index on mallory.above (blobid) where {x}",
    ),
    "the function of an event trigger": (EVENT, ""),
    "a view in the place of a table": (
        "drop table blobs",
        "create view mallory.blobs as select 'x' as blobid where {x}",
    ),
}


@pytest.fixture
def mallory(database: Connection, role: Callable[[], str]) -> str:
    """A role that may create in the database; its code waits in the schema `mallory`."""
    name = role()
    database.execute(f"grant create on database {database.info.dbname} to {name}".encode())
    play(database, name, "create schema mallory; grant usage on schema mallory to public")
    play(database, name, SPRING.format(schema="mallory", role=name))
    play(
        database,
        name,
        "create function mallory.same(text, text) returns bool immutable language plpgsql as"
        " $$begin return mallory.volatile(); end$$;"
        " create operator mallory.=== (leftarg = text, rightarg = text, function = mallory.same)",
    )
    return name


def play(conn: Connection, name: str, text: str) -> None:
    """Execute statements as the role, in a session of its own."""
    url = make_conninfo(conn.info.dsn, user=name)
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(text.encode())


def is_superuser(conn: Connection, name: str) -> bool:
    return rows(conn, f"select rolsuper from pg_roles where rolname = '{name}'") == [(True,)]


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_schema_that_somebody_else_prepared_is_refused_before_it_is_read(
    database: Connection, postgres: Postgres, mallory: str, prepared: str
) -> None:
    """Also by a script that was printed before."""
    database.execute(LIVE)
    script = make_plan(database, "remote", notify=True).script()
    play(database, mallory, f"create schema ntt_backup; {PREPARED[prepared]}")

    for attempt in (init_db, make_plan):
        with pytest.raises(CatalogRefused, match="ntt_backup") as caught:
            attempt(database, "remote", notify=True)
        assert f"belongs to {mallory}" in caught.value.detail
        assert "drop schema ntt_backup cascade;" in caught.value.hint
    done = postgres.psql(script, database.info.dsn)
    assert done.returncode != 0
    assert f"belongs to {mallory}" in done.stderr
    assert not is_superuser(database, mallory)


def test_an_ordinary_owner_of_the_database_keeps_what_he_made(
    database: Connection, postgres: Postgres, role: Callable[[], str]
) -> None:
    """A superuser prints what another role lacks, and reads nothing of the owner's tables."""
    owner, other = role(), role()
    database.execute(f"alter database {database.info.dbname} owner to {owner}".encode())
    with connect(make_conninfo(database.info.dsn, user=owner), "test") as own:
        init_db(own, "remote", notify=True)
    play(
        database,
        owner,
        SPRING.format(schema="public", role=owner)
        + "create index on ntt_backup.schema_version (version) where public.spring('x')",
    )

    script = make_plan(database, "remote", role=other).script()
    done = postgres.psql(script, database.info.dsn)

    assert done.returncode == 0, done.stderr
    with connect(make_conninfo(database.info.dsn, user=other), "test") as session:
        assert verify_schema(session, "remote") == []
    assert not is_superuser(database, owner)


@pytest.mark.parametrize("way", OWNED)
def test_a_superuser_does_not_use_what_a_role_with_fewer_rights_can_put_code_into(
    database: Connection, mallory: str, way: str
) -> None:
    database.execute(LIVE)
    init_db(database, "remote")
    parts = {"role": mallory, "x": "mallory.spring('x')"}
    before, after = (text.format(**parts).encode() for text in OWNED[way])
    database.execute(before)
    play(database, mallory, after.decode())
    url = database.info.dsn
    if way.startswith("a view"):
        url = make_conninfo(url, options="-c search_path=mallory")

    with (
        pytest.raises(CatalogRefused, match="rights beyond") as caught,
        connect(url, "test") as session,
    ):
        session.execute(
            sql.SQL("select from {}.blobs").format(sql.Identifier(session.schema or ""))
        )

    assert mallory in caught.value.detail or "public" in caught.value.detail
    assert "init-db --role" in caught.value.hint
    assert not is_superuser(database, mallory)


def test_a_superuser_uses_what_superusers_have_made_wherever_that_is(
    database: Connection, mallory: str
) -> None:
    """Whoever owns a schema can drop what is in it, but give it no other code."""
    database.execute(LIVE)
    init_db(database, "remote")
    database.execute(
        b"create function mallory.own(text) returns bool immutable language sql as 'select true';"
        b"create domain mallory.d as text check (mallory.own(value)); alter table blobs add d"
        b" mallory.d; create index on blobs (blobid) where mallory.own(blobid)"
    )
    with connect(database.info.dsn, "test") as session:
        assert verify_schema(session, "remote") == []


def test_init_db_by_a_superuser_fires_no_event_trigger_of_a_role_with_fewer_rights(
    database: Connection, postgres: Postgres, mallory: str
) -> None:
    database.execute(LIVE)
    script = make_plan(database, "remote").script()
    database.execute(EVENT.format(role=mallory).encode())

    with (
        pytest.raises(CatalogRefused) as caught,
        connect(database.info.dsn, "test", no_tables=True) as session,
    ):
        init_db(session, "remote")
    done = postgres.psql(script, database.info.dsn)

    assert f"function mallory.event() belongs to {mallory}" in caught.value.detail
    assert f"function mallory.event() belongs to {mallory}" in done.stderr
    assert not is_superuser(database, mallory)


def test_no_event_trigger_is_fired_for_the_owner_of_the_database_nor_by_a_restore(
    database: Connection, mallory: str
) -> None:
    """Whoever owns a database is trusted with its schemas, and not with a superuser's rights."""
    database.execute(EVENT.format(role=mallory).encode())
    database.execute(f"alter database {database.info.dbname} owner to {mallory}".encode())

    with (
        pytest.raises(CatalogRefused) as planned,
        connect(database.info.dsn, "test", no_tables=True) as session,
    ):
        init_db(session, "remote")
    with (
        pytest.raises(CatalogRefused) as restored,
        restorer(database.info.dsn, "test", allow_superuser=False),
    ):
        pytest.fail("a role was made")

    for caught in (planned, restored):
        assert f"function mallory.event() belongs to {mallory}" in caught.value.detail
    assert not is_superuser(database, mallory)


@pytest.mark.parametrize("granted", ["", "with inherit false, set false", "with admin option"])
def test_a_member_in_name_only_is_not_trusted_as_the_role_itself(
    database: Connection, mallory: str, granted: str
) -> None:
    if granted.startswith("with inherit") and database.info.server_version < 160000:
        pytest.skip("before PostgreSQL 16 all members can become the role")
    database.execute(f"grant postgres to {mallory} {granted}".encode())
    database.execute(LIVE)
    init_db(database, "remote")
    database.execute(f"alter table blobs owner to {mallory}".encode())

    refused = granted.startswith("with inherit")
    expected = pytest.raises(CatalogRefused, match="rights beyond") if refused else nullcontext()
    with expected, connect(database.info.dsn, "test"):
        pass


def test_init_db_by_a_superuser_calls_nothing_that_the_owner_of_blobs_has_there(
    database: Connection, mallory: str
) -> None:
    database.execute(f"grant create on schema public to {mallory}".encode())
    play(
        database,
        mallory,
        f"{LIVE}; create index on blobs (blobid) where mallory.spring('x');"
        " create trigger t after insert or update on blobs execute function mallory.fire();"
        " alter table blobs add check (mallory.volatile()) not valid;"
        " create rule r as on update to blobs do also select mallory.volatile();"
        " insert into blobs values ('ab'), ('cd')",
    )
    said: list[str] = []

    with connect(database.info.dsn, "test", no_tables=True) as session:
        init_db(session, "remote", notify=True, report=said.append)
        make_plan(session, "second", role=mallory)

    assert f"belongs to {mallory}" in said[-1]
    assert not is_superuser(database, mallory)


def test_a_role_that_can_become_a_superuser_is_as_good_as_one(
    database: Connection, mallory: str, role: Callable[[], str]
) -> None:
    """Also where its sessions begin as another role."""
    database.execute(LIVE)
    init_db(database, "remote")
    database.execute(f"alter table blobs owner to {mallory}".encode())
    for mighty in ("member", "postgres", "server programs"):
        name = role() if mighty != "postgres" else mighty
        if mighty == "member":
            database.execute(f"grant postgres to {name}".encode())
        elif mighty == "server programs":
            database.execute(f"grant pg_execute_server_program to {name}".encode())
        url = make_conninfo(database.info.dsn, user=name, options=f"-c role={mallory}")
        if mighty != "postgres":
            url = make_conninfo(database.info.dsn, user=name)
        with pytest.raises(CatalogRefused, match="rights beyond"):
            connect(url, "test")


def test_an_ordinary_role_uses_the_tables_of_others_as_before(
    database: Connection, role: Callable[[], str]
) -> None:
    owner, user = role(), role()
    database.execute(LIVE)
    init_db(database, "remote")
    database.execute(f"alter table blobs owner to {owner}".encode())
    database.execute(f"grant all on blobs to {user}".encode())
    connect(make_conninfo(database.info.dsn, user=user), "test").execute("select from public.blobs")


def test_a_table_that_stands_before_ours_in_the_search_path_is_not_even_planned_on(
    database: Connection, mallory: str, role: Callable[[], str]
) -> None:
    """The first schema of the path has the name of the role, and whoever comes first makes it."""
    user = role()
    database.execute(LIVE)
    init_db(database, "remote")
    database.execute(
        f"grant usage on schema ntt_backup to {user};"
        f" grant select on ntt_backup.schema_version, public.blobs to {user};".encode()
    )
    url = make_conninfo(database.info.dsn, user=user)
    assert connect(url, "test").schema == "public"
    play(
        database,
        mallory,
        f"create schema {user}; grant usage on schema {user} to public;"
        f" create function {user}.see(text) returns boolean immutable language plpgsql as $$begin"
        f" if session_user = '{user}' then raise 'it ran'; end if; return true; end$$;"
        f" create table {user}.blobs (blobid text primary key, remote_copied bool);"
        f" grant all on {user}.blobs to public;"
        f" create index on {user}.blobs (blobid) where {user}.see('x')",
    )

    with pytest.raises(CatalogRefused, match="serves another table") as caught:
        any_copied(connect(url, "test"), "remote")

    assert "search_path" in caught.value.hint
