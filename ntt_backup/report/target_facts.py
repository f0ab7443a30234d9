"""The facts of a target are read from daemon, catalog and this host.

They are for `status`, the page, the metrics and the notices, which all judge the health by them.
Any of these sources may be unreachable, slow or old: what cannot be read is named in place of its
figures. Who reads again and again keeps the last figures with the time at which they were read, and
has one connection to the catalog, which may only read; what is costly is read again after a time
many times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Self, TypeVar, cast

from ntt_backup.audit.object_locks import TargetLock, known_lock
from ntt_backup.catalog import (
    connection,
    history,
    identities,
    listed_files,
    proofs,
    range_locks,
    stats,
)
from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.config import CatalogConfig, application_name
from ntt_backup.daemon.control_socket import DaemonReport, report
from ntt_backup.daemon.progress import WorkerStatus
from ntt_backup.daemon.signals import time_limit
from ntt_backup.errors import BackupError, CatalogError, CatalogRefused, CatalogUnavailable
from ntt_backup.model import ALL_BLOBS, Part
from ntt_backup.pack.names import LARGE_BLOB
from ntt_backup.rollback_detection import Newest, missed
from ntt_backup.snapshot.last_take import Last, last

T = TypeVar("T")

DAYS: Final = 30
_RUNS: Final = 6
_DUMPS: Final = 4
_EXAMPLES: Final = 2
PATIENCE_SECONDS: Final = 4.0
_STATEMENT_MILLISECONDS: Final = 2000
# A figure is read again after so many times as long as it took, and not before some seconds.
_REST: Final = 50
_SOON_SECONDS: Final = 1.0
_SLOW_SECONDS: Final = 60.0


@dataclass(slots=True)
class TargetFacts:
    """Holds the known facts about a target.

    Attributes:
        daemon: The report of the daemon; None if the daemon does not answer.
        silence: The reason why the daemon does not answer.
        read_at: The last time at which the catalog was read; None: never.
        trouble: The reason why the catalog could not be read now.
        lacks: The errors for facts that the catalog refused to tell.
        lock: What this host has noted of the object locks of a bucket; None: nothing.
        unknown: The number of failed blobs that are not marked as known.
        runs: The runs, the newest first.
        contact: The first contact with the target.
        unproved: The copied blobs that nobody has checked since.
        count: The last count of proved copies, on all targets.
        files: The files that go by their paths; None where names are hashes.
        others: The other parts of the blobs, and their hosts, where this host has a part.

    `holders` and `stored` are for `status` alone; `hours`, `examples` and `proved` for the page;
    `end` for listeners to runs.
    """

    settings: CatalogConfig
    daemon: DaemonReport | None = None
    silence: BackupError | None = None
    snapshots: Mapping[str, Last] = field(default_factory=dict)
    missed: Sequence[Newest] = ()
    lock: TargetLock | None = None
    read_at: datetime | None = None
    trouble: BackupError | None = None
    lacks: list[CatalogError] = field(default_factory=list)
    totals: stats.Totals | None = None
    unknown: int = 0
    contact: proofs.Contact | None = None
    unproved: proofs.Unproved | None = None
    count: proofs.ProofCount | None = None
    files: listed_files.Files | None = None
    runs: Sequence[history.Run] = ()
    others: Sequence[tuple[Part, str]] = ()
    dumps: Sequence[history.DumpRun] = ()
    checks: Sequence[history.CheckRun] = ()
    holders: Sequence[range_locks.Holder] = ()
    stored: stats.StoredObjects | None = None
    hours: Sequence[history.Hour] = ()
    examples: Sequence[FailedBlob] = ()
    proved: stats.Proved | None = None
    end: history.RunEnd | None = None
    place: identities.Place | None = None

    @classmethod
    def of_host(cls, settings: CatalogConfig, daemon: DaemonReport | None = None) -> Self:
        """Returns the facts that this host knows without the catalog.

        daemon: What the daemon tells of itself; None: the daemon is asked.
        """
        known = {name: last(settings, name) for name in settings.snapshots}
        found = cls(settings, daemon, snapshots=known, missed=missed(settings))
        found.lock = known_lock(settings)
        if daemon is None:
            found.ask_daemon()
        return found

    def ask_daemon(self) -> None:
        """Asks the daemon of the target on this host."""
        self.daemon = self.silence = None
        try:
            self.daemon = report(self.settings)
        except BackupError as error:
            self.silence = error

    def read_for_status(self, conn: connection.Connection, *, exact: bool) -> None:
        """Reads the facts that `status` shows. Raises CatalogError.

        exact: Whether to count all rows, however long that takes.
        """
        target, remote = self.target, self.settings.remote
        self.totals = (stats.exact_totals if exact else stats.quick_totals)(conn, target)
        self.unknown = stats.still_failed(conn, target)
        self.runs = history.latest_runs(conn, target)
        self.others = history.parts_of_others(conn, target)
        self.dumps = history.last_dumps(conn, target)
        self.checks = history.last_checks(conn, target)
        self.place = identities.place_of(conn, target)
        self.contact = proofs.first_contact(conn, target)
        self.unproved = proofs.unproved(conn, target, self.contact, exact=exact)
        self.count = proofs.kept_count(conn, self.settings.targets, self.settings.policy.proved)
        if self.settings.by_path:
            self.files = listed_files.count_files(conn)
        self.holders = range_locks.holders(conn, target)
        if remote is not None and remote.packs:
            self.stored = stats.stored_objects(conn, target, LARGE_BLOB, exact=exact)
        self.read_at = datetime.now(UTC)

    @property
    def target(self) -> str:
        return self.settings.target

    @property
    def part(self) -> str:
        """The part of the store that the figures are about, and who has the rest; "" for all."""
        known = [f"{part} to {host}" for part, host in self.others]
        taken = (one.prefixes for one in (self.settings.part, *(part for part, _ in self.others)))
        left = set(ALL_BLOBS.prefixes).difference(*taken)
        if known and left:
            known.append(f"{Part(tuple(sorted(left)))} to no host that ran in the last days")
        return ": ".join([*self.settings.part.words, *filter(None, [", ".join(known)])])

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """Returns the running daemon's workers."""
        return self.daemon.state.workers if self.daemon is not None else ()


class FactsReader:
    """Reads the facts of all targets again and again.

    Args:
        targets: The settings, by the name of the target.
        who: The name of the reader for the catalog's server.
        page: Whether what only the page shows is read.
        patience: The seconds for the catalog, for who reads in the main thread; None: no limit.
    """

    def __init__(
        self,
        targets: Mapping[str, CatalogConfig],
        who: str = "serve",
        *,
        page: bool = True,
        patience: float | None = PATIENCE_SECONDS,
    ) -> None:
        self.targets = targets
        self._who = who
        self._page = page
        self._patience = patience
        self._connection: connection.Connection | None = None
        self._last = {name: TargetFacts(settings) for name, settings in targets.items()}
        self._kept: dict[tuple[str, str], tuple[Any, float]] = {}
        self._trouble: CatalogError | None = None
        self._rests_until = 0.0

    def read(self, target: str, daemon: DaemonReport | None = None) -> TargetFacts:
        """Returns the present facts of a target. daemon: as for `TargetFacts.of_host`."""
        found = TargetFacts.of_host(self.targets[target], daemon)
        if time.monotonic() >= self._rests_until:
            try:
                with self._limited():
                    self._read_catalog(found)
                found.read_at = datetime.now(UTC)
                self._last[target] = found
                return found
            except CatalogError as error:
                # Its traceback would keep open what was in use.
                self._trouble = error.with_traceback(None)
                self._rests_until = time.monotonic() + _SOON_SECONDS
                self.close()
        return replace(
            self._last[target],
            daemon=found.daemon,
            silence=found.silence,
            snapshots=found.snapshots,
            missed=found.missed,
            lock=found.lock,
            trouble=self._trouble,
        )

    def _limited(self) -> AbstractContextManager[None]:
        if self._patience is None:
            return nullcontext()
        hint = "look at the load of the catalog's server, and try again"
        late = CatalogUnavailable("the catalog is too slow to be read", hint=hint)
        return time_limit(self._patience, late)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _read_catalog(self, found: TargetFacts) -> None:
        conn, target = self._open(), found.target

        def part(read: Callable[[], T], otherwise: T, name: str = "", rest: float = 0.0) -> T:
            try:
                return self._keep((target, name), read, rest) if name else read()
            except CatalogRefused as error:
                found.lacks.append(error)
                return otherwise

        found.checks = part(lambda: history.last_checks(conn, target), [])
        found.place = part(lambda: identities.place_of(conn, target), None)
        found.unknown = part(lambda: stats.still_failed(conn, target), 0)
        found.totals = part(lambda: stats.quick_totals(conn, target), None, "totals", _SOON_SECONDS)
        targets, proved_s = found.settings.targets, found.settings.policy.proved
        found.count = part(lambda: proofs.kept_count(conn, targets, proved_s), None)
        found.contact = part(lambda: proofs.first_contact(conn, target), None)
        if (contact := found.contact) is not None:
            found.unproved = part(
                lambda: proofs.unproved(conn, target, contact), None, "unproved", _SLOW_SECONDS
            )
        if found.settings.by_path:
            found.files = part(lambda: listed_files.count_files(conn), None, "files", _SOON_SECONDS)
        found.others = part(lambda: history.parts_of_others(conn, target), [])
        if self._page:
            found.runs = part(lambda: history.recent_runs(conn, target, _RUNS), [])
            found.dumps = part(lambda: history.recent_dumps(conn, target, _DUMPS), [])
            found.hours = part(lambda: history.hours(conn, target, DAYS), [])
            found.examples = part(lambda: stats.failure_examples(conn, target, _EXAMPLES), [])
            found.proved = part(lambda: stats.proved(conn, target), None, "proved", _SLOW_SECONDS)
        else:
            found.runs = part(lambda: history.latest_runs(conn, target), [])
            found.dumps = part(lambda: history.last_dumps(conn, target), [])
            found.end = part(lambda: history.last_end(conn, target), None)
        if found.lacks:
            try:
                verify_schema(conn, target, "status")
            except CatalogRefused as error:
                found.lacks = [error]  # It says all at once, and better.

    def _keep(self, key: tuple[str, str], read: Callable[[], T], rest: float) -> T:
        """Returns a value that was read recently, or reads the value."""
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
            some = next(iter(self.targets.values()))
            name, part = application_name(self._who), some.part
            self._connection = connection.connect(some.catalog.url, name, part=part)
            connection.configure(self._connection, "default_transaction_read_only", "on")
            connection.configure(self._connection, "statement_timeout", _STATEMENT_MILLISECONDS)
        return self._connection
