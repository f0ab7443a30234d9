"""The dump as the coordinator sees it: a process that is started now and then, heard, and killed.

A run makes one before its first blob; one that watches looks again every `dump.interval`, and
sooner after a failure. Whatever becomes of the process, the run goes on; `failed` says whether the
last one failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from ntt_backup.config import Settings
from ntt_backup.daemon.child import EventChild
from ntt_backup.daemon.dump_main import work
from ntt_backup.events import DumpFailed, Event
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import DumpOver
from ntt_backup.process.pipeline import Child

RETRY_SECONDS: Final = 3600.0


def fork_dump(settings: Settings) -> Child:
    """Returns a process that makes a dump if one is due. Raises OSError where that cannot be."""
    return Fork(partial(work, settings), "ntt-dump")


class DumpChild:
    """At most one process, the leader of its own process group."""

    def __init__(self, settings: Settings) -> None:
        self.failed = False
        self._settings = settings
        self._child: EventChild | None = None
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
        """Starts one, if it is time to. now: monotonic seconds."""
        if self._next is None or now < self._next or self._child is not None:
            return
        wanted = self._settings.dump
        self._next = now + min(wanted.interval, wanted.max_age or wanted.interval)
        self._over = False
        try:
            self._child = EventChild(fork_dump(self._settings))
        except OSError:  # short of memory: the next look may find more
            self._retry(now)

    def hear(self, now: float) -> Iterator[Event]:
        """Its events; afterwards `running` is False if it has ended."""
        child = self._child
        if child is None:
            return
        for message in child.hear():
            if isinstance(message, DumpOver):
                self._over, self.failed = True, message.failed
            elif isinstance(message, Event):
                yield message
        if child.ended:
            child.reap()
            self._child = None
            if not self._over:
                self.failed = True
                yield DumpFailed(
                    pid=child.pid,
                    exit_code=1,
                    message="the process that dumps the catalog died",
                    detail=child.detail,
                    hint="",
                )
            if self.failed:
                self._retry(now)

    def kill(self) -> None:
        """Ends it and all that it started, now; the remote removes what it got."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap()

    def _retry(self, now: float) -> None:
        self._next = now + min(RETRY_SECONDS, self._settings.dump.interval)
