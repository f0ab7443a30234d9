"""The history of runs: when the last one was, what it copied, whether it is alive; and by the hour.

A run that dies leaves its row without an end, until the next one of its host notes that it was
killed. `updated_at`, renewed with every progress event, shows how long ago it was last seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import statement


@dataclass(frozen=True, slots=True)
class Run:
    """One run, its figures as of updated_at, seen at read_at. ended_at, outcome and exit_code are
    None while it is under way, and if it died; once that is known, outcome is "killed", and
    ended_at is when it was last seen. reason: the error that ended it; "" where none did.
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
class Hour:
    """What the runs of a target did in an hour. outage_s: seconds in which something was away."""

    hour: datetime
    copied: int
    failed: int
    bytes: int
    outage_s: float


def start_run(conn: Connection, run_id: UUID, target: str, **about: str | int) -> None:
    """Records that a run begins. about: its host, pid, strategy and number of workers."""
    with translated("note the run"):
        conn.execute(statement("start_run"), {"run_id": run_id, "target": target, **about})


def unended_runs(conn: Connection, target: str, host: str) -> dict[UUID, int]:
    """Returns the PIDs of the target's runs from that host that have no end."""
    with translated("read the history of runs"):
        values = {"target": target, "host": host}
        return dict(conn.execute(statement("unended_runs"), values).fetchall())


def note_killed(conn: Connection, run_ids: Sequence[UUID]) -> None:
    """Records that these runs have died. One that has not takes that back with its next update."""
    with translated("note the run"):
        conn.execute(statement("note_killed"), {"run_ids": list(run_ids)})


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
) -> None:
    """Records a run so far: blobs copied and failed, bytes copied. With an outcome it has ended.
    outage_s: seconds of outages to add to the hour; None leaves the hours alone.
    """
    done = {"copied": copied, "failed": failed, "bytes": bytes}
    ended = {"outcome": outcome, "exit_code": exit_code}
    with translated("note the run"), conn.transaction():
        if outage_s is not None:
            values = {"run_id": run_id, "outage_s": outage_s, **done}
            conn.execute(statement("add_to_hour"), values)
        conn.execute(statement("update_run"), {"run_id": run_id, **done, **ended})


def note_reason(conn: Connection, run_id: UUID, reason: str) -> None:
    """Records the error that ended a run. Raises CatalogRefused where an older catalog has no place
    for it.
    """
    with translated("note the run"):
        conn.execute(statement("note_reason"), {"run_id": run_id, "reason": reason})


def may_note_hours(conn: Connection) -> bool:
    """Returns whether `update_run` can add to the hours: older catalogs do not have them."""
    with translated("show its privileges"):
        return bool(conn.execute(statement("may_note_hours")).fetchall()[0][0])


def hours(conn: Connection, target: str, days: int) -> list[Hour]:
    """Returns the hours of the last days in which the target's runs did anything, in order."""
    with translated("read the history of hours"):
        values = {"target": target, "days": days}
        return [Hour(*row) for row in conn.execute(statement("hours"), values)]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Tells how the last run ended that has ended, and when one last ended with 0. exit_code: 1
    of a run that was killed. reason: see `Run`.
    """

    ended_at: datetime
    exit_code: int
    succeeded_at: datetime | None
    reason: str


def last_end(conn: Connection, target: str) -> RunEnd | None:
    """Returns the end of the target's last run that has one."""
    with translated("read the history of runs"):
        row = conn.execute(statement("last_end"), {"target": target}).fetchone()
    return RunEnd(*row) if row else None


def latest_runs(conn: Connection, target: str) -> list[Run]:
    """Returns the target's latest run, if there is one, and then others that are under way."""
    with translated("read the history of runs"):
        rows = conn.execute(statement("latest_runs"), {"target": target}).fetchall()
    return [Run(*row) for row in rows]


def recent_runs(conn: Connection, target: str, limit: int) -> list[Run]:
    """Returns the target's last runs, the newest first."""
    with translated("read the history of runs"):
        rows = conn.execute(statement("recent_runs"), {"target": target, "limit": limit}).fetchall()
    return [Run(*row) for row in rows]
