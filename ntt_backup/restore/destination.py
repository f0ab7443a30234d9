"""In the destination directory of a restore, every name that is visible is complete and right.

The directory is locked, and has scratch space in which nothing counts yet. Content goes into that
space; once it hashes to its name and a sync has covered all of a batch, it is published as
`aa/bb/<blobid>`, or replaces a wrong file. The stage of each thread or process has directories
`aa/bb`, too, so that what the target lacks as a whole is published by one rename. A large blob is
kept in `.ntt-restore/partial` until it is whole, also when the program is killed: the next call
hashes what it finds and resumes after it. No link below the target is followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ntt_backup.blobdir.descriptors import (
    DIRECTORY,
    Misplaced,
    can_syncfs,
    closing,
    error_line,
    make_directory,
    names_in,
    open_below,
    remove_tree,
    write_all,
)
from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, BlobDirectory, Layout, NotAFile
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.client.read_session import hash_mismatch, remote_failure
from ntt_backup.errors import BackupError, DestinationError, LockHeld
from ntt_backup.model import WHOLE, Failure, Shard
from ntt_backup.name_hash import NEW_HASHER, HashOfNames
from ntt_backup.process.durable import sync_below
from ntt_backup.wire import messages
from ntt_backup.wire.messages import PRESENT, REFUSED, REPLACED, RESUMABLE, Large

if TYPE_CHECKING:
    from ntt_backup.name_hash import NameHasher

SCRATCH: Final = ".ntt-restore"
PARTIAL: Final = "partial"
# Blobs that the caller gives other names.
_UNNAMED: Final = "blobs"
_KEPT: Final = (PARTIAL, _UNNAMED)

_CHUNK: Final = 1 << 20
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
# The errors of one name. Every other error ends the command.
_OF_ONE_NAME: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EXDEV,
    errno.EISDIR,
    errno.ETXTBSY,
}


class Look(NamedTuple):
    """The owner, the group and the permission bits of a file or directory."""

    owner: int
    group: int
    mode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Look:
        # A blob is no program, so it gets no bit that would let it run as its owner.
        mask = 0o7777 if stat.S_ISDIR(status.st_mode) else 0o777
        return cls(status.st_uid, status.st_gid, status.st_mode & mask)

    def give(self, fd: int) -> None:
        """Gives a file or directory this look. Raises OSError."""
        status = os.fstat(fd)
        if (status.st_uid, status.st_gid) != self[:2]:
            os.fchown(fd, *self[:2])
        os.fchmod(fd, self.mode)


@dataclass(frozen=True, slots=True)
class InStore:
    """What is known of the store that a target is, and of the blobs that come into it.

    Attributes:
        files: The look of each blob.
        directories: The look of each directory "aa" or "aa/bb" that may be made.
        sizes: The sizes in bytes, as far as they are known. A larger blob is not kept.
    """

    files: dict[bytes, Look] = field(default_factory=dict)
    directories: dict[str, Look] = field(default_factory=dict)
    sizes: dict[bytes, int] = field(default_factory=dict)


class Oversized(BackupError):
    """A target sends a larger blob than the catalog has, which is not received."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("a blob is larger than expected", detail=failure.detail)
        self.failure = failure


class RestoreTarget:
    """The target, made if only its last part is missing, and locked against a second restore.
    Raises DestinationError, LockHeld.

    began_ns: the time of the file system at which it was opened.

    turn: the lock that a thread holds while it makes or names many small files. Threads that do so
    at once wake each other a few times for each file, which takes longer than the file.

    shard: the part that this restore is of, which has scratch space of its own, since restores of
    other parts may work in the target at the same time.

    unnamed: blobs are kept in the scratch space, also for the next call, until the caller gives
    them their names, or removes them by `remove_unnamed`.

    in_store: is given where the target is the store itself. Then a name that cannot be given fails
    its blob only, and no incomplete blob stays when the target is closed.

    layout: where the blobs lie in it.
    """

    def __init__(
        self,
        root: Path,
        in_store: InStore | None = None,
        shard: Shard = WHOLE,
        layout: Layout = BY_HASH_LAYOUT,
        *,
        unnamed: bool = False,
    ) -> None:
        self.root = root
        self.layout = layout
        self._unnamed = unnamed
        self._name = f"{SCRATCH}-{shard.number}-of-{shard.count}" if shard.count > 1 else SCRATCH
        self.in_store = in_store
        self.turn = threading.Lock()
        # Whose part each large blob is that comes now: a list may name one twice.
        self.parts: dict[bytes, object] = {}
        with destination(root):
            self._made = not root.is_dir()
            if self._made:
                root.mkdir(0o755, exist_ok=True)
            self.open()
            try:
                fcntl.flock(self._scratch, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld.restoring(root) from None
            os.utime(self._scratch)
            self.began_ns = os.fstat(self._scratch).st_ctime_ns
            self._empty_scratch()

    def open(self) -> None:
        """Opens the target: once more in a copy of this process, which has no descriptors."""
        with destination(self.root):
            self.fd = self.top = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.device = os.fstat(self.top).st_dev
            make_directory(self.top, self._name, 0o700)
            self._scratch = open_below(self.top, self._name)
            make_directory(self._scratch, PARTIAL, 0o700)
            self.partial = open_below(self._scratch, PARTIAL)
            if self._unnamed:
                make_directory(self._scratch, _UNNAMED, 0o700)
                self.fd = open_below(self._scratch, _UNNAMED)

    def stage(self, name: str) -> int:
        """Returns an empty directory for the files of one writer, for the caller to close."""
        with destination(self.root):
            os.mkdir(name, 0o700, dir_fd=self._scratch)
            return open_below(self._scratch, name)

    def sync(self, stage: int) -> None:
        """Makes the files of one writer durable, before they are published. stage: the descriptor
        that the caller has held since before it wrote, and that nobody else syncs by.
        """
        with destination(self.root):
            sync_below(stage)

    def sync_large(self, blob: int) -> None:
        """Makes a file that is not in a stage durable, where the sync of a stage does not."""
        with destination(self.root):
            if not can_syncfs(self.device):
                os.fsync(blob)

    def sync_names(self) -> None:
        """Makes all that was published durable."""
        with destination(self.root):
            sync_below(self.fd, files=False)

    def remove_unnamed(self) -> None:
        """Removes the blobs that were given no name."""
        remove_tree(self._scratch, _UNNAMED)

    def close(self) -> None:
        """Removes the scratch space, except incomplete large blobs, which can be resumed."""
        with suppress(OSError):
            self._empty_scratch()
            if self.in_store is not None:
                remove_tree(self._scratch, PARTIAL)
            for name in {*names_in(self._scratch)} & {*_KEPT}:
                os.rmdir(name, dir_fd=self._scratch)
            os.rmdir(self._name, dir_fd=self.top)
            if self._made:
                self.root.rmdir()  # Where nothing came, it is empty.
        for fd in {self.partial, self._scratch, self.fd, self.top}:
            os.close(fd)

    def _empty_scratch(self) -> None:
        for name in names_in(self._scratch):
            if name not in _KEPT:
                remove_tree(self._scratch, name)


@dataclass(slots=True)
class _Large:
    """A blob that comes in pieces: its file, and the hash of the pieces so far."""

    digest: bytes
    fd: int
    directory: int
    hasher: NameHasher
    size: int
    resumed: bool = False


class Found(IntEnum):
    """The state of a blob in the target: no right content, right before the restore began, or
    restored since then.
    """

    NOT_RIGHT = 0
    BEFORE = 1
    RESTORED = 2


class TargetWriter:
    """Writes and publishes the files of one thread or process; a `read_session.ContentSink`.
    Methods raise DestinationError, OSError.

    Args:
        target: The target directory.
        name: The name of the stage.
        on_bytes: Is told the length of content as it comes.
        where: Where content lies that is not right, in words.
        verify: Whether content is compared with its name.
        keep_parts: Whether an incomplete large blob is kept, so that the next call can resume it.
        names: The hash of names.

    Attributes:
        failures: Blobs that were not given, or are not right.
        refused: Blobs that cannot be published, with a few words: a directory stands in their
            place.
    """

    def __init__(
        self,
        target: RestoreTarget,
        name: str,
        on_bytes: Callable[[int], None] = lambda length: None,
        *,
        where: str = "on the remote",
        verify: bool = True,
        keep_parts: bool = True,
        names: HashOfNames = "blake3",
    ) -> None:
        self._new_hasher = NEW_HASHER[names]
        self._target = target
        self._stage = target.stage(name)
        self._layout = target.layout
        self._blobs = BlobDirectory(target.fd, target.device, layout=target.layout)
        self._on_bytes = on_bytes
        self._where = where
        self._verify = verify
        self._keep_parts = keep_parts
        self._buffer = memoryview(bytearray(_CHUNK))
        # The directories that the target has, by the one above, as far as they were looked up.
        self._known: dict[str, set[str]] = {}
        # The blobs in each directory `aa/bb` of the stage.
        self._staged: dict[str, set[bytes]] = {}
        # Other files are called by the blobid, and have their directory here: large blobs, and
        # those for which the target has a directory.
        self._staged_files: set[tuple[bytes, int]] = set()
        self._large: _Large | None = None
        self._again: list[bytes] = []
        self._parts: set[bytes] = set()
        self.failures: list[Failure] = []
        self.refused: list[tuple[bytes, str]] = []

    # --- what the target has ----------------------------------------------------------------------

    def find(self, digest: bytes, size: int | None, *, trust_size: bool) -> Found:
        """Returns whether the target has this blob. size: the remote's, None for unknown.
        trust_size: takes a file of that size for right without reading it.
        """
        name = digest.hex()
        if not self._has_directory(self._layout.directory(name)):
            return Found.NOT_RIGHT
        try:
            fd, status = self._blobs.open_blob(name)
            with closing(fd):
                if trust_size and size is not None:
                    right = status.st_size == size
                else:
                    right = self._hash(fd).digest() == digest
        except (OSError, NotAFile):
            return Found.NOT_RIGHT
        if not right:
            return Found.NOT_RIGHT
        return Found.RESTORED if status.st_ctime_ns > self._target.began_ns else Found.BEFORE

    def _has_directory(self, place: str) -> bool:
        """Returns whether there is a directory `aa/bb`: most blobs of a first restore need no
        more.
        """
        above, _, below = place.rpartition("/")
        names = self._known.get(above)
        if names is None:
            names = set()
            with suppress(OSError):  # Publishing will meet it too, and tell.
                names.update(names_in(self._blobs.directory(above)))
            self._known[above] = names
        return below in names

    def has_part(self, digest: bytes) -> bool:
        """Returns whether an earlier attempt has left a part of this blob, which no other thread
        goes on with.
        """
        if not self._takes_part(digest):
            return False
        try:
            os.stat(digest.hex(), dir_fd=self._target.partial, follow_symlinks=False)
        except OSError:
            return False
        return True

    def discard_part(self, digest: bytes) -> None:
        """Removes the part of a blob that no call will resume, unless another thread writes it."""
        if self.has_part(digest):
            os.unlink(digest.hex(), dir_fd=self._target.partial)

    def resume(self, digest: bytes, alive: Callable[[], None] = lambda: None) -> int:
        """Returns how many bytes of a large blob an earlier attempt has left, to resume after. None
        are where the disk cannot read them any more. alive is called now and then while they are
        hashed, and may raise.
        """
        self._abandon()
        fd = os.open(digest.hex(), os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._target.partial)
        try:
            hasher = self._hash(fd, alive)
        except OSError:
            os.close(fd)
            os.unlink(digest.hex(), dir_fd=self._target.partial)
            return 0
        except BaseException:
            os.close(fd)
            raise
        size = os.lseek(fd, 0, os.SEEK_CUR)
        self._large = _Large(digest, fd, self._target.partial, hasher, size, resumed=True)
        return size

    def _hash(self, fd: int, alive: Callable[[], None] = lambda: None) -> NameHasher:
        hasher = self._new_hasher()
        while count := os.readv(fd, [self._buffer]):
            hasher.update(self._buffer[:count])
            alive()
        return hasher

    # --- what comes -------------------------------------------------------------------------------

    def whole(self, digest: bytes, content: memoryview) -> None:
        self._on_bytes(len(content))
        if self._verify and (found := self._new_hasher(content).digest()) != digest:
            self._refuse(digest, len(content), found)
            return
        name, layout = digest.hex(), self._layout
        place = layout.directory(name)
        staged = self._staged_at(place)
        if staged is not None:
            staged.add(digest)
        else:
            self._staged_files.add((digest, self._stage))
        path = name if staged is None else f"{place}/{name[layout.file_at :]}"
        fd = _new(path, self._stage)
        try:  # A context manager takes a tenth of the time of all this.
            write_all(fd, content)
            self._give_look(fd, digest)
        finally:
            os.close(fd)

    def _staged_at(self, place: str) -> set[bytes] | None:
        """Returns the blobs in a directory `aa/bb` of the stage; None where the target has it."""
        staged = self._staged.get(place)
        if staged is None and not self._has_directory(place):
            try:
                os.mkdir(place, 0o755, dir_fd=self._stage)
            except OSError:  # The first below its directory "aa", which nearly all others find.
                for path in directories_to(place):
                    make_directory(self._stage, path, 0o755)
            staged = self._staged[place] = set()
        return staged

    def _give_look(self, fd: int, digest: bytes) -> None:
        if (store := self._target.in_store) is not None:
            store.files[digest].give(fd)

    def begin(self, large: Large) -> None:
        resumed = self._large
        if resumed is not None and (resumed.digest, resumed.size) == (large.digest, large.offset):
            return
        if resumed is not None and resumed.digest == large.digest:
            os.unlink(large.digest.hex(), dir_fd=resumed.directory)  # The remote has less of it.
        self._abandon()
        store = self._target.in_store
        if store is not None and large.size > (limit := store.sizes.get(large.digest, large.size)):
            text = f"{large.size} bytes {self._where}, {limit} in the catalog"
            raise Oversized(remote_failure(large.digest.hex(), messages.WRONG, text))
        resumable = self._keep_parts and large.size > RESUMABLE
        kept = resumable and self._takes_part(large.digest)
        directory = self._target.partial if kept else self._stage
        fd = _new(large.digest.hex(), directory)
        hasher, goes_on = self._new_hasher(), large.offset > 0
        self._large = _Large(large.digest, fd, directory, hasher, 0, resumed=goes_on)

    def piece(self, data: memoryview) -> None:
        self._on_bytes(len(data))
        large = self._large
        if large is not None:
            if self._verify:
                large.hasher.update(data)
            large.size += len(data)
            write_all(large.fd, data)

    def end(self, problem: str) -> None:
        large, self._large = self._large, None
        if large is None:
            return
        name = large.digest.hex()
        with closing(large.fd):
            if not problem:
                self._give_look(large.fd, large.digest)
            if not problem and large.directory != self._stage:
                self._target.sync_large(large.fd)
        if problem:
            self.not_given(large.digest, messages.UNREADABLE, problem)
            if large.directory == self._stage:
                os.unlink(name, dir_fd=self._stage)
        elif self._verify and (found := large.hasher.digest()) != large.digest:
            os.unlink(name, dir_fd=large.directory)
            if large.resumed:
                self._again.append(large.digest)  # The part of an earlier attempt may be wrong.
            else:
                self._refuse(large.digest, large.size, found)
        else:
            if self._target.in_store is not None:  # Else the directory is made with any look.
                self._staged_at(self._layout.directory(name))
            self._staged_files.add((large.digest, large.directory))

    def not_given(self, digest: bytes, verdict: int, text: str) -> None:
        self.failures.append(remote_failure(digest.hex(), verdict, text))

    def _refuse(self, digest: bytes, size: int, found: bytes) -> None:
        self.not_given(digest, messages.WRONG, hash_mismatch(size, found, self._where))

    # --- publishing -------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publishes all that is whole; returns how many blobs the target did not have before."""
        new = 0
        # Nothing is tried again after a sync that has failed.
        staged, self._staged = self._staged, {}
        files, self._staged_files = sorted(self._staged_files), set()
        if staged or files:
            self._give_looks(staged)
            self._target.sync(self._stage)
            self._known.clear()
            fd, device = self._target.fd, self._target.device
            publisher = Publisher(fd, device, may_replace=True, layout=self._layout)
            try:
                with self._target.turn:
                    new = self._publish_directories(publisher, staged)
                    new += sum(self._publish_file(publisher, *one, one[0].hex()) for one in files)
            finally:
                publisher.close()
        self._leave_parts()
        return new

    def _give_looks(self, staged: dict[str, set[bytes]]) -> None:
        if (store := self._target.in_store) is not None:
            paths = {path for place in staged for path in directories_to(place)}
            for path in sorted(paths, reverse=True):
                with closing(os.open(path, DIRECTORY, dir_fd=self._stage)) as fd:
                    store.directories[path].give(fd)

    def _publish_directories(self, publisher: Publisher, staged: dict[str, set[bytes]]) -> int:
        new = 0
        for above, places in groupby(sorted(staged), key=_above):
            below = {place: staged[place] for place in places}
            if publisher.move(above, self._stage, above):
                new += sum(map(len, below.values()))
                continue
            for place, digests in below.items():
                if place != above and publisher.move(place, self._stage, place):
                    new += len(digests)
                else:
                    with closing(os.open(place, DIRECTORY, dir_fd=self._stage)) as directory:
                        for digest in sorted(digests):
                            name = digest.hex()[self._layout.file_at :]
                            new += self._publish_file(publisher, digest, directory, name)
            remove_tree(self._stage, above)
        return new

    def _publish_file(self, publisher: Publisher, digest: bytes, directory: int, name: str) -> bool:
        """Returns whether the target did not have the blob before. name: in the directory."""
        with destination(self._target.root / self._layout.directory(digest.hex())):
            try:
                taken = publisher.publish(digest, directory, name.encode())
            except OSError as error:
                if self._target.in_store is None or error.errno not in _OF_ONE_NAME:
                    raise
                taken = (REFUSED, error_line(error))
            if taken is not None and taken[0] == PRESENT:
                os.unlink(name, dir_fd=directory)
            elif taken is not None and taken[0] == REFUSED:
                self.refused.append((digest, taken[1]))
        return taken is None or taken[0] == REPLACED

    def again(self) -> list[bytes]:
        """Returns the blobs that must be fetched once more, from their beginning."""
        again, self._again = self._again, []
        return again

    def forget(self) -> None:
        """Discards all that came on a lost connection, except large blobs that can be resumed."""
        self._abandon()
        self.failures.clear()
        for above in set(map(_above, self._staged)):
            remove_tree(self._stage, above)
        self._staged.clear()
        for digest, directory in self._staged_files:
            if directory == self._stage:
                os.unlink(digest.hex(), dir_fd=directory)
        self._staged_files.clear()

    def close(self) -> None:
        self._abandon()
        self._leave_parts()
        self._blobs.close()
        os.close(self._stage)

    def _takes_part(self, digest: bytes) -> bool:
        """Returns whether the part of a large blob is this thread's, until it is published."""
        ours = self._target.parts.setdefault(digest, self) is self
        if ours:
            self._parts.add(digest)
        return ours

    def _leave_parts(self) -> None:
        """Releases the parts that this thread holds, except of the blob that it is receiving."""
        kept = {self._large.digest} if self._large is not None else set()
        for digest in self._parts - kept:
            del self._target.parts[digest]
        self._parts &= kept

    def _abandon(self) -> None:
        large, self._large = self._large, None
        if large is not None:
            os.close(large.fd)


def directories_to(place: str) -> list[str]:
    """Returns the directories on the way to one of blobs, and that one: "aa", "aa/bb"."""
    return [place] if (above := _above(place)) == place else [above, place]


def _above(place: str) -> str:
    return place.partition("/")[0]


def _new(path: str, directory: int) -> int:
    """Returns a descriptor of an empty file."""
    return os.open(path, _NEW, 0o644, dir_fd=directory)


@contextmanager
def destination(path: Path) -> Iterator[None]:
    """Raises DestinationError for an OSError about the target."""
    try:
        yield
    except Misplaced as error:
        raise DestinationError.at(path, OSError(errno.ELOOP, str(error))) from error
    except OSError as error:
        raise DestinationError.at(path, error) from error
