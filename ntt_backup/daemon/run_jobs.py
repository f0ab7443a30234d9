"""A run has two side jobs: the dump of the catalog, and the snapshots."""

from __future__ import annotations

from ntt_backup.config import Settings
from ntt_backup.daemon.dump_job import dump_job
from ntt_backup.daemon.side_job import SideJobs
from ntt_backup.daemon.snapshot_job import snapshot_job


def jobs_of(settings: Settings) -> SideJobs:
    """Returns the side jobs of a run with these settings."""
    return SideJobs(dump=dump_job(settings), snapshot=snapshot_job(settings))


def adopt(jobs: SideJobs, settings: Settings) -> None:
    """Lets the jobs of a run go on with other settings."""
    for name, job in jobs_of(settings).items():
        # Of a snapshot it is known when it is due; a dump would be made at once.
        jobs[name].become(job, look=name == "snapshot")
