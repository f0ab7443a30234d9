"""`move-catalog` leaves a catalog whole where it was, or whole where it goes."""

from __future__ import annotations

import json
import signal
from unittest import mock

import psycopg
import pytest

from ntt_backup.catalog.connection import database_name
from ntt_backup.cli.commands import catalog
from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

WAITING = "select 1 from pg_locks where not granted and relation = %s::regclass"
OURS = (
    "select 1 from pg_stat_activity where datname = current_database()"
    " and application_name like 'ntt-backup-remote/%'"
)


def rows(url: str) -> dict[str, list[tuple[object, ...]]]:
    """All rows of our tables, by table."""
    with psycopg.connect(url, options="-c datestyle=ISO") as conn:
        named = "select schemaname, tablename from pg_tables where schemaname not in ('pg_catalog',"
        found = conn.execute(f"{named} 'information_schema') order by 2".encode()).fetchall()
        return {
            name: conn.execute(
                f"select t::text from {schema}.{name} t order by 1".encode()
            ).fetchall()
            for schema, name in found
        }


def test_all_rows_are_moved_and_the_settings_follow(env: Environment, scratch_url: str) -> None:
    count = len(env.fill_both(20)) + 1
    env.path(env.put(b"lost")).unlink()
    env.call("run", expect=7)
    before, text = rows(env.url), env.config.read_text()
    # The two servers write a date in different orders, and none says in which.
    for url, style in ((env.url, "SQL, DMY"), (scratch_url, "SQL, MDY")):
        with psycopg.connect(url) as conn:
            command = f"alter database {database_name(url)} set datestyle to '{style}'"
            conn.execute(command.encode())
    real = env.config.rename(env.root / "real.toml")
    env.config.symlink_to(real)

    with mock.patch.object(catalog, "write_durably", side_effect=KeyboardInterrupt):
        env.call("move-catalog", scratch_url, expect=130)
    assert real.read_text() == text
    done = env.call("move-catalog", scratch_url, "--json", expect=0)

    assert rows(scratch_url) == before == rows(env.url)
    told = json.loads(done.stdout)
    assert (told["rows"]["blobs"], told["rows"]["failures"], told["written"]) == (count, 1, True)
    assert real.read_text() == text.replace(json.dumps(env.url), json.dumps(scratch_url))
    assert env.config.readlink() == real
    status = json.loads(env.call("status", "--json").stdout)
    assert (status["copied"], status["failed"]) == (count - 1, 1)
    assert "the catalog itself" in env.call("move-catalog", scratch_url, expect=2).stderr
    env.query("update blobs set remote_last_checked = now()")
    assert "has other rows in blobs" in env.call("move-catalog", env.url, expect=2).stderr


def test_a_catalog_in_use_is_not_moved(env: Environment, scratch_url: str) -> None:
    env.fill(1)
    with psycopg.connect(env.url, application_name="ntt-backup-remote/other"):
        said = env.call("move-catalog", scratch_url, expect=3).stderr
    assert "ntt-backup-remote/other uses the catalog" in said
    assert rows(scratch_url) == {}


def test_what_another_program_keeps_in_the_table_is_not_lost(
    env: Environment, scratch_url: str
) -> None:
    env.fill(1)
    env.query("alter table blobs add column owner text")
    said = env.call("move-catalog", scratch_url, expect=2).stderr
    assert "columns of other programs: owner" in said
    assert rows(scratch_url) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("amid", "signum"), [(False, signal.SIGKILL), (True, signal.SIGKILL), (True, signal.SIGTERM)]
)
def test_a_move_that_is_killed_is_repeated(
    env: Environment, scratch_url: str, amid: bool, signum: signal.Signals
) -> None:
    """While it waits for a writer here, or for one there, when some tables are copied."""
    env.fill(5)
    text, before, (here, there) = env.config.read_text(), rows(env.url), (env.url, scratch_url)
    table = "public.blobs"
    if amid:
        env.write_config(catalog={"url": there})
        env.call("init-db", expect=0)
        env.config.write_text(text)
        env.url, table = there, "ntt_backup.places"
    with psycopg.connect(env.url) as other:
        other.execute(f"lock table {table} in share row exclusive mode".encode())
        with env.running("move-catalog", there) as moving:
            wait_until(lambda: env.query(WAITING, table), "the move to wait")
            moving.send_signal(signum)
            if signum == signal.SIGKILL:
                moving.wait(PATIENCE)
        assert rows(there).get("blobs", []) == []
    env.url = here
    assert env.config.read_text() == text
    wait_until(lambda: not env.query(OURS), "the server to miss the killed session")
    env.call("move-catalog", there, expect=0)
    assert rows(there) == before
