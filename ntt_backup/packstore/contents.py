"""The contents of blobs from packs and from files of their own, for who takes and hashes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ntt_backup.filestore.contract import FileArchived, FileMissing, FileUnreadable, SharedStore
from ntt_backup.pack.format import MAX_RAW, RAW, Entry, PackError
from ntt_backup.pack.names import blob_key
from ntt_backup.pack.reader import LARGEST_RANGE, PackReader, Range, Salvage, merge
from ntt_backup.packstore.tables import TROUBLES, PackObject, Tables, Trouble, packs_for
from ntt_backup.wire import messages
from ntt_backup.wire.messages import Large

if TYPE_CHECKING:
    from typing import Protocol

    from ntt_backup.client.read_session import ContentSink
    from ntt_backup.model import Failure

    class JudgingSink(ContentSink, Protocol):
        """Hashes what it takes. failures: what was not given, or not right."""

        failures: list[Failure]


# A pack whose blobs are known.
_Pack = PackReader | Salvage
# A pack's reader serves several threads, and zstandard's objects one at a time.
_decompressing = threading.Lock()


def give_blobs(
    key: str,
    reader: _Pack,
    entries: Iterable[Entry],
    sink: ContentSink,
    turn: AbstractContextManager[object] | None = None,
) -> None:
    """Hands over blobs of a pack, whose entries come in the order of their offsets.

    turn is entered whenever blobs were fetched, until they are handed over. Raises FileArchived
    where the pack must be thawed first.
    """
    for wanted in merge(entries):
        if wanted.length > LARGEST_RANGE:
            (entry,) = wanted.entries
            _give_long(key, reader, entry, sink)
            continue
        try:
            found = reader.range(wanted.start, wanted.length)
        except PackError as trouble:
            # Only some of it may be altered, or cut off.
            if len(wanted.entries) == 1:
                _refuse(wanted.entries[0].digest, key, trouble, sink)
                continue
            for entry in wanted.entries:
                give_blobs(key, reader, [entry], sink, turn)
            continue
        except FileArchived:
            raise
        except (FileMissing, FileUnreadable) as trouble:
            for entry in wanted.entries:
                _refuse(entry.digest, key, trouble, sink)
            continue
        with turn or nullcontext():
            _give_range(reader, key, wanted, memoryview(found), sink)
        del found  # The next range comes into the same memory.


def _give_range(
    reader: _Pack, key: str, wanted: Range, found: memoryview, sink: ContentSink
) -> None:
    for entry in wanted.entries:
        stored = found[entry.offset - wanted.start :][: entry.stored]
        _give(reader, key, entry, stored, sink)


def give_large(
    store: SharedStore, digest: bytes, size: int | None, sink: ContentSink, offset: int = 0
) -> None:
    """Hands over a blob that is a file of its own. Raises FileArchived as `give_blobs` does.

    size: in bytes; None where it is not known whether there is a file. offset: the first byte to
    hand over; the end of the file where that comes first.
    """
    key = blob_key(digest.hex())
    if size is None:
        try:
            info = store.stat(key)
        except FileUnreadable as trouble:
            _refuse(digest, key, trouble, sink)
            return
        if info is None:
            text = "it is in no pack that can be read, and no file of its own"
            sink.not_given(digest, messages.MISSING, text)
            return
        size = info.size
    _give_pieces(partial(store.fetch, key), key, 0, Large(digest, size, min(offset, size)), sink)


def give_elsewhere(
    store: SharedStore,
    tables: Tables,
    sink: JudgingSink,
    but: PackObject | None,
    alone: Container[bytes] | None,
    on_archived: Callable[[str], None] = lambda key: None,
) -> list[str]:
    """Hands over wrong blobs from other packs and files that name them, until the blobs are right.

    Whoever may write to the target can name any blob in a pack.

    What is right in another place is taken off the failures of the sink. Of what is not, the first
    failure stays. but: the pack that was tried before. alone: blobs that may be files of their own;
    None: all of them. on_archived: is told the names of files that must be thawed to be tried.

    Returns:
        The names of the files in which some were right.
    """
    good: list[str] = []
    left = {bytes.fromhex(one.blobid): one for one in sink.failures}
    for key, digests, give in _other_places(store, tables, left, but, alone, on_archived):
        sink.failures.clear()
        try:
            give(sink)
        except FileArchived:
            on_archived(key)
            continue
        wrong = {bytes.fromhex(one.blobid) for one in sink.failures}
        for digest in digests:
            if digest not in wrong:
                del left[digest]
        if len(wrong) < len(digests):
            good.append(key)
    sink.failures[:] = left.values()
    return good


def _other_places(
    store: SharedStore,
    tables: Tables,
    left: Mapping[bytes, object],
    but: PackObject | None,
    alone: Container[bytes] | None,
    on_archived: Callable[[str], None],
) -> Iterator[tuple[str, list[bytes], Callable[[ContentSink], None]]]:
    """Yields each other place of blobs that are left by then: name, blobs, and who gives them.

    The arguments are those of `give_elsewhere`.
    """
    others = packs_for(store, sorted(left)) if left else []
    for pack, reader in tables.open_all(one for one in others if but is None or one.key != but.key):
        if not left:
            return
        if isinstance(reader, PackReader):
            found = [entry for digest in left if (entry := reader.table.find(digest)) is not None]
            found.sort(key=attrgetter("offset"))
            digests = [entry.digest for entry in found]
            yield pack.key, digests, partial(give_blobs, pack.key, reader, found)
        elif isinstance(reader, FileArchived):
            on_archived(pack.key)
    for digest in sorted(left):
        if alone is None or digest in alone:
            yield blob_key(digest.hex()), [digest], partial(give_large, store, digest, None)


def _refuse(digest: bytes, key: str, trouble: Trouble, sink: ContentSink) -> None:
    if isinstance(trouble, FileMissing):
        sink.not_given(digest, messages.MISSING, f"the file {key} is gone")
    elif isinstance(trouble, PackError):
        sink.not_given(digest, messages.WRONG, f"{key}: {trouble}")
    else:
        sink.not_given(digest, messages.UNREADABLE, str(trouble))


def _give(reader: _Pack, key: str, entry: Entry, stored: memoryview, sink: ContentSink) -> None:
    content = stored
    if entry.codec != RAW:
        try:
            with _decompressing:
                content = memoryview(reader.content(entry, bytes(stored)))
        except PackError as error:
            _refuse(entry.digest, key, error, sink)
            return
    sink.whole(entry.digest, content)


def _give_long(key: str, reader: _Pack, entry: Entry, sink: ContentSink) -> None:
    """Hands over a blob that is too long for one range."""
    if entry.codec == RAW:
        large = Large(entry.digest, entry.raw, 0)
        _give_pieces(reader.range, key, entry.offset, large, sink)
    elif entry.stored > MAX_RAW:
        text = f"{key}: compressed it is longer than it may be"
        sink.not_given(entry.digest, messages.WRONG, text)
    else:
        try:
            stored = reader.range(entry.offset, entry.stored)
        except FileArchived:
            raise
        except TROUBLES as trouble:
            _refuse(entry.digest, key, trouble, sink)
        else:
            _give(reader, key, entry, memoryview(stored), sink)


def _give_pieces(
    read: Callable[[int, int], bytes], key: str, start: int, large: Large, sink: ContentSink
) -> None:
    begun = False
    at = large.offset
    while at < large.size or not begun:
        length = min(LARGEST_RANGE, large.size - at)
        try:
            piece = read(start + at, length)
        except FileArchived:
            raise
        except TROUBLES as trouble:
            if begun:
                sink.end(str(trouble))
            else:
                _refuse(large.digest, key, trouble, sink)
            return
        if not begun:
            sink.begin(large)
            begun = True
        sink.piece(memoryview(piece))
        if len(piece) < length:
            break  # Its hash will tell.
        del piece  # As in `give_blobs`.
        at += length
    sink.end("")
