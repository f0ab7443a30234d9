"""Opens blobs by digest, and says in verdicts of the protocol what is wrong with them."""

from __future__ import annotations

import contextlib
import errno
import os

from ntt_backup.blobdir.open import BlobDirectory, NotAFile
from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire.messages import MISSING, UNREADABLE, WRONG

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)


class BlobError(Exception):
    """A blob that cannot be read, or is none. verdict and text are what the client is told."""

    def __init__(self, verdict: int, text: str) -> None:
        super().__init__(text)
        self.verdict = verdict
        self.text = text


class BlobOpener:
    """The blobs of one session's workspace. Not for several threads at once."""

    def __init__(self, workspace: Workspace) -> None:
        self._blobs = BlobDirectory(workspace.by_hash, workspace.device)
        self.close = self._blobs.close

    def open(self, digest: bytes) -> tuple[int, int]:
        """Returns (a descriptor for the caller to close, its size). Raises BlobError."""
        try:
            fd, status = self._blobs.open_blob(digest.hex())
        except NotAFile as found:
            raise BlobError(WRONG, str(found)) from None
        except OSError as problem:
            raise blob_error(problem) from None
        return fd, status.st_size


def blob_error(problem: OSError) -> BlobError:
    """Returns what an error of the system says about one blob."""
    if problem.errno == errno.ENOENT:
        return BlobError(MISSING, "it is not there")
    if problem.errno in _NOT_A_FILE:
        return BlobError(WRONG, "a symlink or a socket is in its place")
    return BlobError(UNREADABLE, error_line(problem))


def forget(fd: int) -> None:
    """Has the next read come from the disk, and lets no content stay in memory.

    A blob that was written or read lately is in the page cache: hashing it there would prove the
    memory, not the disk, and reading all of a large backup would drive everything else out.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
