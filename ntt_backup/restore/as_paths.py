"""Files that go by their paths are restored under their paths.

A list of the files, from the catalog or from a places file, is read once, in the order of their
blobids, beside the restore of the blobs. A file that is right in the directory is kept. The other
files are written to a second list, and their blobs are fetched, each once, into scratch space of
the directory. Then the second list is read, and each blob gets the names of its files: the last of
equal files is the blob itself, renamed, and the files before it are copies, which share its blocks
if the file system can do that. So there need be room for one copy only. An interrupted restore is
called again: blobs that were fetched are kept.

No path is trusted: see `snapshot.restore.tree`. Another file at a path is replaced, unless it may
be a file of this list whose name the file system takes for the same: it was changed since the
restore began, or its name is spelled in another way.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.descriptors import FILE, NEW, rename_new
from ntt_backup.blobdir.descriptors import closing as closing_fd
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.catalog.connection import Connection
from ntt_backup.catalog.listed_files import listed_files
from ntt_backup.dump.places_file import PlacesFile, PlacesWriter, read_places
from ntt_backup.errors import ConfigError
from ntt_backup.formatting import printable
from ntt_backup.model import Failure, ListedFile, Reason
from ntt_backup.name_hash import NEW_HASHER
from ntt_backup.process.durable import sync_below
from ntt_backup.restore.blobs import Restored, Wanted
from ntt_backup.restore.destination import SCRATCH, RestoreTarget, destination
from ntt_backup.restore.from_packs import FromPacks
from ntt_backup.restore.from_receiver import FromReceiver
from ntt_backup.snapshot.patterns import matcher
from ntt_backup.snapshot.restore.files import copy_content, digest_of
from ntt_backup.snapshot.restore.tree import (
    OF_ALL,
    DestinationTree,
    Level,
    Refused,
    open_old,
    reason,
    split,
)

_MOST_LEVELS: Final = 128
_MODE: Final = 0o777  # As of a blob: no bit by which others would run it as its owner.
_DIRECTORY_MODE: Final = 0o777  # The umask applies.
_TICK_SECONDS: Final = 0.2
_NEW_FILE: Final = "file"
_NO_LINK: Final = (errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

Source = Callable[[str], Iterator[ListedFile]]


@dataclass(slots=True)
class FileCounts:
    """The counts of files.

    Attributes:
        files: Files that got their names.
        kept: Files that were there before, and right.
        replaced: Those of `files` that took the place of another one.
    """

    files: int = 0
    kept: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class FileChoice:
    """Which files are restored, and how.

    Attributes:
        patterns: Files that fit one of them, or below a directory that does; none: all files.
        with_gone: Also files that their origin does not list any more.
        hard_links: Equal files become hard links.
    """

    patterns: Sequence[str] = ()
    with_gone: bool = False
    hard_links: bool = False


class FileRestore:
    """The restore of files. Raises BackupError.

    Args:
        source: Returns the list of the files. It is given a directory for temporary files, in which
            it has room for the list.
        choice: Which files are restored.
        wanted: The prefix and the shard of their blobids.

    Attributes:
        counts: The counts so far.
    """

    def __init__(self, source: Source, choice: FileChoice, wanted: Wanted) -> None:
        self._source = source
        self._choice = choice
        self._fits = matcher(choice.patterns)
        self._wanted = wanted
        # The hashes that names may be; first that of the last file that was right.
        self._hashes = list(NEW_HASHER.values())
        self._seen = 0
        self.counts = FileCounts()

    def run(
        self,
        make_work: Callable[[Wanted], FromReceiver | FromPacks],
        path: Path,
        *,
        workers: int,
        trust_size: bool,
        on_progress: Callable[[Restored], None],
    ) -> Restored:
        """Restores the files into a directory.

        Args:
            make_work: Makes the restore of their blobs.
            path: The directory.
            workers: The number of threads that fetch blobs.
            trust_size: Whether a file of the right size and time is not hashed.
            on_progress: Is called about five times a second.
        """
        with (
            closing(RestoreTarget(path, shard=self._wanted.shard, unnamed=True)) as target,
            destination(path),
        ):
            scratch = f"/proc/self/fd/{target.fd}"
            with tempfile.TemporaryFile(dir=scratch) as notes:
                files = self._source(scratch)
                lacking = self._lacking(target, files, notes, trust_size=trust_size)
                work = make_work(Wanted(blobids=lacking, shard=self._wanted.shard))
                self._fail = work.fail
                done = work.run(target, workers, on_progress, trust_size=trust_size)
                if not self._seen:
                    raise ConfigError(
                        "none of the listed files was chosen",
                        hint="check --path, --with-gone, --prefix and --query",
                    )
                notes.seek(0)
                self._place(target, notes, lambda: on_progress(done))
            target.remove_unnamed()
            sync_below(target.top)
        return done

    # --- what is lacking --------------------------------------------------------------------------

    def _lacking(
        self,
        target: RestoreTarget,
        files: Iterator[ListedFile],
        notes: PlacesFile,
        *,
        trust_size: bool,
    ) -> Iterator[str]:
        """Yields the blobids that are needed, each once, and writes the files that need them."""
        tree, writer = DestinationTree(target.top, make=False), PlacesWriter(notes.write)
        needed = ""
        with closing(tree), destination(target.root):
            for file in filter(self._chosen, files):
                self._seen += 1
                if file.blobid is None:
                    self._refuse(file, "it was never backed up", Reason.MISSING)
                elif self._is_right(tree, file, trust_size=trust_size):
                    self.counts.kept += 1
                else:
                    writer.add(file)
                    if file.blobid != needed:
                        needed = file.blobid
                        yield needed
            writer.finish()

    def _chosen(self, file: ListedFile) -> bool:
        blobid, wanted = file.blobid or "", self._wanted
        if not (blobid.startswith(wanted.prefix) and wanted.shard.has(blobid)):
            return False
        if file.gone and not self._choice.with_gone:
            return False
        parts = _below(file).split("/")
        return self._fits is None or any(
            self._fits("/".join(parts[: n + 1])) for n in range(len(parts))
        )

    def _is_right(self, tree: DestinationTree, file: ListedFile, *, trust_size: bool) -> bool:
        """Returns whether the directory has a file, which then gets its time and its mode."""
        try:
            above, name = _checked(file)
            level = tree.enter(above)
            if level.fd < 0:
                return False
            with closing_fd(open_old(level, name)) as fd:
                status = os.fstat(fd)
                if status.st_size != file.size:
                    return False
                trusted = trust_size and status.st_mtime_ns == file.mtime_ns
                if not (trusted or self._hashes_to(fd, file.blobid)):
                    return False
                _give(fd, file)
                return True
        except (OSError, Refused, ValueError):
            return False  # What is wrong is told when the file is placed.

    def _hashes_to(self, fd: int, blobid: str | None) -> bool:
        """Returns whether a file's content has this name, by whichever hash names are."""
        for number, new in enumerate(self._hashes):
            if digest_of(fd, new) == blobid:
                self._hashes.insert(0, self._hashes.pop(number))
                return True
        return False

    # --- what is placed ---------------------------------------------------------------------------

    def _place(
        self, target: RestoreTarget, notes: PlacesFile, on_progress: Callable[[], None]
    ) -> None:
        """Gives the blobs that were fetched the names of their files."""
        tree = DestinationTree(target.top, make=True, mode=_DIRECTORY_MODE)
        due = time.monotonic()
        with closing(tree), closing_fd(target.stage("names")) as stage:
            for file, behind in pairwise(chain(read_places(notes, "the list of files"), [None])):
                assert file is not None
                last = behind is None or behind.blobid != file.blobid
                try:
                    self._place_file(target, tree, stage, file, last=last)
                except (OSError, Refused, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in OF_ALL:
                        raise
                    self._refuse(file, f"it cannot be put in place: {reason(error)}")
                if time.monotonic() > due:
                    on_progress()
                    due = time.monotonic() + _TICK_SECONDS

    def _place_file(
        self,
        target: RestoreTarget,
        tree: DestinationTree,
        stage: int,
        file: ListedFile,
        *,
        last: bool,
    ) -> None:
        """Gives a file its name. last: no file behind it has the same content."""
        blob = relative_path(file.blobid or "")
        try:
            fd = os.open(blob, FILE, dir_fd=target.fd)
        except FileNotFoundError:
            text = f"its blob {file.blobid} was not restored"
            self._refuse(file, text, Reason.REMOTE_MISSING)
            return
        with closing_fd(fd):
            above, name = _checked(file)
            level = tree.enter(above)
            old = _stands_there(level, name, target.began_ns)
            if old and not tree.is_spelled(name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            with suppress(FileNotFoundError):  # Of a file that could not be placed.
                os.unlink(_NEW_FILE, dir_fd=stage)
            linked = self._choice.hard_links and _link(fd, target.fd, blob, stage)
            if last and not linked:
                _move(target.fd, blob, level, name, replace=old)
                _give(fd, file)
            else:
                if not linked:
                    _copy(fd, stage)
                with closing_fd(os.open(_NEW_FILE, FILE, dir_fd=stage)) as new:
                    _give(new, file)
                _move(stage, _NEW_FILE, level, name, replace=old)
        self.counts.files += 1
        self.counts.replaced += old

    def _refuse(self, file: ListedFile, text: str, why: Reason = Reason.UNREADABLE) -> None:
        self._fail(Failure(printable(_below(file)), why, text))


def _below(file: ListedFile) -> str:
    """Returns the path of a file below the directory: an absolute path begins there, too."""
    return os.fsdecode(file.path).removeprefix("/")


def _checked(file: ListedFile) -> tuple[str, str]:
    """Returns the directory of a file and its name in it. Raises Refused."""
    path = _below(file)
    first, *others = path.split("/")
    if first == SCRATCH or first.startswith(f"{SCRATCH}-"):
        raise Refused("this name is reserved for the restore")
    if len(others) > _MOST_LEVELS:
        raise Refused("its path has too many levels")
    return split(path)


def _stands_there(level: Level, name: str, began_ns: int) -> bool:
    """Returns whether a file is to be replaced.

    Raises:
        Refused: A directory stands in its place.
        FileExistsError: What stands there was put there, or changed, since the restore began.
    """
    try:
        status = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(status.st_mode):
        raise Refused("a directory stands in its place")
    if status.st_ctime_ns >= began_ns:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return True


def _copy(fd: int, stage: int) -> None:
    with closing_fd(os.open(_NEW_FILE, NEW, 0o644, dir_fd=stage)) as copy:
        copy_content(fd, copy)


def _link(fd: int, directory: int, blob: str, stage: int) -> bool:
    """Makes a hard link to a blob; returns False where the file system has none.

    A blob that has as many links as a file can have is replaced by a copy of it.
    """
    for _ in range(2):
        try:
            os.link(blob, _NEW_FILE, src_dir_fd=directory, dst_dir_fd=stage, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            if error.errno != errno.EMLINK:
                return False
            _copy(fd, stage)
            os.rename(_NEW_FILE, blob, src_dir_fd=stage, dst_dir_fd=directory)
        else:
            return True
    return False


def _move(directory: int, old: str, level: Level, name: str, *, replace: bool) -> None:
    if replace:
        os.rename(old, name, src_dir_fd=directory, dst_dir_fd=level.fd)
    else:
        rename_new(directory, old.encode(), level.fd, os.fsencode(name))


def _give(fd: int, file: ListedFile) -> None:
    """Gives a file its mode and its time, as far as they are known. Raises OSError."""
    status = os.fstat(fd)
    if file.mode is not None and (mode := file.mode & _MODE) != stat.S_IMODE(status.st_mode):
        os.fchmod(fd, mode)
    if file.mtime_ns is not None and file.mtime_ns != status.st_mtime_ns:
        os.utime(fd, ns=(status.st_atime_ns, file.mtime_ns))


def of_catalog(conn: Connection, query: str | None, directory: str) -> Iterator[ListedFile]:
    """Returns the files that the catalog lists, which are kept in a temporary file meanwhile.

    So no transaction is open while blobs are fetched.

    Args:
        conn: The connection to the catalog.
        query: As in `listed_files`.
        directory: The directory for the temporary file.

    Raises:
        CatalogError: The catalog refuses, or is unreachable.
    """
    file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - it is closed with the iterator
    writer = PlacesWriter(file.write)
    for listed in listed_files(conn, query):
        writer.add(listed)
    writer.finish()
    file.seek(0)
    return read_places(file, "the list of files")
