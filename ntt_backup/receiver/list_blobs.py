"""LIST gives the names below `by-hash`, in order, with their sizes, in constant memory.

There may be tens of millions, so one directory `aa/bb` is read and sorted at a time. What is no
blob is counted, and named up to a bound.

A generator of frames: the receiver takes the next one when the last has gone out, so a client that
reads slowly holds up the walk and fills no memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

from ntt_backup.blobdir.layout import Stray, StrayKind
from ntt_backup.blobdir.walk import Tree
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire import messages

_KINDS = tuple(StrayKind)
_ALIVE_EVERY = 256


class Listing:
    """One LIST. alive is called every now and then while a directory is read."""

    def __init__(
        self, workspace: Workspace, asked: messages.Range, alive: Callable[[], None]
    ) -> None:
        self._tree = Tree(workspace.by_hash, workspace.device)
        self._low, self._high = asked.low.hex(), asked.high.hex()
        self._most = asked.most
        self._alive = alive
        self._strays = 0

    def frames(self) -> Generator[bytes, None, None]:
        """Yields the whole answer, the LISTED at its end included."""
        count = size = 0
        more = False
        page: list[tuple[bytes, int]] = []
        try:
            for found in self._found():
                if self._most and count == self._most:
                    more = True
                    break
                if isinstance(found, Stray):
                    yield from self._told(found)
                    continue
                page.append(found)
                count += 1
                size += found[1]
                if len(page) == messages.MAX_NAMES:
                    yield messages.NAMES.frame(page)
                    page = []
        finally:
            self._tree.close()
        if page:
            yield messages.NAMES.frame(page)
        yield messages.LISTED.frame(count, size, self._strays, more)

    def _found(self) -> Iterator[tuple[bytes, int] | Stray]:
        """Yields the blobs from low to high in order, each with its size, and the strays."""
        first, last = (f"{end[:2]}/{end[2:4]}" for end in (self._low, self._high))
        for directory in self._tree.directories(first=first, last=last):
            if isinstance(directory, Stray):
                yield directory
                continue
            names: list[str] = []
            for number, entry in enumerate(self._tree.entries(directory)):
                if number % _ALIVE_EVERY == 0:
                    self._alive()
                if isinstance(entry, Stray):
                    yield entry
                elif self._low <= entry <= self._high:
                    names.append(entry)
            fd = self._tree.directory(directory) if names else -1  # It is still kept open.
            damaged = False
            for name in sorted(names):
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # It was moved or removed since the directory was read.
                except OSError as problem:
                    if not damaged:
                        yield self._tree.unreadable(directory, problem)
                    damaged = True
                    continue
                yield bytes.fromhex(name), status.st_size

    def _told(self, stray: Stray) -> Iterator[bytes]:
        """Yields the frame for a stray, unless its directory began in the page before, or too many
        were told. Of directories that cannot be read the client must hear in any case.
        """
        is_directory = stray.kind is StrayKind.UNREADABLE
        parent = stray.path.rpartition("/")[0].replace("/", "")
        if not is_directory and parent.ljust(len(self._low), "0") < self._low:
            return
        self._strays += 1
        if is_directory or self._strays <= messages.MAX_STRAYS:
            yield messages.STRAY.frame(_KINDS.index(stray.kind), stray.path)
