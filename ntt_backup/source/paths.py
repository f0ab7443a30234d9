"""The paths of files that go by their paths are checked, and looked up by the blobs.

A path comes from another program or from the catalog, and is bytes. It is checked before each use:
it must lead to a place below the root of the store.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ntt_backup.model import MOST_PATH_BYTES

# A path is opened by one nested call for each level.
MOST_LEVELS: Final = 128
_BAD_PARTS: Final = frozenset({b"", b".", b".."})


def checked_path(path: bytes, root: Path) -> str:
    """Returns a path below the root, as the functions of the store take it.

    Args:
        path: The path, relative to the root or below it.
        root: The root of the store.

    Raises:
        ValueError: The path leads out of the root, or is none. The error says why, in one line.
    """
    within = path
    if path[:1] == b"/":
        within = path.removeprefix(os.path.join(os.fsencode(root), b""))
        if within[:1] == b"/":
            raise ValueError("it is not below source.root")
    parts = within.split(b"/")
    if len(path) > MOST_PATH_BYTES or len(parts) > MOST_LEVELS:
        raise ValueError("it is too long")
    if b"\0" in within or not _BAD_PARTS.isdisjoint(parts):
        raise ValueError("an empty part, . or .., or a NUL is in it")
    return os.fsdecode(within)


class Paths:
    """The paths of blobs in a store whose files go by their paths.

    Args:
        look_up: Returns the paths of each of some blobs; None where `know` is told all that is
            needed.
    """

    def __init__(
        self, look_up: Callable[[Sequence[str]], Mapping[str, list[bytes]]] | None = None
    ) -> None:
        self._look_up = look_up
        self._known: dict[str, list[bytes]] = {}

    def know(self, found: Mapping[str, list[bytes]]) -> None:
        """Adds the paths of blobs that are read next."""
        self._known.update(found)

    def found_for(self, blobids: Sequence[str]) -> Paths:
        """Returns the paths of some blobs, looked up at once; these, where `know` is told all."""
        if self._look_up is None:
            return self
        found = Paths()
        found.know(self._look_up(blobids))
        return found

    def forget(self, blobids: Iterable[str]) -> None:
        """Removes the paths of blobs that are not read any more."""
        for blobid in blobids:
            self._known.pop(blobid, None)

    def of(self, blobid: str, root: Path) -> str:
        """Returns the path below the root of the store where a blob lies.

        The catalog may have any path there: others may write to it.

        Raises:
            FileNotFoundError: No path is known, or it is none below the root.
        """
        if blobid not in self._known and self._look_up is not None:
            self.know(self._look_up([blobid]))
        if not (paths := self._known.get(blobid)):
            text = "no file of the store is known to have this content"
            raise FileNotFoundError(errno.ENOENT, text, blobid)
        try:
            return checked_path(paths[0], root)
        except ValueError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), os.fsdecode(paths[0])) from error

    def drop_first(self, blobid: str) -> bool:
        """Removes the first path of a blob, if there is another one; returns whether there is."""
        paths = self._known.get(blobid, [])
        if len(paths) > 1:
            del paths[0]
            return True
        return False
