"""Cutting what arrives into frames: the one bounded buffer of a reading end.

The obvious way, a buffered reader and two reads a frame, copies every byte twice and waits for
whatever length a peer announces. Here bytes are read from the descriptor straight into their final
place, whole frames are handed out as views of it, and a header that cannot be is refused before its
payload is waited for.
"""

from __future__ import annotations

import mmap

from ntt_backup.wire.write_messages import (
    CONTENT,
    HEADER,
    MAX_CHUNK,
    SUM_BYTES,
    ProtocolError,
    require_sum,
)

_LITTLE = 1 << 16


class Inbox:
    """Bytes in, whole frames out. lengths: the types that may come, each with its bounds.

    Read into `space()` and tell `filled`; then take `next()` until it gives None. A payload is a
    view into the buffer and holds until the next `space()`; nothing may be kept of it.
    """

    __slots__ = ("_begin", "_end", "_lengths", "_view")

    def __init__(self, lengths: dict[int, tuple[int, int]]) -> None:
        self._lengths = lengths
        longest = max(most for _, most in lengths.values())
        # One frame and a read beyond it. Mapped, so that what is never written to takes no memory.
        self._view = memoryview(mmap.mmap(-1, HEADER.size + longest + SUM_BYTES + MAX_CHUNK))
        self._begin = 0
        self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        rest = self._end - self._begin
        # Early, while there is little to move: a buffer that is small in use stays in the cache.
        if self._begin and (rest < _LITTLE or len(self._view) - self._end < MAX_CHUNK // 2):
            self._view[:rest] = self._view[self._begin : self._end]
            self._begin, self._end = 0, rest
        return self._view[self._end :]

    def filled(self, count: int) -> None:
        self._end += count

    @property
    def waiting(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return self._end - self._begin

    def next(self) -> tuple[int, memoryview] | None:
        """The next frame's type and payload. Raises ProtocolError for one that cannot be."""
        begin = self._begin
        if self._end - begin < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(self._view, begin)
        bounds = self._lengths.get(kind)
        if bounds is None:
            raise ProtocolError(f"a frame of unknown type {kind}")
        check = 0 if kind in CONTENT else SUM_BYTES
        if not bounds[0] + check <= length <= bounds[1] + check:
            raise ProtocolError(f"a frame of type {kind} with {length} bytes")
        begin += HEADER.size
        if self._end - begin < length:
            return None
        self._begin = end = begin + length
        payload = self._view[begin : end - check]
        if check:
            require_sum(kind, payload, self._view[end - check : end])
        return kind, payload
