"""Walks a blob directory in order, in constant memory, and names whatever in it is no blob.

The subdirectories of one `aa` are the most that is held at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.descriptors import closing
from ntt_backup.blobdir.layout import BlobDirectory, is_blobid

if TYPE_CHECKING:
    Entry = os.DirEntry[str]

_ALIVE_EVERY = 256


class StrayKind(str, Enum):
    """Says why an entry is no blob. Operators read the words; the protocol counts them in this
    order.
    """

    NOT_A_BLOBID = "not-a-blobid"
    WRONG_DIRECTORY = "wrong-directory"
    SYMLINK = "symlink"
    NOT_A_FILE = "not-a-file"
    UNREADABLE = "unreadable"

    __str__ = str.__str__


class Stray(NamedTuple):
    r"""An entry that is no blob. path is relative to the root; what is not UTF-8 shows as \xNN."""

    path: str
    kind: StrayKind
    detail: str = ""


def stray(parent: str, entry: Entry) -> Stray:
    """Returns what is wrong with an entry of the directory parent that is known to be no blob."""
    path = f"{parent}/{entry.name}" if parent else entry.name
    if entry.is_symlink():
        kind = StrayKind.SYMLINK
    elif not entry.is_file(follow_symlinks=False):
        kind = StrayKind.NOT_A_FILE
    elif is_blobid(entry.name):
        kind = StrayKind.WRONG_DIRECTORY
    else:
        kind = StrayKind.NOT_A_BLOBID
    return Stray(os.fsencode(path).decode("utf-8", "backslashreplace"), kind)


class Tree(BlobDirectory):
    """A blob directory that can be walked."""

    def directories(
        self, after: str | None = None, *, first: str = "", last: str = "", below: str = ""
    ) -> Iterator[str | Stray]:
        """Yields every directory of blobs ("aa/bb") from first to last, or after another one, or
        below "aa", in order, and the strays on the way. first, last: digits or directories.
        """
        low = (after or first).replace("/", "")
        high = (last or "f" * self.layout.digits).replace("/", "")

        def wanted(path: str) -> bool:
            digits = path.replace("/", "")
            return low[: len(digits)] <= digits and digits[: len(high)] <= high[: len(digits)]

        level = [below] if below else (yield from _strays_first(self.level("")))
        for path in filter(wanted, level):
            names = [path]
            if len(self.layout.widths) > 1:
                names = yield from _strays_first(self.level(path))
            for name in filter(wanted, names):
                if name != after:
                    yield name

    def level(self, parent: str) -> Iterator[str | Stray]:
        """Yields the directories in "" or "aa" in no order, and the strays among them."""
        is_directory = self.layout.is_directory
        try:
            with closing(self.open_directory(parent)) as fd, os.scandir(fd) as listing:
                for entry in listing:
                    path = f"{parent}/{entry.name}" if parent else entry.name
                    if is_directory(path) and entry.is_dir(follow_symlinks=False):
                        yield path
                    else:
                        yield stray(parent, entry)
        except FileNotFoundError:
            return  # Removed since it was listed.
        except OSError as error:
            yield self.unreadable(parent, error)

    def entries(self, directory: str) -> Iterator[str | Stray]:
        """Yields the blobids in a directory of blobs in no order, and the strays among them."""
        for found in self._files(directory):
            yield found if isinstance(found, Stray) else found[0]

    def sizes(
        self, directory: str, alive: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, int] | Stray]:
        """Yields the strays in a directory of blobs, then its blobids in order, with their sizes.

        alive is called now and then.
        """
        sized: list[tuple[str, int]] = []
        damaged = False
        for number, found in enumerate(self._files(directory)):
            if number % _ALIVE_EVERY == 0:
                alive()
            if isinstance(found, Stray):
                yield found
                continue
            blobid, entry = found
            try:
                sized.append((blobid, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue  # It was moved or removed since the directory was read.
            except OSError as problem:
                if not damaged:
                    yield self.unreadable(directory, problem)
                damaged = True
        sized.sort()
        yield from sized

    def _files(self, directory: str) -> Iterator[tuple[str, Entry] | Stray]:
        """Yields what `entries` does, each blobid with its entry, which is good until the next."""
        prefix = directory.replace("/", "")
        before = prefix if self.layout.file_at else ""
        try:
            with closing(self.open_directory(directory)) as fd, os.scandir(fd) as listing:
                for entry in listing:
                    blobid = before + entry.name
                    if (
                        is_blobid(blobid)
                        and blobid.startswith(prefix)
                        and entry.is_file(follow_symlinks=False)
                    ):
                        yield blobid, entry
                    else:
                        yield stray(directory, entry)
        except FileNotFoundError:
            return
        except OSError as error:
            yield self.unreadable(directory, error)

    def unreadable(self, path: str, error: OSError) -> Stray:
        """Returns the stray for a directory that cannot be read."""
        return Stray(path or ".", StrayKind.UNREADABLE, error.strerror or str(error))


def _strays_first(level: Iterator[str | Stray]) -> Generator[Stray, None, list[str]]:
    """Yields the strays as they come; returns the rest, sorted."""
    found: list[str] = []
    for entry in level:
        if isinstance(entry, Stray):
            yield entry
        else:
            found.append(entry)
    return sorted(found)
