"""A dump is stored in one of two forms: as pg_dump compresses it, or as one of a series."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.chain import ChainBroken, chain_of
from ntt_backup.dump.last_text import LastText, NewText, directory_of
from ntt_backup.dump.record import PLAIN, SERIES, DumpRecord, Stored
from ntt_backup.dump.series import Writer


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
    """Turns the output of pg_dump into the bytes of the dump. options: of pg_dump; base: the dump
    that this one is an increment on, "" where it is whole; text: the sum of what came.
    """

    def __init__(self, before: LastText | None, base: str, new: NewText | None) -> None:
        self._before = before
        self._new = new
        self._writer = None if new is None else Writer(before, new)
        self.base = base
        self.format = PLAIN if new is None else SERIES
        # What is compressed changes as a whole, wherever a row did.
        self.options = () if new is None else ("--compress=0",)
        self.text = Sum()

    @staticmethod
    def of(settings: RemoteConfig, database: str, known: list[Stored], *, whole: bool) -> Form:
        """Returns the form that the settings ask for. known: the dumps of the database for
        the target that can be restored, oldest first. whole: as no increment.
        """
        if settings.dump.mode != "series":
            return Form(None, "", None)
        base, before = ("", None) if whole else last_text(settings, database, known)
        return Form(before, base, NewText(directory_of(settings, database)))

    def add(self, data: bytes) -> bytes:
        """Returns what is to be sent now; may be nothing."""
        self.text.add(data)
        return data if self._writer is None else self._writer.add(data)

    def end(self) -> bytes:
        """Returns the rest."""
        return b"" if self._writer is None else self._writer.end()

    def keep(self, name: str, made: DumpRecord) -> None:
        """Keeps what was written for the next dump."""
        if self._new is not None:
            self._new.keep(name, made.text_sha256)

    def close(self) -> None:
        """Forgets what was not kept."""
        if self._before is not None:
            self._before.close()
        if self._new is not None:
            self._new.give_up()


def last_text(
    settings: RemoteConfig, database: str, known: list[Stored]
) -> tuple[str, LastText | None]:
    """Returns the dump that the next one can be an increment on, and its text; "" and None where
    there is none, or it is not on this machine.
    """
    last = base_of(known, settings.dump.full_every)
    if last is not None:
        found = LastText.find(directory_of(settings, database), last.name, last.text[1])
        if found is not None:
            return last.name, found
    return "", None


def base_of(known: list[Stored], full_every: int) -> Stored | None:
    """Returns the dump on which the next one can be an increment, if it is on this machine: the
    last one, as long as its chain is whole and has room.
    """
    if not known or known[-1].record is None or not known[-1].record.series:
        return None
    with suppress(ChainBroken):
        if len(chain_of(known[-1], {one.name: one for one in known})) < full_every:
            return known[-1]
    return None
