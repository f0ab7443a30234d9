"""The queries as text: named, described, complete, used. No database is asked."""

from __future__ import annotations

import pwd
import re
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from ntt_backup.catalog import connection
from ntt_backup.catalog.history import Run
from ntt_backup.catalog.latest_server import LatestServer
from ntt_backup.catalog.pending import columns, form_of, index_names
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.catalog.statements import fragment, load_all, shown, statement
from ntt_backup.errors import (
    CatalogError,
    CatalogRefused,
    CatalogUnavailable,
    ConfigError,
    SessionExpired,
)

PACKAGE = Path(__file__).parents[2] / "ntt_backup" / "catalog"
PYTHON = "\n".join(file.read_text() for file in PACKAGE.glob("*.py"))
_MANY = {
    "begin_session",
    "mend_partitioned_index",
    "grant_reading",
    "grant_reading_later",
    "create_own_tables",
    "mend_large_objects",
    "create_notify",
    "create_restorer",
    "disable_login",
    "guard",
}
DESCRIBED = [
    described
    for file in (PACKAGE / "sql").glob("*.sql")
    for described in re.findall(r"^-- name: *(\S+)\n((?:--.*\n)*)", file.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(("name", "description"), DESCRIBED, ids=lambda one: one.split("\n")[0])
def test_every_query_is_described_and_used(name: str, description: str) -> None:
    assert len(description) > 15
    assert description.endswith(".\n")
    text = load_all()[name]
    assert text
    assert ";" not in text or name in _MANY
    assert re.search(rf"[\"']{name}[\"']", PYTHON), "nobody uses it"


def test_every_query_has_a_name_of_its_own() -> None:
    assert sorted(name for name, _ in DESCRIBED) == sorted(load_all())


def test_no_sql_outside_the_files() -> None:
    found = re.findall(r'(?:execute|copy)\(\s*(?:f?"|sql\.SQL)', PYTHON)

    assert found == []


def test_no_query_leaves_it_to_a_search_path_which_table_blobs_is() -> None:
    bare = re.compile(r"\b(from|join|update|into|table|only) blobs\b|'blobs'::regclass")
    texts = {name: re.sub("--.*", "", text) for name, text in load_all().items()}

    assert [name for name, text in texts.items() if bare.search(text) and "mend_" not in name] == []


def test_a_statement_says_its_name_and_quotes_identifiers() -> None:
    parts = {name: sql.Identifier('odd"name') for name in columns("remote")}

    text = statement("mark_failed", counted=fragment("counted"), **parts).as_string(None)

    assert text.startswith("/* ntt_backup mark_failed */ with failing as")
    assert '"odd""name" = true' in text


def test_a_catalog_is_named_without_its_password() -> None:
    for url, name, described in (
        ("postgresql://ntt:secret@db:5433/copyjob", "copyjob", "copyjob on db"),
        ("hostaddr=::1 dbname=c", "c", "c on ::1"),
        ("service=backup", "", "the default database on backup"),
        ("", "", "the default database on local socket"),
    ):
        assert (connection.database_name(url), connection.describe(url)) == (name, described)


def test_of_many_lines_the_first_are_shown() -> None:
    lines = [f"line {n}" for n in range(connection._SHOWN + 2)]
    assert connection.shortened(lines[:2]) == "line 0, line 1"
    assert "more" not in connection.shortened(lines[:-2])
    assert connection.shortened(lines) == f"{', '.join(lines[:-2])} and 2 more"


LOST = psycopg.OperationalError
CHECK_USER = "check user, password and host in catalog.url"


@pytest.mark.parametrize(
    ("error", "expected", "hint"),
    [
        (psycopg.errors.InsufficientPrivilege("no"), CatalogRefused, "init-db --print-sql"),
        (
            psycopg.errors.InsufficientPrivilege("must be owner of table blobs"),
            CatalogRefused,
            "run it as the owner",
        ),
        (
            psycopg.errors.InsufficientPrivilege("new row violates row-level security policy"),
            CatalogRefused,
            "the triggers and policies of blobs",
        ),
        (psycopg.errors.NotNullViolation("no"), CatalogRefused, "needs a default value"),
        (psycopg.errors.UndefinedTable("no"), CatalogRefused, "run `ntt-backup-remote init-db`"),
        (psycopg.errors.DivisionByZero("no"), CatalogRefused, ""),
        (psycopg.errors.NumericValueOutOfRange("no"), CatalogRefused, ""),
        (psycopg.errors.DataCorrupted("no"), CatalogRefused, ""),
        (psycopg.errors.DeadlockDetected("no"), CatalogUnavailable, "write the same rows all"),
        (psycopg.errors.DiskFull("no"), CatalogUnavailable, "free space on the database server"),
        (psycopg.errors.IoError("no"), CatalogUnavailable, "check that PostgreSQL runs"),
        (psycopg.errors.TooManyConnections("no"), CatalogUnavailable, "run fewer workers"),
        (psycopg.errors.QueryCanceled("no"), CatalogUnavailable, "a statement_timeout"),
        (psycopg.errors.ReadOnlySqlTransaction("no"), CatalogUnavailable, "is a standby"),
        (LOST("session is read-only"), CatalogUnavailable, "promote a standby"),
        (psycopg.errors.IdleSessionTimeout("no"), SessionExpired, "check that PostgreSQL runs"),
        (
            psycopg.errors.IdleInTransactionSessionTimeout("no"),
            SessionExpired,
            "check that PostgreSQL runs",
        ),
        (psycopg.InterfaceError("closed"), CatalogUnavailable, "check that PostgreSQL runs"),
        (LOST("connection is bad: refused"), CatalogUnavailable, "check that PostgreSQL runs"),
        (LOST('database "c" does not exist'), CatalogRefused, "createdb"),
        (LOST('permission denied for database "c"'), CatalogRefused, CHECK_USER),
        (LOST('role "me" does not exist'), CatalogRefused, CHECK_USER),
        (LOST('role "root" does not exist'), CatalogRefused, "runuser -u ntt-backup --"),
        (psycopg.DataError("odd"), CatalogRefused, CHECK_USER),
    ],
    ids=str,
)
def test_an_error_of_the_server_is_told_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch,
    error: psycopg.Error,
    expected: type[CatalogError],
    hint: str,
) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda name: name)
    with pytest.raises(CatalogError) as caught, connection.translated("count"):
        raise error
    assert type(caught.value) is expected
    assert hint in caught.value.hint
    assert bool(hint) == bool(caught.value.hint)
    assert caught.value.detail == str(error).removeprefix("connection is bad: ")


def _tried(*errors: str) -> psycopg.OperationalError:
    """What psycopg says where each host of a connection string failed by an error."""
    lines = (
        f"- host: '{error.partition(' ')[0]}', port: '5432', hostaddr: '10.0.0.1': connection"
        f' failed: connection to server at "10.0.0.1", port 5432 failed: {error.partition(" ")[2]}'
        for error in errors
    )
    return LOST("\n".join(["the last", "Multiple connection attempts failed. ...:", *lines]))


def test_of_several_hosts_each_is_told_and_a_fenced_one_refuses_nobody() -> None:
    fenced = "db1 FATAL:  pg_hba.conf rejects connection for host"
    with pytest.raises(CatalogUnavailable) as caught, connection.translated("count"):
        raise _tried(fenced, "db2 session is read-only", "db3 connection refused\n\tIs it there?")
    assert caught.value.detail == (
        "db1:5432: FATAL: pg_hba.conf rejects connection for host; db2:5432: session is read-only;"
        " db3:5432: connection refused Is it there?"
    )
    assert "promote a standby" in caught.value.hint
    with pytest.raises(CatalogRefused), connection.translated("count"):
        raise _tried(fenced, fenced.replace("db1", "db2"))
    # One host with two addresses, as localhost often is, is one host.
    with pytest.raises(CatalogRefused), connection.translated("count"):
        raise _tried("db1 connection refused", fenced)


def test_an_old_primary_is_refused_until_the_run_starts_anew() -> None:
    latest = LatestServer()
    moves = [latest.note("77", timeline) for timeline in (0, 3, 3, 4)]
    assert moves == [None, None, None, (3, True)]
    latest.require("77", 4)
    latest.require("", 0)
    latest.require("78", 1)
    for refuse in (latest.note, latest.require):
        with pytest.raises(CatalogUnavailable, match="an old primary") as caught:
            refuse("77", 3)
    assert "on timeline 3, and the run has used timeline 4" in caught.value.detail
    assert latest.note("78", 4) == (4, False)
    latest.begin()
    assert latest.note("77", 3) is None


def test_root_is_told_of_the_services_user_only_where_there_is_one() -> None:
    with pytest.raises(CatalogRefused) as caught, connection.translated("count"):
        raise LOST('role "root" does not exist')
    assert CHECK_USER in caught.value.hint


class Session:
    """A connection of which the backend is told; a pooler may lend it another one each time."""

    def __init__(self, backend: int, *answers: int | psycopg.Error) -> None:
        self.info = SimpleNamespace(backend_pid=backend)
        self.answers = [*answers]
        self.error: psycopg.Error | None = None
        self.closed = False
        self.asked = 0

    def rows(self, _: str) -> list[tuple[int]]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        answer = self.answers.pop(0)
        if isinstance(answer, psycopg.Error):
            raise answer
        return [(answer,)]

    def transaction(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [
        ([1], [], False),
        ([7, 7, 7, 7, 7, 7], [2, 3, 4, 5, 6], False),
        ([7, 1, 2, 3, 4, 9], [5, 5, 5, 5, 9], True),
        ([7, 8], [psycopg.errors.ProtocolViolation()], True),
    ],
)
def test_a_pooler_is_refused_where_it_lends_our_session_to_others(
    monkeypatch: pytest.MonkeyPatch, ours: list[Any], theirs: list[Any], shared: bool
) -> None:
    mine, other = cast(Any, Session(1, *ours)), Session(2, *theirs)
    monkeypatch.setattr(connection.Connection, "connect", lambda *_, **__: other)
    if shared:
        with pytest.raises(ConfigError, match="a pooler that shares sessions"):
            connection.refuse_shared_session(mine, "dbname=c")
    else:
        connection.refuse_shared_session(mine, "dbname=c")
    assert mine.answers == other.answers == []


def test_a_sign_of_life_is_sent_by_an_open_session_and_raises_nothing() -> None:
    for error in (None, psycopg.OperationalError("gone")):
        session = Session(1, 1)
        session.error = error
        connection.show_life(cast(Any, session))
        assert session.asked == 1
        session.closed = True
        connection.show_life(cast(Any, session))
        assert session.asked == 1


def test_what_is_shown_can_be_pasted() -> None:
    key = "add primary key (blobid) with (fillfactor = 70)"
    assert shown("mend_unique") == f"alter table blobs {key};"


@pytest.mark.parametrize(
    ("predicate", "form"),
    [
        ("((remote_copied IS FALSE) OR (remote_copied IS NULL))", "uncopied_is_false"),
        ("((remote_copied IS NULL) OR (remote_copied IS FALSE))", "uncopied_is_false"),
        ("((remote_copied = false) OR (remote_copied IS NULL))", "uncopied_equals_false"),
        ("(remote_copied IS NOT TRUE)", "uncopied_is_not_true"),
        ("((NOT remote_copied) OR (remote_copied IS NULL))", "uncopied_negated"),
        ("(remote_copied IS FALSE)", None),
        ("((other_copied IS FALSE) OR (other_copied IS NULL))", None),
        ("((remote_copied IS NOT TRUE) AND (remote_copy_failed IS NOT TRUE))", None),
        ("(COALESCE(remote_copied, false) = false)", None),
    ],
)
def test_only_predicates_of_the_same_meaning_are_known(predicate: str, form: str | None) -> None:
    assert form_of(predicate, "remote") == form


def test_names_that_other_hosts_and_scripts_rely_on() -> None:
    assert lock_class("remote") == 230523420
    assert lock_class("other") != lock_class("remote")
    assert index_names("remote")[0] == "idx_blobs_remote_pending"
    assert columns("b2")["last_checked"] == sql.Identifier("b2_last_checked")


def test_the_speed_of_a_run_is_that_from_its_start_to_its_last_update() -> None:
    began = datetime(2026, 3, 4, tzinfo=UTC)
    common = {"run_id": UUID(int=1), "target": "remote", "host": "h", "pid": 1, "strategy": "tar"}
    counts = {"workers": 1, "copied": 1, "failed": 0, "bytes": 30_000_000, "reason": ""}
    ends = {"ended_at": None, "outcome": None, "exit_code": None, "read_at": began}
    for seconds, speed in ((0, 0.0), (10, 3.0), (0.5, 60.0), (-1, 0.0)):
        updated = began + timedelta(seconds=seconds)
        run = Run(**cast(Any, common | counts | ends), started_at=began, updated_at=updated)
        assert run.mb_per_s == speed
