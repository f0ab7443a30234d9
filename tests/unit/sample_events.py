"""Events and a state of a run, as a view or a log would be told of them."""

from __future__ import annotations

from ntt_backup import events
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.progress import RunState, WorkerStatus

BLOBID = "ab" * 32
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9bb\r\nc\u202ed\x00[red]"
RUN_START = events.RunStart(
    version="1",
    target="remote",
    strategy="tar",
    workers=4,
    watch=False,
    source="/srv/store",
    remote="host:/backup",
)
PROGRESS = events.Progress(
    copied=3_150,
    failed=2,
    pending=1_848,
    estimated=False,
    bytes=212_300_000,
    mb_per_s=48.14,
    blobs_per_s=812.0,
    eta_s=34.0,
    active_workers=4,
)
RUN_STOP = events.RunStop(
    outcome="some_failed",
    exit_code=7,
    copied=4_998,
    failed=2,
    bytes=250_000_000,
    duration_s=12.5,
)
BLOB_FAILED = events.BlobFailed(blobid=BLOBID, reason="missing", detail="no such file")
OUTAGE = events.Outage(what="remote", reason="no answer", detail="timed out", attempt=2, wait_s=3.2)
OUTAGE_END = events.OutageEnd(what="remote", duration_s=1.0)
STALL = events.WorkerStall(worker=1, silent_s=61.0, hint="look")
STALL_END = events.WorkerStallEnd(worker=1, duration_s=70.0)
DIED = events.WorkerRestart(worker=0, status=-9, detail="", attempt=1, wait_s=1.0)
TARGET_DIED = TargetRestart(status=-9, detail="", attempt=1, wait_s=1.0)
BATCH = events.BatchComplete(
    pid=4711,
    worker=0,
    batch="0.1",
    blobs=2,
    copied=1,
    failed=1,
    bytes=100,
    wire_bytes=150,
    duration_s=0.5,
    mb_per_s=0.0002,
    attempt=1,
    answer_s=0.25,
)
ERROR = events.Error(exit_code=5, message="m", detail="d", hint="do it")
STATE = RunState(
    elapsed_s=72.0,
    copied=2_998,
    failed=2,
    pending=1_000,
    estimated=False,
    bytes=123_456_789,
    sent=125_000_000,
    done=3_000,
    share=0.756,
    mb_per_s=12.25,
    blobs_per_s=812.0,
    eta_s=34.0,
    workers=(
        WorkerStatus(0, "sending", "w0-7", 1_500, 6.5),
        WorkerStatus(1, "outage", "", 0, 0.0),
    ),
)
