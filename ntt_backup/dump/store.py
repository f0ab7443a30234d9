"""The dumps of catalogs lie in a file store: each is a file, with a record beside it.

The length of a dump is not known before its end, and a target cannot tell that end from a link that
was cut. So a dump gets no name by itself: only the side that has seen pg_dump end well publishes
it. Until then the target shows it to nobody, and removes it when the connection ends.

An increment makes what pg_dump wrote together with the whole dump that it refers to. It is fetched
first, into a temporary file, and proved before anything is done with it. The whole dump, which is
far larger, is read as it comes.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import IO, Final

from ntt_backup.config import RemoteConfig
from ntt_backup.dump.record import DumpRecord, Stored, by_age, read
from ntt_backup.dump.series import replay
from ntt_backup.dump.toc import DumpDamaged, drain
from ntt_backup.errors import DumpFailed, DumpImpossible, NameTaken, RemoteDenied
from ntt_backup.filestore.contract import (
    UNKNOWN_ARRIVAL,
    Area,
    FileMissing,
    FileStore,
    FileUnreadable,
    NewFile,
    Range,
    ReadableStore,
    StoredFileDamaged,
)
from ntt_backup.filestore.open import open_store
from ntt_backup.wire import stored_names
from ntt_backup.wire.stored_names import MAX_DUMPS, MAX_RECORD, PLACES, RECORD, dump_of, is_pin

_PIECE: Final = 8 << 20
_LOCAL_PIECE: Final = 1 << 16
_ANOTHER: Final = "`ntt-backup-remote dumps` lists the others"

DUMPS: Final = Area(
    name=stored_names.DUMPS,
    word="dump",
    file="a dump",
    files="dumps",
    most=4
    * MAX_DUMPS,  # Each dump has two or three files. Somebody may have put more there by hand.
    replace=False,
    by_shell=True,
    denied=DumpImpossible,
    instead="; or dump the catalog by another way and set run.skip_pgdump",
    sealed=lambda name: not (name.endswith(RECORD) or is_pin(name)),
)


def open_dumps(settings: RemoteConfig) -> FileStore:
    """Opens the dumps of a target. Raises DumpImpossible where a forced command accepts none."""
    return open_store(settings, DUMPS)


def list_dumps(store: FileStore) -> list[Stored]:
    """Returns the dumps on the target, oldest first, and changes nothing."""
    files = {one.name: one for one in store.list()}
    names = {dump_of(name) for name in files if not is_pin(name)}
    pins: dict[str, list[str]] = {}
    for name in filter(is_pin, files):
        pins.setdefault(dump_of(name), []).append(name)
    if len(names) > MAX_DUMPS:  # The record of each is asked for.
        raise RemoteDenied(
            f"there are more than {MAX_DUMPS:,} dumps on the target",
            detail=f"{len(names):,} names in {DUMPS.name}",
            hint="remove what none of your hosts has stored there, with the tools of the target",
        )
    recorded = sorted(name for name in names if name + RECORD in files)
    records = dict(_read_records(store, recorded))
    dumps = []
    for name in names:
        found, record = files.get(name), records.get(name)
        if found is None:
            dumps.append(Stored(name, None, record))
            continue
        arrived = None if found.arrived == UNKNOWN_ARRIVAL else found.arrived
        said = (found.refused, found.sealed, tuple(pins.get(name, ())))
        dumps.append(Stored(name, found.size, record, arrived, *said))
    return by_age(dumps)


def fetch_dump(store: ReadableStore, dump: Stored) -> Generator[bytes, None, None]:
    """Yields the content of a dump as the content arrives, without a check.

    Raises FileMissing, FileUnreadable and StoredFileDamaged, as all that the store raises.
    """
    size = dump.size or 0
    ranges = (Range(dump.name, at, min(_PIECE, size - at)) for at in range(0, size, _PIECE))
    for data in store.read(ranges):
        if not data:  # The file is shorter than was listed.
            return
        yield data


def remove_dumps(store: FileStore, names: Sequence[str]) -> int:
    """Removes dumps, their places files and records; returns how many the target did not keep."""
    if not names:
        return 0
    # What has a record is found again.
    store.remove([file for name in names for file in (name, name + PLACES, name + RECORD)])
    left = {one.name for one in store.list()}
    gone = set(names) - {dump_of(name) for name in left if not is_pin(name)}
    # Pins that keep nothing: others have put them there.
    store.remove([name for name in left if is_pin(name) and dump_of(name) in gone])
    return len(gone)


def publish_dump(
    store: FileStore, file: NewFile, name: str, record: DumpRecord, places: NewFile | None = None
) -> None:
    """Gives a finished dump its name, and its places file, which are durable when this returns.

    The record comes first: a dump without one would stay. Raises NameTaken: whoever may list the
    uploads of a bucket knows the name before.
    """
    beside = store.write(name + RECORD)
    try:
        beside.add(record.to_json().encode() + b"\n")
        beside.finish()
        beside.publish()
    finally:
        beside.discard()
    try:
        if places is not None:
            places.publish()
        file.publish()
    except NameTaken:
        # Else the record would vouch for the content of somebody else. Who may not remove it
        # removes no older dumps either.
        with suppress(RemoteDenied):
            store.remove([*([name + PLACES] if places is not None else []), name + RECORD])
        raise


def _read_records(
    store: ReadableStore, names: Sequence[str]
) -> Iterator[tuple[str, DumpRecord | None]]:
    """Yields the record of each dump that has one; None for a record that cannot be read."""
    rest = iter(names)
    while left := list(rest):
        rest = iter(left)
        texts = store.read(Range(name + RECORD, 0, MAX_RECORD + 1) for name in left)
        try:
            for text, name in zip(texts, rest, strict=False):
                yield name, read(text.decode("utf-8", "replace"))
        except (FileMissing, FileUnreadable, StoredFileDamaged):
            # A reader ends with its first error: the records behind it need a new one.
            yield next(rest), None


class BaseUnusable(Exception):
    """An increment cannot be restored without the dump that the message names."""


def needed_by(one: Stored, known: Mapping[str, Stored]) -> list[Stored]:
    """Returns the dumps that must be read to restore one: its whole dump, if it needs one, and it.

    Raises:
        BaseUnusable: The whole dump is missing, not complete, or an increment itself.
    """
    if not one.base:
        return [one]
    base = known.get(one.base)
    if base is None or base.age >= one.age:
        raise BaseUnusable(f"{one.base} is missing")
    if not base.whole:
        raise BaseUnusable(f"{one.base} {base.torn}")
    if base.base or not (base.record and base.record.series):
        raise BaseUnusable(f"{one.base} is no whole dump of a series")
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
        on_piece: Is called with each piece that comes, and may raise.

    Attributes:
        damaged: After the last piece, the dump that is at fault where the pieces are not what was
            dumped; "" else.
        why: What is wrong with that dump, in words.
    """

    def __init__(
        self,
        store: ReadableStore,
        needed: Sequence[Stored],
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._needed = needed
        self._on_piece = on_piece
        self.damaged = self.why = ""

    def __iter__(self) -> Generator[bytes, None, None]:
        base, one = self._needed[0], self._needed[-1]
        stored = self._file(base)
        if not (one.record and one.record.series):
            yield from stored
            return
        with ExitStack() as stack:
            text = _at_most(replay(stored), base.text[0])
            if one is not base:
                with _explained():
                    file = stack.enter_context(tempfile.TemporaryFile())
                    file.writelines(self._file(one))
                    file.seek(0)
                if self.damaged:
                    return
                text = _at_most(replay(_pieces(file), text), one.text[0])
            try:
                yield from self._proved(text, one.name, one.text)
            except (DumpDamaged, MemoryError) as error:
                if not self.damaged:
                    self.damaged, self.why = one.name, str(error) or "it takes too much memory"
            drain(stored)  # Only its end proves it.

    def _file(self, one: Stored) -> Iterator[bytes]:
        said = (one.record.bytes, one.record.sha256) if one.record is not None else (0, "")
        return self._proved(fetch_dump(self._store, one), one.name, said)

    def _proved(self, pieces: Iterator[bytes], name: str, said: tuple[int, str]) -> Iterator[bytes]:
        """Yields the pieces of a dump, and checks them against the dump's record.

        After the last piece, `damaged` and `why` are set where the size or the SHA-256 of all
        pieces is not that of the record.
        """
        digest, size, why = hashlib.sha256(), 0, "its SHA-256 differs from its record"
        try:
            for piece in pieces:
                self._on_piece()
                digest.update(piece)
                size += len(piece)
                if size <= said[0]:  # The rest is read to its end, and dropped.
                    yield piece
        except FileMissing:
            why = "it is missing"
        except (FileUnreadable, StoredFileDamaged) as error:
            why = error.detail if isinstance(error, StoredFileDamaged) else str(error)
            why = why.removeprefix(f"{name}: ")
        if (size, digest.hexdigest()) != said:
            self.damaged, self.why = name, why


def write_text(
    store: ReadableStore, one: Stored, known: Mapping[str, Stored], file: IO[bytes]
) -> None:
    """Writes into a file what pg_dump wrote of a dump, as pg_restore reads it.

    Raises:
        DumpFailed: The dump is damaged or not complete, or one that it needs is.
        OSError: The file cannot be written.
    """
    try:
        text = DumpText(store, needed_by(one, known))
        file.writelines(text)
    except BaseUnusable as error:
        raise DumpFailed(f"{one.name} cannot be read: {error}", hint=_ANOTHER) from error
    if text.damaged:
        raise DumpFailed(f"{text.damaged} is damaged: {text.why}", hint=_ANOTHER)


@contextmanager
def _explained() -> Iterator[None]:
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
    """Yields segments up to a limit, since a few bytes of a dump may expand to terabytes.

    Raises:
        DumpDamaged: The segments have more than `size` bytes.
    """
    for segment in segments:
        size -= len(segment)
        if size < 0:
            raise DumpDamaged("its content is longer than its record says")
        yield segment


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with _explained():
        yield from iter(partial(file.read, _LOCAL_PIECE), b"")
