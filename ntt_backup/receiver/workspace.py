"""The workspace of a session that reads: the root and `by-hash`, by descriptor.

Both are opened once, and all below them is reached through these descriptors: no path is resolved
again, so nothing that is swapped meanwhile leads elsewhere.
"""

from __future__ import annotations

import os

from ntt_backup.blobdir.layout import BY_HASH
from ntt_backup.blobdir.open import Misplaced, open_below
from ntt_backup.blobdir.syscalls import words


class Refusal(Exception):
    """The session cannot begin, or go on. code and text are what the client is told."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def gone(name: str = BY_HASH) -> Refusal:
    """Returns the refusal for a directory that is missing, or has gone away."""
    return Refusal("gone", f"{name} is gone: is its disk mounted?")


class Workspace:
    """The root and `by-hash`. A disk that is read-only, or mounted at `by-hash` itself, will do.

    placed: by-hash exists; a client may look around without it. device: the file system on which
    blobs are looked for. Raises Refusal.
    """

    superseded = False

    def __init__(self, root: str) -> None:
        try:
            self._path = root.encode("utf-8", "surrogateescape")
            self.root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as problem:
            said = words(problem) if isinstance(problem, OSError) else str(problem)
            raise Refusal("root", said) from None
        self.placed = True
        try:
            self.by_hash = open_below(self.root, BY_HASH)
        except FileNotFoundError:
            self.placed = False
            self.by_hash = os.dup(self.root)
        except (OSError, Misplaced) as problem:
            raise refusal(problem, BY_HASH) from None
        self.device = os.fstat(self.by_hash).st_dev

    def free(self) -> tuple[int, int]:
        """Returns (free, total) bytes, as this account may use them."""
        room = os.statvfs(self.root)
        return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize

    @property
    def in_place(self) -> bool:
        """Whether the open directories still have their names: a disk may have been taken away, or
        another one put over it.
        """
        try:
            root = os.stat(self._path)  # noqa: PTH116 - a name of any bytes
            by_hash = os.stat(BY_HASH, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(root, os.fstat(self.root)) and os.path.samestat(
            by_hash, os.fstat(self.by_hash)
        )

    def leave(self) -> None:
        """Closes both."""
        os.close(self.by_hash)
        os.close(self.root)


def refusal(problem: OSError | Misplaced, name: str) -> Refusal:
    """Returns the refusal for a directory of ours that cannot be opened or made."""
    if isinstance(problem, Misplaced):
        return Refusal("place", str(problem))
    return (
        gone(name) if isinstance(problem, FileNotFoundError) else Refusal("storage", words(problem))
    )
