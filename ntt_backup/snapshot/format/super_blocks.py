"""A super block has content of files, many pieces in one zstd frame; packs hold super blocks.

A pack is eight bytes of magic, and frames one after the other. Each frame has its checksum and says
the size of its content, so it is read alone, and in bounded memory. Which content lies where stands
in the manifest (`Extent`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

import zstandard

from ntt_backup.filestore.contract import Buffer, FileStore, NewFile
from ntt_backup.snapshot.format.entry import MAX_SUPER_BLOCK, Extent
from ntt_backup.snapshot.names import SnapshotDamaged, pack_name

if TYPE_CHECKING:
    from concurrent.futures import Future

MAGIC: Final = b"NTTSNAP\x01"
MAX_PACK: Final = 256 << 20
FULL: Final = 1 << 20
INCREMENT: Final = 256 << 10
_LEVEL: Final = 3
# Of manifests and maps.
_MAX_WINDOW: Final = 8 << 20
# Super blocks that wait for their compression, or to be written.
_AHEAD: Final = 4


class PackSum(NamedTuple):
    """The size of a pack in bytes, and its SHA-256 in hex."""

    size: int
    sha256: str


# An extent without its place, and the list that takes it once that is known.
_Piece = tuple[list[Extent], Extent]


class _Frame(NamedTuple):
    """A super block on its way. All content of the first tickets is in it and those before."""

    compressed: Future[bytes]
    pieces: list[_Piece]
    tickets: int


class SuperBlockWriter:
    """Writes the packs of a version, which has an index in its own `Header.chain`.

    The writer compresses in a thread of its own, and uses the repository in the caller's thread.
    """

    def __init__(self, repository: FileStore, set: str, version: str, *, index: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # Who only reads does without.

        self._repository = repository
        self._set = set
        self._version = version
        self._index = index
        self._size = INCREMENT if index else FULL
        self._thread = ThreadPoolExecutor(1, "super-blocks")
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._content = bytearray()
        self._pieces: list[_Piece] = []
        self._tickets = 0
        self._frames: deque[_Frame] = deque()
        self._file: NewFile | None = None
        self._at = 0
        self._packs: list[PackSum] = []
        self.settled = 0
        self.stored = 0

    def grow(self, size: int) -> None:
        """Makes super blocks of so many bytes from now on, where they have not as many."""
        if self._size < size:
            self.flush()
            self._size = min(size, MAX_SUPER_BLOCK)

    def add(self, start: int, data: Buffer, into: list[Extent]) -> int:
        """Stores content of a file, which begins at byte start of it, and returns a ticket.

        Once `settled` is above the ticket, its extents are in `into`. Content that is neighboured
        in its file, and was added in a row, has one extent in a super block.
        """
        ticket = self._tickets
        view = memoryview(data)
        done = 0
        while True:
            part = view[done : done + self._size - len(self._content)]
            self._hold(into, start + done, len(part))
            self._content += part
            done += len(part)
            if done == len(view):
                self._tickets += 1
            if len(self._content) == self._size:
                self._seal()
            if done == len(view):
                return ticket

    def flush(self) -> None:
        """Writes what is held, so that all tickets are settled."""
        if self._content:
            self._seal()
        while self._frames:
            self._store()
        self.settled = self._tickets

    def end(self) -> tuple[PackSum, ...]:
        """Writes what is held, and returns the packs once they are durable."""
        self.flush()
        self._finish()
        self._thread.shutdown()
        return tuple(self._packs)

    def give_up(self) -> None:
        """Forgets what is not written yet. Never raises; does nothing after the end."""
        self._thread.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.discard()
            self._file = None

    def _hold(self, into: list[Extent], start: int, length: int) -> None:
        if self._pieces:
            of, last = self._pieces[-1]
            if of is into and last.start + last.length == start:
                self._pieces[-1] = of, last._replace(length=last.length + length)
                return
        if length:
            place = (self._index, 0, 0, 0)
            self._pieces.append((into, Extent(start, length, *place, len(self._content))))

    def _seal(self) -> None:
        if len(self._frames) == _AHEAD:
            self._store()
        compressed = self._thread.submit(self._zstd.compress, self._content)
        self._frames.append(_Frame(compressed, self._pieces, self._tickets))
        self._content, self._pieces = bytearray(), []

    def _store(self) -> None:
        frame = self._frames[0]
        stored = frame.compressed.result()
        if self._at + len(stored) > MAX_PACK:
            self._finish()
        number = len(self._packs) + 1
        if self._file is None:
            self._file = self._repository.write(pack_name(self._set, self._version, number))
            self._file.add(MAGIC)
            self._at = len(MAGIC)
        self._file.add(stored)
        for into, extent in frame.pieces:
            into.append(extent._replace(pack=number, offset=self._at, stored=len(stored)))
        self._at += len(stored)
        self.stored += len(stored)
        self.settled = frame.tickets
        self._frames.popleft()

    def _finish(self) -> None:
        if self._file is not None:
            self._packs.append(PackSum(self._at, self._file.finish().sha256.hex()))
            self._file.publish()
            self._file = None


class _OfThread(threading.local):
    """Holds the decompressor of a thread.

    To make one takes half as long as to decompress a super block.
    """

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor(max_window_size=MAX_SUPER_BLOCK)


_own: Final = _OfThread()


def read_super_block(data: Buffer) -> bytes:
    """Returns the content of one frame. Raises SnapshotDamaged.

    It has been compared with the checksum and the size that the frame names, and has at most
    MAX_SUPER_BLOCK bytes.
    """
    with suppress(zstandard.ZstdError):
        said = zstandard.get_frame_parameters(data)
        if (
            data[: len(zstandard.FRAME_HEADER)] == zstandard.FRAME_HEADER
            and said.has_checksum
            and said.content_size <= MAX_SUPER_BLOCK
        ):
            return _own.zstd.decompress(data, allow_extra_data=False)
    raise SnapshotDamaged("a super block is damaged")


class ZstdStream:
    """Decompresses zstd frames from a target in pieces.

    A few bytes of a frame may expand to any size. The reader must check that the content ends where
    it should end.
    """

    def __init__(self, data: Iterable[bytes]) -> None:
        zstd = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._reader = zstd.stream_reader(cast("IO[bytes]", _Source(data)), read_across_frames=True)

    def read(self, size: int) -> bytes:
        """Returns the next size bytes, fewer only at the end. Raises SnapshotDamaged."""
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as error:
            raise SnapshotDamaged(f"it cannot be decompressed: {error}") from error


class _Source:
    """The pieces of data, one a call, as the decompressor asks for them."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self._data = filter(None, data)

    def read(self, _: int) -> bytes:
        return next(self._data, b"")
