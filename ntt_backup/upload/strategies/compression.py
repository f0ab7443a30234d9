"""Which codec a pack travels in: none, zlib or zstd, and whether it pays for this very pack.

Most evidence does not compress (pictures, archives, media); some does, by a factor of three. The
obvious switch, one codec for a run, wastes either the CPU or the link. So with `auto` a sample of
each pack is tried, 32 KiB of it, and where samples do not shrink they are taken ever more rarely:
incompressible data costs almost nothing, and a change is noticed within a few MiB.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import zstandard

from ntt_backup.errors import Unsupported
from ntt_backup.wire.write_messages import RAW, ZLIB, ZSTD

SAMPLE_BYTES: Final = 32 * 1024
LONGEST_PAUSE: Final = 16
# What a sample must shrink to: below that the saved bytes are worth the time, also on a fast link.
_PAYS: Final = {ZSTD: 0.85, ZLIB: 0.6}

# A tenth less on the link than level 1, at two thirds of its speed: still 200 MB/s of text a core.
_AUTO_LEVEL: Final = 3

Parts = Sequence[memoryview]


@dataclass(slots=True)
class Codec:
    """Compresses parts, or leaves them: see `encode`. always: without trying samples."""

    number: int
    pack: Callable[[Parts], bytes]
    always: bool = False
    _pause: int = field(default=0, init=False)
    _left_out: int = field(default=0, init=False)

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """The codec's number in a frame, and the parts as they travel under it."""
        if self.number == RAW or not self._worthwhile(parts[-1]):
            return RAW, parts
        packed = self.pack(parts)
        if len(packed) >= sum(map(len, parts)):
            return RAW, parts
        return self.number, [memoryview(packed)]

    def _worthwhile(self, content: memoryview) -> bool:
        if self.always:
            return True
        if self._left_out < self._pause:
            self._left_out += 1
            return False
        middle = max(0, len(content) - SAMPLE_BYTES) // 2
        sample = content[middle : middle + SAMPLE_BYTES]
        pays = len(self.pack([sample])) <= _PAYS[self.number] * len(sample)
        self._left_out = 0
        self._pause = 0 if pays else min(LONGEST_PAUSE, max(1, 2 * self._pause))
        return pays


def choose(setting: str, offered: Sequence[str]) -> Codec:
    """The codec for a session: setting is run.codec, offered what the remote can decompress.

    Raises Unsupported where a codec was asked for by name and the remote does not have it.
    """
    if setting == "none":
        return Codec(RAW, b"".join)
    name, _, level = setting.partition("-")
    if name == "auto":
        if "zstd" in offered:
            return Codec(ZSTD, _zstd(_AUTO_LEVEL))
        return Codec(ZLIB, _zlib) if "zlib" in offered else Codec(RAW, b"".join)
    if name not in offered:
        raise Unsupported(
            f"the remote cannot decompress {name}",
            detail=f"it has {', '.join(offered) or 'nothing'}",
            hint="install python3-zstandard there, or set run.codec to auto",
        )
    return Codec(ZSTD, _zstd(int(level)), always=True) if level else Codec(ZLIB, _zlib, always=True)


def _zstd(level: int) -> Callable[[Parts], bytes]:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)

    def pack(parts: Parts) -> bytes:
        run = compressor.compressobj()
        return b"".join([*map(run.compress, parts), run.flush()])

    return pack


def _zlib(parts: Parts) -> bytes:
    run = zlib.compressobj(1)
    return b"".join([*map(run.compress, parts), run.flush()])
