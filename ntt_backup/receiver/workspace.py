"""The workspace of a session that reads has the root and `by-hash`, by descriptor.

Both are opened once, and all below them is reached through these descriptors: no path is resolved
again, so nothing that is swapped meanwhile leads elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ntt_backup.blobdir.descriptors import Misplaced, error_line, names_in, open_below
from ntt_backup.blobdir.layout import BY_HASH, find_marker
from ntt_backup.wire.framing import FORMAT


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

    def __init__(self, root: str) -> None:
        try:
            self._path = root.encode("utf-8", "surrogateescape")
            self.root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as problem:
            said = error_line(problem) if isinstance(problem, OSError) else str(problem)
            raise Refusal("root", said) from None
        with refused(BY_HASH):
            try:
                self.by_hash = open_below(self.root, BY_HASH)
                self.placed = True
            except FileNotFoundError:
                self.by_hash = os.dup(self.root)
                self.placed = False
        self.device = os.fstat(self.by_hash).st_dev

    @property
    def superseded(self) -> bool:
        """Whether a newer session has asked this one to end; never for one that reads."""
        return False

    def free(self) -> tuple[int, int]:
        """Returns (free, total) bytes, as this account may use them."""
        room = os.statvfs(self.root)
        return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize

    def free_inodes(self) -> int:
        """Returns how many more files fit; -1 where the file system has no fixed number of them."""
        room = os.statvfs(self.root)
        return room.f_favail if room.f_files else -1

    @property
    def has_packs(self) -> bool:
        """Whether the marker of the layout `packs` is in the root."""
        try:
            os.stat(FORMAT, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return True

    @property
    def identity(self) -> str:
        """The identity of the target, see `layout.find_marker`."""
        return find_marker(self.root).identity

    @property
    def hash_of_names(self) -> str:
        """The hash of names, as the marker says; "" without one."""
        return find_marker(self.root).hash

    @property
    def empty(self) -> bool:
        """Whether there is nothing in `by-hash`, or no such directory."""
        try:
            return not (self.placed and names_in(self.by_hash))
        except OSError:
            return False

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


@contextmanager
def refused(name: str, code: str = "storage") -> Iterator[None]:
    """Raises Refusal where a directory of ours, or what is in it, cannot be opened or made. code:
    of an error of the system.
    """
    try:
        yield
    except Misplaced as problem:
        raise Refusal("place", str(problem)) from None
    except FileNotFoundError:
        raise gone(name) from None
    except OSError as problem:
        raise Refusal(code, error_line(problem)) from None
