"""A dump is a program, and whoever may write to the target can plant one: what comes of that."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest

from ntt_backup.config import Settings, load
from ntt_backup.config.signing_key import SigningKeys, make_signing_key
from ntt_backup.dump import record as records
from tests.helpers.environment import Environment
from tests.helpers.parallel import memory
from tests.helpers.postgres import Postgres

PLANTED = "20990101T000000Z-0badcafe.dump"
HIGHEST = (1 << 53) - 1
# What a superuser's session can do with a line of SQL; other roles may not.
EVIL = """
    create function public.evil(text) returns boolean language plpgsql as $$
    begin
        begin
            execute 'reset session authorization';
            execute 'reset role';
        exception when others then null;
        end;
        execute 'copy (select 1) to program ''cat >{marker}''';
        return true;
    end $$;
    alter table public.blobs add constraint evil check (public.evil(blobid));
    create function public.twice() returns trigger language plpgsql as 'begin return new; end';
    create trigger twice before insert on public.blobs
        for each row execute function public.twice();
    create table public.of_others (name text);
"""
GOOD = """
    drop table public.of_others; drop trigger twice on public.blobs; drop function public.twice;
    alter table public.blobs drop constraint evil; drop function public.evil;
"""


@pytest.fixture
def env(env: Environment, postgres: Postgres) -> Environment:
    """The environment, with blobs that are copied, and with the pg_dump of its server."""
    env.write_config(dump={"bin": str(postgres.programs)})
    env.fill_both(20)
    return env


@pytest.fixture
def marker() -> Iterator[Path]:
    """A file that the code in a hostile dump would make. The server is another user, who cannot
    enter pytest's own directories.
    """
    with TemporaryDirectory(dir=memory()) as name:
        Path(name).chmod(0o777)
        yield Path(name) / "marker"


def place(env: Environment) -> Path:
    return env.remote.local / "pgdump"


def dump(env: Environment) -> str:
    """The name of one more dump."""
    before = {*place(env).glob("*.dump")}
    env.call("dump", "--force", expect=0)
    (new,) = {*place(env).glob("*.dump")} - before
    return new.name


def plant(
    env: Environment, content: bytes, *, name: str = PLANTED, sign: bool = False, **changes: Any
) -> None:
    """A dump with this content and the highest number of all, beside a good one."""
    like = records.read(next(place(env).glob("*.json")).read_text())
    assert like is not None
    made = replace(like, number=HIGHEST, bytes=len(content), signature="", base="")
    made = replace(made, sha256=sha256(content).hexdigest(), **changes)
    if sign:
        made = made.signed(name, SigningKeys.of(load(Settings, file=env.config, environ={})))
    (place(env) / name).write_bytes(content)
    (place(env) / f"{name}.json").write_text(made.to_json())


def hostile(env: Environment, postgres: Postgres, marker: Path) -> bytes:
    """A dump of the catalog, with code in it."""
    env.query(EVIL.format(marker=marker))
    done = subprocess.run(
        [str(postgres.programs / "pg_dump"), "-Fc", env.url], check=True, capture_output=True
    )
    env.query(GOOD)
    marker.unlink()
    return done.stdout


def restore(
    env: Environment, url: str, *options: str, expect: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`restore --catalog` into the database of url."""
    live = env.url
    env.write_config(catalog={"url": url})
    try:
        return env.call("restore", "--catalog", *options, expect=expect)
    finally:
        env.write_config(catalog={"url": live})


def rows(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute("select * from public.blobs order by blobid").fetchall()


def found(url: str, query: str) -> list[Any]:
    with psycopg.connect(url) as conn:
        return [row[0] for row in conn.execute(query.encode()).fetchall()]


def is_empty(url: str) -> bool:
    return not found(url, "select relname from pg_class where relname in ('blobs', 'failures')")


# --- who made it ----------------------------------------------------------------------------------


def test_a_planted_dump_is_named_and_passed_over_whatever_its_number(
    env: Environment, postgres: Postgres, database_url: str, marker: Path
) -> None:
    ours = dump(env)
    plant(env, hostile(env, postgres, marker))
    done = restore(env, database_url, expect=0)
    assert ours in done.stdout
    assert f"{PLANTED} is passed over, since it is not of this host" in done.stderr
    assert rows(database_url) == rows(env.url)
    assert not marker.exists()
    # Nor does its number keep the next one of ours from being the newest.
    assert json.loads((place(env) / f"{dump(env)}.json").read_text())["number"] == 2


def test_check_without_the_key_believes_the_dump_that_the_catalog_knows(
    env: Environment,
) -> None:
    ours = dump(env)
    plant(env, b"nothing", name="20300101T000000Z-00000000.dump")
    env.host_key.unlink()
    env.write_config(run={"skip_pgdump": False})
    said = env.call("check").stdout
    assert f"the newest is of {ours[:4]}-{ours[4:6]}-{ours[6:8]}" in said
    assert "2030-01-01" not in said


@pytest.mark.long
def test_a_drill_is_proved_by_the_dump_of_this_host_beside_a_planted_one(
    env: Environment, postgres: Postgres, database_url: str, marker: Path
) -> None:
    ours = dump(env)
    plant(env, hostile(env, postgres, marker))
    scratch = str(env.root / "scratch")
    done = env.call("drill", "--scratch", scratch, "--database", database_url, "--json", expect=0)
    said = json.loads(done.stdout)
    assert (said["dump"], said["dump_origin"], said["bad_dumps"]) == (ours, "this host", [])
    assert PLANTED in done.stderr
    assert not marker.exists()


def test_a_drill_takes_no_dump_of_another_database_of_this_host(
    env: Environment, database_url: str
) -> None:
    """Whoever may write to that one decides what is in it."""
    ours = dump(env)
    content = (place(env) / ours).read_bytes()
    head: dict[str, Any] = {"head_bytes": len(content), "head_sha256": sha256(content).hexdigest()}
    plant(env, content, sign=True, database="another", **head)
    scratch = str(env.root / "scratch")
    done = env.call("drill", "--scratch", scratch, "--database", database_url, "--json", expect=0)
    assert json.loads(done.stdout)["dump"] == ours
    # Where none is of a database of this name, it is the newest of all.
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute("drop schema public, ntt_backup cascade; create schema public")
    assert f"from {PLANTED}," in restore(env, database_url).stdout


@pytest.mark.long
def test_a_drill_without_the_key_trusts_the_target_when_it_is_told_to(
    env: Environment, database_url: str
) -> None:
    dump(env)
    env.host_key.unlink()
    call = ("drill", "--scratch", str(env.root / "scratch"), "--database", database_url)
    done = env.call(*call, expect=7)
    assert "no dump on the remote is known to be of this host" in done.stderr
    done = env.call(*call, "--trust-target", expect=0)
    assert "nothing proves who made this dump" in done.stdout
    assert "PROVED" in done.stdout


@pytest.mark.parametrize("key", ["none", "another"])
def test_without_the_key_nothing_is_taken_until_somebody_trusts_the_target(
    env: Environment, database_url: str, key: str
) -> None:
    dump(env)
    env.host_key.unlink()
    if key == "another":
        make_signing_key(env.host_key)
    done = restore(env, database_url, expect=7)
    assert "no dump on the remote is known to be of this host" in done.stderr
    assert "--trust-target" in done.stderr
    assert "init-db makes one" in done.stderr
    assert is_empty(database_url)
    done = restore(env, database_url, "--trust-target", expect=0)
    assert "nothing proves who made this dump" in done.stderr
    assert rows(database_url) == rows(env.url)
    env.write_config(catalog={"url": database_url})
    env.call("status", expect=0)


def test_a_record_under_another_name_is_forged_and_never_taken_unasked(
    env: Environment, database_url: str
) -> None:
    ours = dump(env)
    for end in ("", ".json"):
        (place(env) / f"{ours}{end}").rename(place(env) / f"{PLANTED}{end}")
    for option in ((), ("--trust-target",), ("--dump", PLANTED)):
        done = restore(env, database_url, *option, expect=7)
        assert f"{PLANTED} is passed over, since it is FORGED" in done.stderr
    restore(env, database_url, "--trust-target", "--dump", PLANTED, expect=0)


@pytest.mark.parametrize("key", [True, pytest.param(False, marks=pytest.mark.long)])
def test_planted_dumps_make_no_good_one_go(env: Environment, key: bool) -> None:
    """Their clocks go over days, and their records are those of good ones."""
    if not key:
        env.host_key.unlink()
    env.write_config(dump={"keep_last": 2, "keep_daily": 3, "keep_weekly": 0})
    good = [dump(env) for _ in range(2)]
    content = (place(env) / good[0]).read_bytes()
    planted = [f"202611{day:02}T000000Z-0badcafe.dump" for day in range(1, 20)]
    for number, name in enumerate(planted, 100):
        plant(env, content, name=name, number=number)
    third = dump(env)
    names = {path.name for path in place(env).glob("*.dump")}
    assert names == {*good[1:], third, *planted}
    said = [event["reason"] for event in env.events("warning")]
    assert not said  # The command has no log.
    done = env.call("dump", "--force")
    assert "19 dumps of this catalog on the remote are not known to be of this host" in done.stdout
    # Nor is one of them taken for the last dump, which the next one need not repeat.
    assert "first" not in done.stdout


def test_a_dump_of_ours_with_a_clock_far_off_stays_and_takes_no_place(env: Environment) -> None:
    env.write_config(dump={"keep_last": 1, "keep_daily": 0, "keep_weekly": 0})
    odd = place(env) / dump(env)
    content = odd.read_bytes()
    plant(env, content, name="20260101T000000Z-00000001.dump", sign=True, number=2)
    first = dump(env)
    second = env.call("dump", "--force")
    assert "20260101T000000Z-00000001.dump: the time in its name is more than" in second.stdout
    names = {path.name for path in place(env).glob("*.dump")}
    assert "20260101T000000Z-00000001.dump" in names
    # And the newest that was there before it.
    assert names >= {odd.name}
    assert first not in names
    assert len(names) == 3


@pytest.mark.long
def test_dumps_of_made_up_targets_are_listed_and_removed_by_name_alone(env: Environment) -> None:
    ours = dump(env)
    plant(env, b"content", target="made_up", host="\x1b[2J")
    assert PLANTED not in env.call("dumps").stdout
    said = env.call("dumps", "--all").stdout
    assert "\x1b" not in said
    (line,) = (line for line in said.splitlines() if PLANTED in line)
    assert "target made_up, not of this host" in line
    (line,) = (line for line in said.splitlines() if ours in line)
    assert "target remote, of this host" in line
    listed = json.loads(env.call("dumps", "--all", "--json").stdout)["dumps"]
    assert {(one["name"], one["origin"], one["target"]) for one in listed} == {
        (ours, "this host", "remote"),
        (PLANTED, "unknown", "made_up"),
    }
    dump(env)
    assert (place(env) / PLANTED).exists()
    env.call("dumps", "--remove", "20200101T000000Z-00000000.dump", expect=2)
    done = env.call("dumps", "--remove", PLANTED)
    assert (done.returncode, done.stdout) == (0, "removed 1 dump\n")
    assert not list(place(env).glob(f"{PLANTED}*"))
    assert (place(env) / ours).exists()


def test_a_dump_that_another_one_needs_is_removed_with_it_or_not_at_all(env: Environment) -> None:
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(dump={"mode": "series"})
    whole, part = dump(env), dump(env)
    done = env.call("dumps", "--remove", whole, expect=2)
    assert f"{part} is an increment on {whole}" in done.stderr
    done = env.call("dumps", "--remove", whole, "--remove", part)
    assert done.stdout == "removed 2 dumps\n"
    assert not list(place(env).iterdir())
    # What this host has removed is not missed.
    checked = env.call("check")
    assert "the target lacks" not in checked.stdout


# --- what nobody vouches for ----------------------------------------------------------------------


def test_of_a_dump_that_nobody_vouches_for_only_rows_of_ours_come_back(
    env: Environment, postgres: Postgres, database_url: str, marker: Path
) -> None:
    env.query("alter table blobs add column theirs text default 'x'")
    env.query(
        "insert into ntt_backup.failures (target, blobid, reason) values ('remote', 'a', E'b\\tc')"
    )
    ours = dump(env)
    plant(env, hostile(env, postgres, marker))
    (place(env) / f"{ours}.json").unlink()

    done = restore(env, database_url, "--trust-target", expect=0)
    assert PLANTED in done.stdout
    assert not marker.exists()
    known = "blobid, size, created_at, remote_copied, remote_last_checked, remote_copy_failed"
    with psycopg.connect(database_url) as conn, psycopg.connect(env.url) as before:
        query = f"select {known} from blobs order by 1".encode()
        assert conn.execute(query).fetchall() == before.execute(query).fetchall()
    assert found(database_url, "select reason from ntt_backup.failures") == ["b\tc"]
    mine = "select proname from pg_proc where pronamespace = 'public'::regnamespace"
    assert found(database_url, mine) == []
    assert found(database_url, "select tgname from pg_trigger where not tgisinternal") == []
    assert found(database_url, "select relname from pg_class where relname = 'of_others'") == []
    for said in (
        "FUNCTION public.evil(text)",
        "TRIGGER public.blobs twice",
        "TABLE public.of_others",
    ):
        assert said in done.stderr
    assert "GRANT" not in done.stdout


def test_a_statement_in_the_place_of_a_copy_is_not_executed(
    env: Environment, postgres: Postgres, database_url: str, marker: Path
) -> None:
    """pg_restore sends whatever stands there, and lists TABLE DATA."""
    content = (place(env) / dump(env)).read_bytes()
    copy = b"COPY public.blobs (blobid"
    assert content.count(copy) == 1
    plant(env, content.replace(copy, b"drop table blobs;--OPY pub"[: len(copy)]))
    for path in place(env).glob("2[!0]*"):
        path.unlink()
    done = restore(env, database_url, "--trust-target", "--dump", PLANTED, expect=7)
    assert (
        f"{PLANTED} is damaged: the columns of TABLE DATA public.blobs cannot be determined"
        in done.stderr
    )
    assert is_empty(database_url)


@pytest.mark.parametrize(
    "where",
    [pytest.param(0.1, marks=pytest.mark.long), 0.5, pytest.param(0.98, marks=pytest.mark.long)],
)
def test_a_torn_dump_that_nobody_vouches_for_leaves_the_database_empty_and_the_next_is_tried(
    env: Environment, database_url: str, where: float
) -> None:
    content = (place(env) / dump(env)).read_bytes()
    env.host_key.unlink()
    plant(env, content[: int(len(content) * where)])
    done = restore(env, database_url, "--trust-target", expect=0)
    assert f"{PLANTED} is damaged" in done.stderr
    assert rows(database_url) == rows(env.url)


def test_rows_that_do_not_fit_are_damage_of_their_dump(
    env: Environment, postgres: Postgres, database_url: str
) -> None:
    dump(env)
    env.host_key.unlink()
    env.query("alter table blobs alter column size type text using 'many'")
    pg_dump = [str(postgres.programs / "pg_dump"), "-Fc", env.url]
    plant(env, subprocess.run(pg_dump, check=True, capture_output=True).stdout)
    done = restore(env, database_url, "--trust-target", expect=0)
    assert f"{PLANTED} is damaged: the catalog refused to take the rows of blobs" in done.stderr


# --- what is of this host -------------------------------------------------------------------------


def test_code_in_a_dump_of_ours_runs_as_a_role_that_can_do_nothing_else(
    env: Environment, postgres: Postgres, database_url: str, marker: Path
) -> None:
    """Somebody with rights in the catalog's database may have put it there."""
    env.query(EVIL.format(marker=marker))
    marker.unlink()
    dump(env)
    before = found(database_url, "select rolname from pg_roles")
    owner = "select datdba::regrole::text from pg_database where datname = current_database()"
    whose = found(database_url, owner)

    done = restore(env, database_url, expect=7)
    assert "permission denied to COPY to or from an external program" in done.stderr
    assert "--allow-superuser" in done.stderr
    assert not marker.exists()
    assert is_empty(database_url)
    # What former tests have left goes.
    assert {*found(database_url, "select rolname from pg_roles")} <= {*before}
    assert found(database_url, owner) == whose
    restore(env, database_url, "--allow-superuser", expect=0)
    assert marker.exists()


def test_a_head_that_is_not_proved_is_never_given_to_pg_restore(
    env: Environment, postgres: Postgres, database_url: str, tmp_path: Path
) -> None:
    """The record is ours, and of the content only the statements are others."""
    ours = dump(env)
    path, called = place(env) / ours, tmp_path / "called"
    content = path.read_bytes()
    assert b"CREATE TABLE public.blobs" in content
    path.write_bytes(content.replace(b"CREATE TABLE public.blobs", b"CREATE TABLE public.evils"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in (("pg_dump", ""), ("pg_restore", f"touch {called}\n")):
        (programs / name).write_text(f'#!/bin/sh\n{script}exec {postgres.programs}/{name} "$@"\n')
        (programs / name).chmod(0o755)
    env.write_config(dump={"bin": str(programs)})
    done = restore(env, database_url, expect=7)
    assert f"{ours} is damaged" in done.stderr
    assert not called.exists()
    assert is_empty(database_url)


def test_an_ordinary_owner_restores_by_himself_and_a_mighty_role_is_refused(
    env: Environment, database_url: str, role: Callable[[], str]
) -> None:
    dump(env)
    owner = role()
    url = psycopg.conninfo.make_conninfo(database_url, user=owner)
    with psycopg.connect(database_url, autocommit=True) as conn:
        conn.execute(f"alter database {conn.info.dbname} owner to {owner}".encode())
        conn.execute(f"grant pg_execute_server_program to {owner}".encode())
        done = restore(env, url, expect=7)
        assert f"{owner} is, or may become, pg_execute_server_program" in done.stderr
        assert is_empty(database_url)
        conn.execute(f"revoke pg_execute_server_program from {owner}".encode())
    restore(env, url, expect=0)
    tables = "select distinct tableowner::text from pg_tables where schemaname !~ '^(pg_|info)'"
    assert found(database_url, tables) == [owner]


def test_what_a_superuser_restored_belongs_to_a_role_that_can_do_nothing_else(
    env: Environment, database_url: str, role: Callable[[], str]
) -> None:
    owner = role()
    env.query(
        "create function public.who(int) returns name language sql security definer"
        " as 'select current_user'"
    )
    env.query(f"alter function public.who(int) owner to {owner}")
    dump(env)
    done = restore(env, database_url, expect=0)
    (made,) = re.findall(r"belongs to (ntt_restore_\w+) now", done.stdout)
    assert f"grant {made} to ROLE;" in done.stdout
    assert found(database_url, "select public.who(1)") == [made]
    owners = (
        "select distinct tableowner from pg_tables where schemaname in ('public', 'ntt_backup')"
    )
    assert found(database_url, owners) == [made]
    might = f"select rolsuper or rolcanlogin from pg_roles where rolname = '{made}'"
    assert found(database_url, might) == [False]
    assert f"ALTER FUNCTION public.who(integer) OWNER TO {owner};" in done.stdout
    assert "OWNER TO postgres" not in done.stdout


def test_a_drill_reads_what_was_restored_as_the_role_that_owns_it(
    env: Environment, database_url: str
) -> None:
    """The planner calls code in an index of the dump for whoever reads."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    env.query(
        "create function public.note(text) returns boolean immutable language plpgsql as $$ begin"
        f" if session_user = 'postgres' and current_database() = '{name}' then"
        " raise exception 'called by a superuser'; end if; return true; end $$"
    )
    env.query("create index on public.blobs (blobid) where public.note('x')")
    dump(env)
    scratch = str(env.root / "scratch")
    env.call("drill", "--scratch", scratch, "--database", database_url, expect=0)
    with pytest.raises(psycopg.Error, match="called by a superuser"):
        rows(database_url)


def test_no_text_in_a_dump_plays_a_right_or_reaches_the_terminal(
    env: Environment, database_url: str, role: Callable[[], str]
) -> None:
    owner = role()
    env.query(
        "create function public.f() returns int language sql as"
        " E'select 1 /*\\nGRANT ALL ON SCHEMA public TO evil;\\n*/'"
    )
    env.query('create table public."x\x1b]52;c;evil\x07\nGRANT evil TO you;" (a int)')
    env.query(f'alter table public."x\x1b]52;c;evil\x07\nGRANT evil TO you;" owner to {owner}')
    env.query("comment on table public.blobs is E'\\nGRANT ALL ON SCHEMA public TO evil;\\n'")
    dump(env)
    done = restore(env, database_url, expect=0)
    assert "\x1b" not in done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("GRANT")]
    assert f"OWNER TO {owner};" in done.stdout


# --- programs -------------------------------------------------------------------------------------


def programs(
    env: Environment, postgres: Postgres, tmp_path: Path, version: str, script: str
) -> None:
    """Programs that say they are of this version; $real is the true pg_restore."""
    directory = tmp_path / "programs"
    directory.mkdir()
    lines = {
        "pg_dump": f"echo 'pg_dump (PostgreSQL) {version}'",
        "pg_restore": f"real={postgres.programs}/pg_restore\n{script}",
    }
    for name, text in lines.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    env.write_config(dump={"bin": str(directory)})


def test_a_pg_restore_that_dies_midway_leaves_the_database_empty(
    env: Environment, postgres: Postgres, database_url: str, tmp_path: Path
) -> None:
    env.query("create table of_others as select random()::text as t from generate_series(1, 50000)")
    dump(env)
    before = found(database_url, "select rolname from pg_roles")
    programs(env, postgres, tmp_path, "18.0", 'head -c 200000 | "$real" "$@"; kill -KILL $$')
    done = restore(env, database_url, expect=7)
    assert "pg_restore failed, and the database is as it was" in done.stderr
    assert is_empty(database_url)
    assert {*found(database_url, "select rolname from pg_roles")} <= {*before}


@pytest.mark.long
def test_a_pinned_dump_stays_and_a_pin_of_somebody_else_keeps_none(env: Environment) -> None:
    env.write_config(dump={"keep_last": 1, "keep_daily": 0, "keep_weekly": 0})
    first = dump(env)
    env.call("dumps", "--pin", first, "--reason", "of the old machine", expect=0)
    second = dump(env)
    pin = f"{second}.pin-{'0' * 16}-{'0' * 64}"
    (place(env) / pin).write_text("{}")
    third = dump(env)
    names = {path.name for path in place(env).iterdir()}
    assert {name for name in names if name.endswith(".dump")} == {first, third}
    assert pin not in names
    rows = json.loads(env.call("dumps", "--json").stdout)["dumps"]
    assert {row["name"]: row["pinned"] for row in rows} == {first: True, third: False}
    assert f"{first}  " in env.call("dumps").stdout
    assert ", pinned: of the old machine" in env.call("dumps").stdout
    assert "is pinned" in env.call("dumps", "--remove", first, expect=2).stderr
    env.call("dumps", "--unpin", first, expect=0)
    env.call("dumps", "--remove", first, expect=0)
