"""The files of an area are read from a directory of this machine, without a receiver.

The contract is `contract.ReadableStore`. Whatever writes goes by the receiver, which is told what
to make durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from threading import Lock
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.descriptors import DIRECTORY, Misplaced, closing, error_line, forget
from ntt_backup.blobdir.layout import find_marker
from ntt_backup.errors import RemoteDenied
from ntt_backup.filestore.contract import (
    Area,
    FileMissing,
    FileUnreadable,
    Hash,
    Range,
    StoredFile,
    checksum,
)
from ntt_backup.receiver.file_areas import AREAS
from ntt_backup.wire.stored_names import read_arrival, require_below

_PIECE: Final = 1 << 20


class FileStoreByDirectory:
    """See the module. root: the path above the directory of the area. Raises OSError where there is
    none.
    """

    hashes = True

    def __init__(self, root: str, area: Area) -> None:
        self._area = area
        self._lock = Lock()
        self._root = os.open(root, DIRECTORY)
        self._files = AREAS[area.name](self._root)
        try:
            _ = self._files.base
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> str:
        """The identity of the target, see `layout.find_marker`."""
        return find_marker(self._root).identity

    def close(self) -> None:
        if self._root >= 0:
            self._files.close()
            os.close(self._root)
            self._root = -1

    def list(self, below: str = "") -> Iterator[StoredFile]:
        require_below(self._area.name, below)
        try:
            found = [
                StoredFile(name, size, read_arrival(arrived_us))
                for name, size, arrived_us in self._files.found(below)
            ]
        except (OSError, Misplaced) as error:
            raise _denied(RemoteDenied, f"{self._area.files} cannot be listed", error) from error
        return iter(found)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return (self.fetch(*one) for one in ranges)

    def stat(self, name: str) -> StoredFile | None:
        return next(self.list(self._area.require_name(name)), None)

    def fetch(self, name: str, start: int, length: int) -> bytes:
        with self._opened(name) as fd:
            found = os.pread(fd, length, start)
            while len(found) < length:
                if not (more := os.pread(fd, length - len(found), start + len(found))):
                    break
                found += more
            return found

    def prove(self, name: str, by: Hash = "sha256") -> str:
        digest, size = sha256() if by == "sha256" else blake3(), 0
        with self._opened(name) as fd:
            forget(fd)  # This process may have read it before.
            while data := os.pread(fd, _PIECE, size):
                digest.update(data)
                size += len(data)
            forget(fd)
        return checksum(digest.digest())

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Gives a descriptor of a file for as long as another thread may close the file."""
        try:
            with self._lock:
                fd = os.dup(self._files.open(self._area.require_name(name)))
            with closing(fd):
                yield fd
        except FileNotFoundError:
            raise FileMissing(name) from None
        except (OSError, Misplaced) as error:
            raise _denied(FileUnreadable, f"{self._area.file} cannot be read", error) from error


def _denied(kind: type[RemoteDenied], what: str, error: OSError | Misplaced) -> RemoteDenied:
    detail = error_line(error) if isinstance(error, OSError) else str(error)
    return kind(what, detail=detail, hint="look at the target's disk, and who may read it")
