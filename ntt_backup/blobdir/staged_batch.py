"""A staged batch knows which of its files holds which blob, and which blobs went otherwise.

A blob takes 32 bytes here: file names follow from a counter or from the digest.
"""

from __future__ import annotations

import contextlib
import os
from binascii import hexlify
from collections.abc import Iterator
from typing import NamedTuple

from ntt_backup.blobdir.partial import Partial
from ntt_backup.blobdir.staging import remove_tree
from ntt_backup.wire.framing import DIGEST_BYTES
from ntt_backup.wire.write_messages import Exceptional


class Entry(NamedTuple):
    """A staged file: its name in a directory, by descriptor. partial: it can be resumed."""

    digest: bytes
    position: int
    directory: int
    name: bytes
    partial: Partial | None


class NewDirectory:
    """A directory `aa/bb` in the making. name: where it lies in the stage. It holds blobs of the
    batch under their final names, between the positions begin and end.
    """

    __slots__ = ("begin", "end", "name", "prefix")

    def __init__(self, prefix: bytes, name: str, position: int) -> None:
        self.prefix = prefix
        self.name = name
        self.begin = self.end = position


class NewParent(NamedTuple):
    """A directory `aa` in the making: it lies in the stage under a name of its own, and holds new
    directories under their final names.
    """

    prefix: bytes
    name: str
    directories: list[NewDirectory]


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
        self.parents: list[NewParent] = []
        self._digests = bytearray()
        self._loose: set[int] = set()
        self._partials: dict[int, Partial] = {}
        self._missing: set[int] = set()

    def add(self, digests: bytes, size: int) -> None:
        """Adds the next blobs, in order. size: the bytes of all of them together."""
        self._digests += digests
        self.blobs += len(digests) // DIGEST_BYTES
        self.bytes += size

    @property
    def partials(self) -> int:
        """Returns the number of partial files that it holds open."""
        return len(self._partials)

    def add_partial(self, partial: Partial) -> None:
        """Notes that the blob that was added last lies in this partial file, not in the stage."""
        self._partials[self.blobs - 1] = partial

    def except_for(self, position: int, verdict: int, text: str) -> None:
        """Gives a blob that is not staged (any more), or not simply stored, its own verdict."""
        self.exceptions.append(Exceptional(position, verdict, text))
        self._missing.add(position)

    def name(self, position: int) -> bytes:
        """Returns the name of a file of its own in the stage."""
        return b"%d" % (self.first + position)

    def lay(self, position: int) -> bytes:
        """Returns the name for a blob that gets a file of its own, in the stage or partial."""
        self._loose.add(position)
        return self.name(position)

    def begin_parent(self, prefix: bytes, position: int) -> NewParent:
        """Adds a directory `aa`, which must still be made in the stage."""
        parent = NewParent(prefix, f"d{self.first + position}", [])
        self.parents.append(parent)
        return parent

    def entries(self, stage: int) -> Iterator[Entry]:
        """Yields the files of single blobs in order of digest: each directory is opened once."""
        for digest, position in sorted((self._digest(at), at) for at in self._loose):
            if position in self._missing:
                continue
            partial = self._partials.get(position)
            if partial is None:
                yield Entry(digest, position, stage, self.name(position), None)
            else:
                yield Entry(digest, position, partial.directory, partial.name, partial)

    def entries_in(self, directory: NewDirectory, fd: int) -> Iterator[Entry]:
        """Yields the files in that directory, which is open as fd."""
        for position in range(directory.begin, directory.end):
            if position not in self._missing and position not in self._loose:
                digest = self._digest(position)
                yield Entry(digest, position, fd, hexlify(digest), None)

    def take_partial(self, position: int) -> None:
        """Forgets the partial file of this blob, if there is one: it has been published."""
        partial = self._partials.pop(position, None)
        if partial is not None:
            partial.moved()

    def drop(self, position: int, directory: int, name: bytes) -> None:
        """Removes the file of this blob: its partial file, or else the one of that name. Raises
        OSError.
        """
        partial = self._partials.pop(position, None)
        if partial is None:
            os.unlink(name, dir_fd=directory)
        else:
            partial.remove()

    def discard(self, stage: int, keep_partials: bool) -> None:
        """Removes all that is left of it in the stage."""
        for position in self._loose:
            with contextlib.suppress(OSError):
                os.unlink(self.name(position), dir_fd=stage)
        for parent in self.parents:
            remove_tree(stage, parent.name)
        for partial in self._partials.values():
            if keep_partials:
                partial.close()
            else:
                partial.remove()
        self._partials.clear()

    def _digest(self, position: int) -> bytes:
        return bytes(self._digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES])
