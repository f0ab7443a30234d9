"""The catalog of the demo is on an embedded PostgreSQL.

PostgreSQL refuses to run as root; in a demo by root it runs as `nobody`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from pathlib import Path

from ntt_backup.errors import ConfigError
from ntt_backup.process import embedded, postgres


class Postgres:
    """An embedded PostgreSQL in a home directory, which has its data at the next start, too.

    setting: `catalog.url` for commands. url: the connection string.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._directory = home / embedded.NAME
        self.setting = f"embedded:{home}"
        self.url = postgres.url_of(self._directory)

    @property
    def programs(self) -> Path:
        """Returns the directory of psql, while the server runs."""
        return postgres.installations()[-1] / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """Returns what psql, createdb and the like need to find the database."""
        names = {"PGUSER": postgres.OWNER, "PGDATABASE": postgres.DATABASE}
        return {"PGHOST": str(self._directory), **names}

    def start(self) -> None:
        """Starts the server, with an empty database unless it has data. Raises BackupError."""
        if os.geteuid() == 0:
            self._admit_nobody()
        embedded.hold(self._directory)

    def stop(self) -> None:
        """Stops the server; does nothing if the server does not run."""
        if self._directory.exists():
            with embedded.unused(self._directory):
                pass

    def lose(self) -> None:
        """Stops the server, and removes the server with the data."""
        embedded.remove(self._directory)

    def query(self, sql: str) -> str:
        """Returns the rows as lines of text, with `|` between columns."""
        argv = [str(self.programs / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", sql]
        return postgres.call([*argv, "-d", self.url], cwd=self._home)

    def _admit_nobody(self) -> None:
        """Gives `nobody` the directory, and programs to start. Raises ConfigError."""
        user, group = nobody()
        if not self._directory.exists():
            self._directory.mkdir(mode=0o700)
            os.chown(self._directory, user, group)
        installed = postgres.installations()
        if not all(map(open_to_others, installed)):
            package = installed[0].parent
            # The programs look for their libraries beside the package.
            for tree in (package, package.with_name(f"{package.name}.libs")):
                copy = self._home / tree.name
                if tree.exists() and not copy.exists():
                    shutil.copytree(tree, copy, symlinks=True)
                    for path in (copy, *copy.rglob("*")):
                        os.chown(path, user, group, follow_symlinks=False)
            sys.path.insert(0, str(self._home))  # There the programs are found first.


def nobody() -> tuple[int, int]:
    """Returns user and group of a server that root starts. Raises ConfigError."""
    try:
        account = pwd.getpwnam("nobody")
    except KeyError:
        raise ConfigError(
            "there is no user nobody",
            detail="PostgreSQL refuses to run as root",
            hint="call this as an ordinary user",
        ) from None
    return account.pw_uid, account.pw_gid


def open_to_others(directory: Path) -> bool:
    """Returns whether every user may enter a directory."""
    return all(one.stat().st_mode & 0o001 for one in (directory, *directory.parents))
