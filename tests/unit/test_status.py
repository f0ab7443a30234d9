"""What `status` and `--dry-run` print: the same figures for people and for programs."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import jsonschema
import pytest
from rich.console import Console

from ntt_backup.catalog.history import DumpRun, Run
from ntt_backup.catalog.range_locks import Holder
from ntt_backup.catalog.stats import StoredObjects
from ntt_backup.cli.commands.run import plan
from ntt_backup.config import CatalogConfig, Settings
from ntt_backup.daemon.control_socket import RunReport
from ntt_backup.model import PendingEstimate
from ntt_backup.report.status import Status
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.snapshot.last_take import Last
from tests.helpers import documents
from tests.unit.sample_events import STATE
from tests.unit.sample_records import NOW, TOTALS, a_run

A_DUMP = DumpRun(NOW, NOW, "20260304T050607Z-0badcafe.dump", 3_000_000_000, "ab" * 32, "")


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def status_of(runs: Sequence[Run] = (), **known: Any) -> Status:
    """The status of a target: what is known of it goes by the fields of `TargetFacts`."""
    made = CatalogConfig.model_validate(known.pop("settings", {}))
    return Status(TargetFacts(made, **{"totals": TOTALS, "runs": runs, "read_at": NOW, **known}))


def shown(status: Status) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(status.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(*runs: Run, **known: Any) -> str:
    return shown(status_of(runs, **known))


# --- status ---------------------------------------------------------------------------------------


def test_the_json_is_plain_and_complete() -> None:
    assert status_of().json()["last_run"] is None
    holders = [Holder(0xAB, "ntt-backup-remote/alpha/0", 99)]
    said = json.loads(json.dumps(status_of([a_run()], dumps=[A_DUMP], holders=holders).json()))
    assert (said["target"], said["url"]) == ("remote", None)
    assert (said["pending"], said["copied"], said["failed"]) == (1200, 3_400_000, 3)
    assert said["pending_bytes"] == 5_000_000
    assert said["failed_by_reason"] == {"missing": 2, "wrong-size": 1}
    assert said["pending_by_reason"] == {"remote-missing": 5}
    assert said["last_run"]["run_id"] == str(UUID(int=7))
    assert said["last_run"]["started_at"] == "2026-03-04T05:06:07Z"
    assert said["last_run"]["read_at"] == "2026-03-04T05:07:47Z"
    assert [(one["name"], one["error"]) for one in said["dumps"]] == [(A_DUMP.name, "")]
    assert said["ranges"] == [{"range": "ab", "holder": "ntt-backup-remote/alpha/0", "pid": 99}]
    assert said["daemon"] is None
    jsonschema.validate(said, documents.status_schema())


def test_the_schema_file_is_made_from_what_status_is_made_of() -> None:
    assert documents.STATUS.read_text() == documents.status_text(), (
        "`python -m tests.helpers.documents` writes it"
    )


def test_the_objects_of_a_bucket_are_shown_those_that_were_counted() -> None:
    def drawn(stored: StoredObjects) -> str:
        status = status_of(stored=stored)
        assert status.json()["objects"] == asdict(stored)
        return shown(status)

    assert "67,000 packs, 17.0 GB; 2 large blobs as files of their own, 140.0 MB" in drawn(
        StoredObjects(67_000, 17_000_000_000, 2, 140_000_000)
    )
    assert "1 pack, 10 Bytes  " in drawn(StoredObjects(1, 10, None, None))
    assert status_of().json()["objects"] is None


def test_the_table_shows_all_figures() -> None:
    text = drawn(a_run())
    for words in ("1,200 blobs", "3,400,000 blobs", "2 missing", "1 wrong-size", "4 pending blobs"):
        assert words in text
    assert "2 rows have no blobid" in text
    assert "2026-03-04 05:06 UTC on alpha: done (exit code 0), 10 copied" in text


def test_a_run_without_an_end_says_how_old_its_figures_are() -> None:
    text = drawn(a_run(ended_at=None, outcome=None, exit_code=None))
    assert "PID 4711: no end yet; as of 40 s ago 10 copied, 0 failed, 1.0 kB, 0.0 MB/s" in text


@pytest.mark.parametrize(("zone", "shown"), [("Asia/Kolkata", "10:36 IST"), ("UTC", "05:06 UTC")])
def test_times_are_local_in_the_table_and_utc_in_json(
    monkeypatch: pytest.MonkeyPatch, zone: str, shown: str
) -> None:
    """Whatever the zone of the database's session."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    theirs = NOW.astimezone(timezone(timedelta(hours=-5)))
    assert f"2026-03-04 {shown} on alpha" in drawn(a_run(started_at=theirs))
    said = status_of([a_run(started_at=theirs)]).json()
    assert said["last_run"]["started_at"] == "2026-03-04T05:06:07Z"


def test_estimated_figures_are_marked() -> None:
    totals = replace(TOTALS, pending=41_930_647, estimated=("pending", "pending_bytes", "unsized"))
    text = drawn(totals=totals)
    assert "about 41,900,000 blobs, 5.0 MB" in text
    assert "about 4 pending blobs have no size" in text
    assert "`ntt-backup-remote status --exact` counts" in text
    assert "about 3,400,000" not in text
    said = status_of(totals=totals).json()
    assert (said["pending"], said["estimated"]) == (41_930_647, totals.estimated)
    assert "about" not in drawn()


def test_blobs_without_any_size_are_not_said_to_be_empty() -> None:
    text = drawn(totals=replace(TOTALS, pending=8, pending_bytes=0, unsized=8))
    assert "8 blobs, size not known yet" in text
    assert "0 Bytes" not in text


def test_the_health_is_told_to_people_and_programs() -> None:
    bad = status_of([a_run(outcome="error", exit_code=6, reason="the remote is full")], unknown=3)
    health = bad.json()["health"]
    assert health["level"] == "action_required"
    assert "3 blobs could not be copied" in [point["what"] for point in health["points"]]
    assert "Action required The last run ended early" in " ".join(shown(bad).split())
    well = replace(TOTALS, pending=0, failed=0, pending_by_reason={}, failed_by_reason={})
    now = datetime.now(UTC)
    good = status_of([a_run(ended_at=now)], totals=well, dumps=[replace(A_DUMP, ended_at=now)])
    assert good.json()["health"]["level"] == "healthy"
    assert "Healthy All blobs are copied" in " ".join(shown(good).split())


def test_control_characters_from_the_catalog_are_escaped() -> None:
    text = drawn(a_run(host="evil\x1b[2J[red]x"), holders=[Holder(1, "who\x1b]0;t\x07[bold]", 5)])
    assert "\x1b" not in text
    assert "\x07" not in text


# --- the plan -------------------------------------------------------------------------------------


def settings(**run: Any) -> Settings:
    return Settings(
        source={"root": "/store"},
        remote={"host": "vault", "path": "/backup"},
        run=run,
    )


@pytest.mark.parametrize(("unsized", "rate"), [(0, None), (7, 12_000_000)])
def test_the_plan_shows_amount_places_and_batches(unsized: int, rate: int | None) -> None:
    text = "\n".join(
        plan(
            settings(batch_size=500, workers=3, bwlimit=rate),
            PendingEstimate(12_345, 10**9, unsized, exact=True),
        )
    )
    assert "would send 12,345 blobs" in text
    assert "/store to vault:/backup/by-hash" in text
    assert "25 batches of at most 500 blobs" in text
    assert "by 3 workers, strategy auto" in text
    assert ("unknown size" in text) is bool(unsized)
    assert ("12.0 MB/s" in text) is bool(rate)


def test_the_plan_has_the_least_batches_where_they_grow() -> None:
    text = "\n".join(plan(settings(), PendingEstimate(12_345, 10**6, 0, exact=True)))
    assert "in at least 4 batches of at most 4,000 blobs" in text


def test_each_set_shows_its_last_version_when_the_next_is_due_and_why_there_is_none() -> None:
    known = Last("20260304T050607Z-0badcafe", 1200, 7_000_000, 5000, 1, taken_at=NOW)
    away = Last(failed_at=NOW, error="it is away")
    sets = {"etc": {"paths": ["/etc"], "every": 86400}, "home": {"paths": ["/home"]}}
    found = status_of(settings={"snapshots": sets}, snapshots={"etc": known, "home": away})
    text = " ".join(shown(found).split())
    assert (
        "snapshot etc 2026-03-04 05:06 UTC: 20260304T050607Z-0badcafe, 1,200 files, 7.0 MB,"
        " 5.0 kB stored; 1 file could NOT be read; next due 2026-03-05 05:06 UTC" in text
    )
    assert "snapshot home none known to this host 2026-03-04 05:06 UTC: FAILED, it is away" in text
    etc, home = json.loads(json.dumps(found.json()))["snapshots"]
    assert (etc["taken_at"], etc["next_due"]) == ("2026-03-04T05:06:07Z", "2026-03-05T05:06:07Z")
    assert (home["taken_at"], home["next_due"]) == (None, None)


def test_beside_a_daemon_the_figures_of_its_run_are_those_of_this_moment() -> None:
    """What the catalog has of a run is up to a minute old."""
    report = RunReport("", 2).report("vault", paused=False, bwlimit=None, jobs={})
    report = replace(report, state=STATE)
    own = a_run(run_id=UUID(int=9), ended_at=None, outcome=None, exit_code=None, copied=0, bytes=0)
    report = replace(report, run_id=str(own.run_id))
    other = replace(own, run_id=UUID(int=8), copied=3)
    status = status_of([own, other], daemon=report)
    said = status.json()
    assert said["last_run"]["copied"] == report.state.copied > 0
    assert [one["copied"] for one in said["under_way"]] == [report.state.copied, 3]
    assert said["last_run"]["updated_at"] == said["last_run"]["read_at"]
    ended = replace(own, ended_at=own.read_at, outcome="done", exit_code=0)
    assert status_of([ended], daemon=report).json()["last_run"]["copied"] == 0
