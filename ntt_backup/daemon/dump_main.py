"""The dump of a run as a process of its own: a copy of the coordinator, as its workers are.

The coordinator may wait for nothing: it answers signals and the watchdog while a dump of gigabytes
goes out, and whatever becomes of the dump never stops the blobs. The events go out as JSON lines on
stdout; the last one is `dump_over`. Exit status: 0, or 1 where a dump should have been made and was
not. Mostly none is due, and loading a program anew to find that out would cost more than all else.

Where this machine or key can make no dumps at all (no pg_dump, a forced command that takes none),
that is a warning as long as nobody relies on them: a dump was never made for this target, and no
place of pg_dump is set. From the first dump on it is a failure.
"""

from __future__ import annotations

import signal
from typing import Final

from ntt_backup import events
from ntt_backup.config import Settings
from ntt_backup.dump.job import dump
from ntt_backup.dump.rehearsal import relied_on
from ntt_backup.errors import BackupError, DumpImpossible
from ntt_backup.process.messages import DumpOver, Message

_STDOUT: Final = 1


def work(settings: Settings) -> int:
    """Makes a dump if one is due; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failed = False
    try:
        dump(settings, _emit)
    except DumpImpossible as error:
        failed = relied_on(settings)
        if failed:
            _emit(events.DumpFailed(**error.fields))
        else:
            text = f"no dump of the catalog is made: {error}; {error.hint}; or set run.skip_pgdump"
            _emit(events.Warning(reason=text))
    except BackupError as error:
        failed = True
        _emit(events.DumpFailed(**error.fields))
    _emit(DumpOver(failed=failed))
    return int(failed)


def _emit(message: Message) -> None:
    message.write(_STDOUT)
