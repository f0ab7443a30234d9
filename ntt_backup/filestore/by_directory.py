"""The files of an area are read from a directory of this machine, without a receiver.

The contract is `contract.ReadableStore`. Whatever writes goes by the receiver, which is told what
to make durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ntt_backup.blobdir.open import Misplaced
from ntt_backup.blobdir.syscalls import DIRECTORY, error_line
from ntt_backup.errors import RemoteDenied
from ntt_backup.filestore.contract import Area, FileMissing, FileUnreadable, Range, StoredFile
from ntt_backup.receiver.file_areas import AREAS
from ntt_backup.wire.stored_names import read_arrival, require_below


class FileStoreByDirectory:
    """See the module. root: the path above the directory of the area. Raises OSError where there is
    none.
    """

    def __init__(self, root: str, area: Area) -> None:
        self._area = area
        self._root = os.open(root, DIRECTORY)
        self._files = AREAS[area.name](self._root)
        try:
            self._files.fd()
        except BaseException:
            self.close()
            raise

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
        return map(self._content, ranges)

    def _content(self, wanted: Range) -> bytes:
        name, start, length = wanted
        try:
            fd = self._files.open(self._area.require_name(name))
            found = os.pread(fd, length, start)
            while len(found) < length:
                if not (more := os.pread(fd, length - len(found), start + len(found))):
                    break
                found += more
        except FileNotFoundError:
            raise FileMissing(name) from None
        except (OSError, Misplaced) as error:
            raise _denied(FileUnreadable, f"{self._area.file} cannot be read", error) from error
        return found


def _denied(kind: type[RemoteDenied], what: str, error: OSError | Misplaced) -> RemoteDenied:
    detail = error_line(error) if isinstance(error, OSError) else str(error)
    return kind(what, detail=detail, hint="look at the target's disk, and who may read it")
