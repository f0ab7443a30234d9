"""The commands of docs/migrate.md, on a store that another program has backed up."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.helpers.blobs import tree
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.other_backup import EXTENSION, OtherBackup
from tests.helpers.postgres import Postgres
from tests.helpers.sshd import Sshd

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
OURS = "ntt-backup"
TARGETS = ("remote", "external", "cold")
# Who asks by `runuser -u NAME --` is that role of the database.
RUNUSER = '#!/bin/sh\nPGUSER=$2\nexport PGUSER\nshift 3\nexec "$@"\n'


def commands() -> dict[int, str]:
    """The commands of the page by their numbers."""
    (block,) = re.findall(r"^```sh\n(# 1\. .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    parts = re.split(r"^# (\d+)\. [^\n]*\n", block, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def block(language: str, nth: int = 0) -> str:
    """Returns a block of the page."""
    fence = rf"^ *```{language}\n(.*?)^ *```$"
    return str(re.findall(fence, PAGE.read_text(), re.MULTILINE | re.DOTALL)[nth])


@pytest.fixture
def other(
    env: Environment, postgres: Postgres, database_url: str, role: object
) -> Iterator[OtherBackup]:
    """The other program's database, store and targets; a role of ours that has no rights."""
    name = str(conninfo_to_dict(database_url)["dbname"])
    env.url = database_url
    if not env.query("select 1 from pg_available_extensions where name = %s", EXTENSION):
        pytest.skip(f"this PostgreSQL has no extension {EXTENSION}")
    owner = f"app_{name}"
    for text in ("create role {} login", "alter database {} owner to {}"):
        names = [sql.Identifier(owner)]
        if text.startswith("alter"):
            names.insert(0, sql.Identifier(name))
        postgres.execute(sql.SQL(text).format(*names))
    postgres.execute(sql.SQL("create role {} login").format(sql.Identifier(OURS)))
    places = {"remote": env.remote.local, "external": env.root / "usb", "cold": env.root / "cold"}
    for place in (places["external"], places["cold"]):
        place.mkdir()
    other = OtherBackup(database_url, owner, env.store, places)
    other.make()
    owned = env.remote.local.stat()
    for path in (env.remote.local, *env.remote.local.rglob("*")):
        os.chown(path, owned.st_uid, owned.st_gid)
    yield other
    drill = sql.SQL("drop database if exists {} with (force)").format(sql.Identifier("drill"))
    postgres.execute(drill)
    ours = sql.Identifier(OURS)
    if env.query("select 1 from pg_roles where rolname = %s", OURS):
        postgres.execute(sql.SQL("reassign owned by {} to postgres").format(ours), name)
        postgres.execute(sql.SQL("drop owned by {} cascade").format(ours), name)
        postgres.execute(sql.SQL("drop role {}").format(ours))


class Operator:
    """Executes the commands of the page as its reader would."""

    def __init__(self, env: Environment, postgres: Postgres, sshd: Sshd) -> None:
        self._given = conninfo_to_dict(env.url)
        self._name = str(self._given["dbname"])
        self._env = env
        tools = env.root / "bin"
        tools.mkdir()
        program = " ".join(map(shlex.quote, env.argv()[:-2]))
        self._tool(tools / "ntt-backup-remote", f'#!/bin/sh\nexec {program} "$@"\n')
        self._tool(tools / "runuser", RUNUSER)
        home = env.root / "home"
        home.mkdir()
        self._environment = {
            **env.environment(),
            "PATH": f"{tools}:{postgres.programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "PGHOST": str(self._given["host"]),
            "NTT_CONFIG": str(home / "backup-remote.toml"),
        }
        text = block("toml")
        text = text.replace("copyjob", self._name).replace("/srv/store/by-hash", str(env.store))
        text = text.replace("vault@backup.example.org/srv/backup", f"{sshd.alias}{env.remote.path}")
        text = text.replace("/mnt/usb/backup", str(env.root / "usb"))
        text = text.replace("/srv/cold/backup", str(env.root / "cold"))
        text = text.replace("[targets.ext", f'ssh_config = "{sshd.ssh_config}"\n\n[targets.ext')
        extra = (
            f'\n[host]\nkey_file = "{env.host_key}"\n[log]\njsonl = "{env.log}"\n'
            f'[dump]\nbin = "{postgres.programs}"\n[run]\nworkers = 1\n'
            f'[lock]\nfile = "{env.root}/{{target}}.lock"\n'
        )
        Path(self._environment["NTT_CONFIG"]).write_text(text + extra)

    def execute(self, text: str, *, code: int = 0) -> str:
        """Executes commands. Returns what they print."""
        text = text.replace("copyjob", self._name).replace("/var/tmp", str(self._env.root))
        text = text.replace("extension blake3", f"extension {EXTENSION}")
        done = subprocess.run(
            ["sh", "-c", text],
            cwd=self._env.root,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, (text, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def result(self, target: str, command: str, *, code: int = 0) -> dict[str, Any]:
        line = f"runuser -u {OURS} -- ntt-backup-remote --target {target} {command} --json"
        found: dict[str, Any] = json.loads(self.execute(line, code=code))
        return found

    @staticmethod
    def _tool(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)


def dumps(target: Path, *, ours: bool) -> dict[str, bytes]:
    """Returns the dumps on a target, those of our program or those of the other one."""
    found = tree(target / "pgdump")
    return {name: data for name, data in found.items() if name.startswith("copyjob") != ours}


def columns(env: Environment) -> list[tuple[str, ...]]:
    return env.query(
        "select column_name from information_schema.columns where table_name = 'blobs' order by 1"
    )


def marks(env: Environment) -> dict[str, tuple[object, ...]]:
    """Returns what the other program's columns say of each blob."""
    names = [f"{one}_{what}" for one in TARGETS[:2] for what in ("copied", "last_checked")]
    rows = env.query(f"select blobid, {', '.join(names)} from blobs")
    return {str(blobid): tuple(rest) for blobid, *rest in rows}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_leads_from_another_program_to_proved_targets_and_back(
    env: Environment, other: OtherBackup, postgres: Postgres, remote: Sshd, link: Link
) -> None:
    """Command 1 installs, which tests of the packages and of the service do."""
    operator = Operator(env, postgres, remote.through(link.port))
    steps = commands()
    assert list(steps) == list(range(1, 13))
    named_before, marks_before = columns(env), marks(env)
    env.query(block("sql", 0))
    their_dumps = {name: dumps(place, ours=False) for name, place in other.targets.items()}
    missing = other.missing_bytes("remote")
    said, passed = {}, {}
    for number in range(2, 13):
        start = link.sent + link.received
        said[number] = operator.execute(steps[number])
        passed[number] = link.sent + link.received - start
        if number == 2:  # The other programs go on: a new medium, with new partitions.
            added = [other.put(seed) for seed in range(100, 110)]
            other.add_medium(added)
            missing += sum(env.path(blobid).stat().st_size for blobid in added)
            theirs = other.theirs()

    blobids = {Path(name).name for name in env.in_store()}
    assert {name: other.right(name) for name in TARGETS} == dict.fromkeys(TARGETS, blobids)
    for name in TARGETS:
        found = operator.result(name, "reconcile")
        assert (found["rows"], found["agreed"]) == (len(blobids), len(blobids))
        assert set(found["differences"].values()) == {0}
        marked = f"select blobid from blobs where {name}_copied and {name}_last_checked is not null"
        assert {blobid for (blobid,) in env.query(marked)} == blobids
    assert env.query("select count(*) from blobs where size is null") == [(0,)]
    assert other.theirs() == theirs
    assert {name: dumps(place, ours=False) for name, place in other.targets.items()} == their_dumps
    assert "1,000 remote-missing" in said[6]
    assert said[10].count("rows agree with both") == len(TARGETS)
    assert "PROVED" in said[12]
    assert "NOT PROVED" not in said[12]
    # On the wire: what was missing, and a dump; before that the questions, each over a connection
    # or two that carry the receiver.
    dumped = sum(map(len, dumps(other.targets["remote"], ours=True).values()))
    assert passed[9] - dumped <= 1.05 * missing
    assert sum(passed[number] for number in (5, 6, 7)) <= 3 * 100 * len(blobids) + 600_000

    operator.execute("runuser -u postgres -- dropdb drill")
    done = postgres.psql(block("sql", 1), env.url)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr
    assert columns(env) == named_before
    assert marks_before.items() <= marks(env).items()
    assert other.theirs() == theirs


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_leads_from_files_alone_to_proved_targets(
    env: Environment, other: OtherBackup, postgres: Postgres, remote: Sshd
) -> None:
    """Nobody has a table `blobs`, and nothing is marked: rsync has put files there."""
    name = str(conninfo_to_dict(env.url)["dbname"])
    env.query(f"drop owned by {other.owner} cascade")
    give = sql.SQL("alter database {} owner to {}")
    postgres.execute(give.format(sql.Identifier(name), sql.Identifier(OURS)))
    operator = Operator(env, postgres, remote)
    steps = commands()
    operator.execute(block("sh", 1))
    for number in (3, 4, 5, 7, 9, 10):
        operator.execute(steps[number])

    blobids = {Path(name).name for name in env.in_store()}
    assert {name: other.right(name) for name in TARGETS} == dict.fromkeys(TARGETS, blobids)
    batches = env.events("batch_complete")
    sent = {one: sum(b["copied"] for b in batches if b["target"] == one) for one in TARGETS}
    # What was there and right was not sent again.
    assert sent == {one: len(other.absent[one]) for one in TARGETS}
