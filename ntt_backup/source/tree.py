"""The local store as a blob directory, which tells of a store that is away by SourceError."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Self

from ntt_backup.blobdir.layout import Stray, StrayKind, is_prefix, relative_path
from ntt_backup.blobdir.open import open_untouched
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.blobdir.walk import Tree
from ntt_backup.errors import SourceError
from ntt_backup.format import many

KEPT_DIRECTORIES: Final = 128
_SAMPLED_PREFIXES: Final = 32
_SAMPLED_BLOBS: Final = 8
# Errors for a file system that is away, and for a process or a machine that has run dry.
_ABOUT_THE_STORE: Final = {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENODEV,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


class SourceTree(Tree):
    """The opened root of the store. Only the root itself may be a symlink; a prefix that is on
    another disk is a bind mount.

    Every method may raise SourceError: when the file system as a whole is away, or this process has
    no descriptors or memory left.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            fd = open_untouched(str(root), DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as error:
            raise self._unusable(error) from error
        super().__init__(fd, kept=KEPT_DIRECTORIES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        os.close(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the root: they tell whether a path still leads to it."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def error_at(self, path: str, error: OSError) -> Exception:
        self.blame(error)
        return super().error_at(path, error)

    def unreadable(self, path: str, error: OSError) -> Stray:
        if not path:
            raise self._unusable(error) from error
        self.blame(error)
        return super().unreadable(path, error)

    def blame(self, error: OSError) -> None:
        """Raises SourceError for an error that is about the store, not about one entry."""
        if error.errno in _ABOUT_THE_STORE:
            raise self._unusable(error) from error

    def sign_of_life(self) -> str:
        """Looks at some blobs: one must be readable, or at least none refused. Returns a few words
        on the store. Raises SourceError.
        """
        prefixes: list[str] = []
        refused = linked = ""
        for found in self.level(""):
            if isinstance(found, str):
                prefixes.append(found)
            elif found.kind is StrayKind.SYMLINK and is_prefix(found.path):
                linked = "its prefix directories are symbolic links, which are not followed"
        seen = many(len(prefixes), "prefix directory", "prefix directories")
        for prefix in prefixes[:: len(prefixes) // _SAMPLED_PREFIXES + 1]:
            for refusal in islice(self._refusals(prefix), _SAMPLED_BLOBS):
                if not refusal:
                    return seen
                refused = refusal
        if not prefixes:
            refused = linked
        if refused:
            raise SourceError(
                f"nothing in the store {self.root} can be read",
                detail=refused,
                hint=f"let uid {os.geteuid()} read it; put prefixes on other disks by bind mounts",
            )
        if not prefixes:
            raise SourceError(
                f"the store {self.root} is empty",
                detail="no directory there has two hex digits for a name",
                hint="mount its disk, or mend source.root; for a store that is really new make its"
                " 00/",
            )
        return seen

    def _refusals(self, prefix: str) -> Iterator[str]:
        """Yields why a blob below "aa", or a directory, cannot be read; nothing where it can."""
        for directory in self.level(prefix):
            entries: Iterable[str | Stray]
            entries = [directory] if isinstance(directory, Stray) else self.entries(directory)
            for entry in entries:
                if isinstance(entry, str):
                    yield self._refusal(entry)
                elif entry.kind is StrayKind.UNREADABLE:
                    yield entry.detail

    def _refusal(self, blobid: str) -> str:
        try:
            fd = self.open(relative_path(blobid))
            try:
                os.read(fd, 1)
            finally:
                os.close(fd)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _unusable(self, error: OSError) -> SourceError:
        hints = {
            errno.ENOENT: "mend source.root, or mount the disk that holds it",
            errno.ENOTDIR: "source.root is the directory that holds aa/bb/<blobid>",
            errno.EACCES: f"let uid {os.geteuid()} read it, or run as a user that can",
            errno.EMFILE: "raise the limit on open files (LimitNOFILE= in the unit, or ulimit -n)",
            errno.ENFILE: "raise the machine's limit on open files (sysctl fs.file-max)",
            errno.ENOMEM: "the machine has no memory left: use fewer workers, or end other"
            " programs",
        }
        return SourceError(
            f"cannot read the store {self.root}",
            detail=error.strerror or str(error),
            hint=hints.get(error.errno or 0, "look at its disk or mount, then start again"),
        )
