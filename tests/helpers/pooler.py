"""PgBouncer before a PostgreSQL server, which it can be led away from while it runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo

from tests.helpers.sshd import HOST, free_port
from tests.helpers.waiting import wait_until

PGBOUNCER: Final = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")


class Pooler:
    """A PgBouncer that runs. `through(url)` is the URL of a database behind it."""

    def __init__(self, home: Path, mode: str) -> None:
        self._home, self._mode = home, mode
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def lead_to(self, server: str) -> None:
        """Have each new session on the server of this connection string."""
        users = self._home / "users.txt"
        users.write_text('"postgres" ""\n')
        (self._home / "pgbouncer.ini").write_text(
            f"[databases]\n* = {server}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {self.port}\n"
            f"unix_socket_dir =\nauth_type = trust\nauth_file = {users}\n"
            f"pool_mode = {self._mode}\nserver_login_retry = 1\nserver_connect_timeout = 2\n"
        )
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def through(self, url: str) -> str:
        return make_conninfo(url, host=HOST, port=self.port)

    def start(self) -> None:
        argv = [str(PGBOUNCER), "--quiet", str(self._home / "pgbouncer.ini")]
        if os.geteuid() == 0:  # As root it refuses to run.
            self._home.chmod(0o755)
            argv[1:1] = ["--user", "nobody"]
        self._process = subprocess.Popen(argv)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def running_pooler(mode: str, server: str, url: str) -> Iterator[Pooler]:
    """A PgBouncer of a pool_mode that leads to a server. url: of a database there."""
    with TemporaryDirectory(prefix="ntt-pooler-") as home:
        made = Pooler(Path(home), mode)
        made.lead_to(server)
        made.start()
        try:
            wait_until(lambda: _answers(made.through(url)), "the pooler")
            yield made
        finally:
            made.stop()


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
