"""The role that restores a dump can do nothing beyond the new database, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog.connection import connect, refuse_code_of_others
from ntt_backup.catalog.restore_role import logged_in, restorer
from ntt_backup.catalog.schema import init_db
from ntt_backup.errors import CatalogRefused, CatalogUnavailable, DumpFailed

ROLES = "select rolname from pg_roles order by 1"
OWNERS = """
    select datdba::regrole::text, (select nspowner::regrole::text from pg_namespace
    where nspname = 'public') from pg_database where datname = current_database()
"""


def play(url: str, *statements: str) -> None:
    """Executes statements; {db} stands for the name of the database."""
    with psycopg.connect(url, autocommit=True) as conn:
        for one in statements:
            conn.execute(one.replace("{db}", conn.info.dbname).encode())


def ask(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(query.encode()).fetchall()


@pytest.fixture
def state(database_url: str) -> Iterator[None]:
    """Afterwards the server has no new role, and the database its owners. Roles of former restores
    may have gone.
    """
    roles, owners = ask(database_url, ROLES), ask(database_url, OWNERS)
    yield
    assert {*ask(database_url, ROLES)} <= {*roles}
    assert ask(database_url, OWNERS) == owners


@pytest.mark.parametrize(
    "evil",
    [
        "set role postgres",
        "set session authorization postgres",
        "copy (select 1) to program 'true'",
        "copy (select 1) to '/dev/shm/x'",
        "select pg_read_file('/etc/passwd')",
        "create role another superuser",
        "alter role postgres set work_mem = '1MB'",
        "alter system set work_mem = '1MB'",
        "create database another",
        "alter database postgres set work_mem = '1MB'",
        "do $$begin execute format('alter database %I set a.b = c', current_database()); end$$",
        "grant pg_execute_server_program to current_user",
        "alter role current_user superuser",
        "create event trigger e on ddl_command_start execute function f()",
    ],
)
def test_what_restores_can_do_nothing_else(database_url: str, state: None, evil: str) -> None:
    with (
        restorer(database_url, "test", allow_superuser=False) as who,
        psycopg.connect(who.url, autocommit=True) as conn,
    ):
        conn.execute("create function f() returns event_trigger language plpgsql as 'begin end'")
        for back in ("reset role", "reset session authorization", "set role none"):
            conn.execute(back.encode())
        with pytest.raises(psycopg.Error):
            conn.execute(evil.encode())


@pytest.mark.parametrize("setting", ["role", "session_authorization"])
@pytest.mark.parametrize("by", ["the url", "the owner of the database"])
def test_a_superuser_whose_sessions_begin_as_another_role_is_still_one(
    database_url: str, role: Callable[[], str], by: str, setting: str
) -> None:
    """Code in a dump is back at whoever logged in by SET ROLE NONE."""
    lesser, url = role(), database_url
    if by == "the url":
        url = make_conninfo(url, options=f"-c {setting}={lesser}")
    else:
        play(url, f"alter database {{db}} owner to {lesser}")
        play(make_conninfo(url, user=lesser), f"alter database {{db}} set {setting} = {lesser}")
    try:
        with (
            restorer(url, "test", allow_superuser=False) as who,
            psycopg.connect(who.url, autocommit=True) as conn,
        ):
            conn.execute("set session authorization default")
            conn.execute("set role none")
            shown = conn.execute("show is_superuser").fetchone()
    except DumpFailed as error:
        assert lesser in str(error) + error.detail  # noqa: PT017 - or a lesser role was made
        assert "--allow-superuser" in error.hint  # noqa: PT017
    else:
        assert shown == ("off",)


@pytest.mark.parametrize("granted", ["pg_read_all_data", "pg_write_all_data", "pg_monitor"])
def test_a_role_that_may_read_or_write_beyond_the_database_is_no_ordinary_one(
    database_url: str, role: Callable[[], str], granted: str
) -> None:
    """Each reaches what no owner can: the passwords of all roles, the statements of others."""
    user = role()
    play(database_url, f"alter database {{db}} owner to {user}", f"grant {granted} to {user}")
    url = make_conninfo(database_url, user=user)
    with (
        pytest.raises(DumpFailed, match="more than a restore needs") as caught,
        restorer(url, "test", allow_superuser=False),
    ):
        raise AssertionError
    assert f"{user} is, or may become, {granted}" in caught.value.detail


def test_all_that_was_made_belongs_to_that_role_which_cannot_log_in(
    database_url: str, role: Callable[[], str]
) -> None:
    with restorer(database_url, "test", allow_superuser=False) as who:
        play(
            who.url,
            "create schema s",
            "create table s.t (a int)",
            "create table public.t (a int)",
            "select lo_create(4711)",
            "comment on schema public is 'ours'",
            "alter default privileges grant select on tables to public",
            "alter role current_user set search_path = s",
        )
        play(database_url, f"grant {who.owner} to {(thief := role())}")
        # It still has a transaction, and locks.
        left = psycopg.connect(who.url)
        left.execute("lock table s.t")
        who.done = True
    of_role = f" from pg_roles where rolname = '{who.owner}'"
    in_database = "has_database_privilege(oid, current_database(), 'create')"
    for query, told in (
        ("select distinct tableowner::text from pg_tables where tablename = 't'", [(who.owner,)]),
        ("select lomowner::regrole::text from pg_largeobject_metadata", [(who.owner,)]),
        (OWNERS, [("postgres", "pg_database_owner")]),
        (f"select rolcanlogin, rolsuper, {in_database}{of_role}", [(False, False, False)]),
        (f"select setconfig from pg_db_role_setting where setrole = (select oid{of_role})", []),
        (f"select pg_has_role('{thief}', '{who.owner}', 'member')", [(False,)]),
    ):
        assert ask(database_url, query) == told, query
    with pytest.raises(CatalogRefused):
        connect(who.url, "test")
    with pytest.raises(psycopg.Error):
        left.execute("select 1")


def test_code_that_was_restored_never_runs_as_a_superuser(
    database_url: str, role: Callable[[], str]
) -> None:
    """A reader logs in as the owner; a member of that role works with the tables as its own."""
    member = role()
    with restorer(database_url, "test", allow_superuser=False) as who:
        play(
            who.url,
            "create function public.who() returns name language sql as 'select session_user'",
            "create table public.blobs (blobid text primary key, t name default who())",
            "insert into public.blobs values ('ab')",
            "create schema ntt_backup",
        )
        who.done = True
    with pytest.raises(CatalogRefused, match="rights beyond") as caught:
        connect(database_url, "test")
    assert f"public.blobs belongs to {who.owner}" in caught.value.detail
    planning = connect(database_url, "test", no_tables=True)
    with pytest.raises(CatalogRefused, match="rights beyond"):
        refuse_code_of_others(planning)
    assert planning.closed
    with logged_in(database_url, "test", who.owner) as url, connect(url, "test") as conn:
        assert conn.execute("select session_user::text, t from public.blobs").fetchall() == [
            (who.owner, who.owner)
        ]
    with pytest.raises(CatalogRefused):
        connect(url, "test")
    play(database_url, f"grant {who.owner} to {member}")
    with connect(make_conninfo(database_url, user=member), "test") as conn:
        init_db(conn, "remote")


def test_roles_of_former_restores_are_dropped_once_they_own_nothing(
    database_url: str, role: Callable[[], str]
) -> None:
    owners, member = [], role()
    for number in range(3):
        with restorer(database_url, "test", allow_superuser=False) as who:
            play(who.url, f"create table t{number} (a int)")
            who.done = True
        owners.append(who.owner)
        then = [f"drop owned by {who.owner}", f"grant {who.owner} to {member}"]
        play(database_url, *([then[:1], then, []][number]))
    left = {name for (name,) in ask(database_url, ROLES)}
    assert left & {*owners} == {*owners[1:]}


@pytest.mark.parametrize("error", [DumpFailed("no", detail="the reason"), KeyboardInterrupt()])
def test_what_went_wrong_first_is_said_also_where_the_role_cannot_be_dropped(
    database_url: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = CatalogUnavailable("away", detail="the server is gone")

    def gone(*args: object, **options: object) -> object:
        raise away

    def fail() -> None:
        with restorer(database_url, "test", allow_superuser=False) as who:
            owners.append(who.owner)
            monkeypatch.setattr("ntt_backup.catalog.restore_role.connect", gone)
            raise error

    owners: list[str] = []
    with pytest.raises(type(error)) as caught:
        fail()
    if isinstance(caught.value, DumpFailed):
        detail = f"the reason; the role {owners[0]} is left: the server is gone"
        assert caught.value.detail == detail


def test_a_role_that_cannot_log_in_is_dropped_and_said(
    database_url: str, state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = CatalogRefused("no", detail="no pg_hba.conf entry")

    def refuse(url: str, application: str, **options: Any) -> object:
        if "ntt_restore_" in url:
            raise refused
        return connect(url, application, **options)

    monkeypatch.setattr("ntt_backup.catalog.restore_role.connect", refuse)
    with (
        pytest.raises(DumpFailed, match="no lesser role can log in") as caught,
        restorer(database_url, "test", allow_superuser=False),
    ):
        raise AssertionError
    assert "no pg_hba.conf entry" in caught.value.detail
    assert "--allow-superuser" in caught.value.hint


def test_a_role_that_may_become_a_mighty_one_restores_only_where_that_is_allowed(
    database_url: str, role: Callable[[], str]
) -> None:
    mighty, ordinary = role(), role()
    play(database_url, f"grant pg_execute_server_program to {mighty}")
    roles = ask(database_url, ROLES)
    url = make_conninfo(database_url, user=mighty)
    with (
        pytest.raises(DumpFailed, match="may do more than a restore needs") as caught,
        restorer(url, "test", allow_superuser=False),
    ):
        raise AssertionError
    assert "pg_execute_server_program" in caught.value.detail
    lesser = make_conninfo(database_url, user=ordinary)
    for given, user, allowed in (
        (url, mighty, True),
        (lesser, ordinary, False),
        (database_url, "postgres", True),
    ):
        with restorer(given, "test", allow_superuser=allowed) as who:
            assert (who.url, who.owner) == (given, user)
            assert ask(database_url, ROLES) == roles


def test_a_role_is_made_and_dropped_beside_tables_that_others_own(
    database_url: str, role: Callable[[], str]
) -> None:
    play(
        database_url,
        "create table public.blobs (blobid text primary key)",
        f"alter table public.blobs owner to {role()}",
    )
    with restorer(database_url, "test", allow_superuser=False) as who:
        assert ask(who.url, "select session_user") == [(who.owner,)]
    assert (who.owner,) not in ask(database_url, ROLES)


def test_a_dump_without_the_schema_public_leaves_no_role_behind(
    database_url: str, role: Callable[[], str]
) -> None:
    with restorer(database_url, "test", allow_superuser=False) as who:
        play(who.url, "drop schema public cascade", "create schema s")
        who.done = True
    may = f"select rolcanlogin from pg_roles where rolname = '{who.owner}'"
    assert ask(database_url, may) == [(False,)]


def test_a_role_that_no_socket_lets_in_logs_in_by_tcp(
    database_url: str, state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str, application: str, **options: Any) -> Any:
        given = conninfo_to_dict(url)
        if "ntt_restore_" not in str(given["user"]):
            return connect(url, application, **options)
        if given["host"] == "127.0.0.1":
            return nullcontext()
        raise CatalogRefused("no", detail="peer authentication failed")

    with psycopg.connect(database_url) as conn:
        if not conn.info.host.startswith("/"):
            pytest.skip("the server of the tests has no socket")
        port, name = conn.info.port, conn.info.dbname
    monkeypatch.setattr("ntt_backup.catalog.restore_role.connect", refuse)
    with restorer(database_url, "test", allow_superuser=False) as who:
        given = conninfo_to_dict(who.url)
        assert (given["host"], given["port"]) == ("127.0.0.1", str(port))
        assert (given["user"], given["dbname"]) == (who.owner, name)
        assert given["password"]
