"""A batch of blobs is staged so that publishing them takes the fewest system calls.

Most senders give blobs in the order of their digests, and a first backup finds hardly any
directory. So where `by-hash` has no `aa/bb`, one is made in the stage, its blobs are written under
their final names, and one rename publishes all of it, with all of `aa` where that is new, too. The
listing that says so may be out of date: publishing finds out, and moves file by file then.

The batch knows which of its files holds which blob, and which blobs went otherwise. A blob takes 32
bytes there: file names follow from a counter or from the digest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from binascii import hexlify
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.descriptors import DIRECTORY, closing, error_line, remove_tree, write_all
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.receiver.large_blob import Partial
from ntt_backup.wire.framing import DIGEST_BYTES
from ntt_backup.wire.messages import MISMATCH, REFUSED, REPLACED, Exceptional

if TYPE_CHECKING:
    from typing import Protocol

    class Hasher(Protocol):
        def digest(self) -> bytes: ...


# These say something about the one name; every other error is about the disk or the account, and
# fails the batch as a whole.
_OF_ONE_NAME = frozenset((errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EPERM, errno.ENXIO))
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Entry(NamedTuple):
    """A staged file: its name in a directory, by descriptor. partial: it can be resumed."""

    digest: bytes
    position: int
    directory: int
    name: bytes
    partial: Partial | None


class NewDirectory:
    """A directory `aa/bb` in the making. name: where it lies in the stage. It holds blobs of the
    batch under their final names, between the positions begin and end.
    """

    __slots__ = ("begin", "end", "name", "prefix")

    def __init__(self, prefix: bytes, name: str, position: int) -> None:
        self.prefix = prefix
        self.name = name
        self.begin = self.end = position


class NewParent(NamedTuple):
    """A directory `aa` in the making: it lies in the stage under a name of its own, and holds new
    directories under their final names.
    """

    prefix: bytes
    name: str
    directories: list[NewDirectory]


class StagedBatch:
    """Blobs between their arrival and their receipt. first: the counter of its first file."""

    def __init__(self, number: int, most_blobs: int, most_bytes: int, first: int) -> None:
        self.number = number
        self.most_blobs = most_blobs
        self.most_bytes = most_bytes
        self.first = first
        self.blobs = 0
        self.bytes = 0
        self.exceptions: list[Exceptional] = []
        self.parents: list[NewParent] = []
        self._digests = bytearray()
        self._loose: set[int] = set()
        self._partials: dict[int, Partial] = {}
        self._missing: set[int] = set()

    def add(self, digests: bytes, size: int) -> None:
        """Adds the next blobs, in order. size: the bytes of all of them together."""
        self._digests += digests
        self.blobs += len(digests) // DIGEST_BYTES
        self.bytes += size

    @property
    def partials(self) -> int:
        """Returns the number of partial files that it holds open."""
        return len(self._partials)

    def add_partial(self, partial: Partial) -> None:
        """Notes that the blob that was added last lies in this partial file, not in the stage."""
        self._partials[self.blobs - 1] = partial

    def except_for(self, position: int, verdict: int, text: str) -> None:
        """Gives a blob that is not staged (any more), or not simply stored, its own verdict."""
        self.exceptions.append(Exceptional(position, verdict, text))
        self._missing.add(position)

    def name(self, position: int) -> bytes:
        """Returns the name of a file of its own in the stage."""
        return b"%d" % (self.first + position)

    def lay(self, position: int) -> bytes:
        """Returns the name for a blob that gets a file of its own, in the stage or partial."""
        self._loose.add(position)
        return self.name(position)

    def begin_parent(self, prefix: bytes, position: int) -> NewParent:
        """Adds a directory `aa`, which must still be made in the stage."""
        parent = NewParent(prefix, f"d{self.first + position}", [])
        self.parents.append(parent)
        return parent

    def entries(self, stage: int) -> Iterator[Entry]:
        """Yields the files of single blobs in order of digest: each directory is opened once."""
        for digest, position in sorted((self._digest(at), at) for at in self._loose):
            if position in self._missing:
                continue
            partial = self._partials.get(position)
            if partial is None:
                yield Entry(digest, position, stage, self.name(position), None)
            else:
                yield Entry(digest, position, partial.directory, partial.name, partial)

    def entries_in(self, directory: NewDirectory, fd: int) -> Iterator[Entry]:
        """Yields the files in that directory, which is open as fd."""
        for position in range(directory.begin, directory.end):
            if position not in self._missing and position not in self._loose:
                digest = self._digest(position)
                yield Entry(digest, position, fd, hexlify(digest), None)

    def take_partial(self, position: int) -> None:
        """Forgets the partial file of this blob, if there is one: it has been published."""
        partial = self._partials.pop(position, None)
        if partial is not None:
            partial.moved()

    def drop(self, position: int, directory: int, name: bytes) -> None:
        """Removes the file of this blob: its partial file, or else the one of that name. Raises
        OSError.
        """
        partial = self._partials.pop(position, None)
        if partial is None:
            os.unlink(name, dir_fd=directory)
        else:
            partial.remove()

    def discard(self, stage: int, keep_partials: bool) -> None:
        """Removes all that is left of it in the stage."""
        for position in self._loose:
            with contextlib.suppress(OSError):
                os.unlink(self.name(position), dir_fd=stage)
        for parent in self.parents:
            remove_tree(stage, parent.name)
        for partial in self._partials.values():
            if keep_partials:
                partial.close()
            else:
                partial.remove()
        self._partials.clear()

    def _digest(self, position: int) -> bytes:
        return bytes(self._digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES])


class StageWriter:
    """Writes what will be published in by_hash into stage; both are descriptors.

    new_hasher: of BLAKE3, to check each blob; None where there is none. by_file: syncs each file.
    """

    def __init__(
        self,
        stage: int,
        by_hash: int,
        new_hasher: Callable[[memoryview], Hasher] | None,
        by_file: bool,
    ) -> None:
        self._stage = stage
        self._missing = _MissingDirectories(stage, by_hash)
        self._new_hasher = new_hasher
        self._by_file = by_file

    def put(
        self,
        batch: StagedBatch,
        position: int,
        raw: memoryview,
        digests: bytes,
        sizes: tuple[int, ...],
        at: int,
    ) -> None:
        """Writes the blobs that lie in raw from `at` on; the first has that position in the batch.
        Raises OSError.
        """
        # The inner loop: nothing is looked up twice.
        open_, write, close, stage = os.open, os.write, os.close, self._stage
        new_hasher, by_file = self._new_hasher, self._by_file
        prefix, place = b"", ""
        new: NewDirectory | None = None
        for index, size in enumerate(sizes):
            content = raw[at : at + size]
            at += size
            digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if new_hasher is not None and new_hasher(content).digest() != digest:
                batch.except_for(position + index, MISMATCH, "")
                continue
            if digest[:2] != prefix:
                prefix = digest[:2]
                new = self._new_directory(batch, prefix, position + index)
                if new is not None:
                    place = new.name + "/"
            fd = -1
            if new is not None:
                try:
                    fd = open_(place + digest.hex(), CREATE, 0o644, dir_fd=stage)
                    new.end = position + index + 1
                except FileExistsError:
                    pass  # The same blob twice: the second will be found present.
            if fd < 0:
                fd = open_(batch.lay(position + index), CREATE, 0o644, dir_fd=stage)
            try:
                if size:
                    written = write(fd, content)
                    if written != size:
                        write_all(fd, content[written:])
                if by_file:
                    os.fsync(fd)
            finally:
                close(fd)

    def _new_directory(
        self, batch: StagedBatch, prefix: bytes, position: int
    ) -> NewDirectory | None:
        """Returns the directory in the stage for blobs of that prefix; None where they go into the
        stage itself. Raises OSError.
        """
        parent: NewParent | None = batch.parents[-1] if batch.parents else None
        if parent is not None and parent.directories[-1].prefix == prefix:
            return parent.directories[-1]
        if not self._missing.take(prefix):
            return None
        if parent is None or parent.prefix != prefix[:1]:
            parent = batch.begin_parent(prefix[:1], position)
            try:
                os.mkdir(parent.name, 0o755, dir_fd=self._stage)
            except OSError as problem:
                if problem.errno != errno.EMLINK:  # As many as this file system has in one.
                    raise
                batch.parents.pop()
                return None
        new = NewDirectory(prefix, f"{parent.name}/{prefix[1:].hex()}", position)
        try:
            os.mkdir(new.name, 0o755, dir_fd=self._stage)
        except FileExistsError:  # Made for blobs before; the listing was read anew since.
            return None
        parent.directories.append(new)
        return new


class _MissingDirectories:
    """The directories `aa/bb` known to be missing: of one `aa`, as most blobs come in order."""

    def __init__(self, stage: int, by_hash: int) -> None:
        self._stage = stage
        self._by_hash = by_hash
        self._above = b""
        self._names: set[str] | None = None

    def take(self, prefix: bytes) -> bool:
        """Returns whether that directory may be made in the stage; then it counts as made."""
        above, name = prefix[:1], prefix[1:].hex()
        if above != self._above:
            self._above = above
            try:
                self._names = self._look(above.hex())
            except OSError:  # Publishing will meet it too, and tell.
                self._names = None
        if self._names is None or name in self._names:
            return False
        self._names.add(name)
        return True

    def _look(self, above: str) -> set[str] | None:
        """Returns the names below; None where a directory that is made in the stage would not
        inherit the same as one that is made below. Raises OSError.
        """
        try:
            fd = os.open(above, DIRECTORY, dir_fd=self._by_hash)
        except FileNotFoundError:
            return set() if _inherited(self._by_hash) == _inherited(self._stage) else None
        try:
            return set(os.listdir(fd)) if _inherited(fd) == _inherited(self._stage) else None
        finally:
            os.close(fd)


def _inherited(fd: int) -> tuple[int | None, bytes]:
    """Returns what a directory passes on to those made in it: its group, and its access list."""
    status = os.fstat(fd)
    group = status.st_gid if status.st_mode & stat.S_ISGID else None
    try:
        acl = os.getxattr(fd, "system.posix_acl_default")
    except (OSError, AttributeError):  # None is set; or this system names them otherwise.
        acl = b""
    return group, acl


class BatchPublisher(Publisher):
    """Publishes whole batches. `entered` are the directories in which names are new."""

    def publish_batch(self, batch: StagedBatch, stage: int) -> set[str]:
        """Publishes every blob of a batch in the stage; returns the directories to be synced.

        New directories go first, each as a whole: a file of its own may belong in one of them.
        Raises OSError when the batch fails as a whole; what is published by then is right.
        """
        self.entered = set()
        try:
            for parent in batch.parents:
                self._publish_parent(batch, parent, stage)
            for entry in batch.entries(stage):
                self._publish_entry(batch, entry)
        finally:
            self.close()
        return self.entered

    def _publish_parent(self, batch: StagedBatch, parent: NewParent, stage: int) -> None:
        above = parent.prefix.hex()
        whole = self.move(above, stage, parent.name)
        for new in parent.directories:
            path = f"{above}/{new.prefix[1:].hex()}"
            if whole or self.move(path, stage, new.name):
                self.entered.update((above, path))
            else:
                self._publish_files_of(batch, new, stage)
        if not whole:
            with contextlib.suppress(OSError):
                os.rmdir(parent.name, dir_fd=stage)

    def _publish_files_of(self, batch: StagedBatch, new: NewDirectory, stage: int) -> None:
        with closing(os.open(new.name, DIRECTORY, dir_fd=stage)) as fd:
            for entry in batch.entries_in(new, fd):
                self._publish_entry(batch, entry)
        with contextlib.suppress(OSError):
            os.rmdir(new.name, dir_fd=stage)

    def _publish_entry(self, batch: StagedBatch, entry: Entry) -> None:
        try:
            taken = self.publish(entry.digest, entry.directory, entry.name)
        except OSError as problem:
            if problem.errno not in _OF_ONE_NAME:
                raise
            taken = (REFUSED, error_line(problem))
        if taken is None or taken[0] == REPLACED:
            batch.take_partial(entry.position)
        else:
            with contextlib.suppress(OSError):  # The end of the session removes it too.
                batch.drop(entry.position, entry.directory, entry.name)
        if taken is not None:
            batch.except_for(entry.position, *taken)
