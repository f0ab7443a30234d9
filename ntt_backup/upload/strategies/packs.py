"""Small blobs gathered into packs, one frame for hundreds of them, compressed where that pays.

A frame, a write and a checksum for every blob of a few hundred bytes would cost more than the blob.
So contents are read one behind the other into one buffer that is never reallocated; before them, on
the wire, goes a table of digests and sizes. See docs/protocol.md, PACK.

Most blobs do not compress (pictures, archives, media); some do, by a factor of three. So with
`run.codec = auto` a sample of each pack is tried, and where samples do not shrink they are taken
ever more rarely: incompressible data costs almost nothing, and a change is noticed within a few
MiB.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import zstandard

from ntt_backup.errors import Unsupported
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import PACK, PACK_BYTES
from ntt_backup.wire.write_messages import RAW, ZLIB, ZSTD

SAMPLE_BYTES: Final = 32 * 1024
LONGEST_PAUSE: Final = 16
# What a sample must shrink to: less gain is not worth the time, also on a fast link.
_PAYS: Final = {ZSTD: 0.85, ZLIB: 0.6}
# A tenth less on the link than level 1, at two thirds of its speed: still 200 MB/s of text a core.
_AUTO_LEVEL: Final = 3
# Of empty blobs. Keeps the table small beside MAX_BLOBS.
_MOST_BLOBS: Final = 8192

Parts = Sequence[memoryview]


@dataclass(slots=True)
class Codec:
    """Compresses parts where that pays. always: without trying samples."""

    number: int
    pack: Callable[[Parts], bytes]
    always: bool = False
    _pause: int = field(default=0, init=False)
    _skipped: int = field(default=0, init=False)

    def encode(self, parts: Parts) -> tuple[int, Parts]:
        """Returns the codec's number for the frame, and the parts as they travel."""
        if self.number == RAW or not self._worthwhile(parts[-1]):
            return RAW, parts
        packed = self.pack(parts)
        if len(packed) >= sum(map(len, parts)):
            return RAW, parts
        return self.number, [memoryview(packed)]

    def _worthwhile(self, content: memoryview) -> bool:
        if self.always:
            return True
        if self._skipped < self._pause:
            self._skipped += 1
            return False
        middle = max(0, len(content) - SAMPLE_BYTES) // 2
        sample = content[middle : middle + SAMPLE_BYTES]
        pays = len(self.pack([sample])) <= _PAYS[self.number] * len(sample)
        self._skipped = 0
        self._pause = 0 if pays else min(LONGEST_PAUSE, max(1, 2 * self._pause))
        return pays


def choose_codec(setting: str, offered: Sequence[str]) -> Codec:
    """Returns the codec for a session: setting is run.codec, offered what the remote can
    decompress.

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
            hint="install python3-zstandard on the remote, or set run.codec to auto",
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


class Packer:
    """A pack that is being filled. checksum: whether packs carry a SHA-256 (for a remote without
    BLAKE3). used: bytes of content in it.
    """

    def __init__(self, codec: Codec, *, checksum: bool) -> None:
        self._codec = codec
        self._checksum = checksum
        # A blob that fits a pack fits behind a pack that is all but full, with a byte to spare that
        # shows that it has ended.
        self._buffer = memoryview(bytearray(2 * PACK_BYTES + 1))
        self._digests: list[bytes] = []
        self._sizes: list[int] = []
        self.used = 0

    @property
    def space(self) -> memoryview:
        """Where the next blob goes; a blob that fills it is too large for a pack."""
        return self._buffer[self.used : self.used + PACK_BYTES + 1]

    @property
    def full(self) -> bool:
        return self.used >= PACK_BYTES or len(self._sizes) >= _MOST_BLOBS

    @property
    def empty(self) -> bool:
        return not self._sizes

    def add(self, blobid: str, size: int) -> None:
        """Adds the blob whose content was just read into `space`."""
        self._digests.append(bytes.fromhex(blobid))
        self._sizes.append(size)
        self.used += size

    def pop_frame(self) -> list[bytes | memoryview]:
        """Empties the pack; returns its frame in pieces that hold until the next blob is read."""
        table = memoryview(write_messages.table(self._digests, self._sizes))
        content = self._buffer[: self.used]
        checksum = b""
        if self._checksum:
            summed = sha256(table)
            summed.update(content)
            checksum = summed.digest()
        raw_length = len(table) + len(content)
        number, parts = self._codec.encode([table, content])
        prefix = write_messages.part_prefix(number, raw_length, checksum)
        length = len(prefix) + sum(map(len, parts))
        self.clear()
        return [framing.head(PACK, length) + prefix, *parts]

    def clear(self) -> None:
        self._digests.clear()
        self._sizes.clear()
        self.used = 0
