"""A real PostgreSQL for the tests: one server a session, one fresh database a test.

Nothing is installed and no port is opened (a Unix socket in a directory of its own). The
server trades durability for speed; nothing here tests what survives a power cut.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from ntt_backup.catalog.connection import Connection, connect
from ntt_backup.catalog.schema import init_db
from ntt_backup.demo.processes import Interrupts
from tests.helpers import postgres_server
from tests.helpers.parallel import memory
from tests.helpers.processes import children

TARGET = "remote"
# Few, so that a test can use them up.
CONNECTIONS = 24
_SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    f"max_connections={CONNECTIONS}",
    "shared_buffers=32MB",
    "autovacuum=off",
)
_numbers = itertools.count(1)
# Another server than that of the package, see tests/matrix: the directory of its bin.
_OTHER = os.environ.get("NTT_TEST_POSTGRES", "")
if _OTHER:
    postgres_server._installation = lambda: Path(_OTHER)


@dataclass(frozen=True)
class Postgres:
    """The session's server. url(name) is a connection string to one of its databases; programs is
    the directory of its pg_dump; log is the file that the server writes its messages to.

    A test may stop it and leave it so: it runs again before the test's database is dropped.
    """

    server: postgres_server.Postgres
    programs: Path
    log: Path

    def url(self, database: str, user: str = "postgres") -> str:
        return psycopg.conninfo.make_conninfo(self.server.url_of(database), user=user)

    def execute(self, statement: sql.Composed, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as conn:
            conn.execute(statement)

    def psql(self, script: str, url: str) -> subprocess.CompletedProcess[str]:
        """Run a script by psql, as somebody who got it in a mail would."""
        return subprocess.run(
            [self.programs / "psql", "--no-psqlrc", "--dbname", url],
            input=script,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def stop(self) -> None:
        """The server ends at once, as in a crash; connections break, new ones are refused."""
        self.server.stop(at_once=True)

    def start(self) -> None:
        """Undo `stop` on the same socket; does nothing where it runs."""
        self.server.start()

    @property
    def processes(self) -> list[int]:
        """The server and its sessions, as long as it runs."""
        server = self.server.pid
        return [] if server is None else [server, *children(server)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The server and its sessions stand still: connections hold, and nothing is answered."""
        try:
            for pid in self.processes:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in reversed(self.processes):
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def on_tcp(self) -> Iterator[int]:
        """Have the server listen on a port of 127.0.0.1, and on no socket; yields the port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.stop()
        self.server.start("listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=")
        try:
            yield port
        finally:
            self.stop()
            self.start()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server, started once and removed with its data at the end."""
    # Not below pytest's own directories: the server's user could not enter them.
    home = Path(tempfile.mkdtemp(prefix="ntt-postgres-", dir=memory()))
    home.chmod(0o711)
    sockets = home / "sockets"
    sockets.mkdir()
    sockets.chmod(0o777)
    # Some tests run a command that has no more rights than any other user.
    server = postgres_server.Postgres(home, Interrupts(), _SETTINGS, sockets)
    try:
        server.start()
        yield Postgres(server, server.programs, home / "log")
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _copy_of(postgres: Postgres, template: str) -> Iterator[str]:
    """The URL of a new database; its files are copied, which is quick without fsync."""
    name = f"ntt_{next(_numbers)}"
    major = int((postgres.log.with_name("data") / "PG_VERSION").read_text())
    how = sql.SQL("strategy file_copy" if major >= 15 else "")
    create = sql.SQL("create database {} template {} {}")
    postgres.execute(create.format(sql.Identifier(name), sql.Identifier(template), how))
    yield postgres.url(name)
    postgres.start()
    postgres.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def session(url: str, name: str = "test", *, no_tables: bool = False) -> Iterator[Connection]:
    """A connection as the program makes it, but with the search path of any other program."""
    with connect(url, name, no_tables=no_tables) as conn:
        conn.execute("select set_config('search_path', %s, false)", [conn.search_path])
        yield conn


@pytest.fixture
def database_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a fresh, empty database that is dropped after the test."""
    with _copy_of(postgres, "template0") as url:
        yield url


@pytest.fixture
def scratch_url(postgres: Postgres) -> Iterator[str]:
    """The URL of one more empty database, for what comes back."""
    with _copy_of(postgres, "template0") as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Connection]:
    """A superuser's connection to a fresh, empty database."""
    with session(database_url) as conn:
        yield conn


@pytest.fixture(scope="session")
def _template(postgres: Postgres) -> str:
    """The name of a database on which init-db has run for the target `remote`."""
    name = "ntt_template"
    postgres.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with connect(postgres.url(name), "test") as conn:
        init_db(conn, TARGET)
    return name


@pytest.fixture
def catalog_url(postgres: Postgres, _template: str) -> Iterator[str]:
    """The URL of a fresh database as init-db makes it; not the one of `database_url`."""
    with _copy_of(postgres, _template) as url:
        yield url


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Connection]:
    """A superuser's connection to a fresh catalog of the target `remote`."""
    with session(catalog_url) as conn:
        yield conn


@pytest.fixture
def tcp_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a database, empty but for what PostgreSQL has there, that is reached by TCP."""
    with postgres.on_tcp() as port:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"


@pytest.fixture
def role(postgres: Postgres) -> Callable[[], str]:
    """Makes login roles without any privilege: `role()` returns the name of a new one.

    They are left to the server's end, since the database with their grants outlives the test.
    """

    def make() -> str:
        name = f"ntt_role_{next(_numbers)}"
        postgres.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        return name

    return make
