"""Small blobs gathered into packs: one frame for hundreds of them.

A frame, a write and a checksum for every blob of a few hundred bytes would cost more than the blob.
So contents are read one behind the other into one buffer that is never reallocated; before them, on
the wire, goes a table of digests and sizes. Pure but for the hashing. See docs/protocol.md, PACK.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from ntt_backup.upload.strategies.compression import Codec
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import PACK, PACK_BYTES

# Half a million frames a second would be needed to fill a link with empty blobs one by one; a few
# thousand a pack are enough, and keep the table small beside MAX_BLOBS.
_MOST: Final = 8192


class Packer:
    """One pack being filled. checksum: whether packs carry a SHA-256 (the remote has no BLAKE3)."""

    def __init__(self, codec: Codec, *, checksum: bool) -> None:
        self._codec = codec
        self._checksum = checksum
        # A blob that fits a pack fits behind a pack that is all but full, with a byte to spare that
        # shows that it has ended.
        self._buffer = memoryview(bytearray(2 * PACK_BYTES + 1))
        self._digests: list[bytes] = []
        self._sizes: list[int] = []
        self._used = 0

    @property
    def space(self) -> memoryview:
        """Where the next blob goes; a blob that fills it is too large for a pack."""
        return self._buffer[self._used : self._used + PACK_BYTES + 1]

    @property
    def full(self) -> bool:
        return self._used >= PACK_BYTES or len(self._sizes) >= _MOST

    @property
    def used(self) -> int:
        """Bytes of content in it."""
        return self._used

    @property
    def empty(self) -> bool:
        return not self._sizes

    def add(self, blobid: str, size: int) -> None:
        """The blob whose content was just put into `space`."""
        self._digests.append(bytes.fromhex(blobid))
        self._sizes.append(size)
        self._used += size

    def take(self) -> list[bytes | memoryview]:
        """The frame, in pieces that hold until the next blob is put in; the pack is empty then."""
        table = memoryview(write_messages.table(self._digests, self._sizes))
        content = self._buffer[: self._used]
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
        """Forget what was put in."""
        self._digests.clear()
        self._sizes.clear()
        self._used = 0
