"""Cuts a dump into segments by its content, so that what is inserted or deleted moves no other cut.

A segment ends after a line whose checksum is low enough. What that is goes by the line's length, so
that segments have about the same size whatever the lines are. The same text is cut in the same
places, however it comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from zlib import crc32

SIZE: Final = 1 << 20
MOST: Final = 4 * SIZE


class Cutter:
    """Cuts what it is given. size: of a segment, on average; most: of any."""

    def __init__(self, size: int = SIZE, most: int = MOST) -> None:
        self._scale = (1 << 32) // size
        self._least = size // 16
        self._most = most
        self._begun: list[bytes] = []
        self._size = 0
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yields the segments that end within data."""
        data = self._rest + data
        end, most = data.rfind(b"\n") + 1, self._most
        lines = data[:end].splitlines(keepends=True)
        # A line that is too long is several.
        if max(map(len, lines), default=0) > most:
            lines = [line[at : at + most] for line in lines for at in range(0, len(line), most)]
        while len(data) - end > most:
            lines.append(data[end : end + most])
            end += most
        self._rest = data[end:]
        yield from self._cut(data, lines)

    def end(self) -> Iterator[bytes]:
        """Yields the rest."""
        if self._size + len(self._rest) > self._most:
            yield b"".join(self._begun)
            self._begun = []
        self._begun.append(self._rest)
        if last := b"".join(self._begun):
            yield last

    def _cut(self, data: bytes, lines: list[bytes]) -> Iterator[bytes]:
        begin = at = done = 0  # Of data: where the segment goes on, and what was looked at.

        def segment() -> bytes:
            nonlocal begin
            whole = b"".join([*self._begun, data[begin:at]])
            self._begun, self._size, begin = [], 0, at
            return whole

        low = self._scale * max(map(len, lines), default=0)
        likely = [number for number, checksum in enumerate(map(crc32, lines)) if checksum < low]
        for number in [*likely, len(lines) - 1]:
            group = lines[done : number + 1]
            done = number + 1
            size = sum(map(len, group))
            if self._size + at - begin + size > self._most:
                for line in group:
                    if self._size + at - begin + len(line) > self._most:
                        yield segment()
                    at += len(line)
            else:
                at += size
            if not group:
                continue
            line = group[-1]
            ends = crc32(line) < self._scale * len(line)
            if ends and self._size + at - begin >= self._least:
                yield segment()
        self._begun.append(data[begin:at])
        self._size += at - begin
