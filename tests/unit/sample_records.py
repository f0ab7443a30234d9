"""Records of a catalog and its dumps, in which a test changes what it is about."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from ntt_backup.catalog.history import Run
from ntt_backup.catalog.stats import Totals
from ntt_backup.dump import record
from ntt_backup.dump.record import DumpRecord, Stored

TOTALS = Totals(
    pending=1200,
    copied=3_400_000,
    failed=3,
    pending_bytes=5_000_000,
    copied_bytes=7_000_000_000,
    failed_bytes=12,
    unsized=4,
    without_blobid=2,
    failed_by_reason={"missing": 2, "wrong-size": 1},
    pending_by_reason={"remote-missing": 5},
)
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
RECORD = DumpRecord(
    format=1,
    number=1,
    target="remote",
    database="copyjob",
    server_version="16.4",
    program="16.4",
    host="alpha",
    bytes=1000,
    sha256="ab" * 32,
    fingerprint="5 1 2+3",
    duration_s=1.5,
)


def a_run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "run_id": UUID(int=7),
        "target": "remote",
        "host": "alpha",
        "pid": 4711,
        "strategy": "tar",
        "workers": 4,
        "started_at": NOW,
        "updated_at": NOW + timedelta(minutes=1),
        "ended_at": NOW + timedelta(minutes=2),
        "outcome": "done",
        "exit_code": 0,
        "copied": 10,
        "failed": 0,
        "bytes": 1000,
        "reason": "",
        "read_at": NOW + timedelta(minutes=1, seconds=40),
    }
    return Run(**{**values, **changes})


def a_dump(moment: datetime = NOON, **changes: object) -> Stored:
    made = replace(RECORD, **changes)  # type: ignore[arg-type]
    return Stored(record.name_of(moment, "0badcafe"), made.bytes, made, moment)
