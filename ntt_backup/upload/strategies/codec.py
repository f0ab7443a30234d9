"""The compression of `stream` follows the data and the link.

Most blobs do not compress (pictures, archives, media); some do, by a factor of three. So with
`run.codec = auto` a sample of each pack is tried, and where samples do not shrink they are taken
ever more rarely: incompressible data costs almost nothing, and a change is noticed within a few
MiB.

The level follows the bottleneck. While the sender waits for the link, a higher level sends more;
where compressing takes the time, as on a link that is as fast as the machine, a lower level does
(`client.compression_level`).

What a session compresses is one zstd stream, so each part gains from what went before it; a higher
level looks back further. What travels raw is no part of it. For an older receiver each part is
compressed by itself, so what compresses goes in larger packs: 4 MiB are 3 to 4 % smaller than four
times 1 MiB, at the same speed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zstandard

from ntt_backup.client.compression_level import Effort, Sender
from ntt_backup.errors import Unsupported
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.messages import RAW, STREAM_WINDOW_LOG, ZLIB, ZSTD, ZSTD_STREAM

SAMPLE_BYTES: Final = 32 * 1024
_SAMPLES: Final = 4
LONGEST_PAUSE: Final = 16
# What a sample must shrink to: less gain is not worth the time, also on a fast link.
_PAYS: Final = {ZSTD_STREAM: 0.85, ZSTD: 0.85, ZLIB: 0.6}

# Of zstd. Above level 12 a core sends less than 10 MB/s.
_LEVELS: Final = (1, 3, 6, 9, 12)
# The lowest level at which a stream looks back as far as a receiver remembers, for long matches.
_FAR: Final = 6
# Its options then. Text shrinks by 1 to 5 % more without matches of five bytes, programs by 1 %
# less. To look for long matches half as often as zstd does by itself saves time and costs nothing.
_OPTIONS: Final[dict[str, Any]] = {
    "window_log": STREAM_WINDOW_LOG,
    "min_match": 6,
    "enable_ldm": True,
    "ldm_hash_rate_log": 7,
}
# A receiver of any version takes a PACK of 8 MiB with its table.
MOST_PACK_BYTES: Final = 4 << 20

Parts = Sequence[memoryview]
Compress = Callable[[Parts], bytes]


@dataclass(slots=True)
class Codec:
    """Compresses parts where that pays.

    Attributes:
        compress: Compresses a part, one for each step of the effort; for step 0 nothing does.
        effort: Chooses the step; None for always the last one, without trying samples.
        stream: The stream that parts belong to that are not compressed each by itself. Each of
            these must then be sent.
        sample: Compresses samples.
    """

    number: int
    compress: Sequence[Compress]
    effort: Sender | None = None
    stream: _Stream | None = None
    sample: Compress = b"".join
    _pause: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)
    _worked: float = field(default=0.0, init=False)
    _raw: int = field(default=0, init=False)
    _wire: int = field(default=0, init=False)

    @property
    def pack_bytes(self) -> int:
        """Returns the bytes of content at which a pack is full."""
        compresses = self.effort.step > 0 if self.effort else len(self.compress) > 0
        return MOST_PACK_BYTES if compresses and not self._pause else PACK_BYTES

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """Returns the codec's number for the frame, and the parts as they travel."""
        step = len(self.compress) if self.effort is None else self.effort.step
        length = self._raw = self._wire = sum(map(len, parts))
        if not step:
            return RAW, parts
        if not self._worthwhile(parts[-1]):
            self._raw = 0
            return RAW, parts
        began = time.monotonic()
        packed = self.compress[step - 1](parts)
        self._worked += time.monotonic() - began
        if len(packed) >= length and self.stream is None:
            return RAW, parts
        self._wire = len(packed)
        return self.number, [memoryview(packed)]

    def sent(self, waited: float) -> None:
        """Notes how many seconds the link took for the frame of `encode`."""
        if self.effort is not None:
            self.effort.note(self._worked, waited, self._raw, self._wire)
            self._worked = 0.0

    def restart(self) -> None:
        """Lets nothing that follows refer to what was sent before."""
        if self.stream is not None:
            self.stream.restart()

    def _worthwhile(self, content: memoryview) -> bool:
        if self.effort is None:
            return True
        if self._skipped < self._pause:
            self._skipped += 1
            return False
        length = SAMPLE_BYTES // _SAMPLES
        starts = range(0, len(content), max(length, len(content) // _SAMPLES))
        sample = [content[start : start + length] for start in starts]
        pays = len(self.sample(sample)) <= _PAYS[self.number] * sum(map(len, sample))
        self._skipped = 0
        self._pause = 0 if pays else min(LONGEST_PAUSE, max(1, 2 * self._pause))
        return pays


def choose_codec(setting: str, offered: Sequence[str], effort: Sender | None = None) -> Codec:
    """Returns the codec for a session.

    Args:
        setting: The value of `run.codec`.
        offered: The codecs that the remote can decompress.
        effort: The effort of `auto`, where others share it.

    Raises:
        Unsupported: A codec was asked for by name, and the remote does not have it.
    """
    name, _, level = setting.partition("-")
    stream = _Stream() if "zstd-stream" in offered else None
    known, zstd = (ZSTD_STREAM, stream.at) if stream is not None else (ZSTD, _zstd)
    if name == "auto":
        if "zstd" in offered:
            steps, sample = [zstd(one) for one in _LEVELS], _zstd(_LEVELS[0])
        elif "zlib" in offered:
            known, steps, sample = ZLIB, [_zlib], _zlib
        else:
            return Codec(RAW, [])
        effort = effort or Effort().sender(0)
        effort.set_steps(len(steps) + 1)
        return Codec(known, steps, effort, stream, sample)
    if name == "none":
        return Codec(RAW, [])
    if name not in offered:
        raise Unsupported(
            f"the remote cannot decompress {name}",
            detail=f"it has {', '.join(offered) or 'nothing'}",
            hint="install python3-zstandard on the remote, or set run.codec to auto",
        )
    return Codec(known, [zstd(int(level))], stream=stream) if level else Codec(ZLIB, [_zlib])


class _Stream:
    """One zstd stream over all parts of a session. Another level begins a new stream.

    Each part is flushed, so it can be decompressed when it has arrived.
    """

    def __init__(self) -> None:
        self._level = 0

    def at(self, level: int) -> Compress:
        """Returns what compresses the next part at this level."""

        def compress(parts: Parts) -> bytes:
            if level != self._level:
                self._run = _begin(level)
                self._level = level
            run = self._run
            packed = [run.compress(part) for part in parts]
            return b"".join([*packed, run.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)])

        return compress

    def restart(self) -> None:
        self._level = 0


def _begin(level: int) -> zstandard.ZstdCompressionObj:
    """Begins a stream. How far it looks back costs a low level more than it saves."""
    options = _OPTIONS if level >= _FAR else {}
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, write_content_size=False, **options
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj()


def _zstd(level: int) -> Compress:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)

    def compress(parts: Parts) -> bytes:
        run = compressor.compressobj()
        return b"".join([*map(run.compress, parts), run.flush()])

    return compress


def _zlib(parts: Parts) -> bytes:
    run = zlib.compressobj(1)
    return b"".join([*map(run.compress, parts), run.flush()])
