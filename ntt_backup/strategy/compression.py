"""Which codec a pack travels in: none, zlib, or zstd at level 1 or 3, whatever ends sooner.

Most evidence does not compress (pictures, archives, media); some does, by a factor of three. The
obvious switch, one codec for a run, wastes either the CPU or the link. So with `auto` a sample of
each pack is tried, 32 KiB of it: how long a way takes is what it costs to shrink a byte, and what
the link takes for what is left of it, which the session measures as it sends. A slow link gets the
tighter level, a fast one the quicker, and one that is faster than the CPU gets the bytes as they
are. Where a sample says that nothing is to be won, samples are taken ever more rarely: data that
does not compress costs almost nothing, and a change is noticed within a few MiB.

Called by `strategy.stream`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import zstandard

from ntt_backup.errors import Unsupported
from ntt_backup.remote.frames import RAW, ZLIB, ZSTD

SAMPLE_BYTES: Final = 32 * 1024
LONGEST_PAUSE: Final = 16
# Seconds a byte, until a few MiB have shown the link: what is written first only fills buffers.
FIRST_GUESS: Final = 1 / 12e6
# The bytes after which what was measured before counts a third.
MEMORY_BYTES: Final = 4 << 20

Parts = Sequence[memoryview]
Pack = Callable[[Parts], bytes]


@dataclass(slots=True)
class Codec:
    """Compresses parts, or leaves them: see `encode`. packs: the ways there are, any of which the
    codec of that number undoes. always: take the first one, without trying samples.
    """

    number: int
    packs: Sequence[Pack] = ()
    always: bool = False
    clock: Callable[[], float] = time.perf_counter
    _link: float = field(default=FIRST_GUESS, init=False)
    _pause: int = field(default=0, init=False)
    _left_out: int = field(default=0, init=False)

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """The codec's number in a frame, and the parts as they travel under it."""
        pack = self._choose(parts[-1])
        if pack is None:
            return RAW, parts
        packed = pack(parts)
        if len(packed) >= sum(map(len, parts)):
            return RAW, parts
        return self.number, [memoryview(packed)]

    def sent(self, count: int, seconds: float) -> None:
        """So many bytes, encoded or not, were handed to the link, and it took so long."""
        share = min(1.0, count / MEMORY_BYTES)
        self._link += share * (seconds / max(1, count) - self._link)

    def _choose(self, content: memoryview) -> Pack | None:
        if self.always:
            return self.packs[0]
        if not self.packs or self._left_out < self._pause:
            self._left_out += 1
            return None
        middle = max(0, len(content) - SAMPLE_BYTES) // 2
        sample = [content[middle : middle + SAMPLE_BYTES]]
        best, least = None, len(sample[0]) * self._link
        for pack in self.packs:
            began = self.clock()
            left = len(pack(sample))
            cost = self.clock() - began + left * self._link
            if cost < least:
                best, least = pack, cost
        self._left_out = 0
        self._pause = 0 if best else min(LONGEST_PAUSE, max(1, 2 * self._pause))
        return best


def choose(setting: str, offered: Sequence[str]) -> Codec:
    """The codec for a session: setting is run.codec, offered what the remote can decompress.

    Raises Unsupported where a codec was asked for by name and the remote does not have it.
    """
    if setting == "none":
        return Codec(RAW)
    name, _, level = setting.partition("-")
    if name == "auto":
        if "zstd" in offered:
            return Codec(ZSTD, (_zstd(1), _zstd(3)))
        return Codec(ZLIB, (_zlib,)) if "zlib" in offered else Codec(RAW)
    if name not in offered:
        raise Unsupported(
            f"the remote cannot decompress {name}",
            detail=f"it has {', '.join(offered) or 'nothing'}",
            hint="install python3-zstandard there, or set run.codec to auto",
        )
    pack = _zstd(int(level)) if level else _zlib
    return Codec(ZSTD if level else ZLIB, (pack,), always=True)


def _zstd(level: int) -> Pack:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)

    def pack(parts: Parts) -> bytes:
        run = compressor.compressobj()
        return b"".join([*map(run.compress, parts), run.flush()])

    return pack


def _zlib(parts: Parts) -> bytes:
    run = zlib.compressobj(1)
    return b"".join([*map(run.compress, parts), run.flush()])
