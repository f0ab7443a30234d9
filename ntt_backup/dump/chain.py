"""A dump may need others: an increment needs all before it in its series, back to a full dump.

A dump comes back as what pg_dump wrote. The increments it needs are fetched first, and proved,
before anything is done with them: into a temporary file, since a chain is replayed in one go. Only
the full dump, which is far larger, is read as it comes.
"""

from __future__ import annotations

import hashlib
import os
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
# As many dumps has a chain at most; dump.full_every allows no more.
LONGEST: Final = 1000


class ChainBroken(Exception):
    """A dump cannot come back. name: of the dump that is at fault."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name = name


def chain_of(one: Stored, known: Mapping[str, Stored]) -> list[Stored]:
    """Returns the dumps that one needs, the full one first and itself last. Raises ChainBroken."""
    chain = [one]
    while base := chain[-1].base:
        if len(chain) == LONGEST:
            raise ChainBroken(one.name, f"needs more than {LONGEST:,} dumps")
        before = known.get(base)
        if before is None or before.age >= chain[-1].age:
            raise ChainBroken(base, "is missing")
        if not before.whole:
            raise ChainBroken(base, before.torn)
        chain.append(before)
    return chain[::-1]


def restorable(dumps: Iterable[Stored]) -> list[Stored]:
    """Returns those of dumps that are complete, with all that they need; in their order."""
    ours = list(dumps)
    known = {one.name: one for one in ours}
    found = []
    for one in ours:
        with suppress(ChainBroken):
            if one.whole and chain_of(one, known):
                found.append(one)
    return found


def with_bases(names: Iterable[str], known: Mapping[str, Stored]) -> frozenset[str]:
    """Returns the dumps of these names, and all that they need."""
    found: set[str] = set()
    for name in names:
        base = name
        while base and base not in found:
            found.add(base)
            base = known[base].base if base in known else ""
    return frozenset(found)


class DumpText:
    """What pg_dump wrote, of the last one of a chain; read once.

    Attributes:
        damaged: After less than all of it the dump that is at fault; "" else.
        why: That dump is damaged, in words.
    """

    def __init__(self, store: ReadableStore, chain: Sequence[Stored]) -> None:
        self._store = store
        self._chain = chain
        self.damaged = self.why = ""

    def __iter__(self) -> Generator[bytes, None, None]:
        last, first = self._chain[-1], self._chain[0]
        if not (last.record and last.record.series):
            yield from self._proved(last)
            return
        with ExitStack() as stack:
            stored = self._proved(first)
            files = [stored]
            if increments := self._chain[1:]:
                # One file for all of them: a process may not have so many open.
                with _keeping():
                    file = stack.enter_context(tempfile.TemporaryFile())
                for one in increments:
                    begin = file.tell()
                    self._save(one, file)
                    if self.damaged:
                        return
                    files.append(_pieces(file, begin, file.tell()))
            try:
                yield from _at_most(replay(files), last.text[0])
            except (SeriesDamaged, MemoryError) as error:
                if not self.damaged:
                    self.damaged, self.why = last.name, str(error) or "it takes too much memory"
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

    def _save(self, one: Stored, file: IO[bytes]) -> None:
        with _keeping():
            for piece in self._proved(one):
                file.write(piece)
            file.flush()


@contextmanager
def _keeping() -> Iterator[None]:
    """Raises DumpFailed for an OSError about a temporary file."""
    try:
        yield
    except OSError as error:
        raise DumpFailed(
            "the increments of a dump cannot be kept on this machine",
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


def _pieces(file: IO[bytes], begin: int, end: int) -> Iterator[bytes]:
    for at in range(begin, end, _PIECE):
        with _keeping():
            data = os.pread(file.fileno(), min(_PIECE, end - at), at)
        yield data
