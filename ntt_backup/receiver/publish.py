"""Giving staged files their names under `by-hash`, without ever harming what stands there.

The obvious `rename` would silently replace good content, and a look before it would race. So the
kernel is asked to rename only where nothing is (`renameat2`), and where something is it is looked
at: the same bytes are kept; what differs is replaced only by a session that knows which of the two
is right. Names are made from the 32 bytes of a digest, so they cannot lead anywhere else.

Nothing is placed here that a sync has not covered before; the directories are synced by the caller
afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from binascii import hexlify

from ntt_backup.blobdir.syscalls import DIRECTORY, kind_of, open_beneath, rename_new
from ntt_backup.receiver.staged_batch import Entry, NewDirectory, StagedBatch
from ntt_backup.receiver.workspace import Ground, words
from ntt_backup.wire.write_messages import PRESENT, REFUSED, REPLACED

_CHUNK = 1 << 18
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# These say something about the one name; every other error is about the disk or the account, and
# fails the batch as a whole.
_OF_ONE_NAME = frozenset((errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EPERM, errno.ENXIO))


class Places:
    """The directories under by-hash, and the one way to put a file there.

    may_replace: what differs from what was sent is known to be wrong. by_file: sync what is found
    present too, because no sync of the whole file system follows.
    """

    def __init__(self, ground: Ground, may_replace: bool, by_file: bool) -> None:
        self._ground = ground
        self._may_replace = may_replace
        self._by_file = by_file

    def place(self, batch: StagedBatch) -> set[str]:
        """Name every staged blob of the batch; the directories that must be synced.

        Directories that are new go first, each as a whole: what is staged by itself may belong in
        one of them.

        Raises OSError when the batch fails as a whole; what is named by then is complete and right.
        """
        directories = _Directories(self._ground)
        try:
            for new in batch.directories:
                if not self._move(new, directories):
                    self._empty(batch, new, directories)
            for entry in batch.entries(self._ground.stage):
                self._place(batch, entry, directories)
        finally:
            directories.close()
        return directories.entered

    def _move(self, new: NewDirectory, directories: _Directories) -> bool:
        """Place a directory with all that is in it; False where that cannot be, or where there is
        one by now.
        """
        try:
            directories.move(self._ground.stage, new.name, new.prefix)
        except OSError:  # What is wrong is met again, and told, file by file.
            return False
        return True

    def _empty(self, batch: StagedBatch, new: NewDirectory, directories: _Directories) -> None:
        stage = self._ground.stage
        fd = os.open(new.name, DIRECTORY, dir_fd=stage)
        try:
            for entry in batch.entries_in(new, fd):
                self._place(batch, entry, directories)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            os.rmdir(new.name, dir_fd=stage)

    def _place(self, batch: StagedBatch, entry: Entry, directories: _Directories) -> None:
        try:
            directory = directories.enter(entry.digest)
            self._put(batch, entry, directory, hexlify(entry.digest))
        except OSError as problem:
            if problem.errno not in _OF_ONE_NAME:
                raise
            self._except(batch, entry, REFUSED, words(problem))

    def _put(self, batch: StagedBatch, entry: Entry, directory: int, name: bytes) -> None:
        try:
            rename_new(entry.directory, entry.name, directory, name)
        except FileExistsError:
            self._settle_taken(batch, entry, directory, name)
        else:
            if entry.partial is not None:
                batch.take_partial(entry.position)

    def _settle_taken(self, batch: StagedBatch, entry: Entry, directory: int, name: bytes) -> None:
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISREG(there.st_mode):
            try:
                same = self._same(entry.directory, entry.name, directory, name)
            except PermissionError as problem:
                self._except(batch, entry, REFUSED, words(problem))
                return
            if same:
                self._except(batch, entry, PRESENT, "")
                return
            found = "other content"
        else:
            found = kind_of(there.st_mode)
        if self._may_replace and not stat.S_ISDIR(there.st_mode):
            os.rename(entry.name, name, src_dir_fd=entry.directory, dst_dir_fd=directory)
            batch.take_partial(entry.position)
            batch.except_for(entry.position, REPLACED, f"{found} stood there")
        else:
            self._except(batch, entry, REFUSED, f"{found} stands in its place")

    def _except(self, batch: StagedBatch, entry: Entry, verdict: int, text: str) -> None:
        batch.except_for(entry.position, verdict, text)
        with contextlib.suppress(OSError):  # The end of the session removes it too.
            batch.drop(entry.position, entry.directory, entry.name)

    def _same(self, source: int, staged: bytes, directory: int, name: bytes) -> bool:
        ours = os.open(staged, _READ, dir_fd=source)
        try:
            theirs = os.open(name, _READ, dir_fd=directory)
            try:
                if os.fstat(ours).st_size != os.fstat(theirs).st_size:
                    return False
                while True:
                    chunk = os.read(ours, _CHUNK)
                    if chunk != os.read(theirs, _CHUNK):
                        return False
                    if not chunk:
                        break
                if self._by_file:
                    os.fsync(theirs)
                return True
            finally:
                os.close(theirs)
        finally:
            os.close(ours)


class _Directories:
    """`aa` and `aa/bb` as they are needed, made where they are missing, the last of each open."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._above = self._below = b""
        self._above_fd = self._below_fd = -1
        self.entered: set[str] = set()

    def enter(self, digest: bytes) -> int:
        """The directory where the digest's name belongs. Raises OSError."""
        if digest[:2] != self._below:
            self._enter(digest[:2])
        return self._below_fd

    def close(self) -> None:
        self._leave_below()
        self._leave_above()

    def move(self, source: int, name: str, prefix: bytes) -> None:
        """Put a directory in its place, never over anything. Raises OSError."""
        self._ascend(prefix[:1])
        below = prefix[1:].hex()
        rename_new(source, name.encode(), self._above_fd, below.encode())
        self.entered.add(f"{prefix[:1].hex()}/{below}")

    def _enter(self, prefix: bytes) -> None:
        self._ascend(prefix[:1])
        below = prefix[1:].hex()
        self._below_fd = self._open_or_make(self._above_fd, below)
        self._below = prefix
        self.entered.add(f"{prefix[:1].hex()}/{below}")

    def _ascend(self, above: bytes) -> None:
        """Have `aa` open, and nothing below it."""
        self._leave_below()
        if above != self._above:
            self._leave_above()
            self._above_fd = self._open_or_make(self._ground.by_hash, above.hex())
            self._above = above
            self.entered.add(above.hex())

    def _open_or_make(self, parent: int, name: str) -> int:
        device = self._ground.device
        try:
            return open_beneath(parent, name, device)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
            return open_beneath(parent, name, device)

    def _leave_below(self) -> None:
        if self._below_fd >= 0:
            os.close(self._below_fd)
        self._below, self._below_fd = b"", -1

    def _leave_above(self) -> None:
        if self._above_fd >= 0:
            os.close(self._above_fd)
        self._above, self._above_fd = b"", -1
