"""A PostgreSQL that works, taken while it works; and from a version, one that is sound."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from ntt_backup.demo.processes import Interrupts
from tests.acceptance.snapshot_machine import Machine
from tests.helpers import postgres_server
from tests.helpers.waiting import wait_until

_ROWS = 200_000


def _installation() -> Path:
    """A PostgreSQL with the extension amcheck: the embedded one is without."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/lib/amcheck.so"))
    if not found:
        pytest.skip("needs pgbench, pg_amcheck and amcheck: the Debian package postgresql")
    return found[-1].parents[1]


class Server:
    """A server of the machine's own PostgreSQL below home."""

    def __init__(self, home: Path, installation: Path) -> None:
        self.home = home
        self.programs = installation / "bin"
        home.chmod(0o711)
        sockets = home / "sockets"
        sockets.mkdir()
        sockets.chmod(0o777)
        self.server = postgres_server.Postgres(home, Interrupts(), ("autovacuum=off",), sockets)

    @property
    def data(self) -> Path:
        return self.home / "data"

    def argv(self, program: str, *args: str) -> list[str]:
        variables = (f"{name}={value}" for name, value in self.server.environment.items())
        return ["env", *variables, str(self.programs / program), *args]

    def call(self, program: str, *args: str) -> str:
        done = subprocess.run(self.argv(program, *args), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def counts(self) -> dict[str, int]:
        tables = ("accounts", "branches", "history", "tellers")
        return {
            one: int(self.server.query(f"select count(*) from pgbench_{one}")) for one in tables
        }


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Server]]:
    """Makes servers, each in a directory that the server's user may enter."""
    installation = _installation()
    monkeypatch.setattr(postgres_server, "_installation", lambda: installation)
    made: list[Server] = []

    def make() -> Server:
        made.append(Server(Path(tempfile.mkdtemp(prefix="ntt-snapshot-")), installation))
        return made[-1]

    yield make
    for one in made:
        one.server.stop(at_once=True)
        shutil.rmtree(one.home, ignore_errors=True)


def take(machine: Machine, server: Server) -> dict[str, int]:
    """Takes the data directory as PostgreSQL's manual tells it: the files between start and stop,
    then the label and the log that the files need. Returns what `take` says of the files.
    """
    label = machine.root / "label"
    label.mkdir(exist_ok=True)
    with psycopg.connect(server.server.url, autocommit=True) as conn:
        conn.execute("select pg_backup_start('test', fast => true)")
        done: dict[str, int] = machine.json("take", "db")
        said = conn.execute("select labelfile from pg_backup_stop(false)").fetchone()
        assert said is not None
        (label / "backup_label").write_text(said[0])
        machine.json("take", "wal")
    return done


def restore(machine: Machine, server: Server, other: Server) -> None:
    """Puts the newest versions together as the data directory of another server."""
    db, wal = (other.home / name for name in ("db", "wal"))
    for to in (db, wal):
        machine.call("restore", to.name, "--to", str(to))
    below = str(server.data)[1:]
    (db / below).rename(other.data)
    shutil.rmtree(other.data / "pg_wal", ignore_errors=True)
    (wal / below / "pg_wal").rename(other.data / "pg_wal")
    label = wal / str(machine.root)[1:] / "label" / "backup_label"
    shutil.copy(label, other.data)
    shutil.chown(other.data / "backup_label", other.data.owner(), other.data.group())


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Transactions go on meanwhile, as many a second on any machine: each changes pages."""
    argv = server.argv("pgbench", "--time=600", "--client=2", "--no-vacuum", "--rate=50")
    before = server.counts()["history"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            wait_until(lambda: server.counts()["history"] > before, "a transaction")
            yield
        finally:
            child.terminate()


@pytest.mark.long
def test_a_database_under_load_comes_back_sound(tmp_path: Path, home: Callable[[], Server]) -> None:
    machine, server = Machine(tmp_path), home()
    data, label = server.data, tmp_path / "label"
    machine.write_config(
        db={"paths": [str(data)], "exclude": [f"{data}/pg_wal/**", f"{data}/postmaster.*"]},
        wal={"paths": [str(data / "pg_wal"), str(label)]},
    )
    server.server.start()
    server.call("pgbench", "--initialize", f"--scale={_ROWS // 100_000}", "--quiet")
    with load(server):
        first = take(machine, server)
    # One in a hundred rows goes, in one stretch.
    server.server.query(f"delete from pgbench_accounts where aid <= {_ROWS // 100}")
    server.server.query("vacuum")
    second = take(machine, server)
    counts = server.counts()
    assert counts["accounts"] == _ROWS - _ROWS // 100
    assert second["parent"] == first["version"]
    assert second["stored"] < first["stored"] // 4
    assert machine.json("verify", "--download")["damaged"] == []

    restored = home()
    restore(machine, server, restored)
    restored.server.start()
    assert restored.counts() == counts
    restored.call("pg_amcheck", "--install-missing", "--heapallindexed")
