"""Blobs are read for sending, and compared with their names while they are read.

The bytes that are sent are the bytes whose BLAKE3 was compared with the name. The usual path is
short: open, read, close, hash. Only after an error `SourceTree.examine` finds its reason.
"""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256

from blake3 import blake3

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.blobdir.open import FILE, NOATIME, closing
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.model import Blob, Failure, Reason
from ntt_backup.source.store import SourceTree, Store


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A blob that does not fit into the buffer, with its true size; see `Reader.opened`."""

    blob: Blob


class Reader(SourceTree):
    """Reads the blobs of a batch in any order. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.root)
        self._flags = FILE | NOATIME
        self._prefix = ""
        self._parent = -1

    def read(self, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        """Reads a blob into a buffer, and compares it with its name.

        Returns:
            The length in bytes; TooLarge if the blob is not shorter than the buffer; or its
            failure.
        """
        blobid = blob.blobid
        if not is_blobid(blobid):
            return self._explain(blob, into)
        try:
            if blobid[:4] != self._prefix:
                self._enter(blobid[:4])
            fd = os.open(blobid, self._flags, dir_fd=self._parent)
            try:
                count = os.readv(fd, (into,))
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.EPERM:  # Only its owner may leave the access time as it is.
                self._flags = FILE
            return self._explain(blob, into)
        if count < len(into) and _is_right(blob, into[:count]):
            return count
        return self._explain(blob, into)

    def close(self) -> None:
        super().close()
        self._leave()

    def _enter(self, prefix: str) -> None:
        """Opens the directory of the next blobs. In most stores a directory has few blobs, and
        keeping several directories open takes longer than opening one.
        """
        self._leave()
        self._parent = os.open(prefix[2:], DIRECTORY, dir_fd=self.directory(prefix[:2]))
        self._prefix = prefix

    def _leave(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
        self._prefix, self._parent = "", -1

    def _explain(self, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        """Returns the failure of a blob, or reads a correct blob that was read in parts."""
        self._leave()
        examined = self.examine(blob, verify=False)
        if isinstance(examined, Failure):
            return examined
        sized = examined[0]
        if sized.size is None or sized.size >= len(into):
            return TooLarge(sized)
        count = 0
        try:
            with self.opened(sized) as fd:
                while piece := os.readv(fd, (into[count:],)):
                    count += piece
        except OSError as error:
            return self.failure(blob, error)
        if count < len(into) and _is_right(sized, into[:count]):
            return count
        found = blake3(into[:count]).hexdigest()
        return Failure(blob.blobid, Reason.CORRUPT_SOURCE, f"its content hashes to {found}")

    def opened(self, blob: Blob) -> AbstractContextManager[int]:
        """Returns a context with a descriptor of the blob. Raises OSError."""
        return closing(self.open(relative_path(blob.blobid)))


class PieceHashes:
    """Hashes a blob that is sent in pieces: by BLAKE3, which is its name, and for a remote without
    BLAKE3 also by SHA-256 over name and content. summed: whether the remote lacks BLAKE3.
    """

    def __init__(self, blobid: str, *, summed: bool) -> None:
        self._blobid = blobid
        self._summed = summed
        self.restart()

    def restart(self) -> None:
        """Discards the pieces that were added."""
        self._name = blake3()
        self._sum = sha256(bytes.fromhex(self._blobid))

    def add(self, piece: memoryview) -> None:
        """Adds the next bytes of the content."""
        self._name.update(piece)
        if self._summed:
            self._sum.update(piece)

    @property
    def checksum(self) -> bytes:
        """The checksum for END."""
        return self._sum.digest() if self._summed else b""

    def so_far(self) -> bytes:
        """Returns the hash of the pieces so far, as the remote computes it."""
        return self._sum.digest() if self._summed else self._name.digest()

    @property
    def name(self) -> str:
        """The BLAKE3 of the pieces, in hex digits."""
        return self._name.hexdigest()


def wrong_content(blob: Blob, found: str, missing: int) -> Failure | None:
    """Returns the failure of a blob that was read in pieces, or None if it is correct.

    Args:
        blob: The blob.
        found: The BLAKE3 of the content in hex digits.
        missing: The bytes that the content was too short.
    """
    if missing:
        text = f"it ended {missing} bytes early"
    elif found != blob.blobid:
        text = f"its content hashes to {found}"
    else:
        return None
    return Failure(blob.blobid, Reason.CORRUPT_SOURCE, text)


def _is_right(blob: Blob, content: memoryview) -> bool:
    if blob.size is not None and blob.size != len(content):
        return False
    return blake3(content).digest() == bytes.fromhex(blob.blobid)
