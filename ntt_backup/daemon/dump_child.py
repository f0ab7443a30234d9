"""The dump of a run: a copy of the coordinator that is started now and then, heard, and killed.

A run makes one before its first blob; a run that watches tries again every `dump.interval`, and
sooner after a failure. The dump has a process of its own, since the coordinator may wait for
nothing: it answers signals and the watchdog while gigabytes are sent, and no failure of a dump
stops the blobs. The process is a copy, since mostly no dump is due, and loading a program only to
find that out would cost more than all else.

Where this machine or key can make no dumps at all (no pg_dump, a forced command that takes none),
that is a warning as long as nobody relies on dumps: none was ever made for this target, and
`dump.bin` is not set. From the first dump on it is a failure.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from typing import Final

from ntt_backup.config import Settings
from ntt_backup.daemon.child import EventChild
from ntt_backup.dump.events import DumpFailed
from ntt_backup.dump.job import dump
from ntt_backup.dump.rehearsal import relied_on
from ntt_backup.errors import BackupError, DumpImpossible
from ntt_backup.events import Event, Warning
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import DumpOver, Message
from ntt_backup.process.pipeline import Child

RETRY_SECONDS: Final = 3600.0
_STDOUT: Final = 1


def fork_dump(settings: Settings) -> Child:
    """Returns a process that makes a dump if one is due. Raises OSError where that cannot be."""
    return Fork(partial(work, settings), "ntt-dump")


class DumpChild:
    """Starts, hears and kills the dumps of a run, at most one process at a time."""

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
        """The descriptors that become readable when the dump says something or ends."""
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


def work(settings: Settings) -> int:
    """Makes a dump if one is due; its events are lines on stdout, the last one is `dump_over`.
    Returns the exit status: 1 where a dump should have been made and was not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failed = False
    try:
        dump(settings, _emit)
    except DumpImpossible as error:
        failed = relied_on(settings)
        if failed:
            _emit(DumpFailed(**error.fields))
        else:
            text = f"no dump of the catalog is made: {error}; {error.hint}; or set run.skip_pgdump"
            _emit(Warning(reason=text))
    except BackupError as error:
        failed = True
        _emit(DumpFailed(**error.fields))
    _emit(DumpOver(failed=failed))
    return int(failed)


def _emit(message: Message) -> None:
    message.write(_STDOUT)
