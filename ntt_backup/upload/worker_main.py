"""A worker as a process of its own: it can be watched and killed by itself, and lost.

It gets its `WorkerSpec` when it is made. On stdin comes the word `go` once it is known that there
is work, and at most the word `stop` after it; its events go out as JSON lines on stdout. Before
`go` it only connects to the remote, which the preflight examines meanwhile. When the coordinator
dies, the kernel ends the worker, and with it its tar and ssh.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ntt_backup import events
from ntt_backup.catalog.ranges import claim_order
from ntt_backup.client.connection import Connection, SessionSpec
from ntt_backup.client.ssh import Ssh
from ntt_backup.client.throttle import Limit
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.process.messages import Fatal
from ntt_backup.source.inspection import Store
from ntt_backup.source.read_ahead import ReadAhead
from ntt_backup.upload.catalog_session import CatalogSession
from ntt_backup.upload.event_pipe import EventPipe
from ntt_backup.upload.strategies import connect_ahead, open_session
from ntt_backup.upload.strategies.session import Session
from ntt_backup.upload.worker import Worker

GO: Final = b"go\n"

_STDIN: Final = 0
_STDOUT: Final = 1
# A connection that has waited for longer may be gone without a sign.
_FRESH_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is to do. worker: its number, counted from 0. owner names this host and target.
    limit: what all workers together may send.
    """

    settings: Settings
    worker: int
    run_id: str
    owner: str
    application: str
    strategy: str
    watch: bool
    limit: Limit | None = None


class Remote:
    """Opens sessions; the first one over a connection that was made ahead, where there is one."""

    def __init__(self, strategy: str, spec: SessionSpec, store: Store) -> None:
        self._strategy = strategy
        self._spec = spec
        self._store = store
        self._ahead: Connection | None = None
        self._since = 0.0

    def connect_ahead(self) -> None:
        """Connects; an error will show again when a session is wanted."""
        with suppress(BackupError):
            self._ahead = connect_ahead(self._strategy, self._spec)
        self._since = time.monotonic()

    def connect(self) -> Session:
        """Opens a session. Raises as `Session` does."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and time.monotonic() - self._since >= _FRESH_SECONDS:
            ahead.abort()
            ahead = None
        return open_session(self._strategy, self._spec, self._store, ahead)


def session_spec(spec: WorkerSpec, pipe: EventPipe) -> SessionSpec:
    """Returns what this worker's sessions are opened with."""
    settings = spec.settings
    return SessionSpec(
        transport=Ssh(settings.remote),
        root=settings.remote.path,
        owner=spec.owner,
        run_id=spec.run_id,
        slot=str(spec.worker),
        run=settings.run,
        pace=spec.limit.sender(spec.worker) if spec.limit is not None else None,
        on_bytes=pipe.sent,
        on_content=pipe.carried,
    )


def run(spec: WorkerSpec, store: Store, remote: Remote, pipe: EventPipe) -> None:
    """Does the work; raises what cannot be waited out."""
    settings = spec.settings

    def connect_catalog() -> CatalogSession:
        return CatalogSession(
            settings.catalog.url,
            f"{spec.application}/{spec.worker}",
            settings.target,
            claim_order(spec.worker, settings.run.workers),
            listen=spec.watch,
        )

    name, connect = str(spec.worker), remote.connect
    ahead = ReadAhead(store.root, settings.source.read_order)
    Worker(name, settings.run, store, ahead, connect, connect_catalog, pipe, watch=spec.watch).run()


def work(spec: WorkerSpec) -> int:
    """Does all that a worker does, on its stdin and stdout. Returns the exit status: 0, or that of
    the error that ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    pipe = EventPipe(_STDIN, _STDOUT)
    store = Store(spec.settings.source.root)
    remote = Remote(spec.strategy, session_spec(spec, pipe), store)
    remote.connect_ahead()
    if _read_line(_STDIN) != GO:
        return 0
    pipe.emit(events.WorkerStart(strategy=spec.strategy))
    try:
        run(spec, store, remote, pipe)
    except BackupError as error:
        pipe.emit(Fatal(**error.fields))
        return error.exit_code
    pipe.emit(events.WorkerStop())
    return 0


def _read_line(fd: int) -> bytes:
    """Returns one line, byte by byte: what follows it belongs to `EventPipe`."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            break
        data += piece
    return data
