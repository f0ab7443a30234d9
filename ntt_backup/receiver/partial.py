"""Large blobs that outlive their connection: what has arrived of them, and how much is durable.

A blob of 20 GB at 12 MB/s takes half an hour; starting again with every cut of the link might mean
never finishing. So it is written to `.ntt-incoming/partial/<hex>`, locked by its session, and what
has been synced of it is noted in `<hex>.mark`. The file's own length would not do: after a crash of
this machine it may cover blocks that never reached the disk. The mark is written after the sync and
needs none itself: an old mark is a smaller one. The prefix is hashed again before it is used, and
the client compares that hash with its own.
"""

from __future__ import annotations

import contextlib
import os
from binascii import hexlify

from ntt_backup.receiver.workspace import MARK, Ground, lock_file
from ntt_backup.wire.framing import MAX_BLOB

_SUFFIX = MARK.encode("ascii")
_MARK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Partial:
    """The partial file of one blob, open and locked: see `open_partial`."""

    def __init__(self, directory: int, name: bytes, fd: int) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd

    def durable(self) -> int:
        """How many of its bytes are known to be on the disk."""
        try:
            fd = os.open(self.name + _SUFFIX, os.O_RDONLY | _MARK, dir_fd=self.directory)
        except OSError:
            return 0
        try:
            text = os.read(fd, 32)
        finally:
            os.close(fd)
        if not text.endswith(b"\n") or not text[:-1].isdigit():
            return 0
        noted = int(text)
        return noted if noted <= min(os.fstat(self.fd).st_size, MAX_BLOB) else 0

    def cut(self, length: int) -> None:
        """Forget what lies beyond length, and go on writing there."""
        if length == 0:
            self._forget_mark()
        os.ftruncate(self.fd, length)
        os.lseek(self.fd, length, os.SEEK_SET)

    def keep(self, length: int) -> None:
        """Make the first length bytes durable, and note that they are. Raises OSError."""
        os.fdatasync(self.fd)
        fd = os.open(
            self.name + _SUFFIX, os.O_WRONLY | os.O_CREAT | _MARK, 0o644, dir_fd=self.directory
        )
        try:
            # Of one width and written over the last one, so that a kill leaves one or the other.
            os.write(fd, b"%020d\n" % length)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Nothing of it stays."""
        # The name is still this file's: only the holder of its lock moves or removes it.
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self.directory)
        self.moved()

    def moved(self) -> None:
        """It has been moved into place. By now the name may be another session's."""
        self._forget_mark()
        self.close()

    def close(self) -> None:
        """Let go of the file, and of its lock."""
        os.close(self.fd)
        os.close(self.directory)

    def _forget_mark(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.name + _SUFFIX, dir_fd=self.directory)


def open_partial(ground: Ground, digest: bytes) -> Partial | None:
    """The partial file for a digest; None where there can be none for this session: another one
    writes it, or the directory is not ours to use.
    """
    try:
        directory = ground.partial()
    except OSError:
        return None
    fd: int | None = None
    with contextlib.suppress(OSError):
        fd = lock_file(directory, hexlify(digest), create=True)
    if fd is None:
        os.close(directory)
        return None
    return Partial(directory, hexlify(digest), fd)
