"""What comes out when the database says no, or nothing: one class, one hint, never a password."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from ntt_backup.catalog.connection import (
    Connection,
    connect,
    end_when_idle,
    for_program,
    translated,
)
from ntt_backup.catalog.ledger import Ledger, requeue
from ntt_backup.catalog.privileges import require_writing
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.stats import exact_totals
from ntt_backup.errors import (
    BackupError,
    CatalogRefused,
    CatalogUnavailable,
    ConfigError,
    SessionExpired,
)
from ntt_backup.model import Blob, Failure, Reason
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import wait_until

SECRET = "hunter2secret"


def end_session(admin: Connection, other: Connection) -> None:
    """The server ends a session, and has freed what the session held."""
    pid = [other.info.backend_pid]
    admin.execute("select pg_terminate_backend(%s)", pid)
    left = "select 1 from pg_stat_activity where pid = %s"
    wait_until(lambda: not admin.execute(left, pid).fetchall(), "the end of the session")


@contextmanager
def server_that_says(message: str) -> Iterator[str]:
    """A server that answers every connection with one fatal error; yields its URL."""
    body = b"SFATAL\0VFATAL\0C28000\0M" + message.encode() + b"\0\0"
    answer = b"E" + (len(body) + 4).to_bytes(4, "big") + body
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(1024)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            port = listener.getsockname()[1]
            yield f"postgresql://me:{SECRET}@127.0.0.1:{port}/copyjob?sslmode=disable"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_session_that_cannot_be_set_up_is_closed(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Connection] = []

    def fail(conn: Connection, *_: object, **__: object) -> None:
        opened.append(conn)
        raise CatalogUnavailable("the catalog is too slow")

    monkeypatch.setattr(Connection, "rows", fail)
    with pytest.raises(CatalogUnavailable):
        connect(database_url, "test")
    assert [conn.closed for conn in opened] == [True]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('password authentication failed for user "me"', CatalogRefused),
        ('no pg_hba.conf entry for host "127.0.0.1", user "me"', CatalogRefused),
        ('role "me" is not permitted to log in', CatalogRefused),
        ("the database system is starting up", CatalogUnavailable),
        ("Passwort-Authentifizierung fehlgeschlagen", CatalogUnavailable),
    ],
)
def test_an_error_at_connecting_is_a_refusal_or_an_outage_by_its_words(
    message: str, expected: type[BackupError]
) -> None:
    with server_that_says(message) as url, pytest.raises(expected) as caught:
        connect(url, "test")

    error = caught.value
    assert type(error) is expected
    assert message in error.detail
    assert "copyjob on 127.0.0.1" in error.message
    assert isinstance(error.__cause__, psycopg.Error)
    assert SECRET not in f"{error.message}{error.detail}{error.hint}{error.__cause__}"
    assert error.hint


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:p@{SECRET}@127.0.0.1/copyjob",
        f"host=127.0.0.1 password={SECRET} unquoted words",
        f"nonsense {SECRET}",
    ],
)
def test_a_malformed_url_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url, "test")

    error = caught.value
    assert "catalog.url" in error.message
    assert "%40" in error.hint
    assert SECRET not in f"{error}{error.hint}{error.__cause__}"


def test_an_unknown_database_or_role_is_refused(postgres: Postgres) -> None:
    with pytest.raises(CatalogRefused, match='database "nowhere" does not exist') as caught:
        connect(postgres.url("nowhere"), "test")
    assert "createdb" in caught.value.hint

    with pytest.raises(CatalogRefused, match='role "nobody" does not exist') as caught:
        connect(postgres.url("postgres", user="nobody"), "test")
    assert "pg_hba.conf" in caught.value.hint


def test_what_the_url_sets_is_left_alone(database_url: str) -> None:
    url = make_conninfo(database_url, connect_timeout=3, application_name="mine")

    with connect(url, "ntt-backup test") as conn:
        given = conn.info.get_parameters()
        shown = conn.execute("show application_name").fetchone()

    assert given["connect_timeout"] == "3"
    assert given["keepalives_idle"] == "10"
    assert shown == ("ntt-backup test",)


def test_a_session_that_the_server_ended_for_its_silence_has_expired(
    database: Connection, database_url: str
) -> None:
    """Whoever was stopped for a while can open a new one at once: the catalog was there."""
    with connect(database_url, "test") as conn:
        if conn.info.server_version < 140_000:
            pytest.skip("this server ends no idle sessions")
        end_when_idle(conn, 1)
        pid = conn.info.backend_pid
        wait_until(lambda: not _lives(database, pid), "the end of the session")
        with pytest.raises(SessionExpired) as caught, translated("record a batch"):
            conn.execute("select 1")
    assert "idle" in caught.value.detail
    with connect(database_url, "test") as conn:
        end_session(database, conn)
        with pytest.raises(CatalogUnavailable) as ended, translated("record a batch"):
            conn.execute("select 1")
    assert type(ended.value) is CatalogUnavailable


def _lives(database: Connection, pid: int) -> bool:
    return bool(database.execute("select from pg_stat_activity where pid = %s", [pid]).fetchall())


@pytest.fixture
def hurried(database: Connection, role: Callable[[], str]) -> str:
    """A role whose sessions are given little time, as an administrator may want it for people."""
    name = role()
    known = database.execute(
        "select name from pg_settings where name = any(%s)",
        [["statement_timeout", "lock_timeout", "idle_session_timeout", "transaction_timeout"]],
    )
    for (limit,) in known.fetchall():
        statement = sql.SQL("alter role {} set {} = '5s'")
        database.execute(statement.format(sql.Identifier(name), sql.Identifier(limit)))
    return name


LIMITS = (
    "select name, setting || coalesce(unit, '') from pg_settings where name in"
    " ('statement_timeout', 'lock_timeout', 'idle_session_timeout', 'transaction_timeout')"
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ("0ms", "30000ms")),
        ("-c statement_timeout=7s -c lock_timeout=8s", ("7000ms", "8000ms")),
    ],
)
def test_limits_of_the_role_do_not_end_our_work_and_those_of_the_url_hold(
    database_url: str, hurried: str, options: str, expected: tuple[str, str]
) -> None:
    with connect(make_conninfo(database_url, user=hurried, options=options), "test") as conn:
        limits: dict[str, str] = dict(conn.execute(LIMITS).fetchall())

    assert (limits.pop("statement_timeout"), limits.pop("lock_timeout")) == expected
    assert set(limits.values()) <= {"0ms"}  # Not every version has them.


def test_both_ends_notice_a_dead_peer(tcp_url: str) -> None:
    with connect(tcp_url, "test") as conn:
        ours = conn.info.get_parameters()
        theirs: dict[str, str] = dict(
            conn.execute(
                "select name, setting from pg_settings"
                " where name like 'tcp%' or name = 'client_connection_check_interval'"
            ).fetchall()
        )

    assert int(theirs["tcp_keepalives_idle"]) == int(ours["keepalives_idle"]) == 10
    assert int(theirs["tcp_keepalives_interval"]) == int(ours["keepalives_interval"]) == 5
    assert int(theirs["tcp_keepalives_count"]) == int(ours["keepalives_count"]) == 4
    assert int(theirs["tcp_user_timeout"]) == int(ours["tcp_user_timeout"]) == 30_000
    # From PostgreSQL 14 on.
    assert int(theirs.get("client_connection_check_interval", 10_000)) == 10_000


def test_a_server_that_stands_still_is_left_and_a_slow_one_is_waited_for(
    database_url: str, postgres: Postgres
) -> None:
    """The kernel of its host, or a proxy before it, keeps the connection alive for ever."""
    limits = {"tcp_user_timeout": 300, "connect_timeout": 2}
    with connect(make_conninfo(database_url, **limits), "test") as conn:
        with translated("sleep"):
            conn.execute("select pg_sleep(0.7)")  # It answers others meanwhile.
        with postgres.frozen(), pytest.raises(CatalogUnavailable) as caught:
            conn.ask("list packs", "next_packs", target="remote", past="", limit=1)
    assert caught.value.detail == (
        "the server does not answer a statement, nor does one answer a new session"
    )
    assert conn.closed


def test_no_statements_but_those_of_marks_and_claims_are_prepared(catalog: Connection) -> None:
    claims, ledger = Claims(catalog, "remote", range(256)), Ledger(catalog, "remote")

    for _ in range(10):
        claims.any_pending()
        ledger.record([Blob("ab")], [Failure("cd", Reason.MISSING)])

    prepared = catalog.execute("select statement from pg_prepared_statements").fetchall()
    assert {text.split()[2] for (text,) in prepared} == {"mark_copied", "free_slices"}


def test_a_lost_connection_is_an_outage_for_every_call(
    catalog: Connection, catalog_url: str
) -> None:
    with connect(catalog_url, "victim") as conn:
        claims = Claims(conn, "remote", range(256))
        ledger = Ledger(conn, "remote")
        claims.listen()
        end_session(catalog, conn)

        def drain() -> None:  # the server's farewell is read first, then the end, which may be late
            wait_until(lambda: bool(claims.drain_notifications()), "the end of the session")

        for call in (
            drain,
            claims.fileno,
            claims.any_pending,
            lambda: claims.take(10),
            lambda: ledger.record([Blob("ab")], []),
            lambda: exact_totals(conn, "remote"),
        ):
            with pytest.raises(CatalogUnavailable):
                call()


def test_a_lock_that_others_hold_is_an_outage(catalog: Connection, catalog_url: str) -> None:
    catalog.execute("insert into blobs (blobid) values ('ab')")
    with connect(catalog_url, "test") as conn:
        conn.execute("set lock_timeout = 50")
        ledger = Ledger(conn, "remote")
        with catalog.transaction():
            catalog.execute("select from blobs for update")

            with pytest.raises(CatalogUnavailable, match="lock timeout") as caught:
                ledger.record([Blob("ab")], [])

        assert "pg_blocking_pids" in caught.value.hint
        ledger.record([Blob("ab")], [])


def test_a_target_or_database_that_was_never_prepared_is_refused(
    catalog: Connection, database: Connection
) -> None:
    with pytest.raises(CatalogRefused, match="other_copied") as no_target:
        Claims(catalog, "other", range(256)).take(1)
    with pytest.raises(CatalogRefused, match="does not exist") as no_table:
        requeue(database, "remote")

    assert "init-db" in no_target.value.hint
    assert "init-db" in no_table.value.hint


def test_the_driver_does_not_write_over_the_screen() -> None:
    """It logs what it then raises anyway; unhandled, Python prints that to stderr."""
    program = (
        "import logging, ntt_backup.catalog.connection\n"
        "logging.getLogger('psycopg.transaction').warning('error ignored in rollback')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=True)
    assert done.stderr == b""


_SECRETS = [one.keyword.decode() for one in Conninfo.get_defaults() if one.dispchar]


@pytest.mark.parametrize("name", [one for one in _SECRETS if one != "password"])
def test_a_program_is_given_no_secret_of_libpq_as_an_argument(name: str) -> None:
    """Those that libpq marks as secrets, or for debugging only, as it does with keys."""
    with pytest.raises(ConfigError, match=f"has {name}, which pg_dump cannot be told secretly"):
        for_program(make_conninfo("host=db", **{name: SECRET}), "test")


def test_a_program_is_given_the_password_by_its_environment() -> None:
    place, environment = for_program(f"host=db user=me password={SECRET} sslmode=require", "test")

    assert SECRET not in place
    assert conninfo_to_dict(place)["sslmode"] == "require"
    assert environment == {"PGPASSWORD": SECRET}


@pytest.mark.parametrize(
    ("standby", "source", "hint"),
    [
        (True, "user", "it is a standby: point catalog.url (NTT_DB_URL) at the primary"),
        (False, "configuration file", "see the server's configuration"),
        (False, "user", 'as a superuser: alter role "me" '),
        (False, "database", 'as a superuser: alter database "db" '),
        (False, "database user", 'as a superuser: alter role "me" in database "db" '),
    ],
)
def test_who_has_made_transactions_read_only_can_undo_it(
    standby: bool, source: str, hint: str
) -> None:
    rows = [(True, standby, source, "db", "me")]
    conn: Any = SimpleNamespace(
        info=SimpleNamespace(user="me"),
        rows=lambda _: rows,
    )
    with pytest.raises(CatalogUnavailable, match="read-only") as caught:
        require_writing(conn)
    assert hint in caught.value.hint
    rows[:] = [(False, standby, source, "db", "me")]
    require_writing(conn)
