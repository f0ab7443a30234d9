"""How a check ended is noted in the catalog, for `status`, metrics and the page, and told.

It is done at the end, over a connection of its own and within some seconds. Where that cannot be
done nobody is told: a check, or a restore on a new machine, needs no catalog to note it in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import click

from ntt_backup.cli.common import Common
from ntt_backup.errors import (
    SOME_FAILED,
    BackupError,
    CatalogUnavailable,
    ConfigError,
    DestinationError,
    LockHeld,
    SourceError,
)
from ntt_backup.format import many, printable

_INTERRUPTED = 130
_PATIENCE_S = 3.0
# A catalog that does not answer is no trouble of the target, and may be a mistyped `--database`.
_REFUSALS = (CatalogUnavailable, ConfigError, DestinationError, LockHeld, SourceError)


@dataclass(slots=True)
class CheckNote:
    """Holds what a check has found so far; see `catalog.check_history`."""

    command: str
    detail: str = ""
    blobs: int = 0
    bytes: int = 0
    wrong: int = 0
    exit_code: int = 0

    def saw(self, blobs: int, bytes_: int, wrong: int, exit_code: int) -> None:
        """Sets what was found so far, and the exit code if that is all."""
        # What speaks to PostgreSQL is loaded while others fetch, not when they have ended.
        import ntt_backup.catalog.check_history  # noqa: F401

        self.blobs, self.bytes, self.wrong, self.exit_code = blobs, bytes_, wrong, exit_code


@contextmanager
def noted(common: Common, command: str, **asked: object) -> Iterator[CheckNote]:
    """Notes what is done in the context as one call of the command. A call that is refused before
    it has looked at anything, since its options, its directory or the settings are wrong or another
    one is at work, says nothing of the target, and is not noted. asked: what limits it
    to a part, by the names of its options; what is not given is None, "" or False.
    """
    note = CheckNote(
        command, ", ".join(f"{name} {value}" for name, value in asked.items() if value)
    )
    began, understood = time.monotonic(), True
    try:
        yield note
    except click.UsageError:
        understood = False
        raise
    except Exception as error:
        understood = not isinstance(error, _REFUSALS) or note.blobs > 0
        note.exit_code, note.detail = getattr(error, "exit_code", 1), printable(str(error))
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        code = getattr(end, "code", None)
        note.exit_code = code if isinstance(code, int) else _INTERRUPTED
        raise
    finally:
        if understood:
            _write(common, note, time.monotonic() - began)
        if note.wrong or note.exit_code == SOME_FAILED:
            with suppress(BackupError):
                _tell(common, note)


def _write(common: Common, note: CheckNote, lasted: float) -> None:
    from ntt_backup.catalog.check_history import note_check
    from ntt_backup.catalog.connection import connect
    from ntt_backup.config import CatalogConfig, identity, load
    from ntt_backup.daemon.signals import time_limit

    with suppress(BackupError), time_limit(_PATIENCE_S, CatalogUnavailable("it is too slow")):
        settings = load(CatalogConfig, file=common.config, target=common.target)
        with connect(settings.catalog.url, identity.application("note")) as conn:
            note_check(conn, settings.target, lasted=lasted, **asdict(note))


def _tell(common: Common, note: CheckNote) -> None:
    """Sends a notice of what was found. Raises BackupError for settings that cannot be read."""
    from ntt_backup.config import CatalogConfig, load
    from ntt_backup.daemon.notices import Notice, send

    settings = load(CatalogConfig, file=common.config, target=common.target)
    found = f"{note.command} found {many(note.wrong, 'blob')} lost or not right"
    text = f"{found} ({note.detail})" if note.detail else found
    for problem in send(settings, Notice("findings", settings.target, text, asdict(note))):
        click.echo(f"warning: {problem}", err=True)
