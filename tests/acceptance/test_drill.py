"""`drill`: it says that everything would come back only where that is so, and touches nothing."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from psycopg import conninfo

from ntt_backup.config import Settings, load
from ntt_backup.daemon.checks import check_due
from ntt_backup.errors import CatalogUnavailable
from ntt_backup.events import Event
from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.other_backup import EXTENSION
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE


@pytest.fixture
def backed_up(env: Environment, postgres: Postgres) -> Environment:
    """All was sent, the last of it after the newest dump, in which that is not copied."""
    env.write_config(dump={"bin": str(postgres.programs)})
    env.fill_both(60, size=lambda chance: chance.randrange(1, 20_000))
    env.fill(5, seed=2, size=lambda chance: chance.randrange(1, 20_000))
    env.register([f"{number:064x}" for number in range(3)])  # never were in the store
    env.call("dump", expect=0)
    env.put(b"younger than the dump")
    env.send_all()
    env.query("update blobs set remote_copy_failed = true where remote_copied is not true")
    return env


def drilled(env: Environment, url: str, *options: str, code: int) -> dict[str, Any]:
    few = ("--json", "--workers", "1")  # Each has a session, which takes time.
    done = env.call("drill", "--scratch", str(back(env)), "--database", url, *few, *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["proved"] is (code == 0)
    return found


def back(env: Environment) -> Path:
    return env.root / "scratch"


def test_all_that_is_copied_is_restored_and_production_is_not_touched(
    backed_up: Environment, database_url: str
) -> None:
    env = backed_up
    rows, store = env.query("select * from blobs order by 1"), env.in_store()
    remote = tree(env.remote.local)

    found = drilled(env, database_url, "--bwlimit", "500kB/s", code=0)

    assert found["restore_s"] > found["bytes"] / 500_000 - 0.5
    assert (found["rows"], found["copied"]) == (68, 60)
    assert (found["restored"], found["right"]) == (66, 66)
    assert (found["later"], found["unsent"]) == (1, 3)
    assert (found["lost"], found["wrong"], found["not_restored"]) == (0, 0, {})
    assert tree(back(env)) == store
    assert found["bytes"] == sum(map(len, store.values()))
    with psycopg.connect(database_url) as conn:
        copied = conn.execute("select count(*) from blobs where remote_copied").fetchall()
    assert copied == [(60,)]
    assert env.query("select * from blobs order by 1") == rows
    assert env.in_store() == store
    assert tree(env.remote.local) == remote


def test_an_extension_that_only_a_superuser_creates_is_created_before(
    backed_up: Environment, database_url: str
) -> None:
    env = backed_up
    if not env.query("select 1 from pg_available_extensions where name = %s", EXTENSION):
        pytest.skip(f"this PostgreSQL has no extension {EXTENSION}")
    env.query(f"create extension {EXTENSION}")
    env.query(f"create table others (it {EXTENSION}); comment on table others is 'kept'")
    env.call("dump", expect=0)

    asked = ("drill", "--scratch", str(back(env)), "--database", database_url)
    refused = env.call(*asked, expect=7)
    assert "extensions that only a superuser creates" in refused.stderr
    assert f'create extension "{EXTENSION}";' in refused.stderr
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"create extension {EXTENSION}".encode())
        drilled(env, database_url, code=0)
        said = conn.execute("select obj_description('others'::regclass)").fetchall()
    assert said == [("kept",)]


def test_the_first_days_drill_is_proved(
    env: Environment, postgres: Postgres, database_url: str
) -> None:
    """With the settings as they are: the first dump is made before anything is copied."""
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    blobs = len(env.fill(20))
    env.call("run", expect=0)
    found = drilled(env, database_url, code=0)
    assert (found["copied"], found["right"]) == (blobs, blobs)


@pytest.mark.long
def test_a_series_of_dumps_is_proved_by_its_last_increment(
    backed_up: Environment, database_url: str
) -> None:
    env = backed_up
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(dump={"mode": "series"})
    for _ in range(3):
        env.put(b"one more")
        before = {*env.remote.local.glob("pgdump/*.dump")}
        env.call("dump", "--force", expect=0)
    # Not the last by name, where two began in one second.
    (last,) = {*env.remote.local.glob("pgdump/*.dump")} - before
    assert json.loads(Path(f"{last}.json").read_text())["base"]

    found = drilled(env, database_url, code=0)

    assert found["dump"] == last.name
    assert found["bad_dumps"] == []


def test_lost_and_wrong_remote_blobs_are_reported(
    backed_up: Environment, database_url: str
) -> None:
    env = backed_up
    lost, rotten = sorted(env.copied())[:2]
    env.remote_path(lost).unlink()
    content = bytearray(env.remote_path(rotten).read_bytes())
    content[-1] ^= 1
    env.remote_path(rotten).write_bytes(content)

    done = env.call("drill", "--scratch", str(back(env)), "--database", database_url, expect=7)
    assert "NOT PROVED" in done.stdout
    assert "1 remote-corrupt: not restored" in done.stdout
    assert "copied according to the catalog, but not restored" in done.stdout
    assert lost in done.stdout
    assert rotten in done.stdout


@pytest.mark.long
def test_a_copied_row_without_a_blobid_is_reported_as_lost(
    backed_up: Environment, database_url: str
) -> None:
    """Somebody's upper case, and a row that would repaint the terminal."""
    env = backed_up
    names = [f"{'AB' * 32}", "\x1b[2Jall is well"]
    for name in names:
        env.query("insert into blobs (blobid, remote_copied) values (%s, true)", name)
    env.call("dump", expect=0)

    done = env.call("drill", "--scratch", str(back(env)), "--database", database_url, expect=7)
    assert "NOT PROVED" in done.stdout
    assert "2 copied according to the catalog, but not restored" in done.stdout
    assert names[0] in done.stdout
    assert "\x1b" not in done.stdout


def test_a_damaged_newer_dump_proves_nothing(backed_up: Environment, database_url: str) -> None:
    """The catalog that comes back then is not the one that should."""
    env = backed_up
    place = env.remote.local / "pgdump"
    (old,) = place.glob("*.dump")
    env.call("dump", "--force", expect=0)
    # Not the last by name, where both began in one second.
    (new,) = {*place.glob("*.dump")} - {old}
    new.write_bytes(new.read_bytes()[:-1] + b"!")

    found = drilled(env, database_url, code=7)

    assert found["dump"] == old.name
    assert len(found["bad_dumps"]) == 1
    assert new.name in found["bad_dumps"][0]
    assert (found["lost"], found["wrong"], found["not_restored"]) == (0, 0, {})


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        pytest.param("delete from blobs", 0, marks=pytest.mark.long),
        ("update blobs set remote_copied = null", 5),
    ],
    ids=["empty", "nothing copied"],
)
def test_a_catalog_that_calls_nothing_copied_proves_nothing(
    env: Environment, postgres: Postgres, database_url: str, loss: str, rows: int
) -> None:
    """As it is when somebody has emptied the table, and in the dump before the first run."""
    env.write_config(dump={"bin": str(postgres.programs)})
    env.fill_both(5)
    env.query(loss)
    env.call("dump", "--force", expect=0)
    found = drilled(env, database_url, code=7)
    assert (found["right"], found["rows"], found["lost"]) == (5, rows, 0)


def test_a_drill_before_the_first_blob_proves_nothing(
    env: Environment, postgres: Postgres, database_url: str
) -> None:
    env.write_config(dump={"bin": str(postgres.programs)})
    env.fill_both(0)
    env.call("dump", "--force", expect=0)
    found = drilled(env, database_url, code=7)
    assert (found["right"], found["rows"], found["lost"]) == (0, 0, 0)


def test_unusable_scratch_space_is_refused_before_the_catalog_is_restored(
    env: Environment, database_url: str
) -> None:
    (env.root / "loop").symlink_to("loop")
    (env.root / "file").touch()
    for scratch in ("no/such", "loop", "loop/new", "file/new", "file"):
        place = str(env.root / scratch)
        done = env.call("drill", "--scratch", place, "--database", database_url, expect=2)
        assert f"cannot use {place}" in done.stderr


def test_objects_of_an_extension_leave_the_database_empty(
    backed_up: Environment, database_url: str
) -> None:
    """As a new database has it where template1 has it."""
    with psycopg.connect(database_url) as conn:
        conn.execute("create view brought as select 1")
        conn.execute("alter extension plpgsql add view brought")
    drilled(backed_up, database_url, code=0)


def test_a_prefix_restores_and_checks_only_its_blobs(
    backed_up: Environment, database_url: str
) -> None:
    env = backed_up
    prefix = min(env.copied())[:1]
    wanted = {name: data for name, data in env.in_store().items() if name.startswith(prefix)}

    found = drilled(env, database_url, "--prefix", prefix, code=0)

    assert tree(back(env)) == wanted
    assert found["right"] == len(wanted)
    assert found["rows"] < 68


def test_used_directories_and_databases_are_refused_as_scratch_space(
    env: Environment, database_url: str
) -> None:
    env.fill(5)

    def refused(scratch: Path, url: str) -> str:
        done = env.call("drill", "--scratch", str(scratch), "--database", url, expect=2)
        return done.stderr

    before = env.in_store(), env.query("select * from blobs order by 1")
    assert "the database" in (said := refused(back(env), env.url))
    assert "is not empty" in said
    assert "lies in the store" in refused(env.store / "new", database_url)
    assert f"{env.root} is not empty" in refused(env.root, database_url)
    assert (env.in_store(), env.query("select * from blobs order by 1")) == before
    assert not back(env).exists()


@pytest.mark.long
def test_a_daemon_drills_in_a_database_and_a_directory_of_its_own(
    env: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    env.write_config(dump={"bin": str(postgres.programs)})
    blobids = env.fill_both(40)
    env.call("dump", expect=0)
    before = env.query("select datname from pg_database order by 1")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    server = conninfo.make_conninfo(env.url, dbname="postgres")
    drill = {"every": "1h", "scratch": str(scratch), "database": server}
    env.write_config(**{"checks.drill": drill})
    with env.running("run", "--watch"):
        done = env.await_event("check_complete")
    assert (done["exit_code"], done["blobs"], done["complete"]) == (0, len(blobids), True)
    assert list(scratch.iterdir()) == []
    assert env.query("select datname from pg_database order by 1") == before


@pytest.fixture
def daily(env: Environment, postgres: Postgres) -> Environment:
    """A daemon drills, below a directory that is empty."""
    scratch = env.root / "space"
    scratch.mkdir()
    env.write_config(dump={"bin": str(postgres.programs)})
    server = conninfo.make_conninfo(env.url, dbname="postgres")
    drill = {"every": "1h", "scratch": str(scratch), "database": server}
    env.write_config(**{"checks.drill": drill})
    return env


def checked(env: Environment) -> list[Event]:
    """What a daemon tells of the checks that are due."""
    told: list[Event] = []
    over = check_due(load(Settings, file=env.config, environ={}), told.append, patient=True)
    assert over.away == ""
    return told


def noted(env: Environment) -> list[tuple[Any, ...]]:
    return env.query("select exit_code, blobs from ntt_backup.checks where command = 'drill'")


def test_a_drill_waits_for_the_first_dump(daily: Environment) -> None:
    daily.fill_both(3)
    daily.write_config(run={"skip_pgdump": False})
    assert checked(daily) == []
    daily.call("dump", expect=0)
    *_, done = checked(daily)
    assert done.fields["exit_code"] == 0


def test_a_drill_that_is_cut_short_proves_nothing(
    daily: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = daily
    env.fill_both(3)
    env.write_config(**{"checks.drill": {"max_time": "1s"}})

    def endless(*_: object, on_restored: Callable[[None], None], **__: object) -> NoReturn:
        while True:
            on_restored(None)

    monkeypatch.setattr("ntt_backup.restore.drill.drill", endless)
    *_, done = checked(env)
    assert done.fields["exit_code"] == 7
    assert noted(env) == [(7, 0)]
    assert "NOT PROVED" in env.call("check").stdout


def test_a_drill_whose_catalog_is_restored_for_too_long_ends_with_its_time(
    daily: Environment, postgres: Postgres
) -> None:
    env = daily
    env.fill_both(3)
    env.call("dump", expect=0)
    programs = env.root / "programs"
    programs.mkdir()
    for real in postgres.programs.iterdir():
        (programs / real.name).symlink_to(real)
    slow = programs / "pg_restore"
    slow.unlink()
    real = postgres.programs / "pg_restore"
    slow.write_text(f'#!/bin/sh\ncase $1 in --version) exec {real} "$@";; esac\nexec sleep 600\n')
    slow.chmod(0o755)
    env.write_config(dump={"bin": str(programs)}, **{"checks.drill": {"max_time": "1s"}})
    began = time.monotonic()
    *_, done = checked(env)
    assert time.monotonic() - began < PATIENCE
    assert (done.fields["complete"], done.fields["exit_code"]) == (False, 7)
    assert list((env.root / "space").iterdir()) == []


@pytest.mark.long
def test_a_drill_of_a_random_part_has_blobs_in_it(daily: Environment) -> None:
    daily.fill_both(3)
    daily.call("dump", expect=0)
    daily.write_config(**{"checks.drill": {"max_bytes": "1"}})
    *_, done = checked(daily)
    assert (done.fields["exit_code"], done.fields["complete"]) == (0, False)
    assert noted(daily) == [(0, 1)]


def test_an_outage_of_the_catalog_in_a_drill_is_none_of_the_drills_own_database(
    daily: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    daily.fill_both(3)
    daily.call("dump", expect=0)
    daily.write_config(**{"checks.drill": {"max_bytes": "1"}})
    told: list[Event] = []

    def gone(*_: object) -> NoReturn:
        raise CatalogUnavailable("gone")

    monkeypatch.setattr("ntt_backup.daemon.checks.estimated_bytes", gone)
    over = check_due(load(Settings, file=daily.config, environ={}), told.append, patient=True)
    assert (over.away, over.reason) == ("catalog", "gone")
    assert [one.kind for one in told] == ["check_start"]


def test_what_killed_drills_have_left_is_removed(daily: Environment) -> None:
    env = daily
    env.fill_both(3)
    env.call("dump", expect=0)
    left, alive, other = (env.root / "space" / f"ntt-backup-drill-{n}" for n in ("1", "2", "3"))
    for directory in (left, alive):
        (directory / "blobs").mkdir(parents=True)
    other.symlink_to(env.store)
    names = [f"ntt_backup_drill_{end}" for end in ("0" * 16, "f" * 16, "mine")]
    for name in names:
        env.query(f"create database {name}")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    server = env.settings["checks.drill"]["database"]
    with psycopg.connect(server, autocommit=True) as maker:
        maker.execute("select pg_advisory_lock(-1)")
        checked(env)
        there = {name for (name,) in env.query("select datname from pg_database")}
    os.close(lock)
    for name in names[1:]:
        env.query(f"drop database {name}")
    assert sorted((env.root / "space").iterdir()) == [alive, other]
    assert {name for name in there if name.startswith("ntt_backup_drill_")} == {*names[1:]}
    assert noted(env) == [(0, 3)]
    assert len(env.in_store()) == 3


@pytest.mark.long
def test_a_daemon_drills_once_a_dump_has_a_copied_blob(daily: Environment) -> None:
    env = daily
    for name in ("reconcile", "verify"):
        env.write_config(**{f"checks.{name}": {"every": "1h"}})
    env.fill(3)
    env.call("dump", expect=0)
    # An empty target looks like a disk that is not mounted.
    assert checked(env) == []
    env.send_all()
    told = [(one.kind, one.fields["command"]) for one in checked(env)]
    assert {command for _, command in told} == {"reconcile", "verify"}
    assert noted(env) == []
    env.call("dump", "--force", expect=0)
    checked(env)
    assert noted(env) == [(0, 3)]


def test_scratch_space_that_cannot_be_used_is_told(daily: Environment) -> None:
    daily.fill_both(3)
    daily.write_config(**{"checks.drill": {"scratch": str(daily.root / "nowhere")}})
    *_, failed = checked(daily)
    assert failed.kind == "check_failed"
    assert "checks.drill.scratch" in failed.fields["hint"]
