"""The dump of a run: made before its first blob, and by a run that watches every `dump.interval`.

Where this machine or key can make no dumps at all (no pg_dump, a forced command that takes none),
that is a warning as long as nobody relies on dumps: none was ever made for this target, and
`dump.bin` is not set. From the first dump on it is a failure.
"""

from __future__ import annotations

import math
from functools import partial

from ntt_backup.config import Settings
from ntt_backup.daemon.side_job import SideJob, tell
from ntt_backup.dump.events import DumpFailed
from ntt_backup.dump.job import dump
from ntt_backup.dump.rehearsal import relied_on
from ntt_backup.errors import BackupError, DumpImpossible
from ntt_backup.events import Event, Warning
from ntt_backup.process.messages import JobOver


def dump_job(settings: Settings) -> SideJob:
    """Returns the dumps of a run."""
    wanted = settings.dump
    every = None if settings.run.skip_pgdump else min(wanted.interval, wanted.max_age or math.inf)
    return SideJob(partial(_dump, settings), "ntt-dump", every=every, died=_died)


def _died(pid: int, detail: str, _last: Event | None) -> Event:
    message = "the process that dumps the catalog died"
    return DumpFailed(pid=pid, exit_code=1, message=message, detail=detail, hint="")


def _dump(settings: Settings) -> JobOver:
    """Makes a dump if one is due."""
    try:
        dump(settings, tell)
    except DumpImpossible as error:
        if not relied_on(settings):
            text = f"no dump of the catalog is made: {error}; {error.hint}; or set run.skip_pgdump"
            tell(Warning(reason=text))
            return JobOver(failed=False)
        tell(DumpFailed(**error.fields))
    except BackupError as error:
        tell(DumpFailed(**error.fields))
    else:
        return JobOver(failed=False)
    return JobOver(failed=True)
