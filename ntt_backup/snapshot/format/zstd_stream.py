"""zstd frames from a target are read in pieces, however much a few of their bytes would become."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Final, cast

import zstandard

from ntt_backup.snapshot.names import SnapshotDamaged

_MAX_WINDOW: Final = 8 << 20


class ZstdStream:
    """The content of zstd frames. That it ends where it should is for the reader to see."""

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
