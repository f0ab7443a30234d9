"""A catalog that an earlier version has made: each command works, or says what completes it."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from blake3 import blake3
from psycopg.conninfo import make_conninfo

from ntt_backup.cli.app import cli
from ntt_backup.config import Settings, load
from ntt_backup.config.signing_key import SigningKeys
from ntt_backup.dump import record as records
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

# Of what init-db makes today, in the order in which it came.
EARLIEST = (
    "drop table ntt_backup.dumps, ntt_backup.marks, ntt_backup.packs, ntt_backup.hours,"
    " ntt_backup.checks",
    "alter table ntt_backup.failures drop column known_at",
)
RECENT = ("drop table ntt_backup.hours, ntt_backup.checks", EARLIEST[1])
# With the exit code that it has in a catalog of today; those without one that ask the catalog, and
# need not.
COMMANDS = {
    "check": 0,
    "run --dry-run": 0,
    "run": 0,
    "scan": 0,
    "status --json": 0,
    "failed": 0,
    "show {lost}": 0,
    "runs": 0,
    "dump --force": 0,
    "requeue": 0,
    "verify": 0,
    "verify --local": 7,
    "heal --dry-run": 0,
    "reconcile --apply": 0,
    "reconcile --adopt": 0,
    "failed --known": 0,
    "bench strategies --sample 1kB --only tar": 0,
    "dumps": None,
    "restore --to {root}/back": None,
    "drill --scratch {root}/drill --database {scratch}": None,
    "snapshot take etc {root}/by-hash": None,
    "snapshot verify": None,
}
LOST = blake3(b"lost").hexdigest()
# They ask no catalog, or a daemon alone; `prune` refuses a store of hashes first. `init-db` and
# `setup` complete the catalog; `serve`, `why` and `move-catalog` have tests of their own.
OTHERS = {
    "bwlimit",
    "completion",
    "config",
    "demo",
    "init-db",
    "install-receiver",
    "install-service",
    "man",
    "mount",
    "move-catalog",
    "now",
    "notify",
    "pack",
    "pause",
    "protect",
    "prune",
    "resume",
    "serve",
    "setup",
    "stop",
    "unpack",
    "why",
}


@pytest.fixture
def old(env: Environment, postgres: Postgres) -> Environment:
    """A catalog with a blob of each kind, whose target is a disk; the tables are those of today."""
    disk = env.root / "disk"
    disk.mkdir()
    env.settings["remote"] = {"url": f"file://{disk}"}
    env.write_config(dump={"bin": str(postgres.programs)}, run={"skip_pgdump": False})
    env.fill(3)
    env.path(env.put(b"lost")).unlink()
    env.run("run", expect=7)
    return env


def call(env: Environment, line: str, url: str) -> tuple[int, str]:
    """The exit code of a command, and all that it says."""
    parts = {"lost": LOST, "root": env.root, "scratch": shlex.quote(url)}
    done = env.call(*shlex.split(line.format(**parts)))
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said


def test_each_command_is_tried() -> None:
    tried = {line.split()[0] for line in COMMANDS}
    assert tried.isdisjoint(OTHERS)
    assert tried | OTHERS == set(cli.list_commands(click.Context(cli)))


@pytest.mark.long
def test_an_early_catalog_is_told_to_be_completed_and_then_all_works(
    old: Environment, database_url: str
) -> None:
    for statement in EARLIEST:
        old.query(statement)
    for line, code in COMMANDS.items():
        found, said = call(old, line, database_url)
        if code is None:
            assert found == 0, (line, said)
        else:
            assert found == 4, (line, said)
            # What is told is told once, and stands in JSON as well.
            times = 1 + line.endswith("--json")
            assert said.count("the schema ntt_backup lacks dumps, marks") == times, (line, said)
            assert "init-db" in said or line == "check", (line, said)
    old.call("init-db", expect=0)
    assert old.call("init-db").stdout == "the catalog is ready for target remote\n"
    for line, code in COMMANDS.items():
        if code is not None:
            found, said = call(old, line, database_url)
            assert found == code, (line, said)


@pytest.mark.long
def test_what_came_last_is_missed_only_where_it_is_needed(
    old: Environment, database_url: str
) -> None:
    for statement in RECENT:
        old.query(statement)
    for line, code in COMMANDS.items():
        found, said = call(old, line, database_url)
        if line == "failed --known":
            assert (found, "init-db" in said) == (4, True), said
        else:
            assert found == (code or 0), (line, said)


@pytest.mark.long
def test_a_dump_of_an_early_catalog_comes_back_and_is_completed(
    old: Environment, postgres: Postgres, database_url: str, role: Callable[[], str]
) -> None:
    for statement in EARLIEST:
        old.query(statement)
    made = [str(postgres.programs / "pg_dump"), "--format=custom", old.url]
    data = subprocess.run(made, check=True, capture_output=True).stdout
    dump, *others = old.root.glob("disk/pgdump/*.dump")
    for other in others:
        other.unlink()
    said, digest = records.read(Path(f"{dump}.json").read_text()), hashlib.sha256(data).hexdigest()
    assert said is not None
    early = replace(
        said, bytes=len(data), sha256=digest, head_bytes=len(data), head_sha256=digest
    ).signed(dump.name, SigningKeys.of(load(Settings, file=old.config, environ={})))
    Path(f"{dump}.json").write_text(early.to_json())
    dump.write_bytes(data)
    copied = old.copied()
    old.write_config(catalog={"url": database_url})
    old.url = database_url
    assert call(old, "restore --catalog", "")[0] == 0
    assert old.copied() == copied
    # What was restored belongs to a role of its own, and ordinary roles become its members.
    ((owner,),) = old.query("select tableowner::text from pg_tables where tablename = 'blobs'")
    member = role()
    old.query(f"grant {owner} to {member}")
    old.write_config(catalog={"url": make_conninfo(database_url, user=member)})
    for line, code in (("run", 4), ("init-db", 0), ("run", 0), ("status", 0)):
        assert call(old, line, "")[0] == code, line
