"""The local store is a directory of blobs that is inspected and read, and never changed.

A blob that cannot be read may be lost, or its disk may not be mounted. Failing blobs in the second
case would mark millions of them failed in an hour. So where no blob of a batch can be read, some
other blob must be readable; otherwise the whole store counts as unreachable: a `SourceError`, and
no blob fails. The root is opened anew by its path for each batch, so that a disk that came back is
seen, and an idle daemon keeps no disk busy.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from ntt_backup.blobdir.layout import Stray, StrayKind, is_blobid, is_prefix, kind_of, relative_path
from ntt_backup.blobdir.open import NotAFile, closing, open_untouched
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.blobdir.walk import Tree
from ntt_backup.errors import SourceError
from ntt_backup.format import many
from ntt_backup.model import Blob, Failure, Reason

READ_SIZE: Final = 1024**2
KEPT_DIRECTORIES: Final = 128
# Device, inode, size and time of modification: they tell one state of a file from another. Not the
# time of change: that moves when another program makes a hard link to a blob.
Stamp = tuple[int, int, int, int]

# A blob that fails for one of these does not prove that the store can be read.
_NO_SIGN_OF_LIFE: Final = {Reason.MISSING, Reason.UNREADABLE, Reason.NOT_A_FILE}
_SAMPLED_PREFIXES: Final = 32
_SAMPLED_BLOBS: Final = 8
# Errors for a file system that is away, and for a process or a machine that has run dry.
_ABOUT_THE_STORE: Final = {
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENODEV,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


class SourceTree(Tree):
    """The opened root of the store, which alone may be a symlink. Every method may raise
    SourceError: when the file system is away, or this process has no descriptors or memory left.
    """

    def __init__(self, root: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.root = root
        self._alive = alive
        try:
            fd = open_untouched(str(root), DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as error:
            raise self._unusable(error) from error
        super().__init__(fd, kept=KEPT_DIRECTORIES)
        self._buffer: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        os.close(self.fd)

    def error_at(self, path: str, error: OSError) -> Exception:
        self._blame(error)
        return super().error_at(path, error)

    def unreadable(self, path: str, error: OSError) -> Stray:
        if not path:
            raise self._unusable(error) from error
        self._blame(error)
        return super().unreadable(path, error)

    def _blame(self, error: OSError) -> None:
        """Raises SourceError for an error that is about the store, not about one entry."""
        if error.errno in _ABOUT_THE_STORE:
            raise self._unusable(error) from error

    def examine(self, blob: Blob, *, verify: bool) -> tuple[Blob, Stamp] | Failure:
        """Returns one blob with its true size and its state, or what is wrong with it."""
        blobid = blob.blobid
        if not is_blobid(blobid):
            return Failure(blobid, Reason.BAD_BLOBID, "not 64 lowercase hex digits")
        try:
            fd, status = self.open_blob(blobid)
        except NotAFile:
            return self._not_a_file(blob, relative_path(blobid))
        except OSError as error:
            return self.failure(blob, error)
        with closing(fd):
            if blob.size is not None and blob.size != status.st_size:
                detail = f"{status.st_size} bytes in the store, {blob.size} expected"
                return Failure(blobid, Reason.WRONG_SIZE, detail)
            if not verify:
                return Blob(blobid, status.st_size), stamp(status)
            try:
                digest, size = self._hash(fd)
            except OSError as error:
                return self.failure(blob, error)
        if digest != blobid:
            return Failure(blobid, Reason.CORRUPT_SOURCE, f"its content hashes to {digest}")
        return Blob(blobid, size), stamp(status)

    def failure(self, blob: Blob, error: OSError) -> Failure:
        """Returns what an error says about one blob. Raises SourceError for the store's own."""
        self._blame(error)
        said = error.strerror or str(error)
        path = str(error.filename or relative_path(blob.blobid))
        if error.errno == errno.ENOENT:
            return Failure(blob.blobid, Reason.MISSING, f"{path}: {said}")
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            # ENOTDIR is also said for a link where a directory is wanted, ENXIO for a socket.
            return self._not_a_file(blob, path)
        return Failure(blob.blobid, Reason.UNREADABLE, f"{path}: {said}")

    def _not_a_file(self, blob: Blob, path: str) -> Failure:
        try:
            mode = self.lstat(path).st_mode
            kind = kind_of(mode) + (", which is not followed" if stat.S_ISLNK(mode) else "")
        except OSError:
            kind = "gone by now"
        return Failure(blob.blobid, Reason.NOT_A_FILE, f"{path} is {kind}")

    def _hash(self, fd: int) -> tuple[str, int]:
        """Returns BLAKE3 and length. No mmap: a file cut short meanwhile would be a SIGBUS."""
        buffer = self._buffer = self._buffer or memoryview(bytearray(READ_SIZE))
        hasher = blake3()
        size = 0
        while count := os.readv(fd, [buffer]):
            hasher.update(buffer[:count])
            size += count
            self._alive()
        return hasher.hexdigest(), size

    def require_life(self, failed: Sequence[Failure], *, nothing_sent: bool) -> None:
        """Raises SourceError if these failures may be the store's own: none of a batch could be
        read and nothing else can, or another disk lies at the root by now.
        """
        reasons = {failure.reason for failure in failed} - {Reason.BAD_BLOBID}
        if not nothing_sent or not reasons or not reasons <= _NO_SIGN_OF_LIFE:
            return
        with SourceTree(self.root) as now:
            now.sign_of_life()
            if not os.path.samestat(os.fstat(now.fd), os.fstat(self.fd)):
                raise SourceError(
                    f"the store {self.root} was replaced while it was read",
                    hint="a disk was mounted or unmounted: start again when it is in place",
                )

    def sign_of_life(self) -> str:
        """Returns a few words on the store. Raises SourceError where no blob can be read."""
        prefixes: list[str] = []
        refused = linked = ""
        for found in self.level(""):
            if isinstance(found, str):
                prefixes.append(found)
            elif found.kind is StrayKind.SYMLINK and is_prefix(found.path):
                linked = "its prefix directories are symbolic links, which are not followed"
        seen = many(len(prefixes), "prefix directory", "prefix directories")
        for prefix in prefixes[:: len(prefixes) // _SAMPLED_PREFIXES + 1]:
            for refusal in islice(self._refusals(prefix), _SAMPLED_BLOBS):
                if not refusal:
                    return seen
                refused = refusal
        if not prefixes:
            refused = linked
        if refused:
            raise SourceError(
                f"nothing in the store {self.root} can be read",
                detail=refused,
                hint=f"let uid {os.geteuid()} read it; put prefixes on other disks by bind mounts",
            )
        if not prefixes:
            raise SourceError(
                f"the store {self.root} is empty",
                detail="no directory in it has two hex digits for a name",
                hint="mount its disk, or mend source.root; for a store that is really new make its"
                " 00/",
            )
        return seen

    def _refusals(self, prefix: str) -> Iterator[str]:
        """Yields why a blob below "aa", or a directory, cannot be read; nothing where it can."""
        for directory in self.level(prefix):
            entries: Iterable[str | Stray]
            entries = [directory] if isinstance(directory, Stray) else self.entries(directory)
            for entry in entries:
                if isinstance(entry, Stray):
                    if entry.kind is StrayKind.UNREADABLE:
                        yield entry.detail
                    continue
                try:
                    with closing(self.open(relative_path(entry))) as fd:
                        os.read(fd, 1)
                except OSError as error:
                    yield error.strerror or str(error)
                else:
                    yield ""

    def _unusable(self, error: OSError) -> SourceError:
        hints = {
            errno.ENOENT: "mend source.root, or mount the disk that holds it",
            errno.ENOTDIR: "source.root is the directory that holds aa/bb/<blobid>",
            errno.EACCES: f"let uid {os.geteuid()} read it, or run as a user that can",
            errno.EMFILE: "raise the limit on open files (LimitNOFILE= in the unit, or ulimit -n)",
            errno.ENFILE: "raise the machine's limit on open files (sysctl fs.file-max)",
            errno.ENOMEM: "the machine has no memory left: use fewer workers, or end other"
            " programs",
        }
        return SourceError(
            f"cannot read the store {self.root}",
            detail=error.strerror or str(error),
            hint=hints.get(error.errno or 0, "look at its disk or mount, then start again"),
        )


def stamp(status: os.stat_result) -> Stamp:
    """Returns the state of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


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
