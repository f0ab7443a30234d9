"""A dump is stored in one of two forms: as pg_dump compresses it, or as one of a series.

For a series this machine keeps the last whole dump, so that the next ones can be increments on it.
That copy is a help and nothing more: where it is missing, damaged or not the newest one, the next
dump is whole. It is the file as it was sent, before it was sealed, and only its user may read it.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.record import PLAIN, SERIES, Stored
from ntt_backup.dump.series import KeptBase, Writer
from ntt_backup.filestore.cache import directory_for

_NEW: Final = ".new-"
# The next dump is whole where the last increment was larger than one part in so many of the whole
# dump: the table was rewritten, or so many rows have changed since that all increments are large.
_LARGE: Final = 4


class NewBase:
    """Keeps a whole dump while it is made. Nothing is kept where that cannot be."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{_NEW}{os.getpid()}"
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.glob(f"{_NEW}*"):
                left.unlink()
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "wb")

    def add(self, data: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError:
            self.close()

    def keep(self, name: str) -> None:
        """Gives it the name of the dump, and removes the one before."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
                self._path.replace(self._path.with_name(name))
                for other in self._path.parent.iterdir():
                    if other.name != name:
                        other.unlink()

    def close(self) -> None:
        """Removes what was not kept. Never raises."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()
        with suppress(OSError):
            self._path.unlink()


class Form:
    """Turns the output of pg_dump into the bytes of the dump.

    Args:
        series: the dump is one of a series, else stored as pg_dump compresses it.
        old: the whole dump that this one is an increment on; None where this one is whole.
        new: keeps this dump; None where it is not kept.

    Attributes:
        options: Of pg_dump.
        text_bytes: The size of what pg_dump wrote.
    """

    def __init__(
        self, *, series: bool, old: KeptBase | None = None, new: NewBase | None = None
    ) -> None:
        self._old = old
        self._new = new
        self._writer = Writer(old) if series else None
        self._digest = hashlib.sha256()
        self.format = SERIES if series else PLAIN
        self.base, self.step = (old.name, old.step) if old is not None else ("", 0)
        # What is compressed changes as a whole, wherever a row did.
        self.options = ("--compress=0",) if series else ()
        self.text_bytes = 0

    @staticmethod
    def of(settings: RemoteConfig, database: str, known: list[Stored], *, whole: bool) -> Form:
        """Returns the form that the settings ask for.

        Args:
            settings: of the run.
            database: the name of the database.
            known: the dumps of the database for the target that can be restored, oldest first.
            whole: make no increment.
        """
        if settings.dump.mode != "series":
            return Form(series=False)
        if not whole and (old := kept_base(settings, database, known)) is not None:
            return Form(series=True, old=old)
        return Form(series=True, new=NewBase(_directory(settings, database)))

    def add(self, data: bytes) -> bytes:
        """Returns what is to be sent now; may be nothing."""
        self.text_bytes += len(data)
        self._digest.update(data)
        return data if self._writer is None else self._noted(self._writer.add(data))

    def end(self) -> bytes:
        """Returns the rest."""
        return b"" if self._writer is None else self._noted(self._writer.end())

    @property
    def text_sha256(self) -> str:
        """The SHA-256 of what pg_dump wrote."""
        return self._digest.hexdigest()

    def _noted(self, made: bytes) -> bytes:
        if self._new is not None:
            self._new.add(made)
        return made

    def keep(self, name: str) -> None:
        """Keeps a whole dump on this machine, for the next ones."""
        if self._new is not None:
            self._new.keep(name)

    def close(self) -> None:
        """Forgets what was not kept."""
        for one in (self._old, self._new):
            if one is not None:
                one.close()


def kept_base(settings: RemoteConfig, database: str, known: list[Stored]) -> KeptBase | None:
    """Returns the whole dump that the next dump can be an increment on.

    Returns:
        The copy of the whole dump on this machine, or None where the next dump has to be whole.
    """
    base, step = base_of(known, settings.dump.full_every)
    with suppress(OSError, ValueError):
        if base is not None:
            path = _directory(settings, database) / base.name
            return KeptBase(path, base.size or 0, step)
    return None


def _directory(settings: RemoteConfig, database: str) -> Path:
    return directory_for("dumps", settings.remote, settings.target, database)


def base_of(known: list[Stored], full_every: int) -> tuple[Stored | None, int]:
    """Returns the whole dump on which the next one can be an increment, and the step of that.

    Args:
        known: the dumps of a database that can be restored, oldest first.
        full_every: of so many dumps one is whole.
    """
    records = [(one, one.record) for one in known if one.record is not None and one.record.series]
    base = next((one for one, record in reversed(records) if not record.base), None)
    if base is None:
        return None, 0
    on = [record for one, record in records if record.base == base.name]
    step = 1 + max((record.step for record in on), default=0)
    large = bool(on) and on[-1].bytes * _LARGE > (base.size or 0)
    return (None, 0) if large or step >= full_every else (base, step)
