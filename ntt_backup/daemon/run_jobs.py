"""A run has two side jobs: the dump of the catalog, and the snapshots.

The dump is made before the first blob, and by a run that watches every `dump.interval`. A dump in
which no blob is copied does not tell what a restore must bring back, so after the first blobs of a
target's life another one is made: at the end of the run, or, where it watches, after an hour.

Where this machine or key can make no dumps at all (no pg_dump, a forced command that takes none),
that is a warning as long as nobody relies on dumps: none was ever made for this target, and
`dump.bin` is not set. From the first dump on it is a failure.

The sets that have `every` are taken after the blobs, or while the run watches. What does either is
loaded by the process that does it: no blob waits for that.

A run that watches waits for a remote or a catalog that is unreachable with this work as with blobs:
the outage is told, and no failure.
"""

from __future__ import annotations

import math
from functools import partial

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings
from ntt_backup.daemon.child import tell_parent
from ntt_backup.daemon.side_job import MOST_RETRY_SECONDS, SideJob, SideJobs
from ntt_backup.dump.events import DumpFailed, DumpRecovered
from ntt_backup.errors import BackupError, CatalogUnavailable, DumpImpossible
from ntt_backup.events import Event, Warning
from ntt_backup.process.messages import JobOver, ProcessEnded
from ntt_backup.snapshot.events import (
    SnapshotFailed,
    SnapshotProgress,
    SnapshotsRecovered,
    SnapshotStart,
)


def jobs_of(settings: Settings, *, watch: bool) -> SideJobs:
    """Returns the side jobs of a run with these settings. watch: the run waits for outages."""
    backoff = Backoff.of(settings.run) if watch else None
    return SideJobs(dump=dump_job(settings, backoff), snapshot=_snapshot_job(settings, backoff))


def adopt(jobs: SideJobs, settings: Settings) -> None:
    """Lets the jobs of a run go on with other settings."""
    for name, job in jobs_of(settings, watch=True).items():
        # Of a snapshot it is known when it is due; a dump would be made at once.
        jobs[name].become(job, look=name == "snapshot")


def dump_job(settings: Settings, backoff: Backoff | None = None) -> SideJob:
    """Returns the dumps of a run. backoff: see `SideJob`."""
    wanted = settings.dump
    every = None if settings.run.skip_pgdump else min(wanted.interval, wanted.max_age or math.inf)
    return SideJob(
        partial(_dump, settings),
        "ntt-dump",
        every=every,
        died=_dump_died,
        well=DumpRecovered,
        needs=frozenset({"remote", "catalog"}),
        backoff=backoff,
    )


def _dump(settings: Settings, patient: bool) -> JobOver:
    """Makes a dump if one is due. patient: an outage is waited for, and no failure."""
    from ntt_backup.dump.job import dump
    from ntt_backup.dump.rehearsal import relied_on

    try:
        tells = dump(settings, tell_parent, patient=patient)
    except DumpImpossible as error:
        if not relied_on(settings):
            text = f"no dump of the catalog is made: {error}; {error.hint}; or set run.skip_pgdump"
            tell_parent(Warning(reason=text))
            return JobOver(failed=False)
        tell_parent(DumpFailed(**error.fields))
    except BackupError as error:
        if patient and error.retryable:
            what = "catalog" if isinstance(error, CatalogUnavailable) else "remote"
            return JobOver(failed=False, away=what, reason=error.message, detail=error.detail)
        tell_parent(DumpFailed(**error.fields))
    else:
        soon = min(MOST_RETRY_SECONDS, settings.dump.interval)
        return JobOver(failed=False, again_s=None if tells else soon)
    return JobOver(failed=True)


def _dump_died(ended: ProcessEnded, _last: Event | None) -> Event:
    message = "the process that dumps the catalog died"
    return DumpFailed(pid=ended.pid, exit_code=1, message=message, detail=ended.detail, hint="")


def _snapshot_job(settings: Settings, backoff: Backoff | None) -> SideJob:
    return SideJob(
        partial(_take, settings),
        "ntt-snapshot",
        every=min(settings.scheduled.values(), default=None),
        died=partial(_take_died, settings),
        well=SnapshotsRecovered,
        needs=frozenset({"remote"}),
        backoff=backoff,
    )


def _take(settings: Settings, patient: bool) -> JobOver:
    from ntt_backup.snapshot.schedule import take_due

    return take_due(settings, tell_parent, patient=patient)


def _take_died(settings: Settings, ended: ProcessEnded, last: Event | None) -> Event:
    from ntt_backup.snapshot.last_take import note_failure

    name = last.set if isinstance(last, SnapshotStart | SnapshotProgress) else ""
    message = "the process that takes snapshots died"
    note_failure(settings, name, message)
    return SnapshotFailed(
        set=name, pid=ended.pid, exit_code=1, message=message, detail=ended.detail, hint=""
    )
