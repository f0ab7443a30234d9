"""The history of runs, dumps and checks, and whether the database has changed since a dump.

A run that dies leaves its row without an end, until the next one of its host notes that it was
killed. `updated_at`, renewed with every progress event, shows how long ago it was last seen.

The server's counters of rows inserted, updated and deleted are a fingerprint of the database: where
it differs, something may have changed. Our own tables are left out, and so are the rows of `blobs`
that we have marked, which each marking statement counts in `ntt_backup.marks` with its own commit:
after a restore, a mark that the dump lacks only has a blob sent or checked again. The fingerprint
must be taken before the dump, so that later changes count for the next one. A session tells the
server its counts with a delay of some seconds, and ours at once: beside working workers the two do
not match, which costs a dump and no more. What is overlooked is seen the next time, or when the
dump has reached `dump.max_age`.

Where the table of checks is missing, or the role may not read it, the history of checks is taken as
empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from psycopg import errors

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.ledger import storable
from ntt_backup.catalog.range_locks import lock_class
from ntt_backup.config.values import parse_prefixes
from ntt_backup.errors import ConfigError, LockHeld
from ntt_backup.model import Part

_NOTE_RUN = "note the run"
_READ_RUNS = "read the history of runs"
_READ_DUMPS = "read the history of dumps"
# What the detail of a check says of blobs that it could not prove.
BY_WORD = "by the remote's word alone"
UNCHECKED = "could not be checked"


@dataclass(frozen=True, slots=True)
class Run:
    """A run and its figures.

    Attributes:
        updated_at: The time of the figures.
        ended_at: When the run ended, or when a killed run was last seen; None while the run is
            under way, and for a dead run that is not marked yet.
        outcome: The outcome, "killed" for a run that is marked; None where `ended_at` is None.
        exit_code: The exit code; None while the run is under way, and if the run died.
        reason: The error that ended the run; "" if no error did.
        read_at: When the row was read.
    """

    run_id: UUID
    target: str
    host: str
    pid: int
    strategy: str
    workers: int
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    outcome: str | None
    exit_code: int | None
    copied: int
    failed: int
    bytes: int
    reason: str
    read_at: datetime = field(compare=False)

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6 bytes) a second, from its start to updated_at."""
        lasted = (self.updated_at - self.started_at).total_seconds()
        return round(self.bytes / lasted / 1e6, 3) if lasted > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of the last run that has ended; the exit code is 1 for one that was killed.

    succeeded_at: when a run last ended with exit code 0; None if no run did.
    """

    ended_at: datetime
    exit_code: int
    succeeded_at: datetime | None
    reason: str


@dataclass(frozen=True, slots=True)
class Hour:
    """What the runs of a target did in an hour. outage_s: seconds in which something was away."""

    hour: datetime
    copied: int
    failed: int
    bytes: int
    outage_s: float


def start_run(conn: Connection, run_id: UUID, target: str, **about: str | int) -> None:
    """Records that a run begins. about: its host, pid, strategy and number of workers."""
    conn.ask(_NOTE_RUN, "start_run", run_id=run_id, target=target, **about)


def unended_runs(conn: Connection, target: str, host: str) -> dict[UUID, int]:
    """Returns the PIDs of the target's runs from that host that have no end."""
    return dict(conn.ask(_READ_RUNS, "unended_runs", target=target, host=host))


def note_killed(conn: Connection, run_ids: Sequence[UUID]) -> None:
    """Marks the runs as dead. A run that is still alive clears the mark with its next update."""
    conn.ask(_NOTE_RUN, "note_killed", run_ids=list(run_ids))


def update_run(
    conn: Connection,
    run_id: UUID,
    *,
    copied: int,
    failed: int,
    bytes: int,
    outcome: str | None = None,
    exit_code: int | None = None,
    outage_s: float | None = None,
) -> bool:
    """Records what a run has done so far, and with an outcome and exit code that it has ended.

    outage_s: the seconds of outages to add to the hour; None leaves the hours unchanged. Returns
    whether the catalog knows the run: a standby that was promoted may lack it.
    """
    done = {"run_id": run_id, "copied": copied, "failed": failed, "bytes": bytes}

    def write() -> bool:
        if outage_s is not None:
            conn.rows("add_to_hour", {**done, "outage_s": outage_s})
        return bool(conn.rows("update_run", {**done, "outcome": outcome, "exit_code": exit_code}))

    return conn.in_transaction(_NOTE_RUN, write)


def note_reason(conn: Connection, run_id: UUID, reason: str) -> None:
    """Records the error that ended a run. Raises CatalogRefused where the catalog is too old."""
    conn.ask(_NOTE_RUN, "note_reason", run_id=run_id, reason=reason)


def may_note_hours(conn: Connection) -> bool:
    """Returns whether `update_run` can add to the hours: older catalogs do not have them."""
    return bool(conn.ask("show its privileges", "may_note_hours")[0][0])


def hours(conn: Connection, target: str, days: int) -> list[Hour]:
    """Returns the hours of the last days in which the target's runs did anything, in order."""
    rows = conn.ask("read the history of hours", "hours", target=target, days=days)
    return [Hour(*row) for row in rows]


def last_end(conn: Connection, target: str) -> RunEnd | None:
    """Returns the end of the target's last run that has one."""
    rows = conn.ask(_READ_RUNS, "last_end", target=target)
    return RunEnd(*rows[0]) if rows else None


def latest_runs(conn: Connection, target: str) -> list[Run]:
    """Returns the target's latest run, if there is one, and then others that are under way."""
    return [Run(*row) for row in conn.ask(_READ_RUNS, "latest_runs", target=target)]


def recent_runs(conn: Connection, target: str, limit: int) -> list[Run]:
    """Returns the target's last runs, the newest first."""
    return [Run(*row) for row in conn.ask(_READ_RUNS, "recent_runs", target=target, limit=limit)]


def parts_of_others(conn: Connection, target: str) -> list[tuple[Part, str]]:
    """Returns the parts of the blobs that other hosts have, by their runs, with their hosts."""
    found = []
    if not conn.part.whole:
        mine = str(conn.part)
        for prefixes, host in conn.ask(_READ_RUNS, "parts_of_others", target=target, prefixes=mine):
            with suppress(ValueError):
                found.append((parse_prefixes(prefixes), host))
    return found


# --- dumps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """The state of the database to be dumped.

    server_version: a number, such as 160004 where `server` is 16.4. fingerprint: "" if the server
    counts nothing.
    """

    database: str
    server: str
    server_version: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DumpRun:
    """A dump that was made, or tried: then name is "", and error says why."""

    started_at: datetime
    ended_at: datetime
    name: str
    bytes: int
    sha256: str
    error: str


def database_state(conn: Connection) -> DatabaseState:
    """Returns the database as it is at this moment."""
    return DatabaseState(*conn.ask("tell about itself", "database_state")[0])


def require_empty(conn: Connection) -> None:
    """Raises ConfigError where anybody keeps anything in the database."""
    for (name,) in conn.ask("list its tables", "first_relation"):
        raise ConfigError(
            f"the database {conn.info.dbname} is not empty",
            detail=f"it has {name}",
            hint="create a new one for this (createdb), and drop it afterwards (dropdb)",
        )


def record_dump(
    conn: Connection,
    target: str,
    started_at: datetime,
    *,
    name: str,
    bytes: int,
    sha256: str,
    error: str,
) -> None:
    """Records a dump that was made or has failed."""
    result = {"name": name, "bytes": bytes, "sha256": sha256, "error": error}
    conn.ask("note the dump", "record_dump", target=target, started_at=started_at, **result)


def last_dumps(conn: Connection, target: str) -> list[DumpRun]:
    """Returns the target's latest good dump, and its latest failed one where that came later."""
    return [DumpRun(*row) for row in conn.ask(_READ_DUMPS, "last_dumps", target=target)]


def recent_dumps(conn: Connection, target: str, limit: int) -> list[DumpRun]:
    """Returns the target's last dumps, made or failed, the newest first."""
    rows = conn.ask(_READ_DUMPS, "recent_dumps", target=target, limit=limit)
    return [DumpRun(*row) for row in rows]


def noted_dumps(conn: Connection, target: str, limit: int) -> frozenset[tuple[str, str]]:
    """Returns name and SHA-256 of the good ones among the target's last dumps."""
    last = recent_dumps(conn, target, limit)
    return frozenset((one.name, one.sha256) for one in last if not one.error)


def ever_made(conn: Connection, target: str) -> bool:
    """Returns whether the target ever got a good dump."""
    return any(one.name for one in last_dumps(conn, target))


# --- checks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One call of a command that checks or restores blobs.

    bytes: of content that were read. wrong: blobs that are lost or wrong. detail: which part was
    selected, why the command ended early, or how many blobs it could not prove.
    """

    command: str
    started_at: datetime
    ended_at: datetime
    exit_code: int
    blobs: int
    bytes: int
    wrong: int
    detail: str

    @property
    def doubts(self) -> bool:
        """Returns whether there are blobs that the check could not prove."""
        return BY_WORD in self.detail or UNCHECKED in self.detail


def lock_work(conn: Connection, work: str, target: str) -> bool:
    """Locks the checks or dumps of a target, in the session's part, as long as the session lives.

    Args:
        conn: The session.
        work: What is locked: `checks` or `dumps`.
        target: The name of the target.

    Returns:
        False if another session has locked that.
    """
    key = lock_class(f"{work} of {target} {conn.part}".rstrip())
    ((locked,),) = conn.ask(f"lock the {work}", "lock_work", key=key)
    return bool(locked)


def require_no_prune(conn: Connection, target: str) -> None:
    """Keeps `prune` out as long as the session lives: it and what marks blobs must take turns.

    Raises:
        LockHeld: `prune` removes blobs of the target at this moment.
    """
    key = lock_class(f"prune of {target}")
    ((locked,),) = conn.ask("lock the marks", "share_work", key=key)
    if not locked:
        raise LockHeld(
            f"prune removes blobs of the target {target} at this moment",
            hint="wait for its end; a dead process holds no lock",
        )


def note_check(
    conn: Connection,
    target: str,
    command: str,
    *,
    lasted: float,
    exit_code: int,
    blobs: int,
    bytes: int,
    wrong: int,
    detail: str = "",
) -> None:
    """Notes a check that ends at this moment and took so many seconds. Raises CatalogError."""
    found = {"exit_code": exit_code, "blobs": blobs, "bytes": bytes, "wrong": wrong}
    about = {"target": target, "command": command, "lasted": lasted, "detail": storable(detail)}
    conn.ask("note the check", "note_check", **about, **found)


def last_checks(conn: Connection, target: str) -> list[CheckRun]:
    """Returns of each command its last call, and the last one that found all right."""
    with translated("read the history of checks"):
        try:
            with conn.transaction():
                return [CheckRun(*row) for row in conn.rows("last_checks", {"target": target})]
        except (errors.UndefinedTable, errors.InsufficientPrivilege):
            return []
