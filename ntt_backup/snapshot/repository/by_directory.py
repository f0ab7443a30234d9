"""Snapshots are read from a directory of this machine, without a receiver.

The contract is `contract.RepositoryToRead`. Everything that writes goes by the receiver, which is
told what to make durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from ntt_backup.blobdir.open import Misplaced
from ntt_backup.blobdir.syscalls import DIRECTORY, error_line
from ntt_backup.errors import RemoteDenied
from ntt_backup.receiver.snapshot_directory import SnapshotDirectory
from ntt_backup.snapshot.repository.contract import FileMissing, Range, StoredFile
from ntt_backup.wire.dump_messages import read_arrival


class RepositoryByDirectory:
    """See the module. root: the path above `snapshots/`. Raises OSError where there is none."""

    def __init__(self, root: str) -> None:
        self._root = os.open(root, DIRECTORY)
        self._directory = SnapshotDirectory(self._root)
        try:
            self._directory.fd()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._root >= 0:
            self._directory.close()
            os.close(self._root)
            self._root = -1

    def list(self, below: str = "") -> Iterator[StoredFile]:
        of_set, _, version = below.rstrip("/").partition("/")
        try:
            found = [
                StoredFile(name, size, read_arrival(arrived_us))
                for name, size, arrived_us in self._directory.found(of_set, version)
            ]
        except (OSError, Misplaced) as error:
            raise _denied("snapshots cannot be listed", error) from error
        return iter(found)

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return map(self._content, ranges)

    def _content(self, wanted: Range) -> bytes:
        name, start, length = wanted
        try:
            fd = self._directory.open(name)
            found = os.pread(fd, length, start)
            while len(found) < length:
                if not (more := os.pread(fd, length - len(found), start + len(found))):
                    break
                found += more
        except FileNotFoundError:
            raise FileMissing(name) from None
        except (OSError, Misplaced) as error:
            raise _denied("a file of a snapshot cannot be read", error) from error
        return found


def _denied(what: str, error: OSError | Misplaced) -> RemoteDenied:
    detail = error_line(error) if isinstance(error, OSError) else str(error)
    return RemoteDenied(what, detail=detail, hint="look at the target's disk, and who may read it")
