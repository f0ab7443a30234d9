"""A PostgreSQL server of tests and benches has any settings, and can be stopped as in a crash.

The server runs in a directory. PostgreSQL refuses to run as root; by root it is run as `nobody`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ntt_backup.demo.postgres import nobody
from ntt_backup.demo.processes import Interrupts, Server
from ntt_backup.errors import CatalogUnavailable, ConfigError, SourceError
from ntt_backup.process import postgres
from ntt_backup.process.spawn import die_with_parent

# No port; a socket in the data directory, for its owner only.
_SETTINGS: Final = (
    "listen_addresses=",
    "unix_socket_directories=.",
    "unix_socket_permissions=0700",
)
_FOR_ALL: Final = "unix_socket_permissions=0777"
_START_SECONDS: Final = 120.0
# A fast end is asked for, then an immediate one, then it is killed; each is given some seconds.
_STOPS: Final = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))


class Postgres(Server):
    """One server in one home directory, whose data it finds again at the next start.

    settings: more of them, such as `fsync=off`. sockets: where its socket lies, open to every user;
    without it, in the data directory, open to its own. url is a libpq connection string to its
    database `copyjob`.
    """

    def __init__(
        self,
        home: Path,
        interrupts: Interrupts,
        settings: Iterable[str] = (),
        sockets: Path | None = None,
    ) -> None:
        super().__init__(home / "log", interrupts)
        self._home = home
        self._data = home / "data"
        self._sockets = sockets or self._data
        shared = () if sockets is None else (f"unix_socket_directories={sockets}", _FOR_ALL)
        self._settings = (*_SETTINGS, *shared, *settings)
        self._pid_file = self._data / "postmaster.pid"
        self.url = self.url_of(postgres.DATABASE, postgres.OWNER)

    def url_of(self, database: str, user: str = postgres.SUPERUSER) -> str:
        """Returns a libpq connection string to one of its databases."""
        return postgres.url_of(self._sockets, database, user)

    @property
    def programs(self) -> Path:
        """Returns the directory of its pg_dump. Raises ConfigError."""
        return _installation() / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """Returns what psql, createdb and the like need to find it, and the database in it."""
        names = {"PGUSER": postgres.OWNER, "PGDATABASE": postgres.DATABASE}
        return {"PGHOST": str(self._sockets), **names}

    def start(self, *settings: str) -> None:
        """Returns once it takes connections; does nothing where it runs. settings: for this time.

        Raises ConfigError, CatalogUnavailable.
        """
        if self.process is not None and self.process.poll() is None:
            return
        binaries = self._binaries()
        if not (self._data / "PG_VERSION").exists():
            self._data.mkdir(mode=0o700)
            _give_away(self._data)
            postgres.initialise(binaries, self._data, **self._how())
        argv = [str(binaries / "postgres"), "-D", str(self._data)]
        for setting in (*self._settings, *settings):
            argv += ["-c", setting]
        # An immediate shutdown: nothing has to outlive a process that was killed.
        how = {"env": postgres.environment(), "preexec_fn": die_with_parent(signal.SIGQUIT)}
        if not self.start_process(argv, self._is_ready, _START_SECONDS, **how, **self._how()):
            self.stop()
            said = self.last_lines
            raise CatalogUnavailable("the PostgreSQL of the tests did not start", detail=said)

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the server, however busy the server is; does nothing if the server does not run.

        Args:
            at_once: Whether to stop as in a crash, so that the server recovers at the next start.
        """
        self.end_process(_STOPS[at_once:])

    def create(self) -> None:
        """Makes the database `copyjob`, empty."""
        url = self.url_of("postgres")
        self.query(f"create database {postgres.DATABASE} owner {postgres.OWNER}", url)

    def drop(self) -> None:
        """Removes the database with all that is in it."""
        self.query(f"drop database {postgres.DATABASE} with (force)", self.url_of("postgres"))

    def query(self, sql: str, url: str = "") -> str:
        """Returns the rows as lines of text, with `|` between columns.

        Args:
            sql: The query.
            url: The database and its user; "" for the database `copyjob`, by its owner.
        """
        argv = [str(self.programs / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql]
        return postgres.call([*argv, "-d", url or self.url], cwd=self._home)

    def _how(self) -> dict[str, Any]:
        """Returns what Popen needs to run something as the server's user."""
        return {"cwd": self._home, **postgres.run_as(*_owner())}

    def _is_ready(self) -> bool:
        try:
            lines = [line.strip() for line in self._pid_file.read_text().splitlines()]
        except FileNotFoundError:
            return False
        return lines[:1] == [str(self.pid)] and lines[postgres.STATUS_LINE :] == ["ready"]

    def _binaries(self) -> Path:
        """Returns where initdb and postgres are: a copy where their user may not go there."""
        installed = _installation()
        try:
            postgres.call([str(installed / "bin" / "postgres"), "--version"], **self._how())
        except SourceError:
            # The binaries look for their libraries beside the package's own directory.
            libraries = installed.parent.with_name(f"{postgres.PACKAGE}.libs")
            for tree, copy in (
                (installed, self._home / postgres.PACKAGE / installed.name),
                (libraries, self._home / libraries.name),
            ):
                if tree.exists() and not copy.exists():
                    shutil.copytree(tree, copy, symlinks=True)
                    _give_away(copy)
            return self._home / postgres.PACKAGE / installed.name / "bin"
        return installed / "bin"


def _installation() -> Path:
    """Returns the newest PostgreSQL of the package: the directory with bin, lib and share."""
    if found := postgres.installations():
        return found[-1]
    raise ConfigError(
        "the PostgreSQL of the tests is not installed",
        hint="pip install '.[demo]', in a checkout of this project",
    )


def _give_away(tree: Path) -> None:
    """Makes the tree the server's user's, where that is somebody else."""
    if os.geteuid() == 0:
        for path in (tree, *tree.rglob("*")):
            os.chown(path, *_owner(), follow_symlinks=False)


def _owner() -> tuple[int, int]:
    """Returns user and group of the server."""
    return (os.geteuid(), os.getegid()) if os.geteuid() else nobody()
