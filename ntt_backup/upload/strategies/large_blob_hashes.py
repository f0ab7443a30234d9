"""The hashes of a blob that goes in pieces, while it goes.

A blob larger than memory is read once; by the time its name could be compared, all of it is on its
way. So both hashes, its name and the checksum that the far side asks for, are taken from the pieces
as they are sent, and the verdict goes last. Pure.
"""

from __future__ import annotations

from hashlib import sha256

from blake3 import blake3


class Content:
    """The hashes of a blob that goes in pieces: its own name, and the checksum the remote asks, of
    the name and the content.
    """

    def __init__(self, blobid: str, *, summed: bool) -> None:
        self._blobid = blobid
        self._summed = summed
        self.restart()

    def restart(self) -> None:
        self._name = blake3()
        self._sum = sha256(bytes.fromhex(self._blobid))

    def add(self, piece: memoryview) -> None:
        self._name.update(piece)
        if self._summed:
            self._sum.update(piece)

    @property
    def checksum(self) -> bytes:
        """What END carries."""
        return self._sum.digest() if self._summed else b""

    def so_far(self) -> bytes:
        """The hash of what was taken in, as the remote knows it."""
        return self._sum.digest() if self._summed else self._name.digest()

    def problem(self, missing: int) -> str | None:
        """What is wrong with the content, now that it was read; missing bytes came too few."""
        found = self._name.hexdigest()
        if missing:
            return f"it ended {missing} bytes early"
        return None if found == self._blobid else f"its content hashes to {found}"
