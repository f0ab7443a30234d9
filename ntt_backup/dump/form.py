"""A dump is stored in one of two forms: as pg_dump compresses it, or as one of a series."""

from __future__ import annotations

import hashlib
from typing import Final

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.last_text import LastText, NewText, directory_of
from ntt_backup.dump.record import PLAIN, SERIES, DumpRecord, Stored
from ntt_backup.dump.series import Writer

# The next dump is whole where the last increment was larger than one part in so many of the whole
# dump: the table was rewritten, or so many rows have changed since that all increments are large.
_LARGE: Final = 4


class Sum:
    """Size and SHA-256 of what is added."""

    def __init__(self) -> None:
        self.size = 0
        self._digest = hashlib.sha256()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._digest.update(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class Form:
    """Turns the output of pg_dump into the bytes of the dump.

    Attributes:
        base: The whole dump that this one is an increment on; "" where it is whole.
        step: One more than that of the last increment on the same base; 0 where it is whole.
        format: The number of the form in the record.
        options: Of pg_dump.
        text: The sum of what came.
    """

    def __init__(
        self, base: str = "", step: int = 0, old: LastText | None = None, new: NewText | None = None
    ) -> None:
        """old: the whole dump as it is kept here; new: keeps this one, if it is whole. Neither: the
        dump is stored as pg_dump compresses it.
        """
        self._old = old
        self._new = new
        series = not (old is None and new is None)
        self._writer = Writer(old, new) if series else None
        self.base = base
        self.step = step
        self.format = SERIES if series else PLAIN
        # What is compressed changes as a whole, wherever a row did.
        self.options = ("--compress=0",) if series else ()
        self.text = Sum()

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
            return Form()
        base, step, old = ("", 0, None) if whole else kept_base(settings, database, known)
        new = NewText(directory_of(settings, database)) if old is None else None
        return Form(base, step, old, new)

    def add(self, data: bytes) -> bytes:
        """Returns what is to be sent now; may be nothing."""
        self.text.add(data)
        return data if self._writer is None else self._writer.add(data)

    def end(self) -> bytes:
        """Returns the rest."""
        return b"" if self._writer is None else self._writer.end()

    def keep(self, name: str, made: DumpRecord) -> None:
        """Keeps a whole dump on this machine for the next ones."""
        if self._new is not None:
            self._new.keep(name, made.text_sha256)

    def close(self) -> None:
        """Forgets what was not kept."""
        if self._old is not None:
            self._old.close()
        if self._new is not None:
            self._new.give_up()


def kept_base(
    settings: RemoteConfig, database: str, known: list[Stored]
) -> tuple[str, int, LastText | None]:
    """Returns the whole dump that the next one can be an increment on, the step of that increment,
    and the dump as it is kept here; "", 0 and None where the next one has to be whole.
    """
    base, step = base_of(known, settings.dump.full_every)
    if base is not None:
        old = LastText.find(directory_of(settings, database), base.name, base.text[1])
        if old is not None:
            return base.name, step, old
    return "", 0, None


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
