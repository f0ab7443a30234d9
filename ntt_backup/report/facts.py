"""The facts of a target are read for the page: from the daemon, the catalog, files of this host.

Any of them may be away, slow or old: what cannot be read is named in place of its figures, and the
last figures are kept with the time at which they were read. There is one connection to the catalog,
which may only read. What is costly to read is read again after a time many times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar, cast

from ntt_backup.catalog import check_history, connection, dump_history, glance, history, stats
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.config import CatalogConfig, identity
from ntt_backup.daemon.control.client import report
from ntt_backup.daemon.signals import time_limit
from ntt_backup.errors import (
    BackupError,
    CatalogError,
    CatalogRefused,
    CatalogUnavailable,
    NotRunning,
)
from ntt_backup.newest import Newest, missed
from ntt_backup.snapshot.last_take import Last, last

T = TypeVar("T")

DAYS: Final = 30
_RUNS: Final = 6
_DUMPS: Final = 4
_EXAMPLES: Final = 2
_PATIENCE_SECONDS: Final = 4.0
_STATEMENT_MILLISECONDS: Final = 2000
# A figure is read again after so many times as long as it took, and not before some seconds.
_REST: Final = 50
_SOON_SECONDS: Final = 1.0
_SLOW_SECONDS: Final = 60.0


@dataclass(slots=True)
class Facts:
    """Holds what is known of a target. daemon: what it answers, where it does; silence: why it does
    not, where that is no sign that none runs. read_at: when the catalog was read last; None: never.
    trouble: why it could not be read now; lacks: what it refused to tell. unknown: failed blobs of
    which nobody has said that it is known.
    """

    settings: CatalogConfig
    daemon: Mapping[str, Any] | None = None
    silence: BackupError | None = None
    snapshots: Mapping[str, Last] = field(default_factory=dict)
    missed: Sequence[Newest] = ()
    read_at: datetime | None = None
    trouble: CatalogError | None = None
    lacks: list[CatalogError] = field(default_factory=list)
    totals: stats.Totals | None = None
    unknown: int = 0
    runs: list[history.Run] = field(default_factory=list)
    dumps: list[dump_history.DumpRun] = field(default_factory=list)
    hours: list[history.Hour] = field(default_factory=list)
    checks: list[check_history.CheckRun] = field(default_factory=list)
    examples: list[FailedBlob] = field(default_factory=list)
    proved: glance.Proved | None = None

    @property
    def target(self) -> str:
        return self.settings.target

    @property
    def workers(self) -> list[Mapping[str, Any]]:
        """Returns the running daemon's workers."""
        return list(self.daemon["state"]["workers"]) if self.daemon is not None else []


class Reader:
    """Reads the facts of all targets, from the main thread alone."""

    def __init__(self, targets: Mapping[str, CatalogConfig]) -> None:
        self._targets = targets
        self._connection: connection.Connection | None = None
        self._last = {name: Facts(settings) for name, settings in targets.items()}
        self._kept: dict[tuple[str, str], tuple[Any, float]] = {}
        self._trouble: CatalogError | None = None
        self._rests_until = 0.0

    def read(self, target: str) -> Facts:
        """Returns what is known of a target now."""
        settings = self._targets[target]
        found = Facts(settings)
        try:
            late = NotRunning("the daemon does not answer: it may be busy, or stopped")
            with time_limit(_PATIENCE_SECONDS, late):
                found.daemon = report(settings).fields
        except BackupError as error:
            found.silence = error
        found.snapshots = {name: last(settings, name) for name in settings.snapshots}
        found.missed = missed(settings)
        if time.monotonic() >= self._rests_until:
            try:
                late_catalog = CatalogUnavailable("the catalog is too slow to be read")
                with time_limit(_PATIENCE_SECONDS, late_catalog):
                    self._read_catalog(found)
                found.read_at = datetime.now(UTC)
                self._last[target] = found
                return found
            except CatalogError as error:
                self._trouble = error
                self._rests_until = time.monotonic() + _SOON_SECONDS
                self.close()
        return replace(
            self._last[target],
            daemon=found.daemon,
            silence=found.silence,
            snapshots=found.snapshots,
            missed=found.missed,
            trouble=self._trouble,
        )

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _read_catalog(self, found: Facts) -> None:
        conn, target = self._open(), found.target

        def part(read: Callable[[], T], otherwise: T, name: str = "", rest: float = 0.0) -> T:
            try:
                return self._keep((target, name), read, rest) if name else read()
            except CatalogRefused as error:
                found.lacks.append(error)
                return otherwise

        found.runs = part(lambda: history.recent_runs(conn, target, _RUNS), [])
        found.dumps = part(lambda: dump_history.recent_dumps(conn, target, _DUMPS), [])
        found.hours = part(lambda: history.hours(conn, target, DAYS), [])
        found.checks = part(lambda: check_history.last_checks(conn, target), [])
        found.examples = part(lambda: glance.failure_examples(conn, target, _EXAMPLES), [])
        found.unknown = part(lambda: stats.still_failed(conn, target), 0)
        found.totals = part(lambda: stats.quick_totals(conn, target), None, "totals", _SOON_SECONDS)
        found.proved = part(lambda: glance.proved(conn, target), None, "proved", _SLOW_SECONDS)
        if found.lacks:
            try:
                verify_schema(conn, target, "status")
            except CatalogRefused as error:
                found.lacks = [error]  # It says all at once, and better.

    def _keep(self, key: tuple[str, str], read: Callable[[], T], rest: float) -> T:
        """Returns what was read not long ago, or reads it."""
        known, due = self._kept.get(key, (None, -math.inf))
        began = time.monotonic()
        if began < due:
            return cast(T, known)
        value = read()
        now = time.monotonic()
        self._kept[key] = (value, now + max(rest, (now - began) * _REST))
        return value

    def _open(self) -> connection.Connection:
        if self._connection is None:
            url = next(iter(self._targets.values())).catalog.url
            self._connection = connection.connect(url, identity.application("serve"))
            connection.configure(self._connection, "default_transaction_read_only", "on")
            connection.configure(self._connection, "statement_timeout", _STATEMENT_MILLISECONDS)
        return self._connection
