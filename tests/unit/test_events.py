"""Events: their lines for people, their JSON, and the schema that is made from them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntt_backup import events
from ntt_backup.dump import events as dump_events
from ntt_backup.events import Event
from ntt_backup.process.messages import decode
from tests.helpers import documents
from tests.unit.sample_events import (
    BLOB_FAILED,
    BLOBID,
    ERROR,
    HOSTILE,
    OUTAGE,
    PROGRESS,
    RUN_START,
    RUN_STOP,
)

OUTAGE_END = events.OutageEnd(what="remote", duration_s=72.4)
SPLIT = events.BatchSplit(batch="0.1a", blobs=1, reason="no")
RESTART = events.WorkerRestart(pid=5, worker=3, status=-9, detail="killed", attempt=1, wait_s=0.7)
DUMP_START = dump_events.DumpStart(reason="asked", program="16.2")
DUMP_FAILED = dump_events.DumpFailed(exit_code=7, message="m", detail="d", hint="do it")

LINES = [
    (RUN_START, "4 workers, strategy tar, target remote: /srv/store to host:/backup"),
    (
        PROGRESS,
        "3,150 copied, 2 failed, 1,848 pending, 212.3 MB, 48.1 MB/s, 812 files/s, about 34 s left",
    ),
    (
        replace(PROGRESS, pending=None, eta_s=None),
        "3,150 copied, 2 failed, pending not counted yet, 212.3 MB, 48.1 MB/s, 812 files/s",
    ),
    (
        replace(PROGRESS, estimated=True, eta_s=None),
        "3,150 copied, 2 failed, about 1,848 pending, 212.3 MB, 48.1 MB/s, 812 files/s",
    ),
    (
        RUN_STOP,
        "some failed: 4,998 copied, 2 failed, 250.0 MB in 12 s (20.0 MB/s), exit code 7",
    ),
    (
        replace(RUN_STOP, outcome="error", exit_code=5),
        "ended early: 4,998 copied, 2 failed, 250.0 MB in 12 s (20.0 MB/s), exit code 5",
    ),
    (
        events.BatchRetry(batch="w1-7", blobs=9, attempt=2, reason="tar: exit 2", wait_s=1.5),
        "batch w1-7 again in 1.5 s (attempt 2): tar: exit 2",
    ),
    (replace(SPLIT, blobs=1_000), "batch 0.1a split (1,000 blobs): no"),
    (BLOB_FAILED, f"failed, missing: {BLOBID} no such file"),
    (
        events.BlobsFailed(count=3, reasons={"unreadable": 1, "missing": 2}),
        "3 blobs more failed: 2 missing, 1 unreadable; `ntt-backup-remote failed` lists them",
    ),
    (OUTAGE, "remote is unreachable, again in 3.2 s: no answer: timed out"),
    (replace(OUTAGE, what="preflight"), "cannot begin yet, again in 3.2 s: no answer: timed out"),
    (OUTAGE_END, "remote is reachable again after 1 min 12 s"),
    (replace(OUTAGE_END, what="preflight"), "can begin after 1 min 12 s"),
    (RESTART, "worker 3 died (status -9), a new one starts in 0.7 s: killed"),
    (replace(RESTART, detail=""), "worker 3 died (status -9), a new one starts in 0.7 s"),
    (
        events.WorkerStall(pid=77, worker=1, silent_s=61.0, hint="look"),
        "worker 1 (PID 77) has reported nothing for 1 min 1 s: look",
    ),
    (DUMP_START, "dumping the catalog (as asked)"),
    (DUMP_FAILED, "the catalog is not dumped: m: d; do it"),
    (replace(DUMP_FAILED, detail="", hint=""), "the catalog is not dumped: m"),
    (ERROR, "error: m: d; do it"),
    (events.Warning(reason="odd"), "warning: odd"),
    (events.WorkerStart(strategy="tar"), None),
]


@pytest.mark.parametrize(("event", "line"), LINES)
def test_an_event_has_one_line_for_people_or_none(event: Event, line: str | None) -> None:
    assert event.line == line


@pytest.mark.parametrize(
    "event",
    [
        replace(BLOB_FAILED, detail=HOSTILE),
        replace(BLOB_FAILED, blobid=HOSTILE),
        replace(OUTAGE, reason=HOSTILE, detail=HOSTILE),
        replace(RUN_START, remote=HOSTILE),
    ],
)
def test_a_line_is_printable_whatever_others_said(event: Event) -> None:
    assert event.line is not None
    assert event.line.isprintable()


@given(st.text(st.characters(exclude_categories=())))
def test_an_event_on_a_pipe_is_one_line_that_is_read_back_as_it_was(text: str) -> None:
    event = replace(OUTAGE, worker=3, detail=text)
    line = event.encode()
    assert line.count(b"\n") == 1
    assert decode(line) == event


def test_an_event_has_its_fields_and_no_others_and_keeps_them() -> None:
    event = events.WorkerStart(strategy="tar")
    with pytest.raises(FrozenInstanceError):
        event.strategy = "stream"  # type: ignore[misc]
    assert decode(event.encode()) == event
    assert decode(b'{"event": "worker_start"}') is None
    assert decode(b'{"event": "worker_start", "strategy": "tar", "more": 1}') is None


def test_the_schema_file_is_made_from_the_events() -> None:
    assert documents.EVENTS.read_text() == documents.events_text(), (
        "`python -m tests.helpers.documents` writes it"
    )
