"""Fetches the content of files of a version: by extents, from the super blocks of its packs.

Files come in the order in which they are asked for. A window of them is planned at once: the super
blocks that they need are fetched once each, neighbours in one range, so that thousands of small
files take a few requests; ranges of the next windows are under way meanwhile. What is held is
bounded: the windows that were asked for, and some content that was used last.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from ntt_backup.filestore.contract import (
    FileMissing,
    Range,
    ReadableStore,
    StoredFileDamaged,
    WholeFileDamaged,
)
from ntt_backup.snapshot.format.entry import Extent
from ntt_backup.snapshot.format.manifest import Header
from ntt_backup.snapshot.format.super_blocks import read_super_block

_Item = TypeVar("_Item")
_Key = tuple[int, ...]

_WINDOW_BYTES: Final = 16 << 20
_WINDOW_ITEMS: Final = 1024
_LARGEST_RANGE: Final = 2 << 20
# So many bytes that nobody wants are fetched rather than asking twice, but no more than a quarter
# of those that are wanted before them.
_LARGEST_GAP: Final = 128 << 10
_KEPT: Final = 24 << 20
# Super blocks of a stranger may have a byte each.
_MOST_KEPT: Final = 4096
_NOTHING: Final = memoryview(b"")


# Content of a file from a byte on, and whether that is all of it: less where its super block is
# missing, damaged or too short.
Piece = tuple[int, memoryview, bool]
# An item, its content in the order of its extents, and whether that is all: a large one comes in
# several parts.
Part = tuple[_Item, Sequence[Piece], bool]


@dataclass(slots=True)
class _Frame:
    """A super block that planned items need.

    Attributes:
        key: Version, pack, offset and stored, as in `Extent`.
        content: The content, where it was read before the frame was planned.
        stored: The bytes of the pack, once they have come. A missing one has none.
        uses: How often the frame is still needed.
    """

    key: _Key
    content: memoryview | None = None
    stored: memoryview | None = None
    uses: int = 0


class _Asked(NamedTuple):
    range: Range
    frames: list[_Frame]


_Planned = tuple[_Item, Sequence[Extent], Sequence[_Frame], bool]


class Fetcher(Generic[_Item]):
    """Fetches content from the versions in `header.chain`.

    Attributes:
        fetched: The number of bytes that arrived.
        lost: The packs that could not be read at all or in part, each with the first reason.
    """

    def __init__(self, repository: ReadableStore, header: Header) -> None:
        self._repository = repository
        self._header = header
        self._items: Iterator[tuple[_Item, Sequence[Extent]]] = iter(())
        self._rest: tuple[_Item, Sequence[Extent]] | None = None
        self._planned: deque[_Planned[_Item]] = deque()
        self._waiting: deque[_Asked] = deque()
        self._asked: deque[_Asked] = deque()
        self._frames: dict[_Key, _Frame] = {}
        # Contents, the one that was used last at the end. A damaged one has no bytes.
        self._read: OrderedDict[_Key, memoryview] = OrderedDict()
        self._read_bytes = 0
        self._gone: set[str] = set()
        self._ended = self._broken = False
        self.lost: dict[str, str] = {}
        self.fetched = 0

    def read(self, items: Iterable[tuple[_Item, Sequence[Extent]]]) -> Iterator[Part[_Item]]:
        """Yields the content of each item's extents.

        Items are consumed some time before their content is yielded. Errors of the repository pass
        through, except for FileMissing.
        """
        self._items = iter(items)
        arrivals = self._arrivals()
        planned = self._planned
        for _ in arrivals:
            while planned:
                item, extents, frames, last = planned.popleft()
                pieces: list[Piece] = []
                for extent, frame in zip(extents, frames):  # noqa: B905 - as long, and faster
                    content = frame.content
                    if content is None:
                        while frame.stored is None:
                            next(arrivals)
                        content = self._content(frame.key, frame.stored)
                    start, length, _, _, _, _, skip = extent
                    data = content[skip : skip + length]
                    pieces.append((start, data, len(data) == length))
                    frame.uses -= 1
                    if not frame.uses:
                        del self._frames[frame.key]
                yield item, pieces, last

    # --- what comes -------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[None]:
        """Yields after each range that has come, and after a window that needs none."""
        while self._asked or self._waiting or not self._ended:
            try:
                for data in self._repository.read(self._ranges()):
                    asked, view = self._asked.popleft(), memoryview(data)
                    self.fetched += len(data)
                    for frame in asked.frames:
                        *_, offset, stored = frame.key
                        at = offset - asked.range.start
                        frame.stored = view[at : at + stored]
                    yield
            except (FileMissing, StoredFileDamaged) as error:
                if self._broken or not self._asked:
                    raise
                self._refuse(error)
            yield

    def _refuse(self, error: FileMissing | StoredFileDamaged) -> None:
        """Notes that a pack, or only the range that was requested first, cannot be read.

        The super blocks of an unreadable range are requested one by one. A single unreadable super
        block is left out.
        """
        name = self._asked[0].range.name
        why = error.detail if isinstance(error, StoredFileDamaged) else f"{name} is missing"
        if isinstance(error, FileMissing | WholeFileDamaged):
            self._gone.add(name)
            self.lost[name] = why
            return
        asked = self._asked.popleft()
        if len(asked.frames) == 1:
            asked.frames[0].stored = _NOTHING
            self.lost.setdefault(name, why)
        else:
            self._asked.extendleft(
                _Asked(Range(name, *one.key[2:]), [one]) for one in reversed(asked.frames)
            )

    def _kept(self, key: _Key) -> memoryview | None:
        if key in self._read:
            self._read.move_to_end(key)
        return self._read.get(key)

    def _content(self, key: _Key, stored: memoryview) -> memoryview:
        """Returns the content of a frame, which is kept, since the next window may begin in it."""
        if (content := self._kept(key)) is not None:
            return content
        content = _NOTHING
        with suppress(StoredFileDamaged):
            content = memoryview(read_super_block(stored))
        self._read[key] = content
        self._read_bytes += len(content)
        while (self._read_bytes > _KEPT and len(self._read) > 1) or len(self._read) > _MOST_KEPT:
            self._read_bytes -= len(self._read.popitem(last=False)[1])
        return content

    # --- what is asked for ------------------------------------------------------------------------

    def _ranges(self) -> Iterator[Range]:
        # What did not come when a pack was missing is asked for again.
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        while self._waiting or not self._ended:
            if not self._waiting:
                self._waiting.extend(self._plan())
                if not self._waiting:
                    return
            asked = self._waiting.popleft()
            if asked.range.name not in self._gone:
                self._asked.append(asked)
                yield asked.range
                continue
            for frame in asked.frames:
                frame.stored = _NOTHING
            if not self._waiting:
                return

    def _plan(self) -> list[_Asked]:
        """Plans the next window; returns the ranges that it needs, in the order of first need."""
        new: list[_Frame] = []
        left = _WINDOW_BYTES
        frame = _Frame(())
        for _ in range(_WINDOW_ITEMS):
            following = self._rest or self._next()
            if following is None:
                self._ended = True
                break
            item, extents = following
            self._rest = None
            frames = []
            for extent in extents:
                key = extent[2:6]
                if key != frame.key:
                    if left <= 0:
                        break
                    known = self._frames.get(key)
                    if known is None:
                        known = self._frames[key] = _Frame(key, self._kept(key))
                        if known.content is None:
                            new.append(known)
                            left -= key[3]
                    frame = known
                frame.uses += 1
                frames.append(frame)
            planned = len(frames)
            if planned < len(extents):
                self._rest = (item, extents[planned:])
                extents = extents[:planned]
            self._planned.append((item, extents, frames, self._rest is None))
            if left <= 0:
                break
        return self._merge(new)

    def _next(self) -> tuple[_Item, Sequence[Extent]] | None:
        """Returns the next item, None at the end. What ends the items is no damage of a pack."""
        try:
            return next(self._items, None)
        except Exception:
            self._broken = True
            raise

    def _merge(self, frames: list[_Frame]) -> list[_Asked]:
        need = {frame.key: number for number, frame in enumerate(frames)}
        merged: list[_Asked] = []
        wanted = 0
        for frame in sorted(frames, key=lambda one: one.key):
            version, number, offset, stored = frame.key
            last = merged[-1].range if merged else None
            name = self._header.pack(version, number)
            end = last.start + last.length if last is not None else 0
            if (
                last is not None
                and last.name == name
                and offset - end <= min(_LARGEST_GAP, wanted // 4)
                and offset + stored - last.start <= _LARGEST_RANGE
            ):
                length = max(end, offset + stored) - last.start
                merged[-1].frames.append(frame)
                merged[-1] = merged[-1]._replace(range=last._replace(length=length))
                wanted += stored
            else:
                merged.append(_Asked(Range(name, offset, stored), [frame]))
                wanted = stored
        return sorted(merged, key=lambda one: min(need[frame.key] for frame in one.frames))
