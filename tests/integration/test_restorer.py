"""The role that restores a dump can do nothing beyond the new database, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog.connection import connect, refuse_code_of_others
from ntt_backup.catalog.restorer import logged_in, restorer
from ntt_backup.catalog.schema import init_db
from ntt_backup.errors import CatalogRefused, CatalogUnavailable, DumpFailed

ROLES = "select rolname from pg_roles order by 1"
OWNERS = """
    select datdba::regrole::text, (select nspowner::regrole::text from pg_namespace
    where nspname = 'public') from pg_database where datname = current_database()
"""


@pytest.fixture
def state(database_url: str) -> Iterator[None]:
    """Afterwards the server has no new role, and the database its owners. Roles of former restores
    may have gone.
    """

    def look() -> tuple[set[object], object]:
        with psycopg.connect(database_url) as conn:
            return {*conn.execute(ROLES)}, conn.execute(OWNERS).fetchall()

    roles, owners = look()
    yield
    after, still = look()
    assert after <= roles
    assert still == owners


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
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(f"alter database {conn.info.dbname} owner to {lesser}".encode())
        with psycopg.connect(make_conninfo(url, user=lesser), autocommit=True) as conn:
            set_role = f"alter database {conn.info.dbname} set {setting} = {lesser}"
            conn.execute(set_role.encode())
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
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"alter database {conn.info.dbname} owner to {user}".encode())
        conn.execute(f"grant {granted} to {user}".encode())
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
        with psycopg.connect(who.url, autocommit=True) as conn:
            conn.execute("create schema s")
            conn.execute("create table s.t (a int)")
            conn.execute("create table public.t (a int)")
            conn.execute("select lo_create(4711)")
            conn.execute("comment on schema public is 'ours'")
            conn.execute("alter default privileges grant select on tables to public")
            conn.execute("alter role current_user set search_path = s")
        with psycopg.connect(database_url, autocommit=True) as conn:
            conn.execute(f"grant {who.owner} to {(thief := role())}".encode())
        # It still has a transaction, and locks.
        left = psycopg.connect(who.url)
        left.execute("lock table s.t")
        who.done = True
    with psycopg.connect(database_url, autocommit=True) as conn:
        owners = "select distinct tableowner::text from pg_tables where tablename = 't'"
        assert conn.execute(owners.encode()).fetchall() == [(who.owner,)]
        of_object = b"select lomowner::regrole::text from pg_largeobject_metadata"
        assert conn.execute(of_object).fetchall() == [(who.owner,)]
        assert conn.execute(OWNERS).fetchall() == [("postgres", "pg_database_owner")]
        may = "select rolcanlogin, rolsuper,"
        may += " has_database_privilege(oid, current_database(), 'create') from pg_roles"
        may += f" where rolname = '{who.owner}'"
        assert conn.execute(may.encode()).fetchall() == [(False, False, False)]
        settings = "select setconfig from pg_db_role_setting join pg_roles r on r.oid = setrole"
        settings += f" where rolname = '{who.owner}'"
        assert conn.execute(settings.encode()).fetchall() == []
        member = f"select pg_has_role('{thief}', '{who.owner}', 'member')"
        assert conn.execute(member.encode()).fetchall() == [(False,)]
        with pytest.raises(CatalogRefused):
            connect(who.url, "test")
    with pytest.raises(psycopg.Error):
        left.execute("select 1")


def test_code_that_was_restored_never_runs_as_a_superuser(
    database_url: str, role: Callable[[], str]
) -> None:
    """A reader logs in as the owner; a member of that role works with the tables as its own."""
    member = role()
    with (
        restorer(database_url, "test", allow_superuser=False) as who,
        psycopg.connect(who.url, autocommit=True) as conn,
    ):
        conn.execute(
            "create function public.who() returns name language sql as 'select session_user'"
        )
        conn.execute("create table public.blobs (blobid text primary key, t name default who())")
        conn.execute("insert into public.blobs values ('ab')")
        conn.execute("create schema ntt_backup")
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
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"grant {who.owner} to {member}".encode())
    with connect(make_conninfo(database_url, user=member), "test") as conn:
        init_db(conn, "remote")


def test_roles_of_former_restores_are_dropped_once_they_own_nothing(
    database_url: str, role: Callable[[], str]
) -> None:
    owners, member = [], role()
    for number in range(3):
        with (
            restorer(database_url, "test", allow_superuser=False) as who,
            psycopg.connect(who.url, autocommit=True) as conn,
        ):
            conn.execute(f"create table t{number} (a int)".encode())
            who.done = True
        owners.append(who.owner)
        with psycopg.connect(database_url, autocommit=True) as conn:
            if number == 0:
                conn.execute(f"drop owned by {who.owner}".encode())
            if number == 1:
                conn.execute(f"drop owned by {who.owner}".encode())
                conn.execute(f"grant {who.owner} to {member}".encode())
    with psycopg.connect(database_url) as conn:
        left = {name for (name,) in conn.execute(ROLES)}
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
            monkeypatch.setattr("ntt_backup.catalog.restorer.connect", gone)
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

    def refuse(url: str, application: str, **options: bool) -> object:
        if "ntt_restore_" in url:
            raise refused
        return connect(url, application, **options)

    monkeypatch.setattr("ntt_backup.catalog.restorer.connect", refuse)
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
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"grant pg_execute_server_program to {mighty}".encode())
        roles = {*conn.execute(ROLES)}
    url = make_conninfo(database_url, user=mighty)
    with (
        pytest.raises(DumpFailed, match="may do more than a restore needs") as caught,
        restorer(url, "test", allow_superuser=False),
    ):
        raise AssertionError
    assert "pg_execute_server_program" in caught.value.detail
    lesser = make_conninfo(database_url, user=ordinary)
    for given, user, allowed in ((url, mighty, True), (lesser, ordinary, False)):
        with (
            restorer(given, "test", allow_superuser=allowed) as who,
            psycopg.connect(database_url) as conn,
        ):
            assert (who.url, who.owner) == (given, user)
            assert {*conn.execute(ROLES)} == roles


def test_a_role_is_made_and_dropped_beside_tables_that_others_own(
    database_url: str, role: Callable[[], str]
) -> None:
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("create table public.blobs (blobid text primary key)")
        conn.execute(f"alter table public.blobs owner to {role()}".encode())
    with (
        restorer(database_url, "test", allow_superuser=False) as who,
        psycopg.connect(who.url) as conn,
    ):
        assert conn.execute("select session_user").fetchall() == [(who.owner,)]
    with psycopg.connect(database_url) as conn:
        assert (who.owner,) not in {*conn.execute(ROLES)}


def test_a_dump_without_the_schema_public_leaves_no_role_behind(
    database_url: str, role: Callable[[], str]
) -> None:
    with restorer(database_url, "test", allow_superuser=False) as who:
        with psycopg.connect(who.url, autocommit=True) as conn:
            conn.execute("drop schema public cascade")
            conn.execute("create schema s")
        who.done = True
    with psycopg.connect(database_url) as conn:
        may = f"select rolcanlogin from pg_roles where rolname = '{who.owner}'"
        assert conn.execute(may.encode()).fetchall() == [(False,)]


def test_a_role_that_no_socket_lets_in_logs_in_by_tcp(
    database_url: str, state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str, application: str, **options: bool) -> Any:
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
    monkeypatch.setattr("ntt_backup.catalog.restorer.connect", refuse)
    with restorer(database_url, "test", allow_superuser=False) as who:
        given = conninfo_to_dict(who.url)
        assert (given["host"], given["port"]) == ("127.0.0.1", str(port))
        assert (given["user"], given["dbname"]) == (who.owner, name)
        assert given["password"]
