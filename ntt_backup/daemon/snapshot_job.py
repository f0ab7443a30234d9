"""The snapshots of a run: of the sets that have `every`, after its blobs, or while it watches.

What takes them is loaded by the process that does.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from ntt_backup.config import Settings
from ntt_backup.daemon.side_job import SideJob, tell
from ntt_backup.events import Event
from ntt_backup.process.messages import JobOver
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotProgress, SnapshotStart

_RETRY_SECONDS: Final = 60.0


def snapshot_job(settings: Settings) -> SideJob:
    """Returns the snapshots of a run."""
    return SideJob(
        partial(_take, settings),
        "ntt-snapshot",
        every=min(settings.scheduled.values(), default=None),
        died=partial(_died, settings),
        retry=_RETRY_SECONDS,
    )


def _take(settings: Settings) -> JobOver:
    from ntt_backup.snapshot.schedule import take_due

    return take_due(settings, tell)


def _died(settings: Settings, pid: int, detail: str, last: Event | None) -> Event:
    from ntt_backup.snapshot.last_take import note_failure

    name = last.set if isinstance(last, SnapshotStart | SnapshotProgress) else ""
    message = "the process that takes snapshots died"
    note_failure(settings, name, message)
    return SnapshotFailed(set=name, pid=pid, exit_code=1, message=message, detail=detail, hint="")
