"""Dumps of the catalog: what lies in pgdump/ on the remote, and what a run makes of a failure."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ntt_backup.config import Settings, load
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.dump import job, pg_programs
from ntt_backup.dump import record as records
from ntt_backup.dump import restore as dump_restore
from ntt_backup.errors import DumpFailed
from tests.helpers.environment import IGNORING_CHILDREN, Environment
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import Sshd
from tests.helpers.waiting import PATIENCE, wait_until

MADE = ["dump_start", "dump_complete"]
# Where a dump is on the remote whose clock was wrong.
ODD = ["dump_start", "warning", "dump_complete"]


@pytest.fixture
def dumping(env: Environment, postgres: Postgres) -> Environment:
    """The environment, with the pg_dump of its server, and runs that make dumps."""
    env.write_config(
        run={"skip_pgdump": False}, dump={"bin": str(postgres.programs), "keep_last": 2}
    )
    return env


def shelf(env: Environment) -> list[str]:
    """All that stands in pgdump."""
    place = env.remote.local / "pgdump"
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def dumps(env: Environment) -> list[str]:
    """The dumps there, by name; each has its record, and nothing else is there."""
    names = [name for name in shelf(env) if name.endswith(".dump")]
    assert shelf(env) == sorted([*names, *(f"{name}.json" for name in names)])
    return names


def content(env: Environment, name: str) -> bytes:
    return (env.remote.local / "pgdump" / name).read_bytes()


def record(env: Environment, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(content(env, f"{name}.json"))
    return found


def settings(env: Environment) -> Settings:
    return load(Settings, file=env.config, environ={})


def make(env: Environment, *, force: bool = False) -> list[str]:
    """A dump as the command makes it, without starting Python; the names of its events."""
    said: list[str] = []
    job.dump(settings(env), lambda event: said.append(event.kind), force=force)
    return said


def fake(directory: Path, name: str, script: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def stand_in(env: Environment, postgres: Postgres, tmp_path: Path, script: str) -> Path:
    """A pg_dump of the right version that does what script says ($real is the real one)."""
    directory, real = tmp_path / "bin", postgres.programs
    fake(
        directory,
        "pg_dump",
        f'real={real}/pg_dump\n[ "$1" != --version ] || exec "$real" --version\n{script}',
    )
    fake(directory, "pg_restore", f'exec {real}/pg_restore "$@"')
    env.write_config(dump={"bin": str(directory)})
    return directory


# --- what a dump is -------------------------------------------------------------------------------


def test_a_run_dumps_the_catalog_before_it_sends(
    dumping: Environment, postgres: Postgres, database_url: str
) -> None:
    dumping.write_config(dump={"beside": False})
    blobids = dumping.fill(20)
    dumping.run("run", expect=0)
    started = dumping.events("dump_complete")
    name, after = (event["name"] for event in started)
    assert dumps(dumping) == sorted([name, after])
    data, said = content(dumping, name), record(dumping, name)
    assert (said["bytes"], said["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    names = [event["event"] for event in dumping.events()]
    assert names.index("dump_complete") < names.index("batch_complete")
    assert started[0]["bytes"] == len(data)
    # In the first one nothing is copied: it does not tell what must come back.
    assert [one["reason"] for one in dumping.events("dump_start")] == ["first", "marked"]
    assert [record(dumping, one)["copied"] for one in (name, after)] == [False, True]
    assert max(n for n, one in enumerate(names) if one == "batch_complete") < (
        len(names) - 1 - names[::-1].index("dump_start")
    )
    place = dumping.remote.local / "pgdump"
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}

    restore = [str(postgres.programs / "pg_restore"), "--exit-on-error", "-d", database_url]
    subprocess.run(restore, input=data, check=True, capture_output=True)
    with psycopg.connect(database_url) as conn:
        rows = conn.execute("select blobid, remote_copied from blobs order by 1").fetchall()
    assert rows == [(blobid, None) for blobid in sorted(blobids)]  # as it was before the run


@pytest.mark.docker
@pytest.mark.parametrize("account", ["csh", "fishy", "noisy"])
def test_a_dump_goes_through_odd_accounts(dumping: Environment, remote: Sshd, account: str) -> None:
    dumping.through(remote.as_user(account))
    dumping.run("dump", expect=0)
    assert len(dumps(dumping)) == 1


def test_the_password_is_in_no_argument(
    dumping: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    script = f'printf "%s\\n" "$@" "in environment: $PGPASSWORD" >{seen}; exec "$real" "$@"'
    stand_in(dumping, postgres, tmp_path, script)
    url = psycopg.conninfo.make_conninfo(dumping.url, password="s3 cret'")
    dumping.write_config(catalog={"url": url})
    dumping.run("dump", expect=0)
    *arguments, environment = seen.read_text().splitlines()
    assert environment == "in environment: s3 cret'"
    assert "cret" not in "".join(arguments)


# --- when one is made, and which stay -------------------------------------------------------------


def test_no_dump_is_made_while_nothing_changes(dumping: Environment) -> None:
    dumping.fill(5)
    dumping.run("dump", expect=0)
    again = dumping.run("dump", expect=0)
    (name,) = dumps(dumping)
    skipped = f"dump skipped: nobody else has changed the catalog since {name}"
    assert again.stdout.strip() == skipped
    away = dumping.remote.local.rename(dumping.remote.local.with_name("away"))
    dumping.run("dump", expect=6)
    assert [bool(one["error"]) for one in dumping.status()["dumps"]] == [False, True]
    away.rename(dumping.remote.local)
    dumping.run("dump", expect=0)
    assert [(one["name"], one["error"]) for one in dumping.status()["dumps"]] == [(name, "")]
    dumping.run("dump", "--force", expect=0)
    assert len(dumps(dumping)) == 2


@pytest.mark.long
def test_a_run_that_has_nothing_to_send_dumps_what_others_changed(dumping: Environment) -> None:
    blobids = dumping.fill(5)
    for _ in range(2):
        dumping.run("run", expect=0)
    assert dumping.copied() == set(blobids)  # which is our own mark
    assert [event["reason"] for event in dumping.events("dump_start")] == ["first", "marked"]
    assert len(dumping.events("dump_skipped")) == 1
    dumping.query("update blobs set created_at = now() where blobid = %s", blobids[0])
    dumping.run("run", expect=0)
    assert [event["reason"] for event in dumping.events("dump_start")] == [
        "first",
        "marked",
        "changed",
    ]


# By the receiver, and by the shell.
@pytest.mark.parametrize("strategy", ["auto", pytest.param("tar", marks=pytest.mark.long)])
def test_a_dump_is_as_old_as_its_number_and_not_as_its_name(
    dumping: Environment, database_url: str, strategy: str
) -> None:
    """One that was made while the clock was ahead is not what comes back, and takes no place."""
    dumping.write_config(
        run={"strategy": strategy}, dump={"keep_last": 2, "keep_daily": 0, "keep_weekly": 0}
    )
    dumping.fill(20)
    assert make(dumping) == MADE
    (first,) = dumps(dumping)
    place = dumping.remote.local / "pgdump"
    ahead = "29990101T000000Z-00000001.dump"
    (place / first).rename(place / ahead)
    (place / f"{first}.json").rename(place / f"{ahead}.json")
    said = records.read(content(dumping, f"{ahead}.json").decode())
    assert said is not None
    signed = said.signed(ahead, SigningKeys.of(settings(dumping)))
    (place / f"{ahead}.json").write_text(signed.to_json())
    dumping.fill(20, seed=2)
    assert make(dumping, force=True) == ODD
    newest, still = dumps(dumping)
    assert still == ahead
    live, before = dumping.url, rows_of(dumping.url)
    dumping.write_config(catalog={"url": database_url})

    done = dumping.run("restore", "--catalog", expect=0)
    assert newest in done.stdout
    assert rows_of(database_url) == before
    dumping.write_config(catalog={"url": live})
    for _ in range(2):
        assert make(dumping, force=True) == ODD
    assert newest not in dumps(dumping)
    assert len(dumps(dumping)) == 3
    assert ahead in dumps(dumping)


def test_a_remote_whose_disk_is_away_gets_no_dump(dumping: Environment) -> None:
    dumping.fill(1)
    dumping.run("run", "--skip-pgdump", expect=0)
    (dumping.remote.local / "by-hash").rename(dumping.remote.local / "elsewhere")
    done = dumping.run("dump", expect=5)
    assert "remote.path is gone" in done.stderr
    assert shelf(dumping) == []


# --- and back -------------------------------------------------------------------------------------


def rows_of(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute("select * from blobs order by blobid").fetchall()


def damage(env: Environment, name: str) -> None:
    data = content(env, name)
    begin, end = len(data) // 3, len(data) // 2
    broken = data[:begin] + bytes(255 - byte for byte in data[begin:end]) + data[end:]
    (env.remote.local / "pgdump" / name).write_bytes(broken)


def test_the_catalog_comes_back_row_by_row(
    dumping: Environment, database_url: str, role: Callable[[], str]
) -> None:
    dumping.fill(300)
    dumping.run("run", expect=0)
    dumped = dumping.run("dump", "--force")
    before = rows_of(dumping.url)
    (*_, newest) = dumps(dumping)
    said = record(dumping, newest)
    theirs = dumping.remote.local / "pgdump" / "20200101T000000Z-00000001.dump"
    theirs.with_name(f"{theirs.name}.json").write_text(
        json.dumps({**said, "database": "another", "number": 1})
    )
    dumping.write_config(catalog={"url": database_url})

    done = dumping.run("restore", "--catalog", expect=0)
    (last,) = set(re.findall(r"\S+\.dump", done.stdout))
    assert f"dumped the catalog: {last}" in dumped.stdout
    made = f"from {last}, a dump of the database {said['database']} on {said['host']}; "
    assert made in done.stdout
    assert "there are dumps of other databases, too: another" in done.stderr
    assert rows_of(database_url) == before
    # The program goes on as an ordinary role.
    (grant,) = re.findall(r"grant ntt_restore_\w+ to ROLE;", done.stdout)
    name = role()
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(grant.replace("ROLE", name).encode())
    dumping.write_config(catalog={"url": psycopg.conninfo.make_conninfo(database_url, user=name)})
    again = dumping.run("run")
    assert (again.returncode, "0 copied" in again.stdout) == (0, True), again.stdout


def test_owners_and_grants_come_back_as_sql(
    dumping: Environment, database_url: str, role: Callable[[], str]
) -> None:
    owner, reader = role(), role()
    dumping.query("create table of_others (name text)")
    dumping.query(f"alter table of_others owner to {owner}")
    dumping.query(f"grant select on of_others to {reader}")
    dumping.query(
        f"alter default privileges in schema ntt_backup grant select on tables to {owner}"
    )
    assert make(dumping) == MADE
    dumping.write_config(catalog={"url": database_url})

    done = dumping.run("restore", "--catalog", expect=0)
    (made,) = re.findall(r"belongs to (\w+) now, and no grants were restored", done.stdout)
    *_, shown = done.stdout.partition("as a superuser run:\n")
    assert f"ALTER TABLE public.of_others OWNER TO {owner};" in shown
    assert "TO postgres;" not in shown
    owners = (
        "select tableowner, has_table_privilege(%s, 'of_others', 'select') from pg_tables where"
    )
    with psycopg.connect(database_url, autocommit=True) as conn:
        query = f"{owners} tablename = 'of_others'".encode()
        assert conn.execute(query, [reader]).fetchall() == [(made, False)]
        conn.execute(shown.encode())
        assert conn.execute(query, [reader]).fetchall() == [(owner, True)]


def test_the_beginning_of_a_large_dump_is_enough_to_check_it_and_to_tell_of_owners(
    dumping: Environment,
    database_url: str,
    role: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = role()
    dumping.query(
        "create table of_others as select random()::text as t from generate_series(1, 50000)"
    )
    dumping.query(f"alter table of_others owner to {name}")
    monkeypatch.setattr(pg_programs, "HEAD_BYTES", 64 * 1024)
    assert make(dumping) == MADE
    assert record(dumping, *dumps(dumping))["bytes"] > 4 * 64 * 1024
    dumping.write_config(catalog={"url": database_url})
    found = dump_restore.restore_catalog(settings(dumping), pytest.fail)
    assert found.rights == (f"ALTER TABLE public.of_others OWNER TO {name};",)


def test_a_damaged_dump_is_told_of_and_the_one_before_it_taken(
    dumping: Environment, database_url: str
) -> None:
    """The dump is so large that pg_restore sees the damage long before its end."""
    dumping.query(
        "insert into blobs (blobid) select encode(sha256(n::text::bytea), 'hex')"
        " from generate_series(1, 50000) as n"
    )
    for _ in range(2):
        assert make(dumping, force=True) == MADE
    # Two of the same second have names in no order.
    old, new = sorted(dumps(dumping), key=lambda name: int(record(dumping, name)["number"]))
    damage(dumping, new)
    dumping.write_config(catalog={"url": database_url})

    done = dumping.run("restore", "--catalog", expect=0)
    assert f"{new} is damaged" in done.stderr
    assert old in done.stdout
    assert rows_of(database_url) == rows_of(dumping.url)


def test_materialized_views_are_left_empty_where_that_is_asked_for(
    dumping: Environment, database_url: str
) -> None:
    dumping.fill(3)
    dumping.query("create materialized view counted as select count(*) as n from blobs")
    make(dumping)
    dumping.write_config(catalog={"url": database_url})
    done = dumping.call("restore", "--catalog", "--no-refresh", expect=0)
    assert "the dump has 1 materialized view: public.counted; they are left empty" in done.stderr
    dumping.url = database_url
    assert dumping.query("select ispopulated from pg_matviews") == [(False,)]
    (statement,) = re.findall("REFRESH MATERIALIZED VIEW .*;", done.stdout)
    dumping.query(statement)
    assert dumping.query("select n from counted") == [(3,)]


def test_a_dump_is_fetched_as_a_file_for_pg_restore(
    dumping: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    dumping.write_config(dump={"mode": "series"})
    dumping.fill(200)
    make(dumping)
    dumping.fill(5, seed=2)
    make(dumping)
    named = {record(dumping, name)["base"]: name for name in dumps(dumping)}
    assert len(named) == 2  # A whole dump, and an increment.
    for name in named.values():
        file = tmp_path / f"of-{name}"
        asked = ("dumps", "--fetch", name, "--to", str(file))
        dumping.call(*asked, expect=0)
        data = file.read_bytes()
        assert hashlib.sha256(data).hexdigest() == record(dumping, name)["text_sha256"]
        assert file.stat().st_mode & 0o777 == 0o600
        listed = subprocess.run(
            [postgres.programs / "pg_restore", "--list", file], check=True, capture_output=True
        )
        assert b"TABLE DATA public blobs" in listed.stdout
        refused = dumping.call(*asked, expect=2)
        assert "name another file with --to" in refused.stderr
        file.unlink()
    damage(dumping, named[""])
    failed = dumping.call(*asked, expect=7)
    assert f"{named['']} is damaged" in failed.stderr
    assert not file.exists()
    dumping.call("dumps", "--fetch", "20200101T000000Z-00000001.dump", expect=2)


def test_check_says_which_pg_dump_it_will_be(dumping: Environment, postgres: Postgres) -> None:
    dumping.fill(1)
    done = dumping.run("check", expect=0)
    assert re.search(rf"^ok +dump +{postgres.programs}/pg_dump, ", done.stdout, re.MULTILINE)
    assert list(dumping.remote.local.iterdir()) == []


def no_programs(env: Environment, _: Callable[[], str]) -> str:
    env.write_config(dump={"bin": str(env.root)})
    return "pg_dump and pg_restore are not installed"


def no_privilege(env: Environment, role: Callable[[], str]) -> str:
    name = role()
    env.query("create table of_others (name text)")
    env.query(f"grant select, insert, update on blobs to {name}")
    env.query(f"grant usage on schema ntt_backup to {name}")
    env.query(f"grant select, insert, update, delete on all tables in schema ntt_backup to {name}")
    env.write_config(catalog={"url": psycopg.conninfo.make_conninfo(env.url, user=name)})
    return f'public.of_others.*\n.*grant select on all tables in schema "public" to "{name}"'


def no_room(env: Environment, _: Callable[[], str]) -> str:
    (env.remote.local / "pgdump").touch()
    return "pgdump"


def no_password_in_secret(env: Environment, _: Callable[[], str]) -> str:
    url = psycopg.conninfo.make_conninfo(env.url, sslpassword="x")
    env.write_config(catalog={"url": url})
    return "sslpassword"


@pytest.mark.parametrize("broken", [no_programs, no_privilege, no_room, no_password_in_secret])
def test_check_fails_where_the_catalog_cannot_be_dumped(
    dumping: Environment,
    role: Callable[[], str],
    broken: Callable[[Environment, Callable[[], str]], str],
) -> None:
    dumping.fill(1)
    said = broken(dumping, role)
    before = shelf_or_file(dumping)

    check = dumping.run("check", expect=7)
    assert re.search(rf"^FAILED +dump +the catalog cannot be dumped: .*{said}", check.stdout, re.M)
    assert shelf_or_file(dumping) == before


def shelf_or_file(env: Environment) -> list[str]:
    """All that stands at the remote beside by-hash."""
    return sorted(str(path) for path in env.remote.local.glob("[!b]*/**"))


# --- what goes wrong ------------------------------------------------------------------------------


def failure(env: Environment) -> dict[str, Any]:
    """The one failed dump of a run that did everything else; also in `status`."""
    env.run("run", expect=7)
    assert env.on_remote() == env.in_store()
    assert env.events("run_stop")[-1]["outcome"] == "dump_failed"
    assert [name for name in shelf(env) if not name.startswith("20")] == []
    assert env.status()["dumps"][-1]["error"]
    (event,) = env.events("dump_failed")
    return event


def test_a_pg_dump_that_fails_stops_no_blob(
    dumping: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    dumping.fill(10)
    # Nobody is told of the status of a child whose end is ignored, which is inherited.
    dumping.wrapper = IGNORING_CHILDREN
    stand_in(dumping, postgres, tmp_path, '"$real" "$@"; echo oh no >&2; exit 1')
    event = failure(dumping)
    assert (event["message"], event["detail"]) == ("pg_dump failed", "oh no")
    assert dumps(dumping) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('"$real" "$@" | head -c 2000; exit 1', "pg_dump failed"),
        ('exec "$real" "$@" --exclude-table=blobs', "the dump does not hold the table blobs"),
        ("echo no dump", "pg_restore cannot read the dump"),
    ],
)
def test_a_dump_that_is_not_whole_gets_no_name(
    dumping: Environment, postgres: Postgres, tmp_path: Path, script: str, message: str
) -> None:
    dumping.fill(1)
    stand_in(dumping, postgres, tmp_path, script)
    with pytest.raises(DumpFailed) as caught:
        make(dumping)
    assert caught.value.message == message
    assert dumps(dumping) == []


@pytest.mark.long
def test_without_pg_dump_a_run_warns_until_somebody_relies_on_dumps(
    dumping: Environment, tmp_path: Path, postgres: Postgres
) -> None:
    dumping.fill(3)
    good = dumping.settings["dump"].pop("bin")
    empty = tmp_path / "empty"
    empty.mkdir()
    for tool in ("ssh", "tar"):
        (empty / tool).symlink_to(f"/usr/bin/{tool}")
    old = tmp_path / "old"
    for program in ("pg_dump", "pg_restore"):
        fake(old, program, f'echo "{program} (PostgreSQL) 9.6.1"')
    dumping.write_config()
    dumping.environ = {"PATH": f"{old}:{empty}"}
    if any(Path("/usr/lib/postgresql").glob("[0-9]*/bin/pg_dump")):
        dumping.write_config(dump={"bin": str(old)})
        done = dumping.run("dump", expect=2)
        assert "is version 9.6.1; the server has" in done.stderr
        assert "apt-get install postgresql-client-" in done.stderr
    else:
        dumping.run("run", expect=0)
        assert "pg_dump is older than the server" in dumping.events("warning")[-1]["reason"]
    dumping.environ = {}
    dumping.write_config(dump={"bin": good})
    dumping.run("dump", expect=0)
    dumping.write_config(dump={"bin": str(empty)})
    dumping.run("run", expect=7)
    assert dumping.events("dump_failed")[-1]["message"].startswith("pg_dump and pg_restore are not")


@pytest.mark.parametrize("strategy", ["auto", pytest.param("tar", marks=pytest.mark.long)])
def test_a_full_remote_keeps_no_half_dump(
    dumping: Environment, remote: Sshd, strategy: str
) -> None:
    full = remote.full_directory()
    dumping.write_config(remote={"path": full.path}, run={"strategy": strategy})
    dumping.remote = full
    dumping.query(
        "create table of_others as select random()::text as t from generate_series(1, 400000)"
    )
    assert remote.run(f"head -c 14000000 /dev/zero >{full.path}/ballast").returncode == 0
    done = dumping.run("dump", expect=6)
    assert "the remote is full" in done.stderr
    assert remote.run(f"ls -A {full.path}/pgdump").stdout == b""


@pytest.mark.parametrize(
    ("command", "end", "code", "moment", "strategy"),
    [
        pytest.param("dump", signal.SIGINT, 130, "sending", "auto", marks=pytest.mark.long),
        ("run", signal.SIGTERM, 143, "checking", "auto"),
        pytest.param("run", signal.SIGTERM, 143, "checking", "tar", marks=pytest.mark.long),
        pytest.param(
            "run", signal.SIGKILL, -signal.SIGKILL, "sending", "tar", marks=pytest.mark.long
        ),
    ],
)
def test_a_dump_that_is_stopped_leaves_nothing_there(
    dumping: Environment,
    postgres: Postgres,
    tmp_path: Path,
    command: str,
    end: int,
    code: int,
    moment: str,
    strategy: str,
) -> None:
    """As a terminal stops it: the signal goes to ssh and pg_dump, too."""
    dumping.fill(3)
    dumping.write_config(run={"strategy": strategy})
    checking = tmp_path / "checking"
    if moment == "sending":
        stand_in(dumping, postgres, tmp_path, "head -c 3000000 /dev/urandom; exec sleep 1000")
    else:
        programs = stand_in(dumping, postgres, tmp_path, 'exec "$real" "$@"')
        fake(programs, "pg_restore", f"touch {checking}; exec sleep 1000")
    dumping.wrapper = ["setsid"]
    place = dumping.remote.local / "pgdump"

    def under_way() -> bool:
        there = list(place.glob(".incoming-*"))
        return bool(there) and (checking.exists() or there[0].stat().st_size > 2_000_000)

    with dumping.running(command) as run:
        wait_until(under_way, "a dump on its way")
        os.killpg(run.pid, end)
        assert run.wait(PATIENCE) == code, dumping.output()
        wait_until(lambda: shelf(dumping) == [], "the end of the temporary file")
        wait_until(lambda: dumping.processes() == {}, "the end of all it started")


def test_the_death_of_the_process_that_dumps_stops_no_blob(
    dumping: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    dumping.fill(10)
    going = tmp_path / "going"
    stand_in(dumping, postgres, tmp_path, f"touch {going}; exec sleep 1000")
    with dumping.running("run") as run:
        wait_until(going.exists, "pg_dump")
        (victim,) = (
            child for child, name in dumping.children(run.pid).items() if name == "ntt-dump"
        )
        os.kill(victim, signal.SIGKILL)
        assert run.wait(PATIENCE) == 7, dumping.output()
    (event,) = dumping.events("dump_failed")
    assert event["message"] == "the process that dumps the catalog died"
    assert dumping.on_remote() == dumping.in_store()


def test_a_watching_run_dumps_now_and_then(dumping: Environment) -> None:
    dumping.fill(1)
    dumping.write_config(dump={"interval": 1}, run={"poll_interval": 0.2})
    with dumping.running("run", "--watch") as run:
        dumping.await_event("dump_complete")
        blobids = dumping.fill(5)
        dumping.await_event("dump_complete", 2)
        dumping.await_copied(set(blobids))
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, dumping.output()
    assert dumping.events("dump_failed") == []


def test_dump_needs_no_source_settings(dumping: Environment) -> None:
    """`dump` runs where the store is not."""
    del dumping.settings["source"]
    dumping.write_config()
    dumping.run("dump", expect=0)
    assert len(dumps(dumping)) == 1


@pytest.mark.long
def test_a_target_without_the_newest_dump_is_told_by_every_command(dumping: Environment) -> None:
    """As one that shows an older state of itself: what is left of it is whole."""
    env = dumping
    env.fill(3)
    env.run("run", expect=0)
    make(env, force=True)
    earlier = dumps(env)
    # Two dumps of a second are in no order.
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second, "the next second")
    make(env, force=True)
    assert "MISSED" not in env.run("verify", "--download").stdout
    (last,) = set(dumps(env)) - set(earlier)
    for name in (last, f"{last}.json"):
        (env.remote.local / "pgdump" / name).rename(env.remote.local / name)
    checked = env.run("check", expect=0)
    (line,) = (one for one in checked.stdout.splitlines() if one.split()[1:2] == ["newest"])
    assert line.startswith("warning")
    assert f"lacks the dump {last}" in line
    assert [one["missed"] for one in json.loads(env.run("status", "--json").stdout)["missed"]] == [
        last
    ]
    verified = env.run("verify", "--download", expect=7)
    assert f"MISSED: the target lacks the dump {last}" in verified.stdout
    assert f"lacks the dump {last}" in env.run("status").stdout
    said: list[str] = []
    job.dump(settings(env), lambda event: said.append(str(event.line)), force=True)
    assert any(f"lacks the dump {last}" in one for one in said)
    # The next dump does not make it good.
    env.run("verify", "--download", expect=7)
    for name in (last, f"{last}.json"):
        (env.remote.local / name).rename(env.remote.local / "pgdump" / name)
    env.run("verify", "--download", expect=0)
    assert json.loads(env.run("status", "--json").stdout)["missed"] == []
    assert json.loads(env.run("verify", "--download", "--json").stdout)["missed"] == []
    # A target that refuses to list is not known to have all.
    (env.remote.local / "pgdump").rename(env.remote.local / "elsewhere")
    (env.remote.local / "pgdump").touch()
    refused = env.run("verify", "--download", "--json")
    assert (refused.returncode, json.loads(refused.stdout)["missed"]) == (0, None)
    told = env.run("verify", "--download").stdout
    assert "could not check whether the newest dump, versions and pack are on the target: " in told
