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
_AHEAD: Final = 8
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

    def piece(self, number: int) -> tuple[Listed, int, int]:
        """Returns the file that has a piece of the volume, where the piece begins in the file, and
        the length of the piece in bytes.
        """
        at = number * PIECE
        start, one = self.files[bisect_right(self.files, at, key=itemgetter(0)) - 1]
        return one, at - start, min(PIECE, one.size - (at - start))


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

    At most 64 pieces are held; where two follow each other, eight more are fetched ahead.
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
        with self._lock:
            found = self._kept.get((volume, number))
            if found is None:
                found = self._begin(volume, number)
                if (volume, number - 1) in self._kept:
                    last = self._volumes[volume].size // PIECE
                    for ahead in range(number + 1, min(number + 1 + _AHEAD, last)):
                        if (volume, ahead) not in self._kept:
                            self._begin(volume, ahead)
            self._kept.move_to_end((volume, number))
        if found.exception() is not None:  # It is asked for again the next time.
            with self._lock:
                if self._kept.get((volume, number)) is found:
                    del self._kept[volume, number]
        return found.result()

    def _begin(self, volume: int, number: int) -> Future[bytes]:
        begun = self._kept[volume, number] = self._pool.submit(self._get, volume, number)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return begun

    def _get(self, volume: int, number: int) -> bytes:
        one, start, length = self._volumes[volume].piece(number)
        data = self._fetch(one.key, start, length)
        if len(data) != length:
            raise OSError(f"{len(data)} bytes instead of {length} at {start}")
        return data.ljust(PIECE, b"\0")
