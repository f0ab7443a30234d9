"""The dump as the coordinator sees it: a process that is started now and then, heard, and killed.

A run makes one before its first blob; one that watches looks again every `dump.interval`, and
sooner after a failure. Whatever becomes of the process, the run goes on; `failed` says whether the
last one failed.

Called by `coordinator`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from ntt_backup.config import Settings
from ntt_backup.invocation import complete
from ntt_backup.line import read_event
from ntt_backup.process import Child, write

PROGRAM: Final = (sys.executable, "-m", "ntt_backup.dump.process")
RETRY_SECONDS: Final = 3600.0


class DumpChild:
    """At most one process, the leader of its own process group."""

    def __init__(self, settings: Settings) -> None:
        self.failed = False
        self._settings = settings
        self._child: Child | None = None
        self._rest = b""
        self._over = False
        self._next: float | None = None if settings.run.skip_pgdump else 0.0

    @property
    def running(self) -> bool:
        return self._child is not None

    @property
    def fds(self) -> list[int]:
        """What becomes readable when there is news of it."""
        return [] if self._child is None else self._child.fds

    def start_if_due(self, now: float) -> None:
        """Start one, if it is time to. now: monotonic seconds."""
        if self._next is None or now < self._next or self._child is not None:
            return
        wanted = self._settings.dump
        self._next = now + min(wanted.interval, wanted.max_age or wanted.interval)
        self._rest, self._over = b"", False
        try:
            self._child = Child(PROGRAM, new_session=True)
        except OSError:  # short of memory: the next look may find more
            self._retry(now)
            return
        with suppress(BrokenPipeError):  # it fits into the pipe
            write(self._child.stdin_fd, self._settings.model_dump_json().encode())
        self._child.close_stdin()

    def hear(self, now: float) -> Iterator[dict[str, Any]]:
        """Its events; afterwards `running` is False if it has ended."""
        child = self._child
        if child is None:
            return
        child.drain_stderr()
        ended = child.status is not None
        while (data := child.read()) is not None:
            if not data:
                ended = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for event in filter(None, map(read_event, lines)):
                if event["event"] == "dump_over":
                    self._over, self.failed = True, bool(event["failed"])
                else:
                    yield {key: _completed(value) for key, value in event.items()}
        if ended:
            child.wait(5.0)
            self.kill()
            if not self._over:
                self.failed = True
                yield {
                    "event": "dump_failed",
                    "pid": child.pid,
                    "exit_code": 1,
                    "message": "the process that dumps the catalog died",
                    "detail": child.stderr.text[-2000:],
                    "hint": "",
                }
            if self.failed:
                self._retry(now)

    def kill(self) -> None:
        """End it and all that it started, now; the remote removes what it got."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()

    def _retry(self, now: float) -> None:
        self._next = now + min(RETRY_SECONDS, self._settings.dump.interval)


def _completed(value: Any) -> Any:
    """It does not know how this program was called."""
    return complete(value) if isinstance(value, str) else value
