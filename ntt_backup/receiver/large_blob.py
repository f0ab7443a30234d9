"""A blob that comes in pieces, and the offer to go on where an earlier session stopped.

Constant memory whatever its size: each piece is hashed and written as it comes. A resumed blob's
hash goes on from the state that hashing its prefix again has left, so the check at the end covers
all of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.receiver.partial import Partial, open_partial
from ntt_backup.receiver.workspace import Ground
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.write_messages import RESUMABLE, Large

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import Hasher
    from ntt_backup.wire.framing import Buffer

_KEEP_EVERY = 64 << 20
_READ_CHUNK = 1 << 20
# A receiver looks around every second; what it syncs before it goes may take longer.
_PREDECESSOR_SECONDS = 10.0


class Sums:
    """The hashes of a blob that comes in pieces: the session's, and BLAKE3 as name, where that is
    another one and can be had.
    """

    def __init__(self, session: Hasher, name: Hasher | None) -> None:
        self._session = session
        self._name = name

    def update(self, data: Buffer) -> None:
        self._session.update(data)
        if self._name is not None:
            self._name.update(data)

    def digest(self) -> bytes:
        """The session's hash."""
        return self._session.digest()

    def may_be(self, name: bytes) -> bool:
        """Whether BLAKE3, where it was computed beside the session's hash, is this name."""
        return self._name is None or self._name.digest() == name


class LargeBlob:
    """The blob that is coming in. fd: where to; that of partial, if there is one."""

    def __init__(self, announced: Large, fd: int, partial: Partial | None, sums: Sums) -> None:
        self.digest = announced.digest
        self.partial = partial
        self._size = announced.size
        self._length = announced.offset
        self._kept = announced.offset
        self._fd = fd
        self._sums = sums

    def write(self, raw: memoryview) -> None:
        """The next piece. Raises OSError when it cannot be stored."""
        if self._length + len(raw) > self._size:
            raise ProtocolError(f"more than the announced {self._size} bytes")
        self._sums.update(raw)
        write_all(self._fd, raw)
        self._length += len(raw)
        if self.partial is not None and self._length - self._kept >= _KEEP_EVERY:
            self.partial.keep(self._length)
            self._kept = self._length

    def is_right(self, checksum: bytes) -> bool:
        """Whether all of it has this hash of the session's kind, and its own name."""
        if self._length != self._size:
            raise ProtocolError(f"{self._length} of the announced {self._size} bytes")
        return self._sums.digest() == checksum and self._sums.may_be(self.digest)

    def seal(self, by_file: bool) -> None:
        """It is whole and right. A partial file stays locked until it is placed. Raises OSError."""
        if self.partial is not None:
            self.partial.keep(self._length)
            return
        try:
            if by_file:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def interrupt(self) -> None:
        """The connection has ended within it: keep what there is, for the next one."""
        if self.partial is not None:
            with contextlib.suppress(OSError):
                self.partial.keep(self._length)
        self.close()

    def close(self) -> None:
        """Let go of it; a partial file belongs to its batch."""
        if self.partial is None:
            with contextlib.suppress(OSError):
                os.close(self._fd)


class _Offer(NamedTuple):
    """A partial file that was asked for: locked, cut to offset, hashed so far."""

    digest: bytes
    offset: int
    partial: Partial
    sums: Sums


class Offers:
    """The answer to the last ASK_OFFSET, for the LARGE that may follow it.

    begin gives the hashes of a blob, from its digest. alive is called now and then while a long
    prefix is hashed.
    """

    def __init__(
        self, ground: Ground, begin: Callable[[bytes], Sums], alive: Callable[[], None]
    ) -> None:
        self._ground = ground
        self._begin = begin
        self._alive = alive
        self._offer: _Offer | None = None

    def make(self, digest: bytes, size: int) -> tuple[int, bytes]:
        """From where the blob can go on, and the hash of what is there."""
        self.withdraw()
        sums = self._begin(digest)
        if size > RESUMABLE:
            self._await_predecessor()
        partial = open_partial(self._ground, digest) if size > RESUMABLE else None
        if partial is None:
            return 0, sums.digest()
        try:
            offset = min(partial.durable(), size)
            partial.cut(offset)
            self._hash(partial, offset, sums)
        except OSError:
            # It cannot be read: then it is no head start.
            partial.remove()
            return 0, self._begin(digest).digest()
        self._offer = _Offer(digest, offset, partial, sums)
        return offset, sums.digest()

    def take(self, announced: Large) -> tuple[Partial | None, Sums]:
        """The partial file to go on with, if one was offered, and the hashes of what it has."""
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
        """Nobody wanted it."""
        offer, self._offer = self._offer, None
        if offer is not None and offer.offset:
            offer.partial.close()
        elif offer is not None:
            offer.partial.remove()

    def _await_predecessor(self) -> None:
        """What we want may be locked by a session that is about to end."""
        deadline = time.monotonic() + _PREDECESSOR_SECONDS
        while self._ground.awaits_predecessor and time.monotonic() < deadline:
            self._alive()
            time.sleep(0.05)
        self._ground.forget_predecessors()

    def _hash(self, partial: Partial, length: int, sums: Sums) -> None:
        at = 0
        while at < length:
            chunk = os.pread(partial.fd, min(_READ_CHUNK, length - at), at)
            if not chunk:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sums.update(chunk)
            at += len(chunk)
            self._alive()


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
