"""Small blobs are gathered into packs, one frame for hundreds, compressed where that pays.

A frame, a write and a checksum for every blob of a few hundred bytes would cost more than the blob.
So contents are read one behind the other into one buffer that is never reallocated; before them, on
the wire, goes a table of digests and sizes. See docs/protocol.md, PACK.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from ntt_backup.upload.strategies.codec import MOST_PACK_BYTES, Codec
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import PACK_BYTES
from ntt_backup.wire.messages import PACK

# Of empty blobs. Keeps the table small beside MAX_BLOBS.
_MOST_BLOBS: Final = 8192


class Packer:
    """A pack that is being filled.

    Args:
        codec: Compresses the pack.
        checksum: Whether packs carry a SHA-256, for a remote that cannot check the names.

    Attributes:
        used: The bytes of content in the pack.
    """

    def __init__(self, codec: Codec, *, checksum: bool) -> None:
        self._codec = codec
        self._checksum = checksum
        # A blob that fits a pack fits behind a pack that is all but full, with a byte to spare that
        # shows that it has ended.
        self._buffer = memoryview(bytearray(MOST_PACK_BYTES + PACK_BYTES + 1))
        self._blobids: list[str] = []
        self._sizes: list[int] = []
        self._full = 0
        self.used = 0

    @property
    def space(self) -> memoryview:
        """Returns the space for the next blob; a blob that fills it is too large for a pack."""
        return self._buffer[self.used : self.used + PACK_BYTES + 1]

    @property
    def empty(self) -> bool:
        return not self._sizes

    def add(self, blobid: str, size: int) -> bool:
        """Adds the blob that was just read into `space`. Returns whether the pack is full."""
        if not self._sizes:
            self._full = self._codec.pack_bytes  # Asked for each blob, it would take longer.
        self._blobids.append(blobid)
        self._sizes.append(size)
        self.used += size
        return self.used >= self._full or len(self._sizes) >= _MOST_BLOBS

    def pop_frame(self) -> list[bytes | memoryview]:
        """Empties the pack; returns its frame in pieces that hold until the next blob is read."""
        digests = bytes.fromhex("".join(self._blobids))
        table = memoryview(messages.table([digests], self._sizes))
        content = self._buffer[: self.used]
        checksum = b""
        if self._checksum:
            summed = sha256(table)
            summed.update(content)
            checksum = summed.digest()
        raw_length = len(table) + len(content)
        number, parts = self._codec.encode([table, content])
        prefix = messages.part_prefix(number, raw_length, checksum)
        length = len(prefix) + sum(map(len, parts))
        self.clear()
        return [framing.head(PACK, length) + prefix, *parts]

    def clear(self) -> None:
        self._blobids.clear()
        self._sizes.clear()
        self.used = 0
