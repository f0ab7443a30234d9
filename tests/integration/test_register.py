"""Register: what a query of another database lists becomes places, and nothing there changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ntt_backup.audit import register
from ntt_backup.audit.register import register_due, register_files
from ntt_backup.catalog import foreign_query, listed_files, origin_passes, range_locks, unread_files
from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.pending import walk_indexes
from ntt_backup.catalog.schema import init_db, make_plan
from ntt_backup.config import StoreConfig
from ntt_backup.errors import (
    BackupError,
    CatalogError,
    CatalogRefused,
    CatalogUnavailable,
    ConfigError,
)
from ntt_backup.model import MOST_PATH_BYTES, BadFile, Blob, FileReason, ReadFile
from ntt_backup.report import check
from tests.helpers.application import QUERY, Application
from tests.helpers.postgres import Postgres, session
from tests.helpers.waiting import wait_until
from tests.integration.catalogs import losing, rows


def paths(
    catalog: Connection, where: str = "gone_at is null and replaced_at is null"
) -> set[bytes]:
    query = sql.SQL("select path from ntt_backup.places where {}").format(sql.SQL(where))
    return {path for (path,) in catalog.execute(query).fetchall()}


def test_rows_become_places_once(catalog: Connection, application: Application) -> None:
    application.add("a/1", "a/2", "ü/3")
    application.add("a/2", size=None)
    first = register_files(catalog, application.settings())
    assert (first.rows, first.registered) == (4, 3)
    assert paths(catalog) == {b"a/1", b"a/2", "ü/3".encode()}
    again = register_files(catalog, application.settings())
    assert (again.registered, again.changed, again.gone) == (0, 0, 0)
    application.add("b")
    assert register_files(catalog, application.settings()).registered == 1
    assert b"b" in paths(catalog)


def test_a_step_that_loses_to_another_transaction_is_done_again(
    catalog: Connection, application: Application
) -> None:
    application.add("a", "b")
    losing(catalog, "ntt_backup.places", "40P01")
    done = register_files(catalog, application.settings())
    assert (done.rows, done.registered) == (2, 2)
    assert paths(catalog) == {b"a", b"b"}
    assert register_files(catalog, application.settings()).registered == 0


def test_a_pass_reads_from_the_last_key_until_it_is_time_for_all(
    catalog: Connection, application: Application
) -> None:
    application.add(*map(str, range(20)))
    register_files(catalog, application.settings())
    application.add("new")
    later = register_files(catalog, application.settings())
    assert later.registered == 1
    assert later.rows == 2
    assert register_files(catalog, application.settings(), whole=True).rows == 21
    assert register_files(catalog, application.settings(whole_every=0)).rows == 21


NO_KEY = "select path, size, sum as checksum from files"


def test_rows_without_keys_are_read_if_any_of_them_differs(
    catalog: Connection, application: Application
) -> None:
    application.add(*map(str, range(20)))
    change = application.owner.execute

    def read(**others: object) -> int:
        return register_files(catalog, application.settings(NO_KEY, **others)).rows

    assert (read(), read()) == (20, 0)
    # The rows, in another order.
    change("update files set sum = null where id < 9")
    assert read() == 0
    change("update files set sum = '00' where path = '3'")
    assert (read(), read()) == (20, 0)
    # As many rows as before.
    change("update files set path = 'other' where path = '3'")
    assert (read(), paths(catalog) >= {b"other"}, b"3" in paths(catalog)) == (20, True, False)
    assert (read(on_change="version"), read(on_change="version", whole_every=0)) == (20, 20)
    settings = application.settings(NO_KEY, on_change="version")
    assert register_files(catalog, settings, whole=True).rows == 20
    assert register_files(catalog, settings).rows == 0


def test_rows_without_keys_are_those_that_were_compared(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is away only while the rows are read is missed by no later pass."""
    application.add("a", "b")
    compare = foreign_query.OpenQuery.sum_of_rows

    def also_delete(query: foreign_query.OpenQuery, *others: object) -> str | None:
        found = compare(query, *others)
        application.owner.execute("delete from files where path = 'b'")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(foreign_query.OpenQuery, "sum_of_rows", also_delete)
        register_files(catalog, application.settings(NO_KEY))
    application.add("b")
    register_files(catalog, application.settings(NO_KEY))
    assert paths(catalog) == {b"a", b"b"}


def test_a_pass_without_keys_that_was_interrupted_begins_anew(
    catalog: Connection, application: Application
) -> None:
    application.add("a")
    settings = application.settings(NO_KEY)
    register_files(catalog, settings)
    application.owner.execute("update files set path = 'b'")
    with pytest.raises(ZeroDivisionError):
        register_files(catalog, settings, on_progress=lambda _: divmod(1, 0) and None)
    again = register_files(catalog, settings)
    assert (again.rows, again.gone, register_files(catalog, settings).rows) == (1, 1, 0)


def test_what_is_no_longer_listed_is_gone_and_comes_back(
    catalog: Connection, application: Application
) -> None:
    application.add("a", "b", "c")
    register_files(catalog, application.settings())
    application.owner.execute("delete from files where path = 'b'")
    assert register_files(catalog, application.settings()).gone == 0
    assert register_files(catalog, application.settings(), whole=True).gone == 1
    assert paths(catalog) == {b"a", b"c"}
    application.add("b")
    assert register_files(catalog, application.settings()).back == 1
    assert paths(catalog) == {b"a", b"b", b"c"}


def test_a_query_that_gives_nothing_any_more_loses_nothing(
    catalog: Connection, application: Application
) -> None:
    application.add("a", "b", "c")
    register_files(catalog, application.settings())
    application.owner.execute("alter table files enable row level security")
    for _ in range(2):
        with pytest.raises(CatalogRefused, match="gives no row any more"):
            register_files(catalog, application.settings(), whole=True)
    assert paths(catalog) == {b"a", b"b", b"c"}
    application.owner.execute("alter table files disable row level security")
    application.owner.execute("delete from files where path <> 'b'")
    assert register_files(catalog, application.settings(), whole=True).gone == 2


def test_a_pass_goes_on_where_it_was_interrupted(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(30)))
    register_files(catalog, application.settings())
    application.owner.execute("delete from files where path in ('3', '28')")

    class Interrupted(Exception):
        pass

    def interrupt(_: origin_passes.Registration) -> None:
        raise Interrupted

    for _ in range(2):
        with pytest.raises(Interrupted):
            register_files(catalog, application.settings(whole_every=0), on_progress=interrupt)
    rest = register_files(catalog, application.settings(whole_every=0))
    assert rest.rows < 28
    assert rest.gone == 2
    assert paths(catalog, "gone_at is not null") == {b"3", b"28"}


def test_a_crash_of_the_server_in_between_takes_nothing_for_gone(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(20)))
    register_files(catalog, application.settings())
    with pytest.raises(ZeroDivisionError):
        register_files(
            catalog,
            application.settings(whole_every=0),
            on_progress=lambda _: divmod(1, 0) and None,
        )
    catalog.execute("truncate ntt_backup.seen_places")
    rest = register_files(catalog, application.settings(whole_every=0))
    assert (rest.rows >= 20, rest.gone) == (True, 0)


@pytest.mark.parametrize("on_change", ["report", "version"])
def test_a_file_that_was_changed_is_reported_or_gets_a_new_version(
    catalog: Connection, application: Application, on_change: str
) -> None:
    application.add("a", "b", sum="00")
    register_files(catalog, application.settings(on_change=on_change))
    unread = unread_files.UnreadFiles(catalog, "remote")
    read = [
        (one.id, ReadFile(blob_number(nth), 0, 0o644)) for nth, one in enumerate(unread.next(10))
    ]
    unread.record(read, [])
    application.owner.execute("update files set size = 2, sum = '11' where path = 'b'")
    found = register_files(catalog, application.settings(on_change=on_change), whole=True)
    assert (found.changed, found.gone) == (1, 0)
    assert found.registered == (on_change == "version")
    if on_change == "report":
        assert paths(catalog, "failed = 'changed'") == {b"b"}
    else:
        assert paths(catalog, "replaced_at is not null and blobid is not null") == {b"b"}
        assert [one.path for one in unread.next(10)] == [b"b"]
    again = register_files(catalog, application.settings(on_change=on_change), whole=True)
    assert (again.changed, again.registered) == (0, 0)
    if on_change == "report":
        application.owner.execute("update files set size = 1, sum = '00' where path = 'b'")
        register_files(catalog, application.settings(), whole=True)
        assert not paths(catalog, "failed is not null")


def blob_number(nth: int) -> Blob:
    return Blob(f"{nth:064x}", 1)


def test_paths_are_bytes(catalog: Connection, application: Application) -> None:
    query = r"select '\x6100ff0a2f'::bytea as path union all select convert_to('ü', 'LATIN1')"
    register_files(catalog, application.settings(query))
    assert paths(catalog) == {b"a\0\xff\n/", b"\xfc"}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select 1 as path", "column path of type int4"),
        ("select 'a' as name", "no column path"),
        ("select 'a' as path, 1 as id", "nobody asked for, id"),
        ("select 'a' as path, 'b' as size", "column size of type text"),
        ("select path from nowhere", "does not exist"),
        ("delete from files returning path", "syntax error"),
        ("select 'a' as path) to stdout; drop table files; --", "syntax error"),
    ],
)
def test_a_query_that_cannot_be_used_is_refused(
    catalog: Connection, application: Application, query: str, said: str
) -> None:
    with pytest.raises(CatalogRefused) as caught:
        register_files(catalog, application.settings(query))
    text = f"{caught.value} {caught.value.hint}"
    assert said in text
    assert "catalog.from" in text
    assert "init-db" not in text


@pytest.mark.parametrize(
    ("wrong", "said", "hint"),
    [
        ({"query": "select path as name from files"}, "has no column path", "its columns are path"),
        ({"query": "select 1 as path"}, "a column path of type int4", "its columns are path"),
        ({"query": "select path from others"}, "permission denied for table", "grant its role"),
        ({"query": "select path from nowhere"}, "does not exist", "correct the query"),
        ({"query": "select writes() as path"}, "read-only transaction", "let the query only read"),
        ({"role": "nobody_there"}, 'role "nobody_there" does not exist', "catalog.from.role"),
        ({"user": "nobody_there"}, 'role "nobody_there" does not exist', "catalog.from.url"),
        ({"user": "postgres"}, "rights beyond that database", "make a role that may only read"),
    ],
)
def test_check_says_what_is_wrong_with_a_query_and_what_to_do(
    application: Application, wrong: dict[str, str], said: str, hint: str
) -> None:
    application.add("a")
    application.owner.execute(
        "create table others (path text); create function writes() returns text language plpgsql"
        " as $$begin insert into files (path) values ('x'); return 'x'; end$$;"
        " grant insert on files to public"
    )
    if user := wrong.pop("user", ""):
        wrong = {"url": make_conninfo(application.url, user=user)}
    with pytest.raises(BackupError) as caught:
        check.listed_by_query(application.settings(**wrong))
    assert said in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("here", "gives paths, such as here"),
        ("../up", "NUL is in it"),
        ("not", "there is no such file"),
        (None, "gives no path"),
    ],
)
def test_check_says_where_the_first_path_leads(
    application: Application, tmp_path: Path, path: str | None, said: str
) -> None:
    (tmp_path / "here").touch()
    settings = application.settings()
    settings.source.__dict__["root"] = tmp_path
    if path is not None:
        application.add(path)
    step = check.listed_by_query(settings)
    assert said in (step.text if path == "here" else step.warning)


def test_check_only_warns_of_a_query_that_a_pass_may_wait_for(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_QUERY_SECONDS", 0.5)
    application.add("a")
    settings = application.settings("select path from files, pg_sleep(9) order by path")
    assert "no row within" in check.listed_by_query(settings).warning


def test_a_query_may_end_with_a_comment(catalog: Connection, application: Application) -> None:
    application.add("a")
    settings = application.settings(f"{QUERY} -- of today")
    register_files(catalog, settings)
    assert paths(catalog) == {b"a"}
    assert "read, a: there is no such file" in check.listed_by_query(settings).warning


def test_a_query_that_takes_too_long_needs_an_index(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "_STEP_MS", 200)
    application.add("a")
    for query in (QUERY, NO_KEY):
        settings = application.settings(f"{query}, pg_sleep(9)")
        with pytest.raises(CatalogError, match="statement timeout") as caught:
            register_files(catalog, settings)
        assert "let an index give the rows" in caught.value.hint


def test_the_role_may_read_and_nothing_else(catalog: Connection, application: Application) -> None:
    application.owner.execute(
        "create function writes() returns text language plpgsql as $$ begin"
        " insert into files (path) values ('x'); return 'x'; end $$"
    )
    application.grant("insert")
    with pytest.raises(CatalogError, match="read-only transaction"):
        register_files(catalog, application.settings("select writes() as path"))
    superuser = application.settings()
    listed = superuser.catalog.from_
    assert listed is not None
    owner = psycopg.conninfo.make_conninfo(listed.url, user="postgres")
    with pytest.raises(ConfigError, match="rights beyond"):
        register_files(catalog, application.settings(url=owner))


def test_a_database_that_is_away_is_named(catalog: Connection, application: Application) -> None:
    away = application.settings(url="host=/nowhere dbname=app")
    with pytest.raises(CatalogUnavailable, match=r"the database of catalog\.from"):
        register_files(catalog, away)


def test_a_malformed_url_is_named_as_it_stands_in_the_settings(
    catalog: Connection, application: Application
) -> None:
    with pytest.raises(ConfigError, match=r"catalog\.from\.url is no PostgreSQL connection"):
        register_files(catalog, application.settings(url="postgresql://host:port/=/?x"))


def test_many_rows_with_one_key_are_refused(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(20)))
    with pytest.raises(CatalogRefused, match="have the same key"):
        register_files(catalog, application.settings("select path, 1 as key from files"))


def read_all(catalog: Connection) -> None:
    unread = unread_files.UnreadFiles(catalog, "remote")
    found = [(one.id, ReadFile(blob_number(one.id), 0, 0o644)) for one in unread.next(9)]
    unread.record(found, [])


def test_rows_of_any_length_stop_no_other_row(
    catalog: Connection, application: Application
) -> None:
    # What does not shrink has no room in an index.
    long = "(select string_agg(md5(i::text), '/') from generate_series(1, 3000) as i)"
    query = (
        f"select {long} as path, null::numeric as size, 'x' as checksum"
        f" union all select 'a', 4611686018427387904, {long}"
        " union all select 'b', 'NaN', repeat(' ', 1000000)"
    )
    register_files(catalog, application.settings(query))
    (cut,) = paths(catalog) - {b"a", b"b"}
    assert len(cut) == MOST_PATH_BYTES + 1
    rows = catalog.execute("select max(length(checksum)) from ntt_backup.places").fetchall()
    assert rows == [(1000,)]


@pytest.mark.parametrize("rows", [5, 30])
def test_a_row_without_a_key_is_refused(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(rows)))
    query = "select path, nullif(id, 3) as key from files"
    with pytest.raises(CatalogRefused, match="has no key"):
        register_files(catalog, application.settings(query))


def test_keys_may_be_bytes(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(30)))
    query = "select path, int8send(id * 1000) as key from files"
    assert register_files(catalog, application.settings(query)).registered == 30


def test_a_key_of_another_type_begins_anew(catalog: Connection, application: Application) -> None:
    application.add("a", "b")
    view = "create or replace view listed as select path, {} as key from files;"
    grant = f"grant select on listed to {application.reader}"
    application.owner.execute(view.format("id") + grant)
    settings = application.settings("select * from listed")
    register_files(catalog, settings)
    application.owner.execute(
        "drop view listed;" + view.format("now() + id * interval '1 s'") + grant
    )
    application.add("c")
    assert register_files(catalog, settings).registered == 1


def test_a_checksum_that_is_added_later_is_no_change(
    catalog: Connection, application: Application
) -> None:
    application.add("a", "b")
    register_files(catalog, application.settings())
    read_all(catalog)
    for sum, changed in (("11", 0), ("11", 0), ("22", 2)):
        application.owner.execute("update files set sum = %s", (sum,))
        assert register_files(catalog, application.settings(), whole=True).changed == changed


def test_a_clock_that_is_set_back_takes_nothing_for_gone(
    catalog: Connection, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_query, "STEP_ROWS", 7)
    application.add(*map(str, range(20)))
    with pytest.raises(ZeroDivisionError):
        register_files(catalog, application.settings(), on_progress=lambda _: divmod(1, 0) and None)
    catalog.execute("update ntt_backup.origins set began_at = now() + interval '1 hour'")
    found = register_files(catalog, application.settings())
    assert (found.gone, len(paths(catalog))) == (0, 20)
    # Nor does a file wait that was to wait for a moment.
    catalog.execute("update ntt_backup.places set wait_until = now() + interval '1 year'")
    unread = unread_files.UnreadFiles(catalog, "remote")
    assert (unread.any_left(), len(unread.next(100))) == (True, 20)


@pytest.fixture
def daemon(application: Application, catalog_url: str) -> StoreConfig:
    """The settings of a daemon that is notified of new rows."""
    settings = application.settings(channel="new", every=86400)
    settings.catalog.__dict__["url"] = catalog_url
    return settings


def test_no_notification_is_lost_between_two_processes_of_a_daemon(
    catalog: Connection,
    application: Application,
    daemon: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(register, "_STAY_SECONDS", 0)
    for name in ("a", "b"):
        application.add(name)
        # The next process follows at once, or nobody would listen meanwhile.
        assert register_due(daemon, lambda _: None, stays=True) == 0
        assert name.encode() in paths(catalog)


def test_a_daemon_that_waits_for_notifications_sends_what_others_saw_come_back(
    catalog: Connection,
    application: Application,
    daemon: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    application.add("a")
    register_files(catalog, application.settings())
    read_all(catalog)
    states: list[object] = []

    def wait(_: object, seconds: float) -> bool:
        states.extend(rows(catalog, "select remote_copy_failed from blobs"))
        if len(states) > 1:
            raise KeyboardInterrupt
        # The run for another target, whose role may not write the columns of this one.
        catalog.execute("update blobs set remote_copy_failed = true")
        catalog.execute(
            "insert into ntt_backup.failures (target, blobid, reason, detail)"
            " select 'remote', blobid, 'pruned', %s from blobs",
            (unread_files.RETURNED,),
        )
        return False

    monkeypatch.setattr(foreign_query.OpenQuery, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        register_due(daemon, lambda _: None, stays=True)
    assert states[1] in [(None,), (False,)]


def test_a_daemon_that_meets_another_command_tries_again_soon(
    catalog: Connection, application: Application, daemon: StoreConfig
) -> None:
    application.add("a")
    with range_locks.take_turns(catalog, "registering files", origin_passes.REGISTERING) as ours:
        assert ours
        assert 0 < register_due(daemon, lambda _: None, stays=True) <= 60
    assert paths(catalog) == set()


def test_a_role_of_one_target_leaves_files_that_come_back_to_the_daemons_of_others(
    catalog: Connection,
    catalog_url: str,
    application: Application,
    postgres: Postgres,
    role: Callable[[], str],
) -> None:
    init_db(catalog, "other")
    application.add("a", "b")
    register_files(catalog, application.settings())
    read_all(catalog)
    catalog.execute("update ntt_backup.places set gone_at = now() where path = 'a'")
    (blobid,) = (
        one for (one,) in rows(catalog, "select blobid from ntt_backup.places where path = 'a'")
    )
    for target in ("remote", "other"):
        catalog.execute(
            f"update blobs set {target}_copied = false, {target}_copy_failed = true".encode()
        )
        catalog.execute(
            "insert into ntt_backup.failures (target, blobid, reason, known_at)"
            " select %s, blobid, 'pruned', now() from blobs",
            (target,),
        )
    name = role()
    with session(make_conninfo(catalog_url, user=name), "test") as limited:
        done = postgres.psql(make_plan(limited, "remote").script(), catalog_url)
        assert done.returncode == 0, done.stderr
        assert register_files(limited, application.settings(), whole=True).back == 1

    def pending(target: str) -> list[object]:
        query = f"select blobid from blobs where not coalesce({target}_copy_failed, false)"
        return [one for (one,) in rows(catalog, query)]

    assert (pending("remote"), pending("other")) == ([blobid], [])
    unread_files.send_returned(catalog, "other")
    assert (pending("remote"), pending("other")) == ([blobid], [blobid])
    left = rows(catalog, "select target from ntt_backup.failures order by target")
    assert left == [("other",), ("remote",)]


def test_files_that_are_read_again_and_new_ones_come_at_once(
    catalog: Connection, catalog_url: str, application: Application
) -> None:
    application.add("changed")
    register_files(catalog, application.settings())
    read_all(catalog)
    catalog.execute("update ntt_backup.places set failed = 'changed'")
    application.add("new")

    def requeue() -> None:
        with connect(catalog_url, "requeue") as conn:
            unread_files.requeue_files(conn)

    def waits() -> bool:
        with connect(catalog_url, "look") as conn:
            return bool(conn.execute("select from pg_locks where not granted").fetchall())

    other = threading.Thread(target=requeue)
    listed = application.settings().catalog.from_
    assert listed is not None
    with foreign_query.open_query(listed, "test") as opened, catalog.transaction():
        current = origin_passes.Pass("", opened.definition)
        origin_passes.register(catalog, current, opened.rows_from(None), versions=False)
        other.start()
        wait_until(waits, "the other session to wait")
    other.join()
    assert paths(catalog) == {b"changed", b"new"}


def test_a_few_files_are_looked_up_before_the_server_knows_the_table(catalog: Connection) -> None:
    """Not each of the files that were registered a moment ago."""
    many, some = 20_000, 100
    add_places(catalog, many)
    names = [f"{n:064}" for n in range(1, some + 1)]
    expected = {name: [b"%d" % int(name)] for name in names}
    before = rows_read(catalog)
    assert listed_files.places_of(catalog, names) == expected
    # From here on as a worker, which walks indexes.
    walk_indexes(catalog)
    assert listed_files.places_of(catalog, names) == expected
    unread = unread_files.UnreadFiles(catalog, "remote")
    first, *others = unread.next(some)
    read = [(one.id, ReadFile(Blob(f"{one.id:064}", 1), mtime_ns=0, mode=0)) for one in others]
    unread.record(read, [(first.id, BadFile(FileReason.MISSING, "it is gone"))])
    assert unread.next(1)[0].id == many // 2 + some + 1
    assert rows_read(catalog) - before < 10 * some


def test_a_few_rows_are_looked_up_before_the_server_knows_the_table(
    catalog: Connection, application: Application
) -> None:
    add_places(catalog, 20_000)
    application.add(*map(str, range(19_800, 20_200)))
    listed = application.settings().catalog.from_
    assert listed is not None
    before = rows_read(catalog)
    with foreign_query.open_query(listed, "test") as opened, catalog.transaction():
        current = origin_passes.Pass("", opened.definition)
        rows = opened.rows_from(None)
        _, done = origin_passes.register(catalog, current, rows, versions=False)
    assert (done.rows, done.registered) == (400, 199)
    assert rows_read(catalog) - before < 10 * 400


def add_places(conn: Connection, count: int) -> None:
    """Files of which the first half was read."""
    conn.execute(
        "insert into ntt_backup.places (id, origin, path, blobid, size)"
        " select n, '', n::text::bytea, case when n <= %s then lpad(n::text, 64, '0') end, 1"
        " from generate_series(1, %s) as n",
        (count // 2, count),
    )


def rows_read(conn: Connection) -> int:
    """How many rows of places, and entries of their indexes, have been read until now."""
    conn.execute("select pg_stat_force_next_flush()")
    ((rows,),) = conn.execute(
        "select seq_tup_read + (select sum(idx_tup_read) from pg_stat_user_indexes as i"
        " where i.relid = t.relid) from pg_stat_user_tables as t where relname = 'places'"
    ).fetchall()
    return int(rows)
