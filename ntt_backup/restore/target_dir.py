"""The target directory of a restore is locked, and has scratch space in which nothing counts yet.

Content goes into that space below the target; what is complete and right is published from there.
Parts of large blobs are kept in `.ntt-restore/partial`, also when the program is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.open import Misplaced, make_directory, names_in, open_below
from ntt_backup.blobdir.partial import PARTIAL
from ntt_backup.blobdir.staging import remove_tree
from ntt_backup.blobdir.syscalls import can_syncfs
from ntt_backup.errors import DestinationError, LockHeld
from ntt_backup.process.durable import sync_below

SCRATCH: Final = ".ntt-restore"


class RestoreTarget:
    """The target, made if only its last part is missing, and locked against a second restore.
    Raises DestinationError, LockHeld.

    began_ns: the time of the file system at which it was opened.

    turn: the lock that a thread holds while it makes or names many small files. Threads that do so
    at once wake each other a few times for each file, which takes longer than the file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.turn = threading.Lock()
        with destination(root):
            self._made = not root.is_dir()
            if self._made:
                root.mkdir(0o755)
            self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.device = os.fstat(self.fd).st_dev
            make_directory(self.fd, SCRATCH, 0o700)
            self._scratch = open_below(self.fd, SCRATCH)
            try:
                fcntl.flock(self._scratch, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld.restoring(root) from None
            os.utime(self._scratch)
            self.began_ns = os.fstat(self._scratch).st_ctime_ns
            make_directory(self._scratch, PARTIAL, 0o700)
            self.partial = open_below(self._scratch, PARTIAL)
            self._empty_scratch()
        # Whose part each large blob is that comes now: a list may name one twice.
        self.parts: dict[bytes, object] = {}

    def stage(self, name: str) -> int:
        """Returns an empty directory for one thread's files, for the caller to close."""
        with destination(self.root):
            os.mkdir(name, 0o700, dir_fd=self._scratch)
            return open_below(self._scratch, name)

    def sync(self, stage: int) -> None:
        """Makes the files of one thread durable, before they are published. stage: the descriptor
        that the caller has held since before it wrote, and that nobody else syncs by.
        """
        with destination(self.root):
            sync_below(stage)

    def sync_large(self, blob: int) -> None:
        """Makes a file that is not in a stage durable, where the sync of a stage does not."""
        with destination(self.root):
            if not can_syncfs(self.device):
                os.fsync(blob)

    def sync_names(self) -> None:
        """Makes all that was published durable."""
        with destination(self.root):
            sync_below(self.fd, files=False)

    def close(self) -> None:
        """Leaves nothing but published blobs, and what can be resumed of large ones."""
        with suppress(OSError):
            self._empty_scratch()
            os.rmdir(PARTIAL, dir_fd=self._scratch)
            os.rmdir(SCRATCH, dir_fd=self.fd)
            if self._made:
                self.root.rmdir()  # Where nothing came, it is empty.
        for fd in (self.partial, self._scratch, self.fd):
            os.close(fd)

    def _empty_scratch(self) -> None:
        for name in names_in(self._scratch):
            if name != PARTIAL:
                remove_tree(self._scratch, name)


@contextmanager
def destination(path: Path) -> Iterator[None]:
    """Raises DestinationError for what the system says about the target."""
    try:
        yield
    except Misplaced as error:
        raise DestinationError.at(path, OSError(errno.ELOOP, str(error))) from error
    except OSError as error:
        raise DestinationError.at(path, error) from error
