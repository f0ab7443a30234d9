"""An increment needs the whole dump that it refers to: both make what pg_dump wrote.

The increment is fetched first, into a temporary file, and proved before anything is done with it.
The whole dump, which is far larger, is read as it comes.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Final

from ntt_backup.dump.record import Stored
from ntt_backup.dump.series import SeriesDamaged, replay
from ntt_backup.dump.store import fetch_dump
from ntt_backup.errors import DumpFailed
from ntt_backup.filestore.contract import (
    FileMissing,
    FileUnreadable,
    ReadableStore,
    StoredFileDamaged,
)

_PIECE: Final = 1 << 16


class BaseUnusable(Exception):
    """A dump cannot be restored. name: of the dump that is at fault."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name = name


def needed_by(one: Stored, known: Mapping[str, Stored]) -> list[Stored]:
    """Returns the dumps that are read to restore a dump: the whole dump that an increment refers
    to, and the dump itself.

    Args:
        one: the dump.
        known: dumps by their names.

    Raises:
        BaseUnusable: The whole dump is missing, not complete, or an increment itself.
    """
    if not one.base:
        return [one]
    base = known.get(one.base)
    if base is None or base.age >= one.age:
        raise BaseUnusable(one.base, "is missing")
    if not base.whole:
        raise BaseUnusable(one.base, base.torn)
    if base.base or not (base.record and base.record.series):
        raise BaseUnusable(one.base, "is no whole dump of a series")
    return [base, one]


def restorable(dumps: Iterable[Stored]) -> list[Stored]:
    """Returns the complete dumps whose base, if they need one, is complete; in their order."""
    ours = list(dumps)
    known = {one.name: one for one in ours}
    found = []
    for one in ours:
        with suppress(BaseUnusable):
            if one.whole and needed_by(one, known):
                found.append(one)
    return found


class DumpText:
    """What pg_dump wrote, of one dump; read once.

    Args:
        store: has the dumps.
        needed: The dumps that are read, as `needed_by` returns them.

    Attributes:
        damaged: The dump that is at fault where the text ended early; "" else.
        why: What is wrong with that dump, in words.
    """

    def __init__(self, store: ReadableStore, needed: Sequence[Stored]) -> None:
        self._store = store
        self._needed = needed
        self.damaged = self.why = ""

    def __iter__(self) -> Generator[bytes, None, None]:
        base, one = self._needed[0], self._needed[-1]
        if not (one.record and one.record.series):
            yield from self._proved(one)
            return
        with ExitStack() as stack:
            stored = self._proved(base)
            text = _at_most(replay(stored), base.text[0])
            if one is not base:
                with _keeping():
                    file = stack.enter_context(tempfile.TemporaryFile())
                    for piece in self._proved(one):
                        file.write(piece)
                    file.seek(0)
                if self.damaged:
                    return
                text = _at_most(replay(_pieces(file), text), one.text[0])
            try:
                yield from text
            except (SeriesDamaged, MemoryError) as error:
                if not self.damaged:
                    self.damaged, self.why = one.name, str(error) or "it takes too much memory"
            # Only its end proves it.
            for _ in stored:
                continue

    def _proved(self, one: Stored) -> Iterator[bytes]:
        """Yields a dump as it is stored; notes afterwards whether it is what was stored once."""
        digest, size, why = hashlib.sha256(), 0, ""
        said, right = (one.record.bytes, one.record.sha256) if one.record is not None else (0, "")
        pieces = fetch_dump(self._store, one)
        while True:
            try:
                piece = next(pieces, b"")
            except FileMissing:
                why = "it is missing"
                break
            except (FileUnreadable, StoredFileDamaged) as error:
                why = error.detail if isinstance(error, StoredFileDamaged) else str(error)
                why = why.removeprefix(f"{one.name}: ")
                break
            if not piece:
                break
            digest.update(piece)
            size += len(piece)
            if size <= said:  # What a record does not tell of is read to its end, and dropped.
                yield piece
        if (said, right) != (size, digest.hexdigest()):
            self.damaged, self.why = one.name, why or "its SHA-256 is another"


@contextmanager
def _keeping() -> Iterator[None]:
    """Raises DumpFailed for an OSError about a temporary file."""
    try:
        yield
    except OSError as error:
        raise DumpFailed(
            "the increment of a dump cannot be kept on this machine",
            detail=f"in {tempfile.tempdir or 'TMPDIR'}: {error.strerror or error}",
            hint="free space there, or set TMPDIR",
        ) from error


def _at_most(segments: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yields segments. Raises SeriesDamaged instead of more than so many bytes: a few of them may
    make terabytes.
    """
    for segment in segments:
        size -= len(segment)
        if size < 0:
            raise SeriesDamaged("it makes more than its record says")
        yield segment


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while True:
        with _keeping():
            piece = file.read(_PIECE)
        if not piece:
            return
        yield piece
