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


def check_names(b3sum: B3sum, batch: StagedBatch, stage: int, alive: Callable[[], None]) -> None:
    """Removes from a batch the blobs that do not hash to their names. Raises OSError.

    Args:
        b3sum: The program.
        batch: A batch that is complete in the stage.
        stage: The descriptor of the session's stage.
        alive: Called now and then.
    """
    staged = _staged(batch, stage)
    wrong = False
    while some := dict(islice(staged, _FILES)):
        fds = [entry.partial.fd for entry in some.values() if entry.partial is not None]
        expected = {name: entry.digest for name, entry in some.items()}
        found = b3sum.digests(expected, batch.bytes, alive, stage, fds)
        for name, entry in some.items():
            if name not in found:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "b3sum reads no blob")
            if found[name] != entry.digest:
                batch.except_for(entry.position, MISMATCH, "")
                batch.drop(entry.position, stage, name.encode())
                wrong = True
    if wrong:
        for parent in batch.parents:
            kept = [each for each in parent.directories if not _removed(each.name, stage)]
            parent.directories[:] = kept
        batch.parents[:] = [each for each in batch.parents if not _removed(each.name, stage)]


def _staged(batch: StagedBatch, stage: int) -> Iterator[tuple[str, Entry]]:
    """Yields what is staged, each entry with its name for the program."""
    for entry in batch.entries(stage):
        partial = entry.partial
        yield entry.name.decode() if partial is None else by_descriptor(partial.fd), entry
    for parent in batch.parents:
        for directory in parent.directories:
            for entry in batch.entries_in(directory, stage):
                yield f"{directory.name}/{entry.name.decode()}", entry


def _removed(directory: str, stage: int) -> bool:
    """Removes a directory of the stage if it is empty, and returns whether it was."""
    with contextlib.suppress(OSError):
        os.rmdir(directory, dir_fd=stage)
        return True
    return False
