"""The source store is inspected before a batch is sent, and never changed.

A blob that cannot be read may be lost, or its disk not be mounted; to fail it in the second case
would mark millions failed in an hour. So where nothing of a batch could be read, some other blob
must be readable, or the store as a whole counts as away: a `SourceError`, and no blob fails. The
root is opened by path anew for every batch: a disk that came back is seen, and an idle daemon keeps
no disk busy.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.errors import SourceError
from ntt_backup.model import Blob, Failure
from ntt_backup.source.tree import SourceTree, Stamp, stamp


@dataclass(frozen=True, slots=True)
class Inspection:
    """A batch's blobs, each in one of two lists, in order. Ready ones carry their true size.
    stamps: the state in which each ready one was seen.
    """

    ready: list[Blob]
    failed: list[Failure]
    stamps: list[Stamp]


class Store:
    """The directory that holds `aa/bb/<blobid>`. It need not exist yet. alive is called now and
    then while blobs are looked at and hashed.
    """

    def __init__(self, root: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.root = root
        self._alive = alive

    def tree(self) -> SourceTree:
        """Opens the root as the path leads to it now. Raises SourceError."""
        return SourceTree(self.root, self._alive)

    def probe(self) -> str:
        """Returns a few words on the store. Raises SourceError where no blob could be read."""
        with self.tree() as tree:
            return tree.sign_of_life()

    def measure(self, blobs: Sequence[Blob]) -> list[Blob]:
        """Returns the same blobs with the sizes that the catalog does not know, None where none can
        be found out. Never raises.
        """
        if all(blob.size is not None for blob in blobs):
            return list(blobs)
        try:
            with self.tree() as tree:
                return [
                    Blob(blob.blobid, _state(tree, blob)[0]) if blob.size is None else blob
                    for blob in self._alive_for(blobs)
                ]
        except SourceError:
            return list(blobs)

    def inspect(self, blobs: Sequence[Blob], *, verify: bool) -> Inspection:
        """Returns which blobs can be sent. verify: also hashes their content. Raises SourceError
        when the store is to blame; then nothing is known of any blob.
        """
        ready: list[Blob] = []
        failed: list[Failure] = []
        stamps: list[Stamp] = []
        with self.tree() as tree:
            for blob in self._alive_for(blobs):
                outcome = tree.examine(blob, verify=verify)
                if isinstance(outcome, Failure):
                    failed.append(outcome)
                else:
                    ready.append(outcome[0])
                    stamps.append(outcome[1])
            tree.require_life(failed, nothing_sent=not ready)
        return Inspection(ready, failed, stamps)

    def altered(self, inspection: Inspection) -> list[Blob]:
        """Returns the ready blobs that were rewritten, replaced or removed since: where there are
        none, another program that read them has read what was inspected. Raises SourceError.
        """
        seen = zip(self._alive_for(inspection.ready), inspection.stamps, strict=True)
        with self.tree() as tree:
            return [blob for blob, before in seen if _state(tree, blob)[1] != before]

    def _alive_for(self, blobs: Sequence[Blob]) -> Iterator[Blob]:
        """Yields the blobs, and shows life for each: a slow disk may take long for it."""
        for blob in blobs:
            self._alive()
            yield blob


def _state(tree: SourceTree, blob: Blob) -> tuple[int | None, Stamp | None]:
    """Returns size and state of a blob's file, None for what is no file."""
    try:
        status = tree.lstat(relative_path(blob.blobid))
    except (OSError, ValueError):
        return None, None
    return status.st_size if stat.S_ISREG(status.st_mode) else None, stamp(status)
