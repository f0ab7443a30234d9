"""The catalog belongs to others: what each role may do, is told, and has to run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ntt_backup.catalog.schema_check import OWN_TABLES
from ntt_backup.config import CatalogConfig, load
from ntt_backup.report.target_facts import FactsReader
from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres

PAGE = Path(__file__).parents[2] / "docs" / "roles.md"


def as_role(env: Environment, name: str) -> None:
    """From here on the environment's commands are run by this role of the database."""
    env.write_config(catalog={"url": make_conninfo(env.url, user=name)})


@pytest.fixture
def monitor(env: Environment, role: Callable[[], str]) -> str:
    """A role that may read the catalog, and no more."""
    name = role()
    for text in (
        f"grant select on blobs to {name}",
        f"grant usage on schema ntt_backup to {name}",
        f"grant select on all tables in schema ntt_backup to {name}",
    ):
        env.query(text)
    return name


def test_who_may_only_read_is_told_by_check_that_it_cannot_run(
    env: Environment, monitor: str
) -> None:
    env.fill(3)
    as_role(env, monitor)

    done = env.call("check", expect=4)
    (refused,) = re.findall(r"^FAILED +(.*)$", done.stdout, re.MULTILINE)
    assert refused.startswith("rights")
    assert f"{monitor} may not do what `run` does" in refused
    assert re.search("^ok +catalog ", done.stdout, re.MULTILINE)
    assert re.search(
        "^ok +pending +3 examined pending blobs can be sent", done.stdout, re.MULTILINE
    )
    assert "init-db --print-sql" in done.stdout


def test_what_a_role_may_not_do_yet_is_told_with_a_command_that_can_be_pasted(
    env: Environment, role: Callable[[], str]
) -> None:
    name = role()
    for grant in (
        f"grant usage on schema ntt_backup to {name}",
        f"grant all on all tables in schema public, ntt_backup to {name}",
        "create table others (id int)",
    ):
        env.query(grant)
    as_role(env, name)

    done = env.call("init-db", expect=0)
    assert "`dump` (it lacks select on public.others)" in done.stdout
    assert f"`ntt-backup-remote --config {env.config} init-db --print-sql`" in done.stdout


def test_who_may_only_read_is_refused_what_writes(env: Environment, monitor: str) -> None:
    env.fill(3)
    as_role(env, monitor)

    for command in ("requeue", "scan", "run", "dump", "verify", "reconcile --adopt"):
        done = env.run(*command.split())
        said = done.stdout + done.stderr
        assert done.returncode == 4, said
        assert f"{monitor} may not do what `{command}` does" in said
        assert "init-db --print-sql" in said


def test_the_sql_for_a_monitor_lets_it_read_every_figure_and_change_nothing(
    env: Environment, postgres: Postgres, role: Callable[[], str]
) -> None:
    env.fill_both(2)
    absent = env.call("init-db", "--monitor", "nobody", expect=4)
    assert 'create role "nobody" login;' in absent.stderr
    name = role()
    printed = env.call("init-db", "--monitor", name).stdout
    assert set(re.findall(r"^grant (\S+) on", printed, re.MULTILINE)) == {"select", "usage"}
    done = postgres.psql(printed, env.url)
    assert done.returncode == 0, done.stderr
    as_role(env, name)

    commands = ("status --json", "failed", "runs", "dumps", "reconcile", "run --dry-run")
    shown = [env.call(*args.split()) for args in commands]
    page = FactsReader({"remote": load(CatalogConfig, file=env.config, environ={})}).read("remote")

    assert json.loads(shown[0].stdout)["copied"] == 2
    assert [done.returncode for done in shown] == [0] * len(commands), shown
    assert (page.trouble, page.lacks) == (None, [])
    for table in ("blobs", *sorted(f"ntt_backup.{one}" for one in OWN_TABLES if "." not in one)):
        refused = postgres.psql(f"delete from {table}", make_conninfo(env.url, user=name))
        assert "permission denied" in refused.stderr, table


def test_transactions_that_only_read_are_told_of(env: Environment, role: Callable[[], str]) -> None:
    """The role has every privilege, and its transactions are read-only by default."""
    name = role()
    env.fill(3)
    env.query(f"alter role {name} superuser")
    env.query(f"alter role {name} set default_transaction_read_only = on")
    as_role(env, name)

    for command in ("check", "run", "scan", "requeue"):
        done = env.run(command)
        said = done.stdout + done.stderr
        assert done.returncode == 4, said
        assert f"the transactions of {name} are read-only" in said
        assert f'alter role "{name}" set default_transaction_read_only = off;' in said
    assert not (env.remote.local / "by-hash").exists()


def test_an_empty_catalog_over_a_full_store_is_not_done(env: Environment) -> None:
    """Perhaps a wrong database: nothing was backed up, and nobody may believe it was."""
    env.put_in_store(b"never registered")

    ran, checked, dry = (env.run(*args) for args in (["run"], ["check"], ["run", "--dry-run"]))

    assert ran.returncode == checked.returncode == dry.returncode == 2
    for said in (ran.stdout + ran.stderr, checked.stdout, dry.stdout + dry.stderr):
        assert "the catalog knows no blob, and the store has some" in said
        assert "scan" in said
        assert "catalog.url" in said
    env.run("scan", expect=0)
    env.run("run", expect=0)
    env.assert_complete()


def test_a_new_table_is_announced(env: Environment) -> None:
    env.query("drop table blobs")

    done = env.call("init-db", expect=0)
    name = conninfo_to_dict(env.url)["dbname"]
    assert f"make a new, empty table public.blobs in {name}" in done.stdout
    assert "catalog.url" in done.stdout


# --- the whole way --------------------------------------------------------------------------------


def blocks() -> list[tuple[str, str]]:
    """The commands of the page: as whom, and what."""
    found = r"^```sh\n# as (\w+)[^\n]*\n(.*?)^```$"
    return re.findall(found, PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def owned(env: Environment, postgres: Postgres) -> Iterator[Environment]:
    """A database that belongs to nobody of ours: `app` owns the table `blobs`, and
    others have tables that are nobody else's business.
    """
    for text in (
        "drop schema ntt_backup cascade",
        "drop table blobs",
        "create role app login",
        "create schema app authorization app",
        "create table app.blobs (blobid text primary key, note text)",
        "alter table app.blobs owner to app",
        "create table accounts (secret serial)",
        "insert into accounts default values",
        "create role backup login",
        "create role monitor login",
    ):
        env.query(text)
    url = env.settings["catalog"].pop("url")
    env.write_config(run={"skip_pgdump": False}, dump={"bin": str(postgres.programs)})
    tools = env.root / "bin"
    tools.mkdir()
    (tools / "psql").symlink_to(postgres.programs / "psql")
    program = " ".join(map(shlex.quote, env.argv()))
    (tools / "ntt-backup-remote").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tools / "ntt-backup-remote").chmod(0o755)
    yield env
    env.query("drop owned by backup, monitor, app cascade")
    env.query("drop role backup, monitor, app")
    assert url == env.url


def by(env: Environment, user: str, commands: str) -> subprocess.CompletedProcess[str]:
    """What a user of this name would get from the commands, in a shell of its own."""
    given = conninfo_to_dict(env.url)
    name = str(given["dbname"])
    environment = {
        **env.environment(),
        "PATH": f"{env.root / 'bin'}:{os.environ['PATH']}",
        "PGHOST": str(given["host"]),
        "PGUSER": user,
        "NTT_DB_URL": f"postgresql:///{name}",
    }
    return subprocess.run(
        ["sh", "-ec", commands.replace("copyjob", name)],
        cwd=env.root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_the_page_leads_three_roles_from_nothing_to_a_backup(owned: Environment) -> None:
    blobids = {owned.put_in_store(b"blob %d" % number) for number in range(5)}
    early = by(owned, "backup", "ntt-backup-remote init-db --notify")
    assert early.returncode == 4
    assert "the catalog is ready" not in early.stdout + early.stderr
    for who in ("dba", "owner"):
        assert early.stderr.count(f"{who} (") == 1
    steps = blocks()
    assert [who for who, _ in steps] == ["backup", "postgres", "app", "backup", "monitor"]

    said = {}
    for who, commands in steps:
        done = by(owned, who, commands)
        assert done.returncode == 0, (who, done.stdout, done.stderr)
        said[who] = done.stdout

    assert "the catalog is ready for target remote\n" in said["backup"]
    assert {Path(name).name for name in owned.on_remote()} == blobids
    assert len(list((owned.remote.local / "pgdump").glob("*.dump"))) == 2
    assert f"{len(blobids)}" in said["monitor"]
    copied = owned.query("select blobid from app.blobs where remote_copied")
    assert {blobid for (blobid,) in copied} == blobids
    for user, text in (
        ("backup", "delete from app.blobs"),
        ("backup", "update app.blobs set note = 'mine'"),
        ("backup", "drop table ntt_backup.runs"),
        ("backup", "update app.blobs set blobid = 'mine'"),
        ("backup", "truncate app.blobs"),
        ("backup", "alter table app.blobs disable trigger all"),
        ("backup", "create table app.more (n integer)"),
        ("backup", "create table ntt_backup.more (n integer)"),
        ("backup", "create schema more"),
        ("backup", "update public.accounts set secret = 0"),
        ("backup", "copy app.blobs to program 'cat'"),
        ("monitor", "select * from public.accounts"),
        ("monitor", "create table ntt_backup.more (n integer)"),
        ("monitor", "update app.blobs set remote_copied = false"),
        ("monitor", "delete from ntt_backup.failures"),
        ("app", "delete from ntt_backup.failures"),
    ):
        refused = by(owned, user, f'psql -d copyjob -c "{text}"')
        assert refused.returncode != 0, (user, text)
        assert "permission denied" in refused.stderr or "must be owner" in refused.stderr
    twice = [by(owned, who, commands) for who, commands in steps[:3]]
    assert [done.returncode for done in twice] == [0, 0, 0]
    assert (
        owned.root / "dba.sql"
    ).read_text() == "-- dba: a superuser, or postgres: nothing to do\n\n"
