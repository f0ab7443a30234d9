"""A worker as a program: `python -m ntt_backup.worker_process`, started by the coordinator.

An own program rather than a forked child: it inherits no connection, lock or signal handler, it can
be watched and killed by itself, and what it says is readable. Its orders come as one JSON line on
stdin, then at most the word `stop`; its events go out as JSON lines on stdout. When the coordinator
dies, the kernel ends the worker, and with it its tar and ssh.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from ntt_backup.catalog.session import CatalogSession
from ntt_backup.config import Settings
from ntt_backup.errors import BackupError
from ntt_backup.planner import claim_order
from ntt_backup.process import wait_for
from ntt_backup.store import Store
from ntt_backup.strategy import Session, open_session
from ntt_backup.strategy.session import SessionPlan
from ntt_backup.transport.ssh import Ssh
from ntt_backup.worker import Assignment, Worker

_TICK_SECONDS: Final = 0.5


class Orders(BaseModel):
    """The one line a worker is started with. worker counts from 0; owner names this host and
    target.
    """

    model_config = ConfigDict(frozen=True)

    settings: Settings
    worker: int
    run_id: str
    owner: str
    application: str
    strategy: str
    watch: bool


class PipeLine:
    """The way to the coordinator over stdin and stdout; see `Line`."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stopping = False
        self._state = ""
        self._sent = 0
        self._ticked = 0.0

    @property
    def fd(self) -> int:
        return -1 if self._stopping else self._stdin

    @property
    def stopping(self) -> bool:
        if not self._stopping and wait_for(reading=[self._stdin], timeout=0):
            # The word, or the end of the file: the coordinator is gone. Both mean: finish and end.
            self._stopping = True
        return self._stopping

    def emit(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._stdout, data) :]

    def state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._tick(time.monotonic())

    def sent(self, count: int) -> None:
        """Count bytes on their way, and say so now and then."""
        self._sent += count
        now = time.monotonic()
        if now - self._ticked >= _TICK_SECONDS:
            self._tick(now)

    def _tick(self, now: float) -> None:
        self._ticked = now
        self.emit("tick", state=self._state, sent=self._sent)
        self._sent = 0


def run(orders: Orders, line: PipeLine) -> None:
    """Do the orders; raises what cannot be waited out."""
    settings = orders.settings
    store = Store(settings.source.root)
    limit = settings.run.bwlimit
    plan = SessionPlan(
        transport=Ssh(settings.remote),
        store=store,
        root=settings.remote.path,
        owner=orders.owner,
        run_id=orders.run_id,
        slot=str(orders.worker),
        run=settings.run,
        bytes_per_second=limit / settings.run.workers if limit is not None else None,
        on_bytes=line.sent,
    )

    def connect_remote() -> Session:
        return open_session(orders.strategy, plan)

    def connect_catalog() -> CatalogSession:
        return CatalogSession(
            settings.catalog.url,
            f"{orders.application}/{orders.worker}",
            settings.target,
            claim_order(orders.worker, settings.run.workers),
            listen=orders.watch,
        )

    assignment = Assignment(name=str(orders.worker), watch=orders.watch, run=settings.run)
    Worker(assignment, store, connect_remote, connect_catalog, line).run()


def main() -> int:
    """Exit status: 0, or that of the error that ended the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    orders = Orders.model_validate_json(_read_line(sys.stdin.fileno()))
    line = PipeLine(sys.stdin.fileno(), sys.stdout.fileno())
    line.emit("worker_start", strategy=orders.strategy)
    try:
        run(orders, line)
    except BackupError as error:
        line.emit(
            "fatal",
            exit_code=error.exit_code,
            message=error.message,
            detail=error.detail,
            hint=error.hint,
        )
        return error.exit_code
    line.emit("worker_stop")
    return 0


def _read_line(fd: int) -> bytes:
    """One line, byte by byte in effect: what follows it belongs to `PipeLine`."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            raise EOFError("no orders on stdin")
        data += piece
    return data


if __name__ == "__main__":
    status = main()
    # Looking through every object once more would take longer than all else at the end.
    gc.freeze()
    sys.exit(status)
