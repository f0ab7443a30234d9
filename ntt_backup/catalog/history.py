"""The history of runs: when the last one was, what it copied, whether it is alive.

A run that dies leaves its row without an end. Nothing cleans up after it: `updated_at`, renewed
with every progress event, shows how long ago it was last seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from ntt_backup.catalog.connection import Connection, translated
from ntt_backup.catalog.queries import statement


@dataclass(frozen=True, slots=True)
class Run:
    """One run, its figures as of updated_at, seen at read_at. ended_at, outcome and exit_code are
    None while it is under way, and if it died.
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
    read_at: datetime = field(compare=False)

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10^6 bytes) a second, from its start to updated_at."""
        lasted = (self.updated_at - self.started_at).total_seconds()
        return round(self.bytes / lasted / 1e6, 3) if lasted > 0 else 0.0


def start_run(conn: Connection, run_id: UUID, target: str, **about: str | int) -> None:
    """Records that a run begins. about: its host, pid, strategy and number of workers."""
    with translated("note the run"):
        conn.execute(statement("start_run"), {"run_id": run_id, "target": target, **about})


def update_run(
    conn: Connection,
    run_id: UUID,
    *,
    copied: int,
    failed: int,
    bytes: int,
    outcome: str | None = None,
    exit_code: int | None = None,
) -> None:
    """Records a run so far: blobs copied and failed, bytes copied. With an outcome it has ended."""
    done = {"copied": copied, "failed": failed, "bytes": bytes}
    ended = {"outcome": outcome, "exit_code": exit_code}
    with translated("note the run"):
        conn.execute(statement("update_run"), {"run_id": run_id, **done, **ended})


def latest_runs(conn: Connection, target: str) -> list[Run]:
    """Returns the target's latest run, if there is one, and then others that are under way."""
    with translated("read the history of runs"):
        rows = conn.execute(statement("latest_runs"), {"target": target}).fetchall()
    return [Run(*row) for row in rows]
