"""A run has a row in the catalog, and is told the number of pending blobs.

No blob needs either to be copied, so neither may stop a run: while the catalog is unreachable, what
cannot be written is skipped, and the connection is tried again with the next progress event.
Counting pending blobs gets a bounded share of the time, and is an estimate where it takes too long,
so that neither the database nor the event loop notices 42 million rows.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar
from uuid import UUID

from ntt_backup.catalog import connection, history, stats, unread_files
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.config import Settings, application_name
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.daemon.signals import time_limit
from ntt_backup.errors import CatalogError, CatalogUnavailable
from ntt_backup.formatting import printable
from ntt_backup.model import PendingEstimate
from ntt_backup.process.pid_lock import process_exists

T = TypeVar("T")

_COUNT_MILLISECONDS: Final = 300
_COUNT_SHARE: Final = 0.02
_SOON_SECONDS: Final = 1.0
_AT_WORK_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 300.0
# The event loop also answers signals: a locked table, a slow count or a server that stands still
# must not hold it up. Limits that the server keeps do not help with the last.
_PATIENCE_SECONDS: Final = 2.0
_REASON_CHARS: Final = 500


class RunHistory:
    """Writes the run's row, over one connection of its own."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        self._settings = settings
        self._run_id = UUID(run_id)
        self._connection: connection.Connection | None = None
        self._counted = -math.inf
        self._rest = 0.0
        self._started = False
        self._strategy = ""
        self._notes_hours = False
        self._elapsed_s = 0.0
        self._outage_s = 0.0

    def start(self, strategy: str) -> None:
        """Writes to the catalog that the run begins, by this strategy or "".

        Raises:
            CatalogError: The catalog does not answer, which it must at the start.
        """
        self._start(self._open(), strategy)
        self._notes_hours = history.may_note_hours(self._open())

    def _start(self, conn: connection.Connection, strategy: str) -> None:
        self._strategy = strategy
        settings, host = self._settings, socket.gethostname()
        unended = history.unended_runs(conn, settings.target, host)
        gone = [
            run_id
            for run_id, pid in unended.items()
            if pid == os.getpid() or not process_exists(pid)
        ]
        history.note_killed(conn, gone)
        history.start_run(
            conn,
            self._run_id,
            settings.target,
            host=host,
            pid=os.getpid(),
            strategy=strategy,
            workers=settings.run.workers,
        )
        self._started = True

    def refresh(self, state: RunState) -> None:
        """Adds up the seconds in which a side was unreachable."""
        if any(one.state == "outage" for one in state.workers):
            self._outage_s += state.elapsed_s - self._elapsed_s
        self._elapsed_s = state.elapsed_s

    def any_pending(self) -> bool:
        """Returns whether there is, or may be, anything to send. Raises CatalogError."""
        conn = self._open()
        claims = Claims(conn, self._settings.target, self._settings.part.prefixes)
        unread = unread_files.UnreadFiles(conn, self._settings.target)
        return (self._settings.by_path and unread.any_left()) or claims.any_pending() is not False

    def count_pending(self, progress: RunProgress, now: float) -> None:
        """Tells progress how much is pending, if that is due. now: monotonic seconds."""
        rest = _AT_WORK_SECONDS if progress.at_work else _IDLE_SECONDS
        if progress.out_of_date:
            rest = _SOON_SECONDS
        if now < self._counted + max(rest, self._rest):
            return
        began = time.monotonic()
        found = self._try(
            lambda conn: stats.pending_estimate(conn, self._settings.target, _COUNT_MILLISECONDS)
        )
        self.note_pending(progress, found, now)
        self._rest = (time.monotonic() - began) / _COUNT_SHARE

    def note_pending(
        self, progress: RunProgress, found: PendingEstimate | None, now: float
    ) -> None:
        """Tells progress how much was found to be pending, where that is known."""
        if found is not None:
            progress.found(found)
        self._counted = now

    def update(
        self, state: RunState, outcome: str | None = None, exit_code: int | None = None
    ) -> None:
        """Writes the counts, which show that the run is alive; with an outcome, its end."""

        def known(conn: connection.Connection) -> bool:
            return history.update_run(
                conn,
                self._run_id,
                copied=state.copied,
                failed=state.failed,
                bytes=state.bytes,
                outcome=outcome,
                exit_code=exit_code,
                outage_s=self._outage_s if self._notes_hours else None,
            )

        def write(conn: connection.Connection) -> None:
            if self._started and not known(conn):
                # The standby that was promoted did not have the row yet.
                self._start(conn, self._strategy)
                known(conn)
            self._outage_s = 0.0

        self._try(write)

    def still_failed(self) -> int:
        """Returns the number of failed blobs, of any run, that are not marked as known.

        0 if the catalog is unreachable.
        """
        if not self._started:
            return 0
        target = self._settings.target
        return self._try(lambda conn: stats.still_failed(conn, target)) or 0

    def young_files(self) -> int:
        """Returns the number of files by path that were left unread, since they are too young.

        0 if the catalog is unreachable.
        """
        if not (self._started and self._settings.by_path):
            return 0
        target = self._settings.target
        return self._try(lambda conn: unread_files.UnreadFiles(conn, target).count_young()) or 0

    def end(self, state: RunState, outcome: str, exit_code: int, reason: str) -> None:
        """Writes how the run ended, by `RunState.outcome`, and closes the connection.

        A run that could not begin is noted, too: the next run must know that it is not the first to
        fail. reason: of an error.
        """
        if not self._started and outcome == "error":
            self._try(lambda conn: self._start(conn, ""))
        if self._started:
            self.update(state, outcome, exit_code)
        if self._started and outcome == "error":
            kept = printable(reason)[:_REASON_CHARS]
            self._try(lambda conn: history.note_reason(conn, self._run_id, kept))
        self._close()

    def _open(self) -> connection.Connection:
        if self._connection is None:
            url, part = self._settings.catalog.url, self._settings.part
            self._connection = connection.connect(url, application_name(), part=part)
        return self._connection

    def _try(self, work: Callable[[connection.Connection], T]) -> T | None:
        try:
            with time_limit(_PATIENCE_SECONDS, CatalogUnavailable("the catalog is too slow")):
                return work(self._open())
        except CatalogError:
            self._close()
            return None

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
