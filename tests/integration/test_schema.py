"""init-db and verify_schema on a fresh database and on live tables of many shapes.

Hints hold SQL, so the tests execute them: a hint that does not mend fails here.
"""

from __future__ import annotations

import select
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog import schema, schema_check
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.schema import Plan, Who, init_db, make_plan
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.catalog.selection import first_pending
from ntt_backup.errors import CatalogRefused, CatalogUnavailable
from ntt_backup.model import Blob, BlobRange
from tests.helpers.postgres import Postgres, session
from tests.helpers.waiting import PATIENCE, wait_until
from tests.integration.catalogs import FORMS, INDEX, LIVE, LIVE_COLUMNS, assert_usable

ON_NOTE = INDEX.replace("(blobid)", "(note)") + "remote_copied is not true"
BY_PATTERN = INDEX.replace("(blobid)", "(blobid text_pattern_ops)") + "remote_copied is not true"
PARTITIONED = [
    "create table blobs (blobid text primary key) partition by hash (blobid)",
    "create table blobs_0 partition of blobs for values with (modulus 1, remainder 0)",
]
ONE_INDEX = ["idx_blobs_remote_pending"]
TWO_INDEXES = [*ONE_INDEX, "idx_blobs_remote_pending_ntt"]
# What init-db finds.
SHAPES = {
    "live": [LIVE],
    "with columns": [LIVE, LIVE_COLUMNS],
    "of other types": [
        "create table blobs (blobid varchar(64) primary key, size numeric, n int,"
        " remote_last_checked timestamp, remote_copied boolean not null default false)"
    ],
    **{f"index {name}": [LIVE, LIVE_COLUMNS, INDEX + form] for name, form in FORMS.items()},
    "partitioned with its index": [*PARTITIONED, LIVE_COLUMNS, INDEX + FORMS["is false"]],
}
# The index that has the name of ours does not serve us.
UNFIT = {
    "index of another meaning": [LIVE, LIVE_COLUMNS, INDEX + "remote_copied is false"],
    "index without predicate": [LIVE, "create index idx_blobs_remote_pending on blobs (blobid)"],
    "index on another column": [LIVE, LIVE_COLUMNS, "alter table blobs add note text", ON_NOTE],
    "index in another order": [LIVE, LIVE_COLUMNS, BY_PATTERN],
}


def pending_indexes(conn: Connection) -> list[str]:
    rows = conn.execute(
        "select indexname from pg_indexes where tablename = 'blobs' and indexname like 'idx%'"
        " order by 1"
    )
    return [name for (name,) in rows]


def make(conn: Connection, *statements: str) -> None:
    for statement in statements:
        conn.execute(sql.SQL(statement))


def execute_hint(conn: Connection, hint: str) -> None:
    """Run the SQL of a hint as the operator would, by pasting it."""
    statements = hint.rpartition(": ")[2]
    assert statements.endswith(";")
    conn.execute(sql.SQL(statements))


def start_index_and_break_it_off(conn: Connection, url: str) -> None:
    with session(url, "test") as writer, writer.transaction():
        writer.execute("insert into blobs (blobid) values ('ab')")
        conn.execute("set lock_timeout = 50")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute(
                "create index concurrently idx_blobs_remote_pending on blobs (blobid)"
                " where remote_copied is not true"
            )


def forget_search_path(conn: Connection) -> None:
    """Undo what a hint or script has set for the superuser, whom all tests share."""
    reset = sql.SQL("alter role postgres in database {} reset search_path")
    conn.execute(reset.format(sql.Identifier(conn.info.dbname)))


@pytest.fixture
def grant(postgres: Postgres) -> Callable[[Connection], None]:
    """`grant(conn)` has a superuser run the scripts that this session would print."""

    def run(conn: Connection) -> None:
        url = postgres.url(conn.info.dbname)
        done = postgres.psql(make_plan(conn, "remote", notify=True).script(), url)
        assert done.returncode == 0, done.stderr

    return run


# --- what init-db makes ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, *UNFIT])
def test_init_db_makes_any_table_usable_without_rewriting_it(
    database: Connection, shape: str
) -> None:
    make(database, *(SHAPES | UNFIT)[shape], "insert into blobs (blobid) values ('ab'), ('cd')")
    before = database.execute("select pg_relation_filenode(to_regclass('blobs'))").fetchone()

    init_db(database, "remote", notify=True)

    assert_usable(database)
    assert database.execute("select pg_relation_filenode('blobs')").fetchone() == before
    assert first_pending(database, "remote", 10_000, 60_000) == [Blob("ab"), Blob("cd")]
    assert pending_indexes(database) == (TWO_INDEXES if shape in UNFIT else ONE_INDEX)

    made = database.execute("select max(oid::bigint) from pg_class").fetchone()
    lines: list[str] = []
    init_db(database, "remote", notify=True, report=lines.append)

    assert lines == [], "a second init-db has nothing to do"
    assert database.execute("select max(oid::bigint) from pg_class").fetchone() == made


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
    assert_usable(catalog)


def test_rows_from_before_get_no_invented_date(database: Connection) -> None:
    make(database, "create table blobs (blobid text primary key)")
    make(database, "insert into blobs values ('old')")

    init_db(database, "remote")
    make(database, "insert into blobs (blobid) values ('new')")

    dated = database.execute("select blobid from blobs where created_at is not null").fetchall()
    assert dated == [("new",)]


def test_an_unfinished_index_is_refused_then_rebuilt(
    database: Connection, database_url: str
) -> None:
    init_db(database, "remote")
    make(database, "drop index idx_blobs_remote_pending")
    start_index_and_break_it_off(database, database_url)
    with pytest.raises(CatalogRefused, match="unfinished") as caught:
        verify_schema(database, "remote")
    assert "init-db" in caught.value.hint
    lines: list[str] = []

    init_db(database, "remote", report=lines.append)

    assert lines == ["build the index idx_blobs_remote_pending, in place of an unfinished one"]
    assert_usable(database)
    assert pending_indexes(database) == ONE_INDEX


def test_a_script_that_was_interrupted_builds_its_index_anew(
    database: Connection, database_url: str, postgres: Postgres
) -> None:
    make(database, LIVE, LIVE_COLUMNS)
    script = make_plan(database, "remote").script()
    start_index_and_break_it_off(database, database_url)

    done = postgres.psql(script, database_url)

    assert done.returncode == 0, done.stderr
    assert init_db(database, "remote") == []
    assert pending_indexes(database) == ONE_INDEX


def test_building_an_index_waits_for_old_transactions_while_writing_goes_on(
    catalog: Connection, catalog_url: str
) -> None:
    make(catalog, "drop index idx_blobs_remote_pending", "set lock_timeout = 2000")
    with session(catalog_url, "init-db") as conn, session(catalog_url, "writer") as writer:
        conn.execute("set lock_timeout = 20")
        build = threading.Thread(target=init_db, args=[conn, "remote"])
        with writer.transaction():
            writer.execute("insert into blobs (blobid) values ('ab')")
            build.start()
            while build.is_alive() and not waits_long(catalog):
                pass
            catalog.execute("insert into blobs (blobid) values ('cd')")
        build.join()

    assert_usable(catalog)


def waits_long(conn: Connection) -> bool:
    """Whether a session has been waiting for a lock for ten times the limit of 20 ms."""
    since = "waitstart < clock_timestamp() - interval '200 ms'"
    return bool(conn.execute(sql.SQL(f"select 1 from pg_locks where {since}")).fetchall())


def test_an_index_that_another_session_builds_is_left_to_it(
    catalog: Connection, catalog_url: str
) -> None:
    make(catalog, "drop index idx_blobs_remote_pending")
    create = "create index concurrently idx_blobs_remote_pending on blobs (blobid) where "
    with session(catalog_url, "dba") as dba, session(catalog_url, "writer") as writer:
        build = threading.Thread(target=dba.execute, args=[sql.SQL(create + FORMS["is false"])])
        with writer.transaction():
            writer.execute("insert into blobs (blobid) values ('ab')")
            build.start()
            while not pending_indexes(catalog):
                catalog.execute("select pg_stat_clear_snapshot()")

            with pytest.raises(CatalogUnavailable, match=f"pid {dba.info.backend_pid}"):
                init_db(catalog, "remote")

        build.join()

    assert_usable(catalog)


def test_a_large_table_is_announced_with_the_time_it_takes(database: Connection) -> None:
    make(database, LIVE, "insert into blobs (blobid) values ('ab')")
    make(
        database, "update pg_class set reltuples = 42e6, relpages = 1 where oid = 'blobs'::regclass"
    )
    lines: list[str] = []
    script = make_plan(database, "remote").script()

    init_db(database, "remote", report=lines.append)

    said = "over about 42,000,000 rows, which takes about 3 min 30 s"
    assert f"build the index idx_blobs_remote_pending {said}" in lines
    assert said in script


@pytest.mark.parametrize("unfinished", [(), ("_pending",), ("_pending", "_pending_ntt")])
def test_an_index_of_a_partitioned_table_is_left_to_the_operator(
    database: Connection, postgres: Postgres, unfinished: tuple[str, ...]
) -> None:
    """Such an index cannot be built while others write."""
    only = INDEX.replace(" on ", " on only ") + FORMS["is false"]
    make(database, *PARTITIONED, LIVE_COLUMNS)
    make(database, *(only.replace("_pending", suffix) for suffix in unfinished))
    before = pending_indexes(database)

    with pytest.raises(CatalogRefused, match="blobs is partitioned") as caught:
        init_db(database, "remote")

    assert pending_indexes(database) == before
    assert "--print-sql" in caught.value.hint
    done = postgres.psql(make_plan(database, "remote").script(), postgres.url(database.info.dbname))
    assert done.returncode == 0, done.stderr
    init_db(database, "remote")
    assert_usable(database)


def test_two_at_once_take_turns(database: Connection, database_url: str) -> None:
    make(database, LIVE)
    start = threading.Barrier(3)

    def prepare(_: int) -> None:
        with session(database_url, "init-db") as conn:
            start.wait()
            init_db(conn, "remote", notify=True)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(prepare, range(3)))

    assert_usable(database)
    assert pending_indexes(database) == ONE_INDEX


def test_an_init_db_that_was_refused_holds_up_no_other(
    database: Connection, database_url: str
) -> None:
    make(database, "create table blobs (id text)")
    with pytest.raises(CatalogRefused, match="no column blobid"):
        init_db(database, "remote")
    make(database, "drop table blobs")
    with session(database_url, "another") as other:
        assert init_db(other, "remote") == []


def test_a_lock_is_asked_for_again(
    database: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BRIEF_LOCK_MS", 50)
    make(database, LIVE)
    waits: list[str] = []
    with session(database_url, "a long report") as reader:
        reader.execute("begin")
        reader.execute("select from blobs")

        def report(line: str) -> None:
            if "waiting for a lock" in line:
                waits.append(line)
                reader.execute("commit")

        init_db(database, "remote", report=report)

        assert len(waits) == 1
        assert f"pid {reader.info.backend_pid} (a long report)" in waits[0]
    assert_usable(database)


def test_a_lock_that_is_never_free_is_named(
    database: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "BRIEF_LOCK_MS", 20)
    monkeypatch.setattr(schema, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(schema, "_PAUSE_S", 0)
    make(database, LIVE)
    with session(database_url, "a long report") as reader, reader.transaction():
        reader.execute("select from blobs")

        with pytest.raises(CatalogUnavailable, match="a long report"):
            init_db(database, "remote")

    init_db(database, "remote")
    assert_usable(database)


def test_notify_wakes_the_daemon_for_writers_that_know_nothing_of_us(
    catalog: Connection, catalog_url: str, role: Callable[[], str]
) -> None:
    init_db(catalog, "remote", notify=True)
    writer = role()
    make(catalog, f"grant insert on blobs to {writer}")
    claims = Claims(catalog, "remote", range(256))
    claims.listen()

    with session(make_conninfo(catalog_url, user=writer), "another program") as conn:
        conn.execute("insert into blobs (blobid) values ('ab'), ('cd')")

    assert select.select([claims.fileno()], [], [], PATIENCE)[0]
    assert claims.drain_notifications() is True
    assert claims.drain_notifications() is False


# --- what is refused, and what is warned of -------------------------------------------------------


DIGITS = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("kind", "value", "digits", "said"),
    [
        ("bytea", "\\x" + DIGITS, DIGITS, "in the first 1 row it holds raw bytes"),
        ("bytea", DIGITS.encode(), DIGITS, "in the first 1 row it holds hex digits in ASCII"),
        ("uuid", DIGITS[:32], DIGITS[:32], "it must be text"),
        ("char(64)", DIGITS, DIGITS, "it must be text"),
    ],
)
def test_a_blobid_of_another_type_is_refused_and_mended(
    database: Connection, kind: str, value: str | bytes, digits: str, said: str
) -> None:
    make(database, f"create table blobs (blobid {kind} primary key)")
    database.execute("insert into blobs values (%s)", [value])

    with pytest.raises(CatalogRefused, match="of type") as caught:
        init_db(database, "remote")
    assert said in str(caught.value.detail)
    columns = database.execute("select * from blobs").description
    assert columns is not None
    assert len(columns) == 1, "a table that is refused must not be altered"
    execute_hint(database, caught.value.hint)
    init_db(database, "remote")

    assert_usable(database)
    assert first_pending(database, "remote", 10_000, 60_000) == [Blob(digits)]


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (
            [
                *UNFIT["index of another meaning"],
                "create index idx_blobs_remote_pending_ntt on blobs (remote_copied)",
            ],
            "names of our index are taken",
        ),
        (
            ["create table blobs (blobid text primary key, remote_copied integer)"],
            "remote_copied is of type integer",
        ),
        (["create table blobs (blobid text primary key, size text)"], "size is of type text"),
        (
            [
                "create collation careless (provider = libc, locale = 'C')",
                "create table blobs (blobid text collate careless primary key)",
                # As of ICU, which not all servers have.
                "update pg_collation set collisdeterministic = false where collname = 'careless'",
            ],
            "collation of blobs.blobid does not suit",
        ),
    ],
)
def test_what_stands_in_the_way_of_ours_is_refused_and_mended(
    database: Connection, statements: list[str], said: str
) -> None:
    make(database, *statements)

    with pytest.raises(CatalogRefused, match=said) as caught:
        init_db(database, "remote")
    execute_hint(database, caught.value.hint)
    init_db(database, "remote")

    assert_usable(database)


def test_a_size_too_narrow_for_large_blobs_is_a_warning(database: Connection) -> None:
    make(database, "create table blobs (blobid text primary key, size integer)")
    lines: list[str] = []

    init_db(database, "remote", report=lines.append)

    (warning,) = verify_schema(database, "remote")
    assert f"no more than {2**31 - 1}" in warning
    assert "rewrite" in warning
    assert lines[-1] == f"warning: {warning}"
    execute_hint(database, warning)
    assert_usable(database)


@pytest.mark.parametrize(
    ("create", "kind"),
    [
        ("create view blobs as select 'ab'::text as blobid", "a view"),
        ("create sequence blobs", "a sequence"),
    ],
)
def test_what_is_no_table_is_refused_and_mended(
    database: Connection, database_url: str, create: str, kind: str
) -> None:
    make(database, create)
    for check in (init_db, verify_schema):
        with pytest.raises(CatalogRefused, match=f"blobs is {kind}, not a table") as caught:
            check(database, "remote")
        assert "catalog.url" in caught.value.hint

    make(database, "create schema app; create table app.blobs (blobid text primary key)")
    with pytest.raises(CatalogRefused, match="not a table") as caught:
        verify_schema(database, "remote")

    execute_hint(database, caught.value.hint)
    with session(database_url, "test") as conn:
        init_db(conn, "remote")
        assert_usable(conn)
        forget_search_path(conn)


def test_bounds_that_do_not_ascend_are_refused_and_mended(
    catalog: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapping = (BlobRange(0, "", "aa"), BlobRange(1, "aa", "a9"), BlobRange(2, "a9", None))
    monkeypatch.setattr(schema_check, "prefix_ranges", lambda: overlapping)

    with pytest.raises(CatalogRefused, match="collation") as caught:
        verify_schema(catalog, "remote")

    execute_hint(catalog, caught.value.hint)
    monkeypatch.undo()
    assert_usable(catalog)


def test_a_blobid_that_is_no_key_is_a_warning(database: Connection) -> None:
    make(database, "create table blobs (blobid text)")
    init_db(database, "remote")

    warnings = verify_schema(database, "remote")

    assert len(warnings) == 2
    assert "NULL" in warnings[1]
    execute_hint(database, warnings[0])
    assert_usable(database)


def test_policies_that_may_hide_rows_are_a_warning(
    catalog: Connection,
    catalog_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    make(catalog, "alter table blobs enable row level security")
    with session(make_conninfo(catalog_url, user=role()), "test") as conn:
        grant(conn)

        (warning,) = verify_schema(conn, "remote")

        assert "hide" in warning
        execute_hint(catalog, warning)
        assert_usable(conn)


def test_what_is_missing_is_named(database: Connection) -> None:
    with pytest.raises(CatalogRefused, match="no table blobs") as caught:
        verify_schema(database, "b2")
    assert "`ntt-backup-remote init-db`" in caught.value.hint

    make(database, LIVE)
    with pytest.raises(CatalogRefused, match="lacks size, remote_copied, remote_last_checked"):
        verify_schema(database, "remote")

    init_db(database, "remote")
    make(database, "drop table ntt_backup.scans")
    with pytest.raises(CatalogRefused, match="schema ntt_backup lacks scans"):
        verify_schema(database, "remote")

    init_db(database, "remote")
    make(database, "drop index idx_blobs_remote_pending")
    with pytest.raises(CatalogRefused, match="no usable index"):
        verify_schema(database, "remote")

    init_db(database, "remote")
    make(database, "drop table ntt_backup.packs, ntt_backup.hours")
    make(database, "drop index ntt_backup.places_replaced")
    plan = make_plan(database, "remote")
    assert str(plan).endswith(": add to ntt_backup hours, packs, places.places_replaced")
    assert not plan.needed
    init_db(database, "remote")
    assert not make_plan(database, "remote").steps


def test_a_newer_or_older_schema_is_refused(catalog: Connection) -> None:
    make(catalog, "update ntt_backup.schema_version set version = 99")
    for check in (verify_schema, init_db):
        with pytest.raises(CatalogRefused, match="version 99") as caught:
            check(catalog, "remote")
        assert "upgrade ntt_backup" in caught.value.hint

    make(catalog, "delete from ntt_backup.schema_version")
    with pytest.raises(CatalogRefused, match="old version 0"):
        verify_schema(catalog, "remote")
    init_db(catalog, "remote")
    assert_usable(catalog)


# --- who may do what ------------------------------------------------------------------------------


def test_init_db_by_a_role_that_owns_nothing_says_all_at_once(
    database: Connection, database_url: str, role: Callable[[], str]
) -> None:
    make(database, LIVE)
    name = role()
    with session(make_conninfo(database_url, user=name), "test") as conn:
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
    make(database, LIVE)
    name = role()
    if owns != "the database":
        make(database, f"alter table blobs owner to {name}")
        make(database, f"grant create on schema public to {name}")
    if owns != "the table":
        make(database, f"alter database {database.info.dbname} owner to {name}")
    with session(make_conninfo(database_url, user=name), "test") as conn:
        if owns != "both":
            with pytest.raises(CatalogRefused, match="not ready") as caught:
                init_db(conn, "remote", notify=True)
            left = "owner (" if owns == "the database" else "dba ("
            assert caught.value.detail.startswith(f"missing is: {left}")
            assert bool(pending_indexes(database)) == (owns == "the table")
            grant(conn)

        assert init_db(conn, "remote", notify=owns != "the database") == []
        assert_usable(conn)


def test_a_plan_grants_a_role_what_it_lacks_and_nothing_that_it_makes(
    database: Connection, database_url: str, role: Callable[[], str]
) -> None:
    owner, name, monitor = role(), role(), role()
    make(database, f"alter database {database.info.dbname} owner to {owner}")
    with session(make_conninfo(database_url, user=owner), "test") as conn:
        own = make_plan(conn, "remote", notify=True)
        # What it makes is its own.
        assert {step.who for step in own.steps} == {Who.OPERATOR}
        assert " to " + owner not in own.script()
        plan = make_plan(conn, "remote", role=name, monitors=[monitor])
        granted = [step for step in plan.steps if step.text.startswith("let ")]
        of_name = [step for step in granted if step.text.startswith(f"let {name} ")]
        of_monitor = [step for step in granted if step not in of_name]
        assert {step.needed for step in of_name} == {True}
        for steps, who in ((of_name, name), (of_monitor, monitor)):
            text = "\n".join(one for step in steps for one in step.statements)
            assert f"on public.blobs to {who};" in text.replace('"', "")
            assert ("insert" in text) == (who == name)


def test_a_plan_lets_a_role_connect_and_pg_dump_lock_what_it_reads(
    catalog: Connection, role: Callable[[], str]
) -> None:
    name = role()
    with pytest.raises(CatalogRefused, match="the server has no role nobody"):
        make_plan(catalog, "remote", role="nobody")
    found = catalog.execute(
        "select string_agg(quote_ident(attname), ', ') from pg_attribute"
        " where attrelid = 'blobs'::regclass and attnum > 0 and not attisdropped"
    ).fetchall()
    make(
        catalog,
        f"revoke connect on database {catalog.info.dbname} from public",
        f"grant select ({found[0][0]}) on blobs to {name}",
    )

    def grants() -> list[str]:
        """What is granted on blobs."""
        told = [one for step in plan().steps for one in step.statements]
        return [one for one in told if "on public.blobs to" in one.replace('"', "")]

    def plan() -> Plan:
        return make_plan(catalog, "remote", role=name)

    assert f"let {name} connect" in [step.text for step in plan().steps]
    # pg_dump may not lock what can be read by columns alone.
    assert ["select" in one for one in grants()] == [True]
    make(catalog, f"revoke select on blobs from {name}")
    assert [one.count("select") for one in grants()] == [1]
    make(catalog, f"grant select on blobs to {name}")
    assert grants()
    assert not any("select" in one for one in grants())


def test_a_script_lets_the_role_dump_what_other_programs_have(
    database: Connection,
    database_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
) -> None:
    make(database, LIVE, "create schema other", "create table other.theirs (x int)")
    name = role()
    with session(make_conninfo(database_url, user=name), "test") as conn:
        script = make_plan(conn, "remote", notify=False).script()
        assert f"let {name} dump all tables" in script
        grant(conn)
        assert conn.execute("select count(*) from other.theirs").fetchall() == [(0,)]
        assert "dump all tables" not in make_plan(conn, "remote", notify=False).script()


def test_partitions_that_others_add_later_can_be_dumped(
    database: Connection,
    database_url: str,
    role: Callable[[], str],
    grant: Callable[[Connection], None],
    postgres: Postgres,
) -> None:
    """Each medium brings two more partitions, and no DBA grants anything then."""
    app, name = role(), role()
    make(
        database,
        LIVE,
        f"create schema app authorization {app}",
        f"grant select on blobs to {name}",
        f"set role {app}",
        "create table app.inode (medium text, ino bigint) partition by list (medium)",
        "create table app.inode_p_1 partition of app.inode for values in ('1')",
        f"grant usage on schema app to {name}",
        f"grant select on all tables in schema app to {name}",
        "reset role",
    )
    url = make_conninfo(database_url, user=name)
    with session(url, "test") as conn:
        # Whatever exists can be read, so it is the partitions to come that are told of.
        assert "dump all tables" in make_plan(conn, "remote").script()
        grant(conn)
        said: list[str] = []
        assert init_db(conn, "remote", notify=True, report=said.append) == []
        assert said == []
        assert "dump all tables" not in make_plan(conn, "remote").script()
    make(
        database,
        f"set role {app}",
        "create table app.inode_p_2 partition of app.inode for values in ('2')",
        "create table app.path_p_2 (ino serial)",
        "reset role",
    )
    argv = [str(postgres.programs / "pg_dump"), "--format=custom", f"--dbname={url}"]
    assert subprocess.run(argv, capture_output=True, check=False).stderr == b""


def test_partitions_to_come_that_cannot_be_dumped_are_warned_of(
    database: Connection, database_url: str, role: Callable[[], str]
) -> None:
    name = role()
    make(
        database,
        f"grant create on database {database.info.dbname} to {name}",
        LIVE,
        f"alter table blobs owner to {name}",
        f"grant create on schema public to {name}",
        "create table inode (medium text) partition by list (medium)",
        f"grant select on inode to {name}",
    )
    said: list[str] = []
    with session(make_conninfo(database_url, user=name), "test") as conn:
        assert init_db(conn, "remote", report=said.append) == []
    (warned,) = [line for line in said if line.startswith("warning")]
    assert f"{name} may not read partitions that will be added by postgres in public" in warned
    assert "init-db --print-sql dba" in warned


def test_names_in_scripts_are_quoted(
    postgres: Postgres, database_url: str, role: Callable[[], str]
) -> None:
    """Nobody's name may be read as SQL, or as a psql command."""
    odd = 'a "b"; \n\\quit\n drop table c, -- '
    operator, owner = f"{odd} {role()}", f"{odd} {role()}"
    old = str(conninfo_to_dict(database_url)["dbname"])
    database = f'{old} "x" \\q'
    rename = sql.SQL("alter database {} rename to {}")
    for name in (operator, owner):
        postgres.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
    postgres.execute(rename.format(sql.Identifier(old), sql.Identifier(database)))
    url = make_conninfo(database_url, dbname=database)
    parts = {"schema": sql.Identifier(odd), "owner": sql.Identifier(owner)}
    try:
        with session(url, "test") as conn:
            for text in (
                "create schema {schema} authorization {owner}",
                "create table {schema}.blobs (blobid text)",
                "alter table {schema}.blobs owner to {owner}",
                "create table {schema}.other (n integer)",
            ):
                conn.execute(sql.SQL(text).format(**parts))
        as_operator = make_conninfo(url, user=operator)
        with session(as_operator, "test") as conn:
            plan = make_plan(conn, "remote", notify=True)
        for who, user in ((Who.DBA, "postgres"), (Who.OWNER, owner)):
            for _ in range(2):
                done = postgres.psql(plan.script(who), make_conninfo(url, user=user))
                assert done.returncode == 0, done.stderr
        with session(as_operator, "test") as conn:
            assert init_db(conn, "remote", notify=True) == []
            assert not make_plan(conn, "remote", notify=True).steps
        path = "alter database {database} set search_path = {schema}"
        postgres.execute(sql.SQL(path).format(database=sql.Identifier(database), **parts))
        with connect(url, "test", no_tables=True) as conn:
            assert init_db(conn, "second") == [], "it quotes what it executes, too"
    finally:
        postgres.execute(rename.format(sql.Identifier(database), sql.Identifier(old)))


# --- where the table is ---------------------------------------------------------------------------


def test_a_table_that_the_search_path_does_not_find_is_left_as_it_is(
    database: Connection, database_url: str, grant: Callable[[Connection], None]
) -> None:
    """Nor is another made beside it."""
    make(database, "create schema app; create table app.blobs (blobid text primary key)")
    make(database, "create schema other; create table other.blobs (blobid text)")
    with pytest.raises(CatalogRefused, match="there are several"):
        init_db(database, "remote")
    make(database, "drop schema other cascade")
    with pytest.raises(CatalogRefused, match="not ready for postgres") as caught:
        init_db(database, "remote")
    assert "have postgres find blobs in app" in caught.value.detail
    with pytest.raises(CatalogRefused, match="has no table blobs"):
        verify_schema(database, "remote")
    assert database.execute("select to_regclass('public.blobs')").fetchone() == (None,)
    columns = database.execute("select * from app.blobs").description
    assert columns is not None
    assert len(columns) == 1

    grant(database)

    with session(database_url, "test") as conn:
        assert init_db(conn, "remote") == []
        forget_search_path(conn)


def finding(url: str, schema: str) -> AbstractContextManager[Connection]:
    """A connection whose search path finds the tables of one schema only."""
    return session(make_conninfo(url, options=f"-c search_path={schema}"), no_tables=True)


@pytest.fixture
def two_schemas(database: Connection, database_url: str) -> str:
    """The URL of a database where `one` has a prepared table, and `two` may get another."""
    make(database, "create schema one; create schema two")
    with finding(database_url, "one") as conn:
        init_db(conn, "remote")
    return database_url


def test_a_second_table_in_the_same_database_is_refused(two_schemas: str) -> None:
    """Both would share the failures, the progress of scans, and the locks on ranges."""
    with finding(two_schemas, "two") as conn:
        make(conn, "create table blobs (like one.blobs including all)")
        before = conn.execute("select array_agg(attname) from pg_attribute").fetchone()

        for check in (init_db, verify_schema):
            with pytest.raises(CatalogRefused, match="serves another table") as caught:
                check(conn, "remote")
            assert "one.blobs" in caught.value.detail
        with pytest.raises(CatalogRefused, match="serves another table") as refused:
            connect(make_conninfo(two_schemas, options="-c search_path=two"), "refused")
        left = "select from pg_stat_activity where application_name = 'refused'"
        wait_until(lambda: not conn.execute(left).fetchall(), "the end of the session")
        assert refused  # It holds the session, which was closed all the same.

        assert conn.execute("select array_agg(attname) from pg_attribute").fetchone() == before
        execute_hint(conn, caught.value.hint)
    with session(two_schemas, "test") as conn:
        assert_usable(conn)
        forget_search_path(conn)


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
        make(conn, change)
        # To note another table is not worth a refusal of a role that may not.
        assert make_plan(conn, "remote").needed == ("create table" in change)

        init_db(conn, "remote")

        assert_usable(conn)
        make(conn, "create schema three; create table three.blobs (blobid text primary key)")
    with finding(two_schemas, "three") as conn:
        with pytest.raises(CatalogRefused, match="serves another table") as caught:
            init_db(conn, "remote")
        assert f"{schema}.blobs" in caught.value.detail
