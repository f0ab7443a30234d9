"""The way to the coordinator, and what a worker says over it.

A worker's events become lines of the log, so their names and fields are a contract
(docs/jsonl.schema.json). They are put together here, in one place, and not where things happen. On
a pipe each is a line of JSON: also those of the process that dumps.

 `write_event`
and `read_event` are for both ends of the pipes.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

from ntt_backup.errors import BackupError
from ntt_backup.model import Batch, Receipt


class Line(Protocol):
    """The way to the coordinator."""

    @property
    def stopping(self) -> bool:
        """Whether the coordinator has asked for the end."""
        ...

    @property
    def fd(self) -> int:
        """Readable when there is a word from the coordinator; -1 once there will be none."""
        ...

    def emit(self, event: str, **fields: Any) -> None:
        """Tell the coordinator something."""
        ...

    def state(self, state: str, quiet: float = 0.0) -> None:
        """Tell what the worker is doing: sending, waiting, idle, outage; and that it may say
        nothing for quiet seconds. A sign of life, too: one that says nothing counts as stalled.
        """
        ...


def write_event(fd: int, event: str, **fields: Any) -> None:
    """An event of this process, all of it."""
    data = (json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n").encode()
    while data:
        data = data[os.write(fd, data) :]


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event on a line; None for what a library may print there."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def tell_receipt(line: Line, receipt: Receipt) -> None:
    """A batch is recorded: its failures one by one, then the batch as a whole."""
    for failure in receipt.failed:
        line.emit(
            "blob_failed",
            blobid=failure.blobid,
            reason=failure.reason.value,
            detail=failure.detail,
        )
    duration = max(receipt.duration_s, 1e-6)
    line.emit(
        "batch_complete",
        batch=receipt.batch.name,
        blobs=len(receipt.batch.blobs),
        copied=len(receipt.stored),
        failed=len(receipt.failed),
        bytes=receipt.stored_bytes,
        wire_bytes=receipt.wire_bytes,
        duration_s=round(receipt.duration_s, 3),
        mb_per_s=round(receipt.stored_bytes / duration / 1e6, 3),
        attempt=receipt.batch.attempt,
    )


def tell_retry(line: Line, batch: Batch, wait_s: float, error: BackupError) -> None:
    """A batch will be sent again, after wait_s seconds."""
    line.emit(
        "batch_retry",
        batch=batch.name,
        blobs=len(batch.blobs),
        attempt=batch.attempt,
        reason=str(error),
        wait_s=round(wait_s, 3),
    )


def tell_split(line: Line, batch: Batch, error: BackupError) -> None:
    """A batch that keeps failing goes on in halves."""
    line.emit("batch_split", batch=batch.name, blobs=len(batch.blobs), reason=str(error))


def tell_start(line: Line, batch: Batch) -> None:
    """A batch is about to be sent."""
    line.emit("batch_start", batch=batch.name, blobs=len(batch.blobs), bytes=batch.size)


def tell_outage(line: Line, what: str, error: BackupError, attempt: int, wait_s: float) -> None:
    """A side (`remote`, `catalog` or `source`) is away; it is tried again after wait_s seconds."""
    line.emit(
        "outage",
        what=what,
        reason=error.message,
        detail=error.detail,
        attempt=attempt,
        wait_s=round(wait_s, 3),
    )


def tell_outage_end(line: Line, what: str, duration_s: float) -> None:
    """A side that was away has answered again, so long after it was first missed."""
    line.emit("outage_end", what=what, duration_s=round(duration_s, 3))
