"""Pieces of volumes are fetched from the bucket when they are asked for, and the last kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Final

from ntt_backup.mount.volume import PIECE, Volume

_KEPT: Final = 64
_AHEAD: Final = 8
_FETCHERS: Final = 8

Fetch = Callable[[str, int, int], bytes]
_Key = tuple[int, int]


class Pieces:
    """Reads volumes. fetch(key, start, length) returns bytes of an object. It may be used by
    several threads at once.

    At most 64 pieces are held; where two follow each other, eight more are fetched ahead.
    """

    def __init__(self, volumes: Sequence[Volume], fetch: Fetch) -> None:
        self._volumes = volumes
        self._fetch = fetch
        self._kept: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_FETCHERS)

    def read(self, volume: int, start: int, length: int) -> bytes:
        """Returns these bytes of a volume, fewer at its end. What lies behind an object is zeros.

        Raises what fetch raises, and OSError for an object that is shorter than it was.
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
