"""A large blob comes in pieces, and may be resumed where an earlier session stopped.

Memory is constant: each piece is hashed and written as it comes. What an earlier session has left
is hashed again before it is offered, so the check at the end covers all of the blob.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.open import closing
from ntt_backup.blobdir.partial import WORTH_KEEPING, Partial, open_partial
from ntt_backup.blobdir.staging import Staging, write_all
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.messages import RESUMABLE, Large

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import Hasher

    # The hash of the session, and BLAKE3, where that is another one and available.
    Sums = Sequence[Hasher]

_KEEP_EVERY = 64 << 20
_READ_CHUNK = 1 << 20


class LargeBlob:
    """The blob that is coming in. fd: its file; that of partial, if there is one."""

    def __init__(self, announced: Large, fd: int, partial: Partial | None, sums: Sums) -> None:
        self.digest = announced.digest
        self.partial = partial
        self._size = announced.size
        self._length = announced.offset
        self._kept = announced.offset
        self._fd = fd
        self._sums = sums

    def write(self, raw: memoryview) -> None:
        """Writes the next piece. Raises OSError."""
        if self._length + len(raw) > self._size:
            raise ProtocolError(f"more than the announced {self._size} bytes")
        for each in self._sums:
            each.update(raw)
        write_all(self._fd, raw)
        self._length += len(raw)
        if self.partial is not None and self._length - self._kept >= _KEEP_EVERY:
            self.partial.keep(self._length)
            self._kept = self._length

    def is_right(self, checksum: bytes) -> bool:
        """Returns whether all of it has this hash of the session's kind, and its own name."""
        if self._length != self._size:
            raise ProtocolError(f"{self._length} of the announced {self._size} bytes")
        session, *name = self._sums
        return session.digest() == checksum and all(one.digest() == self.digest for one in name)

    def seal(self, by_file: bool) -> None:
        """Ends a blob that is right. A partial file stays locked until it is published. Raises
        OSError.
        """
        if self.partial is not None:
            self.partial.keep(self._length)
            return
        with closing(self._fd):
            if by_file:
                os.fsync(self._fd)

    def interrupt(self) -> None:
        """Keeps what has come, for the next connection, where it is worth that."""
        if self.partial is not None and self._length >= WORTH_KEEPING:
            with contextlib.suppress(OSError):
                self.partial.keep(self._length)
        self.close()

    def close(self) -> None:
        """Closes the file; a partial file belongs to its batch."""
        if self.partial is None:
            with contextlib.suppress(OSError):
                os.close(self._fd)


class _Offer(NamedTuple):
    """A partial file: locked, cut to offset, and hashed so far."""

    digest: bytes
    offset: int
    partial: Partial
    sums: Sums


class ResumeOffers:
    """The answer to the last ASK_OFFSET, for the LARGE that may follow it.

    begin returns the hashes to compute for a blob, given its digest. alive is called now and then
    while a long prefix is hashed.
    """

    def __init__(
        self, staging: Staging, begin: Callable[[bytes], Sums], alive: Callable[[], None]
    ) -> None:
        self._staging = staging
        self._begin = begin
        self._alive = alive
        self._offer: _Offer | None = None

    def make(self, digest: bytes, size: int) -> tuple[int, bytes]:
        """Returns the offset from which the blob can be resumed, and the hash of what is before."""
        self.withdraw()
        sums = self._begin(digest)
        partial: Partial | None = None
        if size > RESUMABLE:
            self._staging.await_predecessors()
            partial = open_partial(self._staging.incoming, digest.hex())
        if partial is None:
            return 0, sums[0].digest()
        try:
            offset = min(partial.durable(), size)
            partial.cut(offset)
            self._hash(partial, offset, sums)
        except OSError:
            # What cannot be read cannot be resumed.
            partial.remove()
            return 0, self._begin(digest)[0].digest()
        self._offer = _Offer(digest, offset, partial, sums)
        return offset, sums[0].digest()

    def take(self, announced: Large) -> tuple[Partial | None, Sums]:
        """Returns the partial file to resume, if one was offered, and the hashes so far."""
        offer = self._offer
        if offer is None or offer.digest != announced.digest:
            self.withdraw()
            if announced.offset:
                raise ProtocolError(f"offset {announced.offset} was not offered for this blob")
            return None, self._begin(announced.digest)
        if announced.offset not in (0, offer.offset):
            raise ProtocolError(f"offset {announced.offset} where {offer.offset} was offered")
        self._offer = None
        sums = offer.sums if announced.offset else self._begin(announced.digest)
        return offer.partial, sums

    def withdraw(self) -> None:
        """Lets go of an offer that was not taken."""
        offer, self._offer = self._offer, None
        if offer is not None and offer.offset:
            offer.partial.close()
        elif offer is not None:
            offer.partial.remove()

    def _hash(self, partial: Partial, length: int, sums: Sums) -> None:
        at = 0
        while at < length:
            chunk = os.pread(partial.fd, min(_READ_CHUNK, length - at), at)
            if not chunk:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            for each in sums:
                each.update(chunk)
            at += len(chunk)
            self._alive()
