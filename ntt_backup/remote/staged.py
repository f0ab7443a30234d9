"""One batch as the receiver holds it: which staged file has which digest, and what went otherwise.

Kept as lean as the frames are: 32 bytes a blob, one run of digests a pack, file names implied by a
counter. Used by `intake`, which fills it, and by `settle` and `place`, which empty it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from ntt_backup.remote.frames import DIGEST_BYTES, Exceptional
from ntt_backup.remote.partial import Partial


class Entry(NamedTuple):
    """A staged file: name lies in the session's stage, or it is a partial file."""

    digest: bytes
    position: int
    name: bytes
    partial: Partial | None


class StagedBatch:
    """Blobs between their arrival and their receipt. first: the counter of its first file."""

    def __init__(self, number: int, most_blobs: int, most_bytes: int, first: int) -> None:
        self.number = number
        self.most_blobs = most_blobs
        self.most_bytes = most_bytes
        self.first = first
        self.blobs = 0
        self.bytes = 0
        self.exceptions: list[Exceptional] = []
        self._digests = bytearray()
        self._partials: dict[int, Partial] = {}
        self._missing: set[int] = set()

    def add(self, digests: bytes, size: int) -> None:
        """Blobs that are staged under the next names, in order; size: all of them together."""
        self._digests += digests
        self.blobs += len(digests) // DIGEST_BYTES
        self.bytes += size

    @property
    def partials(self) -> int:
        """How many partial files it holds open."""
        return len(self._partials)

    def add_partial(self, partial: Partial) -> None:
        """The blob that was added last is not in the stage, but this partial file."""
        self._partials[self.blobs - 1] = partial

    def except_for(self, position: int, verdict: int, text: str) -> None:
        """The blob is not staged (any more), or not simply stored."""
        self.exceptions.append(Exceptional(position, verdict, text))
        self._missing.add(position)

    def name(self, position: int) -> bytes:
        return b"%d" % (self.first + position)

    def entries(self) -> Iterator[Entry]:
        """What is staged, in order of digest, so that each directory is opened once."""
        digests = bytes(self._digests)
        order = sorted(
            (digests[at : at + DIGEST_BYTES], at // DIGEST_BYTES)
            for at in range(0, len(digests), DIGEST_BYTES)
        )
        missing, partials, first = self._missing, self._partials, self.first
        for digest, position in order:
            if position in missing:
                continue
            partial = partials.get(position)
            name = b"%d" % (first + position) if partial is None else partial.name
            yield Entry(digest, position, name, partial)

    def take_partial(self, position: int) -> None:
        """The partial file of this blob was moved into place."""
        partial = self._partials.pop(position, None)
        if partial is not None:
            partial.moved()

    def drop_partial(self, position: int) -> None:
        """The partial file of this blob is of no use any more."""
        partial = self._partials.pop(position, None)
        if partial is not None:
            partial.remove()

    def discard(self, stage: int, keep_partials: bool) -> None:
        """Leave nothing of it in the stage, whatever was and was not placed."""
        for position in range(self.blobs):
            with contextlib.suppress(OSError):
                os.unlink(self.name(position), dir_fd=stage)
        for partial in self._partials.values():
            if keep_partials:
                partial.close()
            else:
                partial.remove()
        self._partials.clear()
