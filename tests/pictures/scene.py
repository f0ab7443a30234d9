"""Three targets as they may be on a day in the middle of a first backup, for pictures.

One is being filled over a link, one is a disk that waits for its next run, one wants a person.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.history import CheckRun, DumpRun, Hour
from ntt_backup.catalog.identities import Place
from ntt_backup.catalog.proofs import Unproved
from ntt_backup.catalog.stats import Proved, Totals
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control_socket import DaemonReport, RunReport
from ntt_backup.daemon.progress import WorkerStatus
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.snapshot.last_take import Last
from tests.unit.sample_records import a_run

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_BLOBS: Final = 42_118_306
NAMES: Final = tuple(f"{random.Random(n).getrandbits(256):064x}" for n in range(4))
_NONE: Final[dict[str, Any]] = {
    "failed": 0,
    "failed_bytes": 0,
    "unsized": 0,
    "without_blobid": 0,
    "failed_by_reason": {},
    "pending_by_reason": {},
}


def targets(now: datetime) -> list[TargetFacts]:
    """Returns the facts of the three targets. now: The moment of the picture."""
    return [_offsite(now), _disk(now), _bucket(now)]


def daemon(now: datetime) -> DaemonReport:
    """Returns what a daemon with four workers says of itself in the middle of its work."""
    run = RunReport(str(UUID(int=7)), 4).report(
        "offsite", paused=False, bwlimit=12_000_000, jobs={"snapshot": True}
    )
    state = replace(
        run.state,
        elapsed_s=9 * 3600.0,
        copied=1_204_551,
        failed=2,
        pending=3_120_400,
        bytes=371_000_000_000,
        sent=371_030_000_000,
        done=1_204_553,
        share=0.278,
        mb_per_s=11.7,
        blobs_per_s=38.6,
        eta_s=23.4 * 3600,
        workers=(
            WorkerStatus(0, "sending", "20261114-0912-0", 311_204, 3.1),
            WorkerStatus(1, "sending", "20261114-0913-1", 298_770, 2.9),
            WorkerStatus(2, "sending", "20261114-0911-2", 304_127, 2.8),
            WorkerStatus(3, "sending", "20261114-0914-3", 290_450, 2.9),
        ),
    )
    minute = int(now.timestamp()) // 60 * 60
    rates = [11.6 + 0.5 * math.sin(n) for n in range(60)]
    for gap in (21, 22, 23, 24):
        rates[gap] = 0.0
    lasted = [60.0] * 59 + [now.timestamp() - minute]
    minutes = [(minute - 60 * (59 - n), int(rates[n] * lasted[n] * 1e6)) for n in range(60)]
    told = [
        (
            now - timedelta(minutes=38),
            "warning",
            "remote is unreachable, again in 1 min 30 s: Connection timed out",
        ),
        (now - timedelta(minutes=34), "info", "remote is reachable again after 4 min 2 s"),
        (now - timedelta(minutes=20), "error", f"failed, missing: {NAMES[0]}"),
        (now - timedelta(minutes=6), "info", "snapshot etc: 1,204 files, 31.2 MB, 412.0 kB stored"),
    ]
    return replace(
        run,
        pid=81_523,
        started_at=(now - 9 * HOUR).isoformat(),
        watch=True,
        strategy="stream",
        state=state,
        recent=[(when.isoformat(), level, line) for when, level, line in told],
        minutes=minutes,
    )


def _settings(target: str, url: str, **tables: Any) -> CatalogConfig:
    return CatalogConfig.model_validate({"target": target, "remote": {"url": url}, **tables})


def _hours(now: datetime, days: int, gb: float, outages: tuple[int, ...] = ()) -> list[Hour]:
    """Returns so many days of about so many GB, and those days before now with an outage."""
    chance, hours = random.Random(days), []
    for back in range(days, -1, -1):
        size = int(gb * 1e9 * chance.uniform(0.6, 1.1))
        away = 7200.0 if back in outages else 0.0
        hours.append(Hour(now - back * DAY, size // 7400, 0, size // (3 if away else 1), away))
    return hours


def _run(now: datetime, back: timedelta, lasted: timedelta, **changes: Any) -> Any:
    began = now - back
    ended = began + lasted
    times = {"started_at": began, "updated_at": ended, "ended_at": ended, "read_at": now}
    return a_run(
        **{**times, "host": "alpha", "run_id": UUID(int=int(back.total_seconds())), **changes}
    )


def _offsite(now: datetime) -> TargetFacts:
    report = daemon(now)
    settings = _settings(
        "offsite",
        "ssh://vault@backup.example.org/srv/backup",
        snapshots={"etc": {"paths": ["/etc"], "every": "1d"}, "mail": {"paths": ["/srv/mail"]}},
    )
    copied = _BLOBS - 3_120_402
    totals = Totals(
        **{**_NONE, "failed": 2, "failed_bytes": 81_233, "failed_by_reason": {"missing": 2}},
        pending=3_120_400,
        copied=copied,
        pending_bytes=961_000_000_000,
        copied_bytes=12_008_000_000_000,
        estimated=("pending", "copied"),
    )
    at_work = _run(now, 9 * HOUR, 9 * HOUR, ended_at=None, outcome=None, exit_code=None)
    runs = [
        replace(at_work, run_id=UUID(int=7), copied=1_204_551, failed=2, bytes=371_000_000_000),
        _run(
            now,
            2 * DAY,
            38 * HOUR,
            copied=5_309_118,
            bytes=1_602_000_000_000,
            outcome="stopped",
            exit_code=143,
        ),
        _run(
            now,
            8 * DAY,
            5 * DAY,
            copied=17_301_551,
            bytes=5_200_000_000_000,
            outcome="stopped",
            exit_code=143,
        ),
        _run(
            now,
            14 * DAY,
            5 * DAY,
            copied=15_182_684,
            bytes=4_835_000_000_000,
            outcome="error",
            exit_code=6,
            reason="the remote is full",
        ),
    ]
    return TargetFacts(
        settings,
        daemon=report,
        read_at=now,
        totals=totals,
        unknown=0,
        runs=runs,
        place=Place("9f2c1e7a4b6d48e2b1c0a5d3f7e6c804", now),
        hours=_hours(now, 14, 980, outages=(5, 11)),
        unproved=Unproved(1_900_000, True, 0, now),
        proved=Proved(18_204, 9_120, 15_800, 17_300, 17_383),
        examples=[FailedBlob(name, "missing", "", 1, now - HOUR, now - HOUR) for name in NAMES[:2]],
        checks=[
            CheckRun(
                "verify",
                now - 26 * HOUR,
                now - 25 * HOUR,
                0,
                421_000,
                120_000_000_000,
                0,
                "sample 1%",
            ),
            CheckRun(
                "drill", now - 12 * DAY, now - 12 * DAY, 0, 160_000, 48_000_000_000, 0, "prefix 00"
            ),
            CheckRun("reconcile", now - 6 * DAY, now - 6 * DAY, 0, 30_000_000, 0, 0, ""),
        ],
        dumps=[
            DumpRun(
                now - (5 + 24 * n) * HOUR,
                now - (5 + 24 * n) * HOUR,
                f"202611{14 - n}T031201Z-{NAMES[n][:8]}.dump",
                2_100_000_000 - n * 40_000_000,
                "",
                "",
            )
            for n in range(4)
        ],
        snapshots={
            "etc": Last("20261114T0600", 1_204, 31_200_000, 412_000, taken_at=now - 6 * HOUR),
            "mail": Last(
                "20261114T0530", 88_210, 41_000_000_000, 96_000_000, taken_at=now - 7 * HOUR
            ),
        },
    )


def _disk(now: datetime) -> TargetFacts:
    totals = Totals(
        **_NONE,
        pending=18_204,
        copied=_BLOBS - 18_204,
        pending_bytes=5_400_000_000,
        copied_bytes=12_960_000_000_000,
    )
    runs = [
        _run(
            now,
            (14 + 24 * n) * HOUR,
            timedelta(minutes=22 + n),
            copied=21_000 + 1_300 * n,
            bytes=6_200_000_000 + n * 310_000_000,
        )
        for n in range(5)
    ]
    return TargetFacts(
        _settings("usb", "file:///mnt/usb/backup"),
        read_at=now,
        totals=totals,
        runs=runs,
        place=Place("51f0b7c9d2ae4c36a8e1947f0c3b5d62", now - 14 * HOUR),
        hours=_hours(now, 29, 6.5),
        proved=Proved(20_000, 20_000, 20_000, 20_000, 20_000),
        checks=[
            CheckRun("verify", now - 3 * DAY, now - 3 * DAY, 0, _BLOBS, 12_960_000_000_000, 0, "")
        ],
        dumps=[
            DumpRun(
                now - 14 * HOUR,
                now - 14 * HOUR,
                "20261113T221102Z-4f1d09aa.dump",
                2_060_000_000,
                "",
                "",
            )
        ],
    )


def _bucket(now: datetime) -> TargetFacts:
    reasons = {"missing": 412, "corrupt-source": 3, "unreadable": 27}
    totals = Totals(
        **{
            **_NONE,
            "failed": 442,
            "failed_bytes": 1_310_000_000,
            "failed_by_reason": reasons,
            "pending_by_reason": {"remote-missing": 24_576},
        },
        pending=24_576,
        copied=_BLOBS - 25_018,
        pending_bytes=7_900_000_000,
        copied_bytes=12_950_000_000_000,
    )
    details = {
        "missing": "",
        "unreadable": "Input/output error: /srv/store/3f/0a/3f0a17c2d5",
        "corrupt-source": "its content hashes to 0badcafe5eed",
        "remote-missing": "packs/20261108T101500Z-7be1.tar is gone",
    }
    examples = [
        FailedBlob(NAMES[n], reason, detail, 2 + n, now - 3 * DAY, now - (4 + n) * HOUR)
        for n, (reason, detail) in enumerate(details.items())
    ]
    runs = [
        _run(
            now,
            6 * HOUR,
            2 * HOUR,
            copied=40_112,
            failed=442,
            bytes=11_000_000_000,
            outcome="error",
            exit_code=5,
            reason="the bucket refuses the login: the credentials have expired",
        ),
        _run(now, 30 * HOUR, 3 * HOUR, copied=38_201, bytes=10_400_000_000),
        _run(now, 54 * HOUR, 3 * HOUR, copied=41_002, bytes=12_100_000_000),
    ]
    return TargetFacts(
        _settings("bucket", "s3://example-backup/store"),
        read_at=now,
        totals=totals,
        unknown=442,
        runs=runs,
        place=Place("c7d21f06e3984b5fa2607b9d8e41c3fa", now - 4 * HOUR),
        hours=_hours(now, 21, 11, outages=(2,)),
        proved=Proved(20_000, 1_400, 9_000, 16_000, 19_800),
        examples=examples,
        checks=[
            CheckRun(
                "verify",
                now - 5 * HOUR,
                now - 5 * HOUR,
                7,
                2_100_000,
                640_000_000_000,
                24_576,
                "older than 30 days",
            ),
            CheckRun(
                "drill",
                now - 140 * DAY,
                now - 140 * DAY,
                0,
                160_000,
                48_000_000_000,
                0,
                "prefix 00",
            ),
        ],
        dumps=[
            DumpRun(
                now - 30 * HOUR,
                now - 30 * HOUR,
                "20261113T031145Z-91ee77bc.dump",
                2_055_000_000,
                "",
                "",
            )
        ],
    )
