"""The coordinator's own page in the catalog: its run's row, and how much is pending.

None of it is needed to move blobs, so none of it may stop a run: when the catalog is away, what
cannot be noted is skipped, and the connection is tried again with the next progress event. What is
pending is looked at with a bounded share of the time, and estimated where a count takes too long,
so that neither the database nor the event loop notices 42 million rows.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from ntt_backup import identity
from ntt_backup.catalog import connection, history, stats
from ntt_backup.catalog.range_locks import Claims
from ntt_backup.catalog.ranges import RANGES
from ntt_backup.config import Settings
from ntt_backup.daemon.progress import Progress, Snapshot
from ntt_backup.daemon.signals import time_limit
from ntt_backup.errors import CatalogError, CatalogUnavailable

T = TypeVar("T")

_COUNT_MILLISECONDS: Final = 300
_COUNT_SHARE: Final = 0.02
_SOON_SECONDS: Final = 1.0
_AT_WORK_SECONDS: Final = 10.0
_IDLE_SECONDS: Final = 300.0
# Once the run goes, the loop that calls here also answers signals: a locked table, a slow count, or
# a server that stands still may not hold it up. Limits that the server keeps do not help with the
# last.
_PATIENCE_SECONDS: Final = 2.0


class RunBook:
    """One connection, opened by `start`."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        self._settings = settings
        self._run_id = UUID(run_id)
        self._connection: connection.Connection | None = None
        self._counted = -math.inf
        self._rest = 0.0
        self._started = False

    def start(self, strategy: str) -> None:
        """Note that the run begins. Raises CatalogError: at the start the catalog must be there."""
        settings = self._settings
        history.start_run(
            self._open(),
            self._run_id,
            target=settings.target,
            host=socket.gethostname(),
            pid=os.getpid(),
            strategy=strategy,
            workers=settings.run.workers,
        )
        self._started = True

    def any_pending(self) -> bool:
        """Whether there is anything to send, as far as that is known in a moment: else the workers
        find out. Raises CatalogError.
        """
        claims = Claims(self._open(), self._settings.target, range(RANGES))
        return claims.any_pending() is not False

    def count(self, progress: Progress, now: float) -> None:
        """Find out how much is pending, if it is time to: sooner where the last look tells little.
        Times are monotonic seconds.
        """
        rest = _AT_WORK_SECONDS if progress.at_work else _IDLE_SECONDS
        if progress.out_of_date:
            rest = _SOON_SECONDS
        if now < self._counted + max(rest, self._rest):
            return
        began = time.monotonic()
        found = self._try(
            lambda conn: stats.pending_estimate(conn, self._settings.target, _COUNT_MILLISECONDS)
        )
        if found is not None:
            progress.found(found.blobs, found.bytes, found.unsized, exact=found.exact)
        self._counted = now
        self._rest = (time.monotonic() - began) / _COUNT_SHARE

    def update(self, snapshot: Snapshot) -> None:
        """Note what the run has done so far; shows that it is alive."""
        done = _figures(snapshot)
        self._try(lambda conn: history.update_run(conn, self._run_id, **done))

    def still_failed(self) -> int:
        """How many blobs are failed by now, by whatever run; 0 where the catalog is away."""
        if not self._started:
            return 0
        return self._try(partial(_failed, self._settings.target)) or 0

    def end(self, snapshot: Snapshot, outcome: str, exit_code: int) -> None:
        """Note how the run ended, and let go of the catalog."""
        done = _figures(snapshot)
        if self._started:
            self._try(
                lambda conn: history.end_run(
                    conn, self._run_id, outcome=outcome, exit_code=exit_code, **done
                )
            )
        self._close()

    def _open(self) -> connection.Connection:
        if self._connection is None:
            self._connection = connection.connect(
                self._settings.catalog.url, identity.application()
            )
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


def _failed(target: str, connection: connection.Connection) -> int:
    return sum(stats.quick_reasons(connection, target, few=False).failed.values())


def _figures(snapshot: Snapshot) -> dict[str, int]:
    return {"copied": snapshot.copied, "failed": snapshot.failed, "bytes": snapshot.bytes}
