"""A PostgreSQL primary with a streaming standby, either of which can be killed, frozen or cut off.

Clients reach each server through a `Link` of its own, and the standby reaches the primary through
another one: so a server can be cut off while it lives, and the standby can lag behind. A server
that was a primary is made anew from the one that has taken its place, as operators do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from ntt_backup.demo.processes import Interrupts
from ntt_backup.process.postgres import DATABASE
from tests.helpers import postgres_server
from tests.helpers.link import Link
from tests.helpers.parallel import memory
from tests.helpers.processes import children
from tests.helpers.sshd import HOST, free_port
from tests.helpers.waiting import wait_until

_SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    "autovacuum=off",
    "shared_buffers=16MB",
    "max_connections=40",
    "wal_keep_size=64MB",
    "wal_retrieve_retry_interval=100ms",
    "checkpoint_timeout=1h",
    # A server that is killed leaves no shared memory of its own behind.
    "dynamic_shared_memory_type=mmap",
    "shared_memory_type=mmap",
)
_STATUS_LINE = 7


class Node(postgres_server.Postgres):
    """One server. clients, wal: the links to it, of clients and of a standby."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o711)
        sockets = home / "sockets"
        sockets.mkdir()
        sockets.chmod(0o777)
        super().__init__(home, Interrupts(), _SETTINGS, sockets)
        self.data = home / "data"
        self.port = free_port()
        self.clients = Link(HOST, self.port)
        self.wal = Link(HOST, self.port)
        self.frozen = False

    def serve(self, *settings: str) -> None:
        """Start, and take connections by TCP."""
        self.start("listen_addresses=127.0.0.1", f"port={self.port}", *settings)

    def _is_ready(self) -> bool:
        with suppress(FileNotFoundError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            ready = [line.strip() for line in lines[_STATUS_LINE:]]
            return lines[:1] == [str(self.pid)] and ready in (["ready"], ["standby"])
        return False

    def address(self, database: str = DATABASE) -> str:
        """The connection string of this server alone, past the links."""
        return f"host={HOST} port={self.port} user=postgres dbname={database} connect_timeout=60"

    @property
    def behind_link(self) -> str:
        """The connection string of this server alone, by its link."""
        return f"host={HOST} port={self.clients.port}"

    def ask(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.address(), autocommit=True) as conn:
            cursor = conn.execute(sql.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def signal(self, number: int) -> None:
        """A signal for the server and all its sessions."""
        if self.pid is not None:
            for pid in (self.pid, *children(self.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def freeze(self) -> None:
        """Stand still: connections hold, and nothing is answered."""
        # First the one that starts others.
        for _ in range(2):
            self.signal(signal.SIGSTOP)
        self.frozen = True

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.frozen = False
        self.end_process()


class Cluster:
    """Two servers, one of which is the primary. url: leads clients to whichever accepts writes."""

    def __init__(self, home: Path) -> None:
        self.nodes = [Node(home / name) for name in ("one", "two")]
        self.primary = self.nodes[0]
        self.synchronous = False

    @property
    def standby(self) -> Node:
        """The other server, which may be down, or an old primary."""
        return next(node for node in self.nodes if node is not self.primary)

    @property
    def url(self) -> str:
        return make_conninfo(
            "",
            host=",".join(HOST for _ in self.nodes),
            port=",".join(str(node.clients.port) for node in self.nodes),
            user="postgres",
            dbname=DATABASE,
            target_session_attrs="read-write",
            connect_timeout=2,
            tcp_user_timeout=1500,
        )

    def begin(self) -> None:
        first = self.nodes[0]
        first.start()
        first.stop(at_once=False)
        first.serve()
        self.rejoin()

    def rejoin(self) -> None:
        """Make the other server anew, as a standby of the primary."""
        node, primary = self.standby, self.primary
        node.kill()
        shutil.rmtree(node.data, ignore_errors=True)
        for link in (node.clients, node.wal, primary.wal):
            link.resume()
            link.restore()
        argv = [str(primary.programs / "pg_basebackup"), "-h", HOST, "-p", str(primary.port)]
        argv += ["-U", "postgres", "-D", str(node.data), "-c", "fast", "--no-sync", "-X", "stream"]
        made = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert made.returncode == 0, f"{made.stderr}\n{primary.last_lines}"
        (node.data / "standby.signal").touch()
        postgres_server._give_away(node.data)
        node.serve(
            f"primary_conninfo=host={HOST} port={primary.wal.port} user=postgres"
            " application_name=standby"
        )
        self.await_standby()

    def await_standby(self) -> None:
        """Until the standby has all that the primary has committed."""
        same = "select 1 from pg_stat_replication where replay_lsn >= pg_current_wal_lsn()"
        wait_until(lambda: self.primary.ask(same), "the standby", 60, self._said)

    def _said(self) -> str:
        return "\n".join(node.last_lines for node in self.nodes)

    def synchronise(self, wanted: bool) -> None:
        """Have commits of the primary wait for the standby, or not."""
        self.synchronous = wanted
        names = "*" if wanted else ""
        self.primary.ask(f"alter system set synchronous_standby_names = '{names}'")
        self.primary.ask("select pg_reload_conf()")

    def lag(self) -> None:
        """From now on nothing reaches the standby."""
        self.primary.wal.cut()

    def promote(self) -> Node:
        """Make the standby the primary; returns the old one, whatever it does meanwhile."""
        old, new = self.primary, self.standby
        new.ask("select pg_promote(true, 60)")
        self.primary = new
        # Else the first commit would wait for a standby that it does not have.
        self.synchronise(False)
        return old

    def end_sessions(self) -> None:
        """Break all sessions of the program with the primary."""
        self.primary.ask(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'ntt-backup-remote%'"
        )


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A primary with a standby that has all; both end with their data."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-cluster-", dir=memory())))
        home.chmod(0o711)
        made = Cluster(home)
        for node in made.nodes:
            stack.enter_context(node.clients)
            stack.enter_context(node.wal)
            stack.callback(node.kill)
        made.begin()
        yield made
