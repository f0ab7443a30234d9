"""The program b3sum checks staged blobs against their names, where Python has no BLAKE3.

A process a blob would be too much, so a batch is checked as a whole once it is committed, before it
is synced and published: a thousand files a process, read from the stage. Blobs that are wrong leave
the stage.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from itertools import islice

from ntt_backup.receiver.b3sum import B3sum, by_descriptor
from ntt_backup.receiver.staged_batch import Entry, StagedBatch
from ntt_backup.wire.messages import MISMATCH

# 80 bytes each: far below what any system takes as arguments.
_FILES = 1000


class NameCheck:
    """Checks the names of staged blobs. stage: the descriptor of the session's stage. alive is
    called now and then.
    """

    def __init__(self, b3sum: B3sum, stage: int, alive: Callable[[], None]) -> None:
        self._b3sum = b3sum
        self._stage = stage
        self._alive = alive

    def check(self, batch: StagedBatch) -> None:
        """Removes from the batch what does not hash to its name. Raises OSError."""
        staged = self._staged(batch)
        wrong = False
        while some := dict(islice(staged, _FILES)):
            fds = [entry.partial.fd for entry in some.values() if entry.partial is not None]
            expected = {name: entry.digest for name, entry in some.items()}
            found = self._b3sum.digests(expected, batch.bytes, self._alive, self._stage, fds)
            for name, entry in some.items():
                if name not in found:
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "b3sum reads no blob")
                if found[name] != entry.digest:
                    batch.except_for(entry.position, MISMATCH, "")
                    batch.drop(entry.position, self._stage, name.encode())
                    wrong = True
        if wrong:
            for parent in batch.parents:
                kept = [each for each in parent.directories if not self._removed(each.name)]
                parent.directories[:] = kept
            batch.parents[:] = [each for each in batch.parents if not self._removed(each.name)]

    def _staged(self, batch: StagedBatch) -> Iterator[tuple[str, Entry]]:
        """Yields what is staged, each entry with its name for the program."""
        for entry in batch.entries(self._stage):
            partial = entry.partial
            yield entry.name.decode() if partial is None else by_descriptor(partial.fd), entry
        for parent in batch.parents:
            for directory in parent.directories:
                for entry in batch.entries_in(directory, self._stage):
                    yield f"{directory.name}/{entry.name.decode()}", entry

    def _removed(self, directory: str) -> bool:
        """Removes the directory if nothing is left in it, and returns whether it did."""
        with contextlib.suppress(OSError):
            os.rmdir(directory, dir_fd=self._stage)
            return True
        return False
