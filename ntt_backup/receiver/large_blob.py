"""A large blob comes in pieces, outlives its connection, and is resumed by a later session.

Such a blob is written to `.ntt-incoming/partial/<hex>`, locked by its session, and the length that
has been synced is noted in `<hex>.mark`. The file's own length would not do: after a crash of this
machine it may cover blocks that never reached the disk. The mark needs no sync: an old mark is a
smaller one.

Memory is constant: each piece is hashed and written as it comes. What an earlier session has left
is hashed again before it is offered, so the check at the end covers all of the blob.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.descriptors import (
    Misplaced,
    closing,
    lock_file,
    make_directory,
    open_below,
    write_all,
)
from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.wire.framing import ProtocolError
from ntt_backup.wire.messages import RESUMABLE, Large

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import Hasher
    from ntt_backup.receiver.write_workspace import WriteWorkspace

    # The hash of the session, and BLAKE3, where that is another one and available.
    Sums = Sequence[Hasher]

PARTIAL = "partial"

_MARK = ".mark"
_MARK_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KEPT_SECONDS = 7 * 86400
# Less of a blob is not worth a file that every session looks at.
WORTH_KEEPING = 1 << 20
# So many files and marks there are at most; a session looks at no more of them.
_MOST_NAMES = 2000
_KEEP_EVERY = 64 << 20
_READ_CHUNK = 1 << 20


class Partial:
    """The partial file of one blob, open and locked."""

    def __init__(self, directory: int, blobid: str, fd: int) -> None:
        self.directory = directory
        self.name = blobid.encode("ascii")
        self.fd = fd
        self._mark = blobid + _MARK

    def durable(self) -> int:
        """Returns how many of its bytes are known to be on the disk."""
        try:
            flags = os.O_RDONLY | _MARK_FLAGS
            with closing(os.open(self._mark, flags, dir_fd=self.directory)) as fd:
                text = os.read(fd, 32)
        except OSError:
            return 0
        noted = int(text) if text.endswith(b"\n") and text[:-1].isdigit() else 0
        return noted if noted <= os.fstat(self.fd).st_size else 0

    def cut(self, length: int) -> None:
        """Cuts the file to that length, where writing goes on."""
        if length == 0:
            self._forget_mark()
        os.ftruncate(self.fd, length)
        os.lseek(self.fd, length, os.SEEK_SET)

    def keep(self, length: int) -> None:
        """Makes the first length bytes durable, and notes that they are. Raises OSError."""
        os.fdatasync(self.fd)
        flags = os.O_WRONLY | os.O_CREAT | _MARK_FLAGS
        with closing(os.open(self._mark, flags, 0o644, dir_fd=self.directory)) as fd:
            # Of one width and written over the last one, so that a kill leaves one or the other.
            os.write(fd, b"%020d\n" % length)

    def remove(self) -> None:
        """Removes the file and its mark."""
        # The name is still this file's: only the holder of its lock moves or removes it.
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self.directory)
        self.moved()

    def moved(self) -> None:
        """Forgets the file, which has been published. By now its name may be another session's."""
        self._forget_mark()
        self.close()

    def close(self) -> None:
        """Lets go of the file, and of its lock."""
        os.close(self.fd)
        os.close(self.directory)

    def _forget_mark(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._mark, dir_fd=self.directory)


def open_partial(incoming: int, blobid: str) -> Partial | None:
    """Returns the partial file of a blob; None where another session writes it, there are too many
    partial files, or their directory cannot be used.
    """
    with contextlib.ExitStack() as otherwise, contextlib.suppress(OSError, Misplaced):
        make_directory(incoming, PARTIAL, 0o755)
        directory = open_below(incoming, PARTIAL)
        otherwise.callback(os.close, directory)
        names = os.listdir(directory)
        if len(names) >= _MOST_NAMES and blobid not in names:
            return None
        fd = lock_file(directory, blobid, create=True)
        if fd is not None:
            otherwise.pop_all()
            return Partial(directory, blobid, fd)
    return None


def remove_useless(incoming: int, by_hash: int) -> None:
    """Removes the partial files that nobody can resume, or has resumed for a week. Those in use are
    locked.
    """
    with contextlib.suppress(OSError, Misplaced), closing(open_below(incoming, PARTIAL)) as fd:
        names = set(os.listdir(fd))
        for name in itertools.islice(names, _MOST_NAMES):
            with contextlib.suppress(OSError):
                _remove_if_useless(fd, name, names, by_hash)


def _remove_if_useless(directory: int, name: str, names: set[str], by_hash: int) -> None:
    if name.endswith(_MARK):
        # Without a lock: a mark that is lost costs time, no more.
        if name[: -len(_MARK)] not in names:
            os.unlink(name, dir_fd=directory)
        return
    changed = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
    resumable = name + _MARK in names and not _is_published(name, by_hash)
    if changed < time.time() - _KEPT_SECONDS or (is_blobid(name) and not resumable):
        lock = lock_file(directory, name, create=False)
        if lock is not None:
            os.unlink(name, dir_fd=directory)
            os.close(lock)
            os.unlink(name + _MARK, dir_fd=directory)


def _is_published(blobid: str, by_hash: int) -> bool:
    try:
        status = os.stat(relative_path(blobid), dir_fd=by_hash, follow_symlinks=False)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode)


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
        self, workspace: WriteWorkspace, begin: Callable[[bytes], Sums], alive: Callable[[], None]
    ) -> None:
        self._workspace = workspace
        self._begin = begin
        self._alive = alive
        self._offer: _Offer | None = None

    def make(self, digest: bytes, size: int) -> tuple[int, bytes]:
        """Returns the offset from which the blob can be resumed, and the hash of what is before."""
        self.withdraw()
        sums = self._begin(digest)
        partial: Partial | None = None
        if size > RESUMABLE:
            self._workspace.await_predecessors()
            partial = open_partial(self._workspace.incoming, digest.hex())
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
