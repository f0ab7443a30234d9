"""Reads blobs for sending: content and its check in one go.

The bytes that are sent are the very bytes whose BLAKE3 was compared with the name. The good case is
kept short: open, read, close, hash. Only when something is odd does `Store.examine` find the words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from ntt_backup.blobdir.layout import relative_path
from ntt_backup.model import Blob, Failure, Reason
from ntt_backup.source.inspection import Store


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A blob that does not fit the buffer, with its true size in bytes: see `Reader.opened`."""

    blob: Blob


class Reader:
    """Reads the blobs of one batch, in any order. Not for several threads at once.

    Raises SourceError when the store is to blame.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tree = store.tree()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tree.__exit__()

    def read(self, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        """Reads the whole blob; returns its length, once its content is known to be right.

        into must be longer than the blob: one that fills it is TooLarge.
        """
        try:
            fd = self._tree.open(relative_path(blob.blobid))
        except (ValueError, OSError):
            return self._explain(blob, into)
        try:
            count = os.readv(fd, (into,))
        except OSError:
            return self._explain(blob, into)
        finally:
            os.close(fd)
        if count < len(into) and _is_right(blob, into[:count]):
            return count
        return self._explain(blob, into)

    def _explain(self, blob: Blob, into: memoryview) -> int | TooLarge | Failure:
        """Returns what is odd about a blob. One that is right, but came in parts, is read."""
        examined = self._store.examine(self._tree, blob, verify=False)
        if isinstance(examined, Failure):
            return examined
        sized = examined[0]
        if sized.size is None or sized.size >= len(into):
            return TooLarge(sized)
        count = 0
        try:
            with self.opened(sized) as fd:
                while piece := os.readv(fd, (into[count:],)):
                    count += piece
        except OSError as error:
            return self.failure(blob, error)
        if count < len(into) and _is_right(sized, into[:count]):
            return count
        found = blake3(into[:count]).hexdigest()
        return Failure(blob.blobid, Reason.CORRUPT_SOURCE, f"its content hashes to {found}")

    @contextmanager
    def opened(self, blob: Blob) -> Iterator[int]:
        """Gives a descriptor of the blob. Raises OSError."""
        fd = self._tree.open(relative_path(blob.blobid))
        try:
            yield fd
        finally:
            os.close(fd)

    def failure(self, blob: Blob, error: OSError) -> Failure:
        """Returns what an error while a blob was read says about it. Raises SourceError."""
        return self._store.failure(self._tree, blob, error)

    def require_life(self, failed: list[Failure], *, nothing_sent: bool) -> None:
        """Raises SourceError if the store may be to blame: see `Store.require_life`."""
        self._store.require_life(self._tree, failed, nothing_ready=nothing_sent)


def _is_right(blob: Blob, content: memoryview) -> bool:
    if blob.size is not None and blob.size != len(content):
        return False
    return blake3(content).digest() == bytes.fromhex(blob.blobid)
