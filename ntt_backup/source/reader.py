"""Blobs are read for sending, and compared with their names while they are read.

The bytes that are sent are the bytes whose hash was compared with the name. The usual path is
short: open, read, close, hash. Only after an error `SourceTree.examine` finds its reason.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from ntt_backup.blobdir.descriptors import DIRECTORY, FILE, NOATIME, closing
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.model import Blob, Failure, Reason
from ntt_backup.name_hash import NEW_HASHER
from ntt_backup.source.store import SourceTree, Store

if TYPE_CHECKING:
    from ntt_backup.name_hash import NewNameHasher


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A blob that does not fit into the buffer, with its true size; see `Reader.pieces`."""

    blob: Blob


class BadSourceBlob(Exception):
    """A blob cannot be read to its end, or its content does not match its name."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class Reader(SourceTree):
    """Reads the blobs of a batch in any order. Not thread-safe."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._hash = NEW_HASHER[store.hash]
        self._digits, self._file_at = store.layout.digits, store.layout.file_at
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
            if self.store.paths is not None:
                fd = self.open(self.path_of(blobid))
            else:
                if blobid[: self._digits] != self._prefix:
                    self._enter(blobid[: self._digits])
                fd = os.open(blobid[self._file_at :], self._flags, dir_fd=self._parent)
            try:
                count = os.readv(fd, (into,))
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.EPERM:  # Only its owner may leave the access time as it is.
                self._flags = FILE
            return self._explain(blob, into)
        if (
            count < len(into)
            and (blob.size is None or blob.size == count)
            and self._hash(into[:count]).digest() == bytes.fromhex(blobid)
        ):
            return count
        return self._explain(blob, into)

    def close(self) -> None:
        super().close()
        self._leave()

    def _enter(self, prefix: str) -> None:
        """Opens the directory of the next blobs.

        In most stores a directory has few blobs, and keeping several directories open takes longer
        than opening one.
        """
        self._leave()
        above, _, name = self.layout.directory(prefix).rpartition("/")
        self._parent = os.open(name, DIRECTORY, dir_fd=self.directory(above))
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

        def rest() -> memoryview:
            return into[count:]

        try:
            for piece in self.pieces(sized, rest):
                count += len(piece)
        except BadSourceBlob as error:
            return error.failure
        return count

    def pieces(
        self,
        blob: Blob,
        space: Callable[[], memoryview],
        hashes: PieceHashes | None = None,
        *,
        begin: int = 0,
        end: int | None = None,
    ) -> Iterator[memoryview]:
        """Yields the content of a blob in pieces, hashed while it is read.

        Args:
            blob: The blob with its true size.
            space: Returns the buffer for the next piece.
            hashes: Hashes the pieces; must have those before `begin`.
            begin: The offset in bytes of the first piece.
            end: The offset in bytes where the pieces end, or None for all. The content is compared
                with the name at the end of the blob.

        Raises:
            BadSourceBlob: The blob cannot be read, is too short, or does not match its name.
        """
        size = blob.size or 0
        at, end = begin, size if end is None else end
        hashes = hashes or PieceHashes(blob.blobid, self._hash)
        try:
            with closing(self.open(self.path_of(blob.blobid))) as fd:
                if begin:
                    os.lseek(fd, begin, os.SEEK_SET)
                while at < end:
                    buffer = space()[: end - at]
                    if not (count := os.readv(fd, (buffer,))):
                        break
                    at += count
                    hashes.add(buffer[:count])
                    yield buffer[:count]
        except OSError as error:
            raise BadSourceBlob(self.failure(blob, error)) from error
        if at < end:
            text = f"it ended {size - at} bytes early"
        elif at == size and hashes.name != blob.blobid:
            text = f"its content hashes to {hashes.name}"
            self.examine(blob, verify=True)  # Where source.hash is wrong, that is said.
        else:
            return
        raise BadSourceBlob(Failure(blob.blobid, Reason.CORRUPT_SOURCE, text))


class PieceHashes:
    """Hashes a blob that is sent in pieces.

    The hash is that of names, and for a remote without that hash also SHA-256 over name and
    content.

    Args:
        blobid: The name of the blob.
        new: Begins a hash of names.
        summed: Whether the remote lacks the hash of names.
    """

    def __init__(
        self, blobid: str, new: NewNameHasher = NEW_HASHER["blake3"], *, summed: bool = False
    ) -> None:
        self._blobid = blobid
        self._new = new
        self._summed = summed
        self.restart()

    def restart(self) -> None:
        """Discards the pieces that were added."""
        self._name = self._new()
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
        """The hash of the pieces by which a blob is named, in hex digits."""
        return self._name.hexdigest()
