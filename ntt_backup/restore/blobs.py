"""A restore fetches blobs from the remote into a directory.

It needs no catalog: what the remote lists says what there is, and a blob's name what it must be.
One thread lists, as fast as the others take what it has found; they leave out what the directory
has already and fetch the rest. Memory is bounded however many blobs there are, and a call that was
interrupted is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntt_backup.config import RemoteConfig
from ntt_backup.config.timetable import Timetable
from ntt_backup.errors import BackupError
from ntt_backup.restore.from_bucket import FromBucket, Thaw
from ntt_backup.restore.target_dir import RestoreTarget
from ntt_backup.restore.work import Restored, Wanted, Work

if TYPE_CHECKING:
    from ntt_backup.restore.from_receiver import FromReceiver


def restore(
    settings: RemoteConfig,
    destination: Path,
    wanted: Wanted,
    *,
    workers: int,
    trust_size: bool,
    on_progress: Callable[[Restored], None],
    on_outage: Callable[[BackupError, float], None],
    on_archived: Callable[[str], None] = lambda key: None,
    thaw: Thaw | None = None,
    bwlimit: Timetable | None = None,
) -> Restored:
    """Fetches what is wanted and missing. on_archived is told the keys of objects that must be
    thawed first; thaw: ask the object store for that. bwlimit: of all that comes. Raises
    BackupError; what is there then is right.
    """
    remote: FromReceiver | FromBucket
    if settings.remote.kind == "s3":
        remote = FromBucket(settings, wanted, on_outage, on_archived, thaw, bwlimit)
    else:
        # What speaks to a receiver takes a while to load, and is not for a bucket.
        from ntt_backup.restore.from_receiver import FromReceiver

        remote = FromReceiver(settings, wanted, on_outage, bwlimit)
    target = RestoreTarget(destination)
    try:
        work: Work[Any] = Work(target, workers, remote.cancelled, trust_size=trust_size)
        remote.run(work, workers, lambda: on_progress(work.state()))
        target.sync_names()
        return work.state()
    finally:
        target.close()
