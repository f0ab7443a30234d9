"""`move-catalog` leaves a catalog whole where it was, or whole where it goes."""

from __future__ import annotations

import json
import signal

import psycopg
import pytest

from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

WAITING = "select 1 from pg_locks where not granted and relation = 'public.blobs'::regclass"
OURS = (
    "select 1 from pg_stat_activity where datname = current_database()"
    " and application_name like 'ntt-backup-remote/%'"
)


def rows(url: str) -> dict[str, list[tuple[object, ...]]]:
    """All rows of our tables, by table."""
    with psycopg.connect(url) as conn:
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

    done = env.call("move-catalog", scratch_url, "--json", expect=0)
    again = env.call("move-catalog", scratch_url, expect=2)

    assert rows(scratch_url) == before == rows(env.url)
    told = json.loads(done.stdout)
    assert (told["rows"]["blobs"], told["rows"]["failures"], told["written"]) == (count, 1, True)
    assert env.config.read_text() == text.replace(json.dumps(env.url), json.dumps(scratch_url))
    assert "has rows in" in again.stderr
    status = json.loads(env.call("status", "--json").stdout)
    assert (status["copied"], status["failed"]) == (count - 1, 1)


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
def test_a_move_that_is_killed_is_repeated(env: Environment, scratch_url: str) -> None:
    env.fill(5)
    text = env.config.read_text()
    with env.locked_catalog(), env.running("move-catalog", scratch_url) as moving:
        wait_until(lambda: bool(env.query(WAITING)), "the move to wait")
        moving.send_signal(signal.SIGKILL)
        moving.wait(PATIENCE)
    wait_until(lambda: not env.query(OURS), "the server to miss the killed session")
    assert env.config.read_text() == text
    assert rows(scratch_url) == {}
    env.call("move-catalog", scratch_url, expect=0)
    assert len(rows(scratch_url)["blobs"]) == 5
