"""Volumes join the files of a target, and pieces of them are fetched when they are asked for.

A mount needs one device for a volume, not one for each pack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from threading import Lock
from typing import Final

from ntt_backup.mount.erofs import MAX_DEVICE
from ntt_backup.packstore.tables import LargeBlob, PackObject

# What is fetched at once. Each file of the target begins at a multiple of it.
PIECE: Final = 1 << 20

_KEPT: Final = 64
# Pieces that one request fetches ahead (a bucket may read 8 MiB to give 1 MiB), and how many such
# requests may be ahead of a reader.
_SPAN: Final = 4
_AHEAD: Final = 4
_FETCHERS: Final = 8

Listed = PackObject | LargeBlob
Fetch = Callable[[str, int, int], bytes]
_Key = tuple[int, int]


@dataclass(slots=True)
class Volume:
    """Files of a target with their places, in order. size in bytes, a multiple of PIECE."""

    size: int = 0
    files: list[tuple[int, Listed]] = field(default_factory=list)

    def add(self, one: Listed) -> int:
        """Lays a file behind the others; returns where it begins."""
        start = self.size
        self.files.append((start, one))
        self.size += -(-one.size // PIECE) * PIECE
        return start

    def place(self, number: int) -> tuple[Listed, int]:
        """Returns the file that has a piece of the volume, and where the piece begins in it."""
        at = number * PIECE
        start, one = self.files[bisect_right(self.files, at, key=itemgetter(0)) - 1]
        return one, at - start


def lay_out(files: Iterable[Listed]) -> Iterator[tuple[Listed, Volume, int]]:
    """Yields each file with its volume, and its place in the volume."""
    volume = Volume()
    for one in files:
        if volume.size + one.size > MAX_DEVICE - PIECE:
            volume = Volume()
        yield one, volume, volume.add(one)


class Pieces:
    """Reads volumes. fetch(key, start, length) returns bytes of a file of the target. Several
    threads may use it at once.

    At most 64 pieces are held. Where a file is read on, up to 19 pieces are fetched ahead, four
    with one request; fewer where many files are read at once, or little of the file was read.
    """

    def __init__(self, volumes: Sequence[Volume], fetch: Fetch) -> None:
        self._volumes = volumes
        self._fetch = fetch
        self._kept: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_FETCHERS)

    def read(self, volume: int, start: int, length: int) -> bytes:
        """Returns these bytes of a volume, fewer at its end. What lies behind a file is zeros.

        Raises what fetch raises, and OSError for a file that is shorter than it was.
        """
        end = min(start + length, self._volumes[volume].size)
        read = []
        while start < end:
            number, offset = divmod(start, PIECE)
            piece = self._piece(volume, number)[offset : offset + end - start]
            read.append(piece)
            start += len(piece)
        return b"".join(read)

    def _piece(self, volume: int, number: int) -> bytes:
        key = volume, number
        with self._lock:
            if alone := key not in self._kept:
                self._begin(volume, number, 1)
            found = self._kept[key]
            self._kept.move_to_end(key)
            # As many spans ahead as are still held behind: what is ahead pushes out what is behind.
            behind = range(number - 1, max(number - _AHEAD * _SPAN, 0) - 1, -_SPAN)
            if spans := sum((volume, one) in self._kept for one in behind):
                self._read_on(volume, number + 1, (number // _SPAN + 1 + spans) * _SPAN)
        if found.exception() is None:
            return found.result()
        with self._lock:
            if self._kept.get(key) is found:
                del self._kept[key]
        # It is asked for again: at once, and alone, where its neighbour may be what does not come.
        return found.result() if alone else self._piece(volume, number)

    def _read_on(self, volume: int, number: int, end: int) -> None:
        """Asks for those of these pieces that are not held, and holds the others for longer."""
        end = min(end, self._volumes[volume].size // PIECE)
        while number < end:
            if (volume, number) in self._kept:
                self._kept.move_to_end((volume, number))
                number += 1
            else:
                number = self._begin(volume, number, _SPAN - number % _SPAN)

    def _begin(self, volume: int, number: int, most: int) -> int:
        """Asks with one request for a piece, and for up to `most` with those that follow it in its
        file; returns the number of the next piece.
        """
        one, start = self._volumes[volume].place(number)
        length = min(one.size - start, most * PIECE)
        begun: list[Future[bytes]] = [Future() for _ in range(0, length, PIECE)]
        self._kept |= {(volume, n): found for n, found in enumerate(begun, number)}
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        self._pool.submit(self._get, one.key, start, length, begun)
        return number + len(begun)

    def _get(self, key: str, start: int, length: int, begun: list[Future[bytes]]) -> None:
        try:
            data = self._fetch(key, start, length)
            if len(data) != length:
                raise OSError(f"{len(data)} bytes instead of {length} at {start}")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the readers must hear it
            for found in begun:
                found.set_exception(error)
            return
        for n, found in enumerate(begun):
            found.set_result(data[n * PIECE : (n + 1) * PIECE].ljust(PIECE, b"\0"))
