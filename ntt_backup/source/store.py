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
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, Self

from ntt_backup.blobdir.descriptors import DIRECTORY, closing, names_in, open_untouched
from ntt_backup.blobdir.layout import BY_HASH_LAYOUT, Layout, is_blobid, kind_of
from ntt_backup.blobdir.walk import Stray, StrayKind, Tree
from ntt_backup.config import SourceSettings
from ntt_backup.errors import ConfigError, SourceError
from ntt_backup.formatting import many, printable
from ntt_backup.model import ALL_BLOBS, OF_THE_STORE, Blob, Failure, Part, Reason
from ntt_backup.name_hash import NEW_HASHER, SHOWN, HashOfNames
from ntt_backup.source.paths import Paths

READ_SIZE: Final = 1024**2
KEPT_DIRECTORIES: Final = 128
# Device, inode, size and time of modification identify the state of a file. The time of change does
# not: it changes when another program makes a hard link to a blob.
Stamp = tuple[int, int, int, int]

# A failure for one of these reasons does not prove that the store can be read.
_NO_SIGN_OF_LIFE: Final = {Reason.MISSING, Reason.UNREADABLE, Reason.NOT_A_FILE}
_SAMPLED_PREFIXES: Final = 32
_SAMPLED_BLOBS: Final = 8
# A file that another layout would have there, or a directory.
_OF_ANOTHER_LAYOUT: Final = re.compile(r"([0-9a-f]{2,4}/){1,2}([0-9a-f]{2,4}|[0-9a-f]{56,64})")
_ELSEWHERE: Final = " is not as source.layout says"
_DIGITS: Final = {2: "two", 3: "three", 4: "four"}
# ENOTDIR is also the error for a symlink in place of a directory, ENXIO for a socket, and EAGAIN
# for a FIFO that somebody has opened.
_OF_NO_FILE: Final = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.EAGAIN}
# Errors of an unreachable file system, and of a process or machine out of resources.
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
    """The opened root of the store, which alone may be a symlink.

    Every method may raise SourceError: the file system is unreachable, or this process is out of
    descriptors or memory.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        try:
            fd = open_untouched(str(store.root), DIRECTORY & ~os.O_NOFOLLOW)
        except OSError as error:
            raise self._unusable(error) from error
        super().__init__(fd, kept=KEPT_DIRECTORIES, layout=store.layout)
        self._buffer: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        os.close(self.fd)

    def level(self, parent: str) -> Iterator[str | Stray]:
        """Yields what `Tree.level` does, without the prefixes of other hosts."""
        for one in super().level(parent):
            if parent or isinstance(one, Stray) or self.store.part.has(one):
                yield one

    def outside(self) -> list[str]:
        """Returns a blob of each prefix that the store has and this host is not to hold."""
        found: dict[str, str] = {}
        for path in () if self.store.part.whole else super().level(""):
            if isinstance(path, str) and not self.store.part.has(path) and path[:2] not in found:
                directories = (one for one in self.directories(below=path) if isinstance(one, str))
                blobs = (one for directory in directories for one in self.entries(directory))
                found |= {
                    one[:2]: one for one in islice((a for a in blobs if isinstance(a, str)), 1)
                }
        return sorted(found.values())

    def error_at(self, path: str, error: OSError) -> Exception:
        self.blame(error)
        return super().error_at(path, error)

    def unreadable(self, path: str, error: OSError) -> Stray:
        if not path:
            raise self._unusable(error) from error
        self.blame(error)
        return super().unreadable(path, error)

    def blame(self, error: OSError) -> None:
        """Raises SourceError for an error that concerns the whole store, not one entry."""
        if error.errno in _ABOUT_THE_STORE:
            raise self._unusable(error) from error

    def path_of(self, blobid: str) -> str:
        """Returns the path of a blob below the root, as `Store.path_of`."""
        return self.store.path_of(blobid)

    def examine(
        self, blob: Blob, *, verify: bool, also: Callable[[memoryview], object] | None = None
    ) -> tuple[Blob, Stamp] | Failure:
        """Returns a blob with its true size, and its state; or its failure.

        Args:
            blob: The blob.
            verify: Whether its content is hashed, and compared with its name.
            also: Gets each piece of the content that is hashed.
        """
        if not is_blobid(blob.blobid):
            return Failure(blob.blobid, Reason.BAD_BLOBID, "not 64 lowercase hex digits")
        outcome, paths = self._examine(blob, verify, also), self.store.paths
        while isinstance(outcome, Failure) and paths and paths.drop_first(blob.blobid):
            outcome = self._examine(blob, verify, also)
        return outcome

    def _examine(
        self, blob: Blob, verify: bool, also: Callable[[memoryview], object] | None
    ) -> tuple[Blob, Stamp] | Failure:
        blobid = blob.blobid
        try:
            path = self.path_of(blobid)
            fd = self.open(path)
        except OSError as error:
            return self.failure(blob, error)
        with closing(fd):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return self._not_a_file(blob, path)
            if blob.size is not None and blob.size != status.st_size:
                detail = f"{status.st_size} bytes in the store, {blob.size} expected"
                return Failure(blobid, Reason.WRONG_SIZE, detail)
            if not verify:
                return Blob(blobid, status.st_size), stamp(status)
            try:
                digest, size = self.hash_content(fd, also)
            except OSError as error:
                return self.failure(blob, error)
            if digest != blobid:
                self._require_hash(blobid, fd)
                return Failure(blobid, Reason.CORRUPT_SOURCE, f"its content hashes to {digest}")
        return Blob(blobid, size), stamp(status)

    def _require_hash(self, blobid: str, fd: int) -> None:
        """Raises ConfigError where wrong content has its name by the other hash.

        Then the setting is wrong, and no blob is.
        """
        ours = self.store.hash
        for other in NEW_HASHER.keys() - {ours}:
            hasher = NEW_HASHER[other](b"")
            with suppress(OSError):
                os.lseek(fd, 0, os.SEEK_SET)
                self.hash_content(fd, hasher.update)
            if hasher.hexdigest() == blobid:
                raise ConfigError(
                    f"the names in the store are {SHOWN[other]}, and source.hash is {ours}",
                    detail=f"{self.store.root}/{self.path_of(blobid)}",
                    hint=f'set source.hash = "{other}"',
                )

    def failure(self, blob: Blob, error: OSError) -> Failure:
        """Returns the failure for an error of a blob. Raises SourceError for one of the store."""
        self.blame(error)
        said = error.strerror or str(error)
        path = str(error.filename or blob.blobid)
        if error.errno == errno.ENOENT:
            return Failure(blob.blobid, Reason.MISSING, f"{_shown(path)}: {said}")
        if error.errno in _OF_NO_FILE:
            return self._not_a_file(blob, path)
        return Failure(blob.blobid, Reason.UNREADABLE, f"{_shown(path)}: {said}")

    def _not_a_file(self, blob: Blob, path: str) -> Failure:
        try:
            mode = self.lstat(path).st_mode
            kind = kind_of(mode) + (", which is not followed" if stat.S_ISLNK(mode) else "")
        except OSError:
            kind = "gone by now"
        return Failure(blob.blobid, Reason.NOT_A_FILE, f"{_shown(path)} is {kind}")

    def hash_content(
        self, fd: int, also: Callable[[memoryview], object] | None = None
    ) -> tuple[str, int]:
        """Returns the hash of a file, from where it stands, and the bytes that were hashed.

        Without mmap: truncation meanwhile would raise SIGBUS.

        Args:
            fd: The descriptor of the file.
            also: Gets each piece of the content.
        """
        buffer = self._buffer = self._buffer or memoryview(bytearray(READ_SIZE))
        hasher = NEW_HASHER[self.store.hash]()
        size = 0
        while count := os.readv(fd, [buffer]):
            hasher.update(buffer[:count])
            if also is not None:
                also(buffer[:count])
            size += count
            self.store.alive()
        return hasher.hexdigest(), size

    def require_life(self, failed: Sequence[Failure], *, nothing_sent: bool) -> None:
        """Raises SourceError if the store may be the cause of the failures of a batch.

        That is so if no blob of the batch could be read, and either no other blob can be read, or
        the root is on another disk now.

        Args:
            failed: The failures of the batch.
            nothing_sent: Whether no blob of the batch could be read.
        """
        reasons = {failure.reason for failure in failed} - {Reason.BAD_BLOBID}
        if not nothing_sent or not reasons or not reasons <= _NO_SIGN_OF_LIFE:
            return
        with self.store.tree() as now:
            now.sign_of_life()
            if not os.path.samestat(os.fstat(now.fd), os.fstat(self.fd)):
                raise SourceError(
                    f"the store {self.store.root} was replaced while it was read",
                    hint="a disk was mounted or unmounted: start again when it is in place",
                )

    def sign_of_life(self) -> str:
        """Returns a few words on the store. Raises SourceError if no blob can be read."""
        if self.store.paths is not None:
            return self._entries_at_the_root()
        prefixes: list[str] = []
        refused = linked = ""
        for found in self.level(""):
            if isinstance(found, str):
                prefixes.append(found)
            elif found.kind is StrayKind.SYMLINK and self.layout.is_directory(found.path):
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
            hint = f"let uid {os.geteuid()} read it; put prefixes on other disks by bind mounts"
            if refused.endswith(_ELSEWHERE):
                hint = f"correct source.layout, which is {self.layout.text}"
            raise SourceError(
                f"nothing in the store {self.store.root} can be read", detail=refused, hint=hint
            )
        if not prefixes:
            part, first = str(self.store.part), f"{self.store.part.prefixes[0]:02x}".ljust(64, "0")
            raise SourceError(
                f"the store {self.store.root} is empty",
                detail=f"no directory in it has {_DIGITS[self.layout.widths[0]]} hex digits for a"
                " name" + f" of {part}" * bool(part),
                hint=f"mount its disk, or correct source.root{' or source.prefixes' * bool(part)};"
                " in a new store create"
                f" {self.layout.directory(first).partition('/')[0]}/",
            )
        return seen

    def _entries_at_the_root(self) -> str:
        """Returns how many entries there are. Raises SourceError if there is none."""
        try:
            names = names_in(self.fd)
        except OSError as error:
            raise self._unusable(error) from error
        if not names:
            raise SourceError(
                f"the store {self.store.root} is empty",
                hint="mount its disk, or correct source.root",
            )
        return many(len(names), "entry", "entries")

    def _refusals(self, prefix: str) -> Iterator[str]:
        """Yields for blobs and directories below "aa" why they cannot be read; "" if they can."""
        for directory in self.directories(below=prefix):
            entries: Iterable[str | Stray]
            entries = [directory] if isinstance(directory, Stray) else self.entries(directory)
            for entry in entries:
                if isinstance(entry, Stray):
                    if entry.kind is StrayKind.UNREADABLE:
                        yield entry.detail
                    elif _OF_ANOTHER_LAYOUT.fullmatch(entry.path):
                        yield entry.path + _ELSEWHERE
                    continue
                try:
                    with closing(self.open(self.path_of(entry))) as fd:
                        os.read(fd, 1)
                except OSError as error:
                    yield error.strerror or str(error)
                else:
                    yield ""

    def _unusable(self, error: OSError) -> SourceError:
        hints = {
            errno.ENOENT: "correct source.root, or mount the disk that holds it",
            errno.ENOTDIR: "source.root is the directory that holds aa/bb/<blobid>",
            errno.EACCES: f"let uid {os.geteuid()} read it, or run as a user that can",
            errno.EMFILE: "raise the limit on open files (LimitNOFILE= in the unit, or ulimit -n)",
            errno.ENFILE: "raise the machine's limit on open files (sysctl fs.file-max)",
            errno.ENOMEM: "the machine has no memory left: use fewer workers, or end other"
            " programs",
        }
        return SourceError(
            f"cannot read the store {self.store.root}",
            detail=error.strerror or str(error),
            hint=hints.get(error.errno or 0, "look at its disk or mount, then start again"),
        )


def stamp(status: os.stat_result) -> Stamp:
    """Returns the state of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Inspection:
    """The blobs of an inspected batch.

    Attributes:
        ready: The blobs that can be sent, with their true sizes, in order.
        failed: The failures of the other blobs, in order.
        stamps: The state of each ready blob.
    """

    ready: list[Blob]
    failed: list[Failure]
    stamps: list[Stamp]


@dataclass(frozen=True)
class Store:
    """The directory that holds the blobs, `aa/bb/<blobid>` as a rule.

    Attributes:
        root: The directory, which need not exist yet.
        alive: Is called regularly while blobs are inspected and hashed.
        grace: The seconds since its last change for which a file may still be being written.
        paths: The paths of blobs; None where their names say where they lie.
        layout: Where they lie then.
        part: The part of it that this host holds. What lies beside that proves nothing.
        hash: The hash of names.
    """

    root: Path
    alive: Callable[[], None] = lambda: None
    grace: float = 0.0
    paths: Paths | None = None
    layout: Layout = BY_HASH_LAYOUT
    part: Part = ALL_BLOBS
    hash: HashOfNames = "blake3"

    @classmethod
    def of(
        cls,
        source: SourceSettings,
        alive: Callable[[], None] = lambda: None,
        paths: Paths | None = None,
    ) -> Self:
        """Returns the store of the settings."""
        names = (source.path_layout, source.part, source.hash)
        return cls(source.root, alive, source.grace, paths, *names)

    def tree(self) -> SourceTree:
        """Opens the root by its path. Raises SourceError."""
        return SourceTree(self)

    def path_of(self, blobid: str) -> str:
        """Returns the path of a blob below the root.

        Raises:
            ValueError: It is no blobid.
            FileNotFoundError: No path of the blob is known.
        """
        return (
            self.layout.path_of(blobid) if self.paths is None else self.paths.of(blobid, self.root)
        )

    def ready_for(self, blobs: Iterable[Blob]) -> Store:
        """Returns the store with the paths of some blobs, for one thread. Looks all up at once."""
        if self.paths is None:
            return self
        return replace(self, paths=self.paths.found_for([blob.blobid for blob in blobs]))

    def probe(self) -> str:
        """Returns a few words on the store. Raises SourceError if no blob can be read."""
        with self.tree() as tree:
            return tree.sign_of_life()

    def measure(self, blobs: Sequence[Blob]) -> list[Blob]:
        """Returns the blobs with the sizes that the catalog lacks.

        A size is None if it cannot be read. The method never raises.
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
        """Returns which blobs can be sent. verify: also hashes their content.

        Raises:
            SourceError: The store cannot be read. Then nothing is known of any blob.
        """
        ready: list[Blob] = []
        failed: list[Failure] = []
        stamps: list[Stamp] = []
        with self.ready_for(blobs).tree() as tree:
            for blob in self._alive_for(blobs):
                outcome = tree.examine(blob, verify=verify)
                if isinstance(outcome, Failure):
                    failed.append(outcome)
                else:
                    ready.append(outcome[0])
                    stamps.append(outcome[1])
            tree.require_life(failed, nothing_sent=not ready)
        return Inspection(ready, failed, stamps)

    def ages_of_young(self, failures: Iterable[Failure]) -> dict[str, float]:
        """Returns the failed blobs that may still be being written, each with its age in seconds.

        The age is the time since the last change of the file, or where it is missing, of the last
        directory on its path that exists. A time in the future is nobody's last change.

        Raises:
            SourceError: The store cannot be read.
        """
        found: dict[str, float] = {}
        suspects = [one.blobid for one in failures if one.reason in OF_THE_STORE]
        if not suspects or not self.grace:
            return found
        with self.tree() as tree:
            for blobid in suspects:
                age = self._age_of_young(_last_change(tree, _path_if_any(tree, blobid)))
                if age is not None:
                    found[blobid] = age
        return found

    def was_changed_lately(self, tree: SourceTree, path: str) -> bool:
        """Returns whether a file, or the directory it is missing in, was changed a moment ago."""
        return self._age_of_young(_last_change(tree, path)) is not None

    def is_young(self, status: os.stat_result) -> bool:
        """Returns whether a file may still be being written, so that its size is none yet."""
        return bool(self.grace) and self._age_of_young(_changed(status)) is not None

    def _age_of_young(self, changed: float) -> float | None:
        """Returns the age in seconds of a file that may still be being written, else None.

        The clock may have been set back a little since.
        """
        age = time.time() - changed
        return max(0.0, age) if abs(age) < self.grace else None

    def altered(self, inspection: Inspection) -> list[Blob]:
        """Returns the ready blobs that were changed, replaced or removed since their inspection.

        If there is none, a program that read them meanwhile has read the inspected content.

        Raises:
            SourceError: The store cannot be read.
        """
        seen = zip(self._alive_for(inspection.ready), inspection.stamps, strict=True)
        with self.tree() as tree:
            return [blob for blob, before in seen if _state(tree, blob)[1] != before]

    def _alive_for(self, blobs: Sequence[Blob]) -> Iterator[Blob]:
        """Yields the blobs, and calls alive for each, since a slow disk may take long."""
        for blob in blobs:
            self.alive()
            yield blob


def _last_change(tree: SourceTree, path: str | None) -> float:
    """Returns when a file was changed, or the last directory on its path that exists.

    A path that cannot be examined, or is not known, was changed long ago.
    """
    if path is None:
        return 0.0
    status: os.stat_result | None = None
    while status is None:
        try:
            status = tree.lstat(path) if path else os.fstat(tree.fd)
        except FileNotFoundError:
            path = path.rpartition("/")[0]
        except OSError:
            return 0.0
    return _changed(status)


def _path_if_any(tree: SourceTree, blobid: str) -> str | None:
    try:
        return tree.path_of(blobid)
    except OSError:
        return None


def _shown(path: str) -> str:
    """Returns a path as a message may show it, whatever bytes it has."""
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _changed(status: os.stat_result) -> float:
    # A copy may have the times of its origin; the time of change is always its own.
    return max(status.st_mtime, status.st_ctime)


def _state(tree: SourceTree, blob: Blob) -> tuple[int | None, Stamp | None]:
    """Returns size and state of the file of a blob; None if it is not a file."""
    try:
        # By the whole path, which opens no directory. A symlink in the path is found by the read.
        path = tree.path_of(blob.blobid)
        status = os.stat(path, dir_fd=tree.fd, follow_symlinks=False)
    except OSError as error:
        tree.blame(error)
        return None, None
    except ValueError:
        return None, None
    return status.st_size if stat.S_ISREG(status.st_mode) else None, stamp(status)
