"""The record of the last take of each set: its version and its last failure, for `status`.

It is a file beside the log, so `status` asks no remote. Nothing else goes by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from ntt_backup.config import CatalogConfig
from ntt_backup.errors import BackupError, LockHeld
from ntt_backup.process.durable import write_durably
from ntt_backup.wire.stored_names import begun

if TYPE_CHECKING:
    from ntt_backup.snapshot.take.new_version import Taken


@dataclass(frozen=True, slots=True)
class Last:
    """Tells how the last takes of a set ended.

    Attributes:
        version: The last version that was taken on this host; "" where none is known. Up to
            `unreadable`, the other fields are those of its `Taken`.
        failed_at: When and why the last take failed; None and "" where it did not fail.
        taken_at: The time at which that version was begun.
    """

    version: str = ""
    files: int = 0
    bytes: int = 0
    stored: int = 0
    unreadable: int = 0
    failed_at: datetime | None = None
    error: str = ""
    taken_at: datetime | None = None


_LAST: Final = TypeAdapter(Last)


def last(settings: CatalogConfig, name: str) -> Last:
    """Returns what is known of a set; nothing where the file is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return _LAST.validate_json(_path(settings, name).read_bytes())
    return Last()


@contextmanager
def noting(settings: CatalogConfig, name: str) -> Iterator[Callable[[Taken], None]]:
    """Records a BackupError of the context. Yields the function that records what was taken.

    A record that cannot be written is dropped.
    """

    def taken(made: Taken) -> None:
        # A clock that was ahead once gives later versions names that are ahead, too.
        at = min(begun(made.version), datetime.now(UTC))
        known = (made.version, made.files, made.bytes, made.stored, made.unreadable)
        keep(settings, name, Last(*known, taken_at=at))

    try:
        yield taken
    except LockHeld:
        raise
    except BackupError as error:
        note_failure(settings, name, str(error))
        raise


def note_failure(settings: CatalogConfig, name: str, error: str) -> None:
    """Keeps that a take of a set failed now."""
    now = datetime.now(UTC)
    keep(settings, name, replace(last(settings, name), failed_at=now, error=error))


def keep(settings: CatalogConfig, name: str, known: Last) -> None:
    """Keeps what is known of a set. What cannot be written is not kept."""
    if name in settings.snapshots:
        with suppress(OSError):
            write_durably(_path(settings, name), _LAST.dump_json(known))


def _path(settings: CatalogConfig, name: str) -> Path:
    return settings.log.notes / f"snapshot-{settings.target}-{name}.json"
