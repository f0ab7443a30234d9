"""init-db and verify_schema on a fresh database and on live tables of many shapes.

Hints hold SQL, so the tests execute them: a hint that does not mend fails here.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog import (
    Claims,
    Connection,
    Ledger,
    begin_scan,
    connect,
    exact_totals,
    init_db,
    iter_pending,
    last_run,
    privileges,
    register,
    requeue,
    verify_schema,
)
from ntt_backup.catalog import schema as schema_module
from ntt_backup.catalog import schema_check as shape_module
from ntt_backup.catalog.ledger import record_checks
from ntt_backup.catalog.schema_plan import look
from ntt_backup.catalog.schema_scripts import Who
from ntt_backup.errors import CatalogRefused, CatalogUnavailable
from ntt_backup.model import Blob, BlobRange, Failure, Reason
from tests.postgres import Postgres

LIVE = "create table blobs (blobid text primary key, n_hardlinks int, created_at timestamptz)"
LIVE_COLUMNS = (
    "alter table blobs add remote_copied boolean, add remote_last_checked timestamptz,"
    " add remote_copy_failed boolean"
)
INDEX = "create index idx_blobs_remote_pending on blobs (blobid) where "
FORMS = {
    "is false": "remote_copied is false or remote_copied is null",
    "null first": "remote_copied is null or remote_copied is false",
    "equals false": "remote_copied = false or remote_copied is null",
    "is not true": "remote_copied is not true",
    "negated": "not remote_copied or remote_copied is null",
}
SHAPES = {
    "fresh": [],
    "live": [LIVE],
    "varchar": ["create table blobs (blobid varchar(64) primary key, n_hardlinks int)"],
    "with columns": [LIVE, LIVE_COLUMNS],
    "with some columns": [
        LIVE,
        "alter table blobs add remote_copied boolean not null default false",
    ],
    **{f"index {name}": [LIVE, LIVE_COLUMNS, INDEX + form] for name, form in FORMS.items()},
    "index of another meaning": [LIVE, LIVE_COLUMNS, INDEX + "remote_copied is false"],
    "index without predicate": [LIVE, "create index idx_blobs_remote_pending on blobs (blobid)"],
    "index on another column": [
        LIVE,
        LIVE_COLUMNS,
        "alter table blobs add note text",
        INDEX.replace("(blobid)", "(note)") + "remote_copied is not true",
    ],
    "index in another order": [
        LIVE,
        LIVE_COLUMNS,
        INDEX.replace("(blobid)", "(blobid text_pattern_ops)") + "remote_copied is not true",
    ],
    "partitioned with its index": [
        "create table blobs (blobid text primary key) partition by hash (blobid)",
        "create table blobs_0 partition of blobs for values with (modulus 1, remainder 0)",
        LIVE_COLUMNS,
        INDEX + FORMS["is false"],
    ],
}


def pending_indexes(conn: Connection) -> list[str]:
    rows = conn.execute(
        "select indexname from pg_indexes where tablename = 'blobs' and indexname like 'idx%'"
        " order by 1"
    )
    return [name for (name,) in rows]


def execute_hint(conn: Connection, hint: str) -> None:
    """Run the SQL of a hint as the operator would, by pasting it."""
    statements = hint.rpartition(": ")[2]
    assert statements.endswith(";")
    conn.execute(sql.SQL(statements))


def assert_usable(conn: Connection) -> None:
    """There is nothing to say about what a run and a scan need."""
    for command in ("run", "scan"):
        assert verify_schema(conn, "remote", command) == []


@pytest.fixture
def grant(postgres: Postgres) -> Callable[[Connection], None]:
    """`grant(conn)` has a superuser run the scripts that this session would print."""

    def run(conn: Connection) -> None:
        url = postgres.url(conn.info.dbname)
        done = postgres.psql(look(conn, "remote").script(), url)
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.parametrize("shape", SHAPES)
def test_init_db_makes_any_shape_usable(database: Connection, shape: str) -> None:
    for statement in SHAPES[shape]:
        database.execute(sql.SQL(statement))
    if SHAPES[shape]:
        database.execute("insert into blobs (blobid) values ('ab'), ('cd')")
    before = database.execute("select pg_relation_filenode(to_regclass('blobs'))").fetchone()

    init_db(database, "remote")

    assert_usable(database)
    if SHAPES[shape]:
        after = database.execute("select pg_relation_filenode('blobs')").fetchone()
        assert after == before, "the table was rewritten"
        assert list(iter_pending(database, "remote")) == [Blob("ab"), Blob("cd")]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_init_db_changes_nothing(database: Connection, shape: str) -> None:
    for statement in SHAPES[shape]:
        database.execute(sql.SQL(statement))
    init_db(database, "remote", notify=True)
    before = database.execute("select max(oid::bigint) from pg_class").fetchone()
    lines: list[str] = []

    init_db(database, "remote", notify=True, report=lines.append)

    assert lines == []
    assert database.execute("select max(oid::bigint) from pg_class").fetchone() == before


def test_a_fresh_catalog_keeps_the_contract(catalog: Connection) -> None:
    columns = catalog.execute(
        "select column_name, data_type from information_schema.columns where table_name = 'blobs'"
        " order by ordinal_position"
    ).fetchall()
    index = catalog.execute(
        "select pg_get_indexdef('idx_blobs_remote_pending'::regclass)"
    ).fetchone()

    assert columns == [
        ("blobid", "text"),
        ("size", "bigint"),
        ("created_at", "timestamp with time zone"),
        ("remote_copied", "boolean"),
        ("remote_last_checked", "timestamp with time zone"),
        ("remote_copy_failed", "boolean"),
    ]
    assert index is not None
    assert "(blobid) WHERE ((remote_copied IS FALSE) OR (remote_copied IS NULL))" in index[0]


def test_rows_from_before_get_no_invented_date(database: Connection) -> None:
    database.execute("create table blobs (blobid text primary key)")
    database.execute("insert into blobs values ('old')")

    init_db(database, "remote")
    database.execute("insert into blobs (blobid) values ('new')")

    dated = database.execute("select blobid from blobs where created_at is not null").fetchall()
    assert dated == [("new",)]


@pytest.mark.parametrize("form", FORMS)
def test_an_index_of_a_known_form_is_kept_alone(database: Connection, form: str) -> None:
    for statement in SHAPES[f"index {form}"]:
        database.execute(sql.SQL(statement))

    init_db(database, "remote")

    assert pending_indexes(database) == ["idx_blobs_remote_pending"]


@pytest.mark.parametrize(
    "shape", [name for name in SHAPES if name.startswith("index ") and name[6:] not in FORMS]
)
def test_an_unfit_index_gets_another_beside_it(database: Connection, shape: str) -> None:
    for statement in SHAPES[shape]:
        database.execute(sql.SQL(statement))

    init_db(database, "remote")

    assert pending_indexes(database) == ["idx_blobs_remote_pending", "idx_blobs_remote_pending_ntt"]


def test_names_that_are_both_taken_are_refused_and_mended(database: Connection) -> None:
    for statement in SHAPES["index of another meaning"]:
        database.execute(sql.SQL(statement))
    database.execute("create index idx_blobs_remote_pending_ntt on blobs (remote_copied)")

    with pytest.raises(CatalogRefused, match="names of our index are taken") as caught:
        init_db(database, "remote")

    execute_hint(database, caught.value.hint)
    init_db(database, "remote")
    assert verify_schema(database, "remote") == []


def test_targets_do_not_disturb_each_other(catalog: Connection) -> None:
    catalog.execute("insert into blobs (blobid) values ('ab')")
    init_db(catalog, "second")

    Ledger(catalog, "remote").record([Blob("ab", 1)], [])

    assert verify_schema(catalog, "second") == []
    assert exact_totals(catalog, "remote").pending == 0
    assert exact_totals(catalog, "second").pending == 1
    assert "idx_blobs_second_pending" in pending_indexes(catalog)


def test_an_unfinished_index_is_refused_then_rebuilt(
    database: Connection, database_url: str
) -> None:
    init_db(database, "remote")
    database.execute("drop index idx_blobs_remote_pending")
    with connect(database_url, "test") as writer, writer.transaction():
        writer.execute("insert into blobs (blobid) values ('ab')")
        database.execute("set lock_timeout = 50")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            database.execute(
                "create index concurrently idx_blobs_remote_pending on blobs (blobid)"
                " where remote_copied is not true"
            )
    with pytest.raises(CatalogRefused, match="unfinished") as caught:
        verify_schema(database, "remote")
    assert "init-db" in caught.value.hint
    lines: list[str] = []

    init_db(database, "remote", report=lines.append)

    assert lines[0] == "dropped the unfinished index idx_blobs_remote_pending"
    assert verify_schema(database, "remote") == []
    assert pending_indexes(database) == ["idx_blobs_remote_pending"]


def test_building_an_index_waits_for_old_transactions_while_writing_goes_on(
    catalog: Connection, catalog_url: str
) -> None:
    catalog.execute("drop index idx_blobs_remote_pending")
    catalog.execute("set lock_timeout = 2000")
    with connect(catalog_url, "init-db") as conn, connect(catalog_url, "writer") as writer:
        conn.execute("set lock_timeout = 20")
        build = threading.Thread(target=init_db, args=[conn, "remote"])
        with writer.transaction():
            writer.execute("insert into blobs (blobid) values ('ab')")
            build.start()
            while build.is_alive() and not waits_long(catalog):
                pass
            catalog.execute("insert into blobs (blobid) values ('cd')")
        build.join()

    assert verify_schema(catalog, "remote") == []


def waits_long(conn: Connection) -> bool:
    """Whether a session has been waiting for a lock for ten times the limit of 20 ms."""
    since = "waitstart < clock_timestamp() - interval '200 ms'"
    return bool(conn.execute(sql.SQL(f"select 1 from pg_locks where {since}")).fetchall())


def test_an_index_that_another_session_builds_is_left_to_it(
    catalog: Connection, catalog_url: str
) -> None:
    catalog.execute("drop index idx_blobs_remote_pending")
    create = "create index concurrently idx_blobs_remote_pending on blobs (blobid) where "
    with connect(catalog_url, "dba") as dba, connect(catalog_url, "writer") as writer:
        build = threading.Thread(target=dba.execute, args=[sql.SQL(create + FORMS["is false"])])
        with writer.transaction():
            writer.execute("insert into blobs (blobid) values ('ab')")
            build.start()
            while not pending_indexes(catalog):
                catalog.execute("select pg_stat_clear_snapshot()")

            with pytest.raises(CatalogUnavailable, match=f"pid {dba.info.backend_pid}"):
                init_db(catalog, "remote")

        build.join()

    assert verify_schema(catalog, "remote") == []


def test_two_at_once_take_turns(database: Connection, database_url: str) -> None:
    database.execute(sql.SQL(LIVE))
    start = threading.Barrier(3)
    errors: list[Exception] = []

    def prepare() -> None:
        with connect(database_url, "init-db") as conn:
            start.wait()
            try:
                init_db(conn, "remote", notify=True)
            except (CatalogRefused, CatalogUnavailable) as error:
                errors.append(error)

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert verify_schema(database, "remote") == []
    assert pending_indexes(database) == ["idx_blobs_remote_pending"]


def test_a_lock_is_asked_for_again(
    database: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_module, "BRIEF_LOCK_MS", 50)
    database.execute(sql.SQL(LIVE))
    lines: list[str] = []
    with connect(database_url, "a long report") as reader:
        reader.execute("begin")
        reader.execute("select from blobs")

        def report(line: str) -> None:
            lines.append(line)
            if "waiting for a lock" in line:
                reader.execute("commit")

        init_db(database, "remote", report=report)

        waits = [line for line in lines if "waiting for a lock" in line]
        assert len(waits) == 1
        assert f"pid {reader.info.backend_pid} (a long report)" in waits[0]
    assert verify_schema(database, "remote") == []


def test_a_lock_that_is_never_free_is_named(
    database: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_module, "BRIEF_LOCK_MS", 20)
    monkeypatch.setattr(schema_module, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(schema_module, "_PAUSE_S", 0)
    database.execute(sql.SQL(LIVE))
    with connect(database_url, "a long report") as reader, reader.transaction():
        reader.execute("select from blobs")

        with pytest.raises(CatalogUnavailable, match="a long report"):
            init_db(database, "remote")

    init_db(database, "remote")
    assert verify_schema(database, "remote") == []


@pytest.mark.parametrize("kind", ["bytea", "uuid", "char(64)"])
def test_a_blobid_of_another_type_is_refused_and_mended(database: Connection, kind: str) -> None:
    database.execute(sql.SQL(f"create table blobs (blobid {kind} primary key)"))
    digits = "0123456789abcdef" * (4 if kind == "char(64)" else 2)
    value = "\\x" + digits if kind == "bytea" else digits
    database.execute("insert into blobs values (%s)", [value])

    with pytest.raises(CatalogRefused, match="of type") as caught:
        init_db(database, "remote")
    columns = database.execute("select * from blobs").description
    assert columns is not None
    assert len(columns) == 1, "a table that is refused must not be altered"
    execute_hint(database, caught.value.hint)
    init_db(database, "remote")

    assert verify_schema(database, "remote") == []
    assert list(iter_pending(database, "remote")) == [Blob(digits)]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("remote_copied", "integer"),
        ("remote_copy_failed", "text"),
        ("size", "text"),
        ("remote_last_checked", "text"),
    ],
)
def test_a_column_of_another_type_is_refused_and_mended(
    database: Connection, column: str, kind: str
) -> None:
    database.execute(sql.SQL(f"create table blobs (blobid text primary key, {column} {kind})"))

    with pytest.raises(CatalogRefused, match=f"{column} is of type {kind}") as caught:
        init_db(database, "remote")
    execute_hint(database, caught.value.hint)
    init_db(database, "remote")

    assert verify_schema(database, "remote") == []


@pytest.mark.parametrize(
    ("kind", "largest"),
    [("smallint", 2**15 - 1), ("integer", 2**31 - 1), ("numeric(5)", 99_999)],
)
def test_a_size_too_narrow_for_large_blobs_is_a_warning(
    database: Connection, kind: str, largest: int
) -> None:
    database.execute(sql.SQL(f"create table blobs (blobid text primary key, size {kind})"))
    lines: list[str] = []

    init_db(database, "remote", report=lines.append)

    (warning,) = verify_schema(database, "remote")
    assert f"no more than {largest}" in warning
    assert "rewrite" in warning
    assert lines[-1] == f"warning: {warning}"
    execute_hint(database, warning)
    assert verify_schema(database, "remote") == []


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        ("create view blobs as select 'ab'::text as blobid", "a view"),
        ("create materialized view blobs as select 'ab'::text as blobid", "a materialized view"),
        ("create sequence blobs", "a sequence"),
        (
            "create foreign data wrapper far; create server away foreign data wrapper far;"
            " create foreign table blobs (blobid text) server away",
            "a foreign table",
        ),
    ],
)
@pytest.mark.parametrize("check", [init_db, verify_schema])
def test_what_is_no_table_is_refused_and_mended(
    database: Connection,
    database_url: str,
    check: Callable[[Connection, str], object],
    create: str,
    kind: str,
) -> None:
    database.execute(sql.SQL(create))
    with pytest.raises(CatalogRefused, match=f"blobs is {kind}, not a table") as caught:
        check(database, "remote")
    assert "catalog.url" in caught.value.hint

    database.execute("create schema app; create table app.blobs (blobid text primary key)")
    with pytest.raises(CatalogRefused, match="not a table") as caught:
        check(database, "remote")

    execute_hint(database, caught.value.hint)
    with connect(database_url, "test") as conn:
        init_db(conn, "remote")
        assert verify_schema(conn, "remote") == []


def test_a_table_of_something_else_is_refused(database: Connection) -> None:
    database.execute("create table blobs (id text)")
    with pytest.raises(CatalogRefused, match="no column blobid"):
        init_db(database, "remote")


def test_bounds_that_do_not_ascend_are_refused_and_mended(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapping = (BlobRange(0, "", "aa"), BlobRange(1, "aa", "a9"), BlobRange(2, "a9", None))
    monkeypatch.setattr(shape_module, "prefix_ranges", lambda: overlapping)

    with pytest.raises(CatalogRefused, match="collation") as caught:
        verify_schema(catalog, "remote")

    execute_hint(catalog, caught.value.hint)
    monkeypatch.undo()
    assert verify_schema(catalog, "remote") == []


PARTITIONED = SHAPES["partitioned with its index"][:2]


@pytest.mark.parametrize(
    "unfinished",
    [
        [],
        [LIVE_COLUMNS, INDEX.replace(" on ", " on only ") + FORMS["is false"]],
        [
            LIVE_COLUMNS,
            *(
                INDEX.replace(" on ", " on only ").replace("_pending", suffix) + FORMS["is false"]
                for suffix in ("_pending", "_pending_ntt")
            ),
        ],
    ],
)
def test_a_partitioned_table_without_its_index_is_refused_and_mended(
    database: Connection, unfinished: list[str]
) -> None:
    """An index of a partitioned table cannot be built while others write."""
    for statement in PARTITIONED + unfinished:
        database.execute(sql.SQL(statement))
    before = pending_indexes(database)

    with pytest.raises(CatalogRefused, match="blobs is partitioned") as caught:
        init_db(database, "remote")

    assert pending_indexes(database) == before
    assert "writers may wait" in caught.value.hint
    execute_hint(database, caught.value.hint)
    init_db(database, "remote")
    assert verify_schema(database, "remote") == []


def test_a_blobid_that_is_no_key_is_a_warning(database: Connection) -> None:
    database.execute("create table blobs (blobid text)")
    init_db(database, "remote")

    warnings = verify_schema(database, "remote")

    assert len(warnings) == 2
    assert "NULL" in warnings[1]
    execute_hint(database, warnings[0])
    assert verify_schema(database, "remote") == []


def test_policies_that_may_hide_rows_are_a_warning(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    name = role()
    catalog.execute("alter table blobs enable row level security")
    with connect(make_conninfo(catalog_url, user=name), "test") as conn:
        grant(conn)

        (warning,) = verify_schema(conn, "remote")

        assert "hide" in warning
        execute_hint(catalog, warning)
        assert verify_schema(conn, "remote") == []


def test_what_is_missing_is_named(database: Connection) -> None:
    with pytest.raises(CatalogRefused, match="no table blobs") as caught:
        verify_schema(database, "b2")
    assert "`ntt-backup-remote init-db`" in caught.value.hint

    database.execute(sql.SQL(LIVE))
    with pytest.raises(CatalogRefused, match="lacks size, remote_copied, remote_last_checked"):
        verify_schema(database, "remote")

    init_db(database, "remote")
    database.execute("drop table ntt_backup.scans")
    with pytest.raises(CatalogRefused, match="schema ntt_backup lacks scans"):
        verify_schema(database, "remote")

    init_db(database, "remote")
    database.execute("drop index idx_blobs_remote_pending")
    with pytest.raises(CatalogRefused, match="no usable index"):
        verify_schema(database, "remote")


def test_a_newer_or_older_schema_is_refused(catalog: Connection) -> None:
    catalog.execute("update ntt_backup.schema_version set version = 99")
    for check in (verify_schema, init_db):
        with pytest.raises(CatalogRefused, match="version 99") as caught:
            check(catalog, "remote")
        assert "upgrade ntt_backup" in caught.value.hint

    catalog.execute("delete from ntt_backup.schema_version")
    with pytest.raises(CatalogRefused, match="old version 0"):
        verify_schema(catalog, "remote")
    init_db(catalog, "remote")
    assert verify_schema(catalog, "remote") == []


def test_a_role_without_privileges_gets_the_grants_it_needs(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    catalog.execute("insert into blobs (blobid) values ('ab')")
    with connect(make_conninfo(catalog_url, user=role()), "test") as conn:
        with pytest.raises(CatalogRefused, match="may not do what `scan` does") as caught:
            verify_schema(conn, "remote", "scan")
        with pytest.raises(CatalogRefused, match="permission denied") as at_work:
            Claims(conn, "remote", range(256)).take(1)
        assert "init-db --print-sql" in caught.value.hint
        assert "init-db --print-sql" in at_work.value.hint

        grant(conn)

        assert_usable(conn)
        assert [blob for blob, _ in Claims(conn, "remote", range(256)).take(9)] == [Blob("ab")]
        Ledger(conn, "remote").record([Blob("ab", 2)], [])
        assert register(conn, [Blob("cd", 3)]) == 1
        begin_scan(conn, "/store")
        assert requeue(conn, "remote") == 0
        assert last_run(conn, "remote") is None
        assert exact_totals(conn, "remote").copied == 1
        record_checks(conn, "remote", [], [Failure("ab", Reason.REMOTE_MISSING)])
        for change in ("update blobs set blobid = 'ef'", "delete from blobs", "truncate blobs"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(sql.SQL(change))


@pytest.mark.parametrize(
    ("revoked", "command", "lack"),
    [
        ("update on blobs", "run", "update (size, remote_copied, remote_last_checked, "),
        ("update on blobs", "requeue", "update (remote_copy_failed) on blobs"),
        ("select on blobs", "status", "select (blobid, size, remote_copied, "),
        ("insert on blobs", "scan", "insert (blobid, size) on blobs"),
        ("usage on schema ntt_backup", "reconcile", "usage on schema ntt_backup"),
        ("delete on ntt_backup.failures", "run", "delete on ntt_backup.failures"),
        ("update on ntt_backup.failures", "verify", "update on ntt_backup.failures"),
        ("insert on ntt_backup.dumps", "dump", "insert on ntt_backup.dumps"),
        ("select on ntt_backup.schema_version", "check", "select on ntt_backup.schema_version"),
    ],
)
def test_each_privilege_is_checked(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
    revoked: str,
    command: str,
    lack: str,
) -> None:
    name = role()
    with connect(make_conninfo(catalog_url, user=name), "test") as conn:
        grant(conn)
        catalog.execute(sql.SQL(f"revoke {revoked} from {name}"))

        with pytest.raises(CatalogRefused, match=f"may not do what `{command}` does") as caught:
            verify_schema(conn, "remote", command)

        assert caught.value.detail.startswith(f"it lacks {lack}")
        grant(conn)
        assert verify_schema(conn, "remote", command) == []


def test_temporary_tables_are_a_privilege_too(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    database = sql.Identifier(catalog.info.dbname)
    catalog.execute(sql.SQL("revoke temporary on database {} from public").format(database))
    with connect(make_conninfo(catalog_url, user=role()), "test") as conn:
        with pytest.raises(CatalogRefused) as caught:
            verify_schema(conn, "remote", "scan")
        assert "temporary on the database" in caught.value.detail

        grant(conn)

        assert register(conn, [Blob("cd", 3)]) == 1


@pytest.mark.parametrize(
    ("right", "columns", "lack"),
    [
        ("select", "blobid", "select (blobid)"),
        ("select", "size", "select (size)"),
        ("update", "remote_copied", "update (remote_copied)"),
        ("update", "size, remote_copy_failed", "update (size, remote_copy_failed)"),
        ("insert", "size", "insert (size)"),
    ],
)
def test_privileges_on_single_columns_are_enough_and_named(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
    right: str,
    columns: str,
    lack: str,
) -> None:
    name = role()
    ours = "size, remote_copied, remote_last_checked, remote_copy_failed"
    for text in (
        f"grant select (blobid, {ours}), update ({ours}), insert (blobid, size) on blobs to {name}",
        f"grant usage on schema ntt_backup to {name}",
        f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}",
        "insert into blobs (blobid) values ('ab')",
    ):
        catalog.execute(sql.SQL(text))
    with connect(make_conninfo(catalog_url, user=name), "test") as conn:
        assert_usable(conn)
        assert [blob for blob, _ in Claims(conn, "remote", range(256)).take(9)] == [Blob("ab")]
        Ledger(conn, "remote").record([Blob("ab", 2)], [])
        assert register(conn, [Blob("cd", 3)]) == 1
        assert exact_totals(conn, "remote").copied == 1
        catalog.execute(sql.SQL(f"revoke {right} ({columns}) on blobs from {name}"))

        with pytest.raises(CatalogRefused) as caught:
            verify_schema(conn, "remote", "scan" if right == "insert" else "run")

        assert caught.value.detail == f"it lacks {lack} on blobs"
        grant(conn)
        assert_usable(conn)


def test_every_table_of_ours_has_its_place_among_the_needs() -> None:
    known = {name for need in privileges.NEEDS.values() for name in need.own}

    assert known | {"schema_version"} == shape_module.OWN_TABLES


# --- who may do what ------------------------------------------------------------------------------


def test_init_db_by_a_role_that_owns_nothing_says_all_at_once(
    database: Connection, database_url: str, role: Callable[[], str]
) -> None:
    database.execute(sql.SQL(LIVE))
    name = role()
    with connect(make_conninfo(database_url, user=name), "test") as conn:
        with pytest.raises(CatalogRefused, match=f"not ready for {name}") as caught:
            init_db(conn, "remote", notify=True)

        dba, owner = caught.value.detail.removeprefix("missing is: ").split("; ")
        assert dba.startswith("dba (a superuser, or postgres): make the schema ntt_backup")
        assert owner.startswith("owner (postgres): add to blobs: size, remote_copied, ")
        assert "build the index idx_blobs_remote_pending" in owner
        assert "wake a watching daemon" in owner
        assert f"let {name} back up" in owner
        assert "init-db --print-sql" in caught.value.hint


@pytest.mark.parametrize("owns", ["the table", "the database", "both"])
def test_init_db_does_what_it_may_and_leaves_the_rest(
    database: Connection,
    database_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
    owns: str,
) -> None:
    database.execute(sql.SQL(LIVE))
    name = role()
    if owns != "the database":
        database.execute(sql.SQL(f"alter table blobs owner to {name}"))
        database.execute(sql.SQL(f"grant create on schema public to {name}"))
    if owns != "the table":
        of = sql.Identifier(database.info.dbname)
        database.execute(sql.SQL("alter database {} owner to {}").format(of, sql.Identifier(name)))
    with connect(make_conninfo(database_url, user=name), "test") as conn:
        if owns != "both":
            with pytest.raises(CatalogRefused, match="not ready") as caught:
                init_db(conn, "remote")
            left = "owner (" if owns == "the database" else "dba ("
            assert caught.value.detail.startswith(f"missing is: {left}")
            assert "; " not in caught.value.detail
            assert bool(pending_indexes(database)) == (owns == "the table")
            grant(conn)

        assert init_db(conn, "remote", notify=owns == "both") == []
        assert_usable(conn)


def test_what_the_user_may_not_do_yet_is_said_beside_ready(
    database: Connection, database_url: str, role: Callable[[], str]
) -> None:
    name = role()
    database.execute("create table other (n integer)")
    of = sql.Identifier(database.info.dbname)
    database.execute(sql.SQL("grant create on database {} to {}").format(of, sql.Identifier(name)))
    database.execute(sql.SQL(f"grant create on schema public to {name}"))
    with connect(make_conninfo(database_url, user=name), "test") as conn:
        assert init_db(conn, "remote") == ["`dump` (it lacks select on public.other)"]

        assert_usable(conn)


def test_a_table_that_the_search_path_does_not_find_gets_no_other_beside_it(
    database: Connection, database_url: str, grant: Callable[[Connection], None]
) -> None:
    database.execute("create schema app; create table app.blobs (blobid text primary key)")
    database.execute("create schema other; create table other.blobs (blobid text)")
    with pytest.raises(CatalogRefused, match="there are several"):
        init_db(database, "remote")
    database.execute("drop schema other cascade")
    with pytest.raises(CatalogRefused, match="not ready for postgres") as caught:
        init_db(database, "remote")
    assert "have postgres find blobs in app" in caught.value.detail
    assert database.execute("select to_regclass('public.blobs')").fetchone() == (None,)

    grant(database)

    with connect(database_url, "test") as conn:
        assert init_db(conn, "remote") == []
        conn.execute(
            sql.SQL("alter role postgres in database {} reset search_path").format(
                sql.Identifier(conn.info.dbname)
            )
        )


def test_scripts_say_nothing_where_nothing_is_missing(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    name = role()
    with connect(make_conninfo(catalog_url, user=name), "test") as conn:
        grant(conn)

        assert look(conn, "remote").script() == "\n".join(
            f"-- {who}: nothing to do\n"
            for who in ("dba: a superuser, or postgres", "owner: postgres", f"operator: {name}")
        )
        assert init_db(conn, "remote") == []


def test_names_in_scripts_are_quoted(
    postgres: Postgres, database_url: str, role: Callable[[], str]
) -> None:
    """Nobody's name may be read as SQL, or as a psql command."""
    odd = 'a "b"; \n\\quit\n drop table c, -- '
    operator, owner = f"{odd} {role()}", f"{odd} {role()}"
    old = str(conninfo_to_dict(database_url)["dbname"])
    database = f'{old} "x" \\q'
    texts = [
        sql.SQL("create role {} login").format(sql.Identifier(operator)),
        sql.SQL("create role {} login").format(sql.Identifier(owner)),
        sql.SQL("alter database {} rename to {}").format(
            sql.Identifier(old), sql.Identifier(database)
        ),
    ]
    for text in texts:
        postgres.execute(text)
    url = make_conninfo(database_url, dbname=database)
    try:
        with connect(url, "test") as conn:
            schema = sql.Identifier(odd)
            conn.execute(
                sql.SQL("create schema {} authorization {}").format(schema, sql.Identifier(owner))
            )
            conn.execute(sql.SQL("create table {}.blobs (blobid text)").format(schema))
            conn.execute(
                sql.SQL("alter table {}.blobs owner to {}").format(schema, sql.Identifier(owner))
            )
            conn.execute(sql.SQL("create table {}.other (n integer)").format(schema))
        as_operator = make_conninfo(url, user=operator)
        with connect(as_operator, "test") as conn:
            missing = look(conn, "remote", notify=True)
        for who, user in ((Who.DBA, "postgres"), (Who.OWNER, owner)):
            for _ in range(2):
                done = postgres.psql(missing.script(who), make_conninfo(url, user=user))
                assert done.returncode == 0, done.stderr
        with connect(as_operator, "test") as conn:
            assert init_db(conn, "remote", notify=True) == []
            assert not look(conn, "remote", notify=True).parts
    finally:
        postgres.execute(
            sql.SQL("alter database {} rename to {}").format(
                sql.Identifier(database), sql.Identifier(old)
            )
        )


def test_a_script_that_was_interrupted_builds_its_index_anew(
    database: Connection, database_url: str, postgres: Postgres
) -> None:
    database.execute(sql.SQL(LIVE))
    database.execute(sql.SQL(LIVE_COLUMNS))
    script = look(database, "remote").script()
    with connect(database_url, "test") as writer, writer.transaction():
        writer.execute("insert into blobs (blobid) values ('ab')")
        database.execute("set lock_timeout = 50")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            database.execute(
                "create index concurrently idx_blobs_remote_pending on blobs (blobid)"
                " where remote_copied is not true"
            )

    done = postgres.psql(script, database_url)

    assert done.returncode == 0, done.stderr
    assert init_db(database, "remote") == []
    assert pending_indexes(database) == ["idx_blobs_remote_pending"]


def test_a_large_table_is_announced_with_the_time_it_takes(database: Connection) -> None:
    database.execute(sql.SQL(LIVE))
    database.execute("insert into blobs (blobid) values ('ab')")
    database.execute(
        "update pg_class set reltuples = 42e6, relpages = 1 where oid = 'blobs'::regclass"
    )
    lines: list[str] = []
    scripts = look(database, "remote").script()

    init_db(database, "remote", report=lines.append)

    said = "over about 42,000,000 rows, which takes about 3 min 30 s"
    assert f"building the index idx_blobs_remote_pending {said}" in "\n".join(lines)
    assert said in scripts


def test_the_limits_of_the_session_are_as_before(database: Connection) -> None:
    before = database.execute("show lock_timeout").fetchone()
    database.execute("set statement_timeout = '7min'")

    init_db(database, "remote")

    assert database.execute("show lock_timeout").fetchone() == before
    assert database.execute("show statement_timeout").fetchone() == ("7min",)


def test_notify_works_for_writers_that_know_nothing_of_us(
    catalog: Connection, catalog_url: str, role: Callable[[], str]
) -> None:
    init_db(catalog, "remote", notify=True)
    writer = role()
    catalog.execute(sql.SQL(f"grant insert on blobs to {writer}"))
    claims = Claims(catalog, "remote", range(256))
    claims.listen()

    with connect(make_conninfo(catalog_url, user=writer), "another program") as conn:
        conn.execute("insert into blobs (blobid) values ('ab'), ('cd')")

    wait_readable(claims.fileno())
    assert claims.drain_notifications() is True
    assert claims.drain_notifications() is False


def wait_readable(fileno: int) -> None:
    assert select.select([fileno], [], [], 30)[0]


def test_a_table_elsewhere_on_the_search_path(database: Connection, database_url: str) -> None:
    database.execute("create schema app; create table app.blobs (blobid text primary key)")
    name = conninfo_to_dict(database_url)["dbname"]
    database.execute(
        sql.SQL("alter database {} set search_path = app").format(sql.Identifier(str(name)))
    )

    with connect(database_url, "test") as conn:
        init_db(conn, "remote")

        assert_usable(conn)
    assert database.execute("select to_regclass('public.blobs')").fetchone() == (None,)


def finding(url: str, schema: str) -> Connection:
    """A connection whose search path finds the tables of one schema only."""
    return connect(make_conninfo(url, options=f"-c search_path={schema}"), "test")


@pytest.fixture
def two_schemas(database: Connection, database_url: str) -> str:
    """The URL of a database where `one` has a prepared table, and `two` may get another."""
    database.execute("create schema one; create schema two")
    with finding(database_url, "one") as conn:
        init_db(conn, "remote")
    return database_url


@pytest.mark.parametrize("there", [True, False])
def test_a_second_table_in_the_same_database_is_refused(
    two_schemas: str, role: Callable[[], str], there: bool
) -> None:
    """Both would share the failures, the progress of scans, and the locks on ranges."""
    with finding(two_schemas, "two") as conn:
        if there:
            conn.execute("create table blobs (like one.blobs including all)")
        before = conn.execute("select array_agg(attname) from pg_attribute").fetchone()

        for check in (init_db, verify_schema) if there else (init_db,):
            with pytest.raises(CatalogRefused, match="serves another table") as caught:
                check(conn, "remote")
            assert "one.blobs" in caught.value.detail

        assert conn.execute("select array_agg(attname) from pg_attribute").fetchone() == before
        execute_hint(conn, caught.value.hint)
        database = conn.info.dbname
    with connect(two_schemas, "test") as conn:
        assert verify_schema(conn, "remote") == []
        conn.execute(
            sql.SQL("alter role postgres in database {} reset search_path").format(
                sql.Identifier(database)
            )
        )


@pytest.mark.parametrize(
    "change",
    [
        "alter schema one rename to uno; create schema one",
        "drop schema two; alter schema one rename to two; create schema one;"
        " create view one.blobs as select from two.blobs",
        "alter table one.blobs rename to old; create table two.blobs (blobid text primary key)",
    ],
)
def test_the_table_may_move(two_schemas: str, change: str) -> None:
    schema = "uno" if "uno" in change else "two"
    with finding(two_schemas, schema) as conn:
        conn.execute(sql.SQL(change))

        init_db(conn, "remote")

        assert verify_schema(conn, "remote") == []
        conn.execute("create schema three; create table three.blobs (blobid text primary key)")
    with finding(two_schemas, "three") as conn:
        with pytest.raises(CatalogRefused, match="serves another table") as caught:
            init_db(conn, "remote")
        assert f"{schema}.blobs" in caught.value.detail
