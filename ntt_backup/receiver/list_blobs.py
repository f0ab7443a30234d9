"""LIST: the names below `by-hash`, in order, with their sizes, in constant memory.

There may be tens of millions, so nothing is gathered: one directory `aa/bb` is read and sorted at a
time, and since both levels are walked in order, all the names come in order. What is no blob is
counted, and named up to a bound; a link is not followed.

A generator of frames: the receiver takes the next one when the last has gone out, so a client that
reads slowly holds up the walk and fills no memory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from ntt_backup.blobdir.syscalls import open_beneath
from ntt_backup.receiver.workspace import Ground
from ntt_backup.wire import read_messages

if TYPE_CHECKING:
    Entry = os.DirEntry[str]

# Kinds of strays, in the order of `asking.STRAY`.
NOT_A_BLOBID, WRONG_DIRECTORY, SYMLINK, NOT_A_FILE, UNREADABLE_DIRECTORY = range(5)

_PAIR = re.compile(r"[0-9a-f]{2}")
_BLOBID = re.compile(r"[0-9a-f]{64}")
_ALIVE_EVERY = 256


class Listing:
    """One LIST. alive is called every now and then while a directory is read."""

    def __init__(
        self, ground: Ground, asked: read_messages.Range, alive: Callable[[], None]
    ) -> None:
        self._ground = ground
        self._low, self._high = asked.low.hex(), asked.high.hex()
        self._most = asked.most
        self._alive = alive
        self._names = 0
        self._bytes = 0
        self._strays = 0
        self._frames: list[bytes] = []  # Strays that were met and not told of yet.
        self._page: list[tuple[bytes, int]] = []

    def frames(self) -> Generator[bytes, None, None]:
        """Everything there is to say, the LISTED at its end included."""
        more = False
        for directory in self._directories():
            if self._most and self._names == self._most:
                more = True
                break
            found = self._blobs(directory)
            room = self._most - self._names if self._most else len(found)
            more = len(found) > room
            for name, size in found[:room]:
                self._page.append((bytes.fromhex(name), size))
                self._names += 1
                self._bytes += size
                if len(self._page) == read_messages.MAX_NAMES:
                    yield from self._told()
            if self._frames:
                yield from self._told()
            if more:
                break
        yield from self._told()
        yield read_messages.listed(
            read_messages.Listed(self._names, self._bytes, self._strays, more)
        )

    def _told(self) -> Iterator[bytes]:
        page, self._page = self._page, []
        strays, self._frames = self._frames, []
        if page:
            yield read_messages.names(page)
        yield from strays

    def _directories(self) -> Iterator[str]:
        for first in self._level("", self._low[:2], self._high[:2]):
            low = self._low[2:4] if first == self._low[:2] else "00"
            high = self._high[2:4] if first == self._high[:2] else "ff"
            for second in self._level(first, low, high):
                yield f"{first}/{second}"

    def _level(self, parent: str, low: str, high: str) -> list[str]:
        """The two-digit directories in parent, sorted; what else is there counts as a stray of
        whoever asks for the first of them.
        """
        found: list[str] = []
        for entry in self._entries(parent):
            if _PAIR.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                if low <= entry.name <= high:
                    found.append(entry.name)
            elif low == "00":
                self._stray(parent, entry)
        return sorted(found)

    def _blobs(self, directory: str) -> list[tuple[str, int]]:
        """The blobs in one directory that were asked for, sorted, with their sizes."""
        found: list[tuple[str, int]] = []
        prefix = directory.replace("/", "")
        low, high = self._low, self._high
        # Else it was told of the strays to whoever asked for the directory's beginning.
        whole = low <= prefix.ljust(64, "0")
        for number, entry in enumerate(self._entries(directory)):
            if number % _ALIVE_EVERY == 0:
                self._alive()
            name = entry.name
            if not _BLOBID.fullmatch(name) or not name.startswith(prefix):
                if whole:
                    self._stray(directory, entry)
            elif low <= name <= high:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # It was moved or removed since the directory was read.
                if stat.S_ISREG(status.st_mode):
                    found.append((name, status.st_size))
                else:
                    self._stray(directory, entry)
        return sorted(found)

    def _entries(self, path: str) -> Iterator[Entry]:
        ground = self._ground
        try:
            if path:
                fd = open_beneath(ground.by_hash, path, ground.device)
            else:
                fd = os.open(
                    ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=ground.by_hash
                )
        except FileNotFoundError:
            return
        except OSError:
            self._count(UNREADABLE_DIRECTORY, path)
            return
        try:
            with os.scandir(fd) as entries:
                yield from entries
        except OSError:
            self._count(UNREADABLE_DIRECTORY, path)
        finally:
            os.close(fd)

    def _stray(self, parent: str, entry: Entry) -> None:
        if entry.is_symlink():
            kind = SYMLINK
        elif not entry.is_file(follow_symlinks=False):
            kind = NOT_A_FILE
        elif _BLOBID.fullmatch(entry.name):
            kind = WRONG_DIRECTORY
        else:
            kind = NOT_A_BLOBID
        self._count(kind, f"{parent}/{entry.name}" if parent else entry.name)

    def _count(self, kind: int, path: str) -> None:
        self._strays += 1
        if self._strays <= read_messages.MAX_STRAYS or kind == UNREADABLE_DIRECTORY:
            self._frames.append(read_messages.stray(kind, path or "."))
