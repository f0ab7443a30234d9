"""Restores a version of a snapshot set, or a part of it, below a directory.

The manifest is fetched first and proved as a whole. Then files come in its order, each compared
with its BLAKE3 before it is complete; several processes take turns in it. Hard links, and what
directories are given, come last. What is there and right is kept, so a call that was interrupted is
made again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from re import compile as pattern
from typing import Any, Final

from ntt_backup.blobdir.descriptors import DIRECTORY, FILE, names_in
from ntt_backup.blobdir.descriptors import closing as closing_fd
from ntt_backup.config.signing_key import Origin
from ntt_backup.errors import SOME_FAILED, ConfigError, DestinationError, LockHeld
from ntt_backup.filestore.contract import FileMissing, ReadableStore, StoredFileDamaged
from ntt_backup.process.child import run_helpers
from ntt_backup.process.durable import sync_directory, write_durably
from ntt_backup.snapshot.format.block_map import MapReader
from ntt_backup.snapshot.format.entry import Entry, entries_of
from ntt_backup.snapshot.format.manifest import ManifestReader
from ntt_backup.snapshot.names import MANIFEST, MAP, SnapshotDamaged
from ntt_backup.snapshot.origins import NOBODY, Origins
from ntt_backup.snapshot.patterns import PathChoice
from ntt_backup.snapshot.restore.attributes import Attributes
from ntt_backup.snapshot.restore.files import RestoreOptions, RestoreStep, VersionRestorer, finish
from ntt_backup.snapshot.restore.tree import MARKER
from ntt_backup.snapshot.versions import Version, choose, content, require_own

_SHOWN: Final = 1000
# The line of a directory or of a hard link. Nothing is tried again: a path may have megabytes.
_LAST: Final = pattern(rb'\["(?:[^"\\]++|\\.)*+","[dh]",')
_PIECE: Final = 1 << 20
# Bytes of a marker.
_MOST_MARKS: Final = 1 << 20
_DOUBT: Final = (
    "an earlier restore into this directory did not finish: the content of all files was compared"
)


@dataclass(slots=True)
class RestoredVersion:
    """Holds the result of a restore so far.

    Attributes:
        files: The number of files that were written.
        kept: The number of files that existed already and were right.
        wrong: The number of files that were not restored.
        problems: The first of those files, each with the reason.
        notes: What could not be done, in words.
        part: The part of the work that is done.
    """

    version: str = ""
    files: int = 0
    kept: int = 0
    bytes: int = 0
    fetched: int = 0
    wrong: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    part: float | None = None
    duration_s: float = 0.0
    origin: str = ""

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.wrong else 0

    def add(self, step: RestoreStep) -> None:
        """Adds what was done."""
        self.files += step.files
        self.kept += step.kept
        self.bytes += step.bytes
        self.fetched += step.fetched
        self.wrong += len(step.problems)
        self.problems += step.problems[: _SHOWN - len(self.problems)]
        self.notes = sorted({*self.notes, *step.notes})


def restore(
    open_store: Callable[[], ReadableStore],
    wanted: str,
    to: Path,
    options: RestoreOptions,
    *,
    jobs: int = 1,
    patterns: tuple[str, ...] = (),
    origins: Origins = NOBODY,
    trust: bool = False,
    on_progress: Callable[[RestoredVersion], object] = lambda _: None,
    before_writing: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda _: None,
) -> RestoredVersion:
    """Restores a version, `SET` or `SET@VERSION`, into a directory by several processes.

    Only the files that fit one of the patterns are restored, see `PathChoice`, or all without any.
    A version that this host did not make is refused unless `trust` is set. `before_writing` is
    called once the directory exists, before anything is written into it.

    Raises:
        ConfigError: No version or more than one is meant, or nothing fits a pattern.
        RemoteError: The version cannot be read; it is a SnapshotDamaged where the version is
            damaged.
        DestinationError: The directory cannot be written.
        LockHeld: Another restore uses the directory.
    """
    began = time.monotonic()
    done = RestoredVersion()
    with ExitStack() as stack:
        repository = stack.enter_context(closing(open_store()))
        version = choose(repository, wanted, origins, tell)
        done.version = version.name
        root = stack.enter_context(_destination(to))
        before_writing()
        stack.callback(os.umask, os.umask(0))
        stack.enter_context(_translated(to))
        source = _Source(repository, version, to, delta=options.delta)
        origin = origins.of_seal(source.header, source.seal)
        done.origin = str(origin)
        if origin != Origin.OURS and not trust:
            raise ConfigError(
                f"{version} is {origin.text}, so nothing was restored",
                detail=origin.why,
                hint="choose another version (ntt-backup-remote snapshot list). On a new machine,"
                " put the host key back (host.key_file). To restore it all the same, add"
                " --trust-target",
            )
        choice = PathChoice(patterns, source.manifest()) if patterns else None
        unfinished = Unfinished(to, root, str(version), patterns)
        if unfinished.doubt:
            done.notes.append(_DOUBT)
        options = replace(options, doubt=unfinished.doubt)
        restorer = partial(source.restorer, options, choice)
        if jobs == 1:
            steps = restorer(repository, root, (0, 1)).run()
        else:
            repository.close()  # With its threads, this process could not be copied.
            steps = _by_helpers(restorer, open_store, to, jobs)
        total = max(choice.bytes if choice is not None else source.trailer.bytes, 1)
        passed = 0
        wrong: set[str] = set()
        for step in steps:
            done.add(step)
            wrong.update(path for path, _ in step.problems)
            passed += step.passed
            done.part = min(passed / total, 1.0)
            done.duration_s = time.monotonic() - began
            on_progress(done)
        attributes = Attributes(privileges=options.privileges)
        end = finish(source.last_entries(), root, choice, wrong, attributes)
        done.add(end)
        if end.durable:
            unfinished.end()
    if source.problem:
        done.notes.append(source.problem)
    done.part = 1.0
    done.duration_s = time.monotonic() - began
    return done


def _by_helpers(
    restorer: Callable[[ReadableStore, int, tuple[int, int]], VersionRestorer],
    open_store: Callable[[], ReadableStore],
    to: Path,
    jobs: int,
) -> Iterator[RestoreStep]:
    """Yields the steps of several processes, each with a repository and a part of the files."""

    def help(number: int) -> Iterator[dict[str, Any]]:
        root = os.open(to, DIRECTORY)
        with closing(open_store()) as repository, _translated(to):
            yield from map(asdict, restorer(repository, root, (number, jobs)).run())

    bodies = [partial(help, number) for number in range(jobs)]
    for said in run_helpers(bodies, "ntt-restore"):
        said["problems"] = [(path, why) for path, why in said["problems"]]
        yield RestoreStep(**said)


class _Source:
    """Keeps the proved manifest of a version, and its map for a delta, in files without names.

    Attributes:
        problem: The reason why there is no map.
    """

    def __init__(
        self, repository: ReadableStore, version: Version, to: Path, *, delta: bool
    ) -> None:
        self.problem = ""
        self._map: mmap.mmap | None = None
        self._manifest = _keep(repository, version, MANIFEST, to)
        proving = self.manifest()
        deque(proving.batches(), maxlen=0)
        assert proving.trailer is not None
        assert proving.seal is not None
        self.header, self.trailer, self.seal = proving.header, proving.trailer, proving.seal
        require_own(self.header, version)
        if delta and self.trailer.map_size:
            with suppress(StoredFileDamaged):
                kept = _keep(repository, version, MAP, to)
                if sha256(kept).hexdigest() == self.trailer.map_sha256:
                    self._map = kept
            if self._map is None:
                self.problem = "the map of the version is damaged: files were fetched whole"

    def last_entries(self) -> Iterator[Entry]:
        """Yields the entries that `finish` restores, in their order."""
        for lines in self.manifest().batches():
            yield from entries_of([line for line in lines if _LAST.match(line)])

    def manifest(self) -> ManifestReader:
        """Returns a reader, at its beginning."""
        return ManifestReader(_pieces(self._manifest))

    def restorer(
        self,
        options: RestoreOptions,
        choice: PathChoice | None,
        repository: ReadableStore,
        root: int,
        part: tuple[int, int],
    ) -> VersionRestorer:
        map = MapReader(_pieces(self._map)) if self._map is not None else None
        return VersionRestorer(repository, self.manifest(), map, root, options, choice, part)


def _keep(repository: ReadableStore, version: Version, name: str, to: Path) -> mmap.mmap:
    """Returns a file of a version. It stays in processes that are copied."""
    placed = version.file(name)
    with tempfile.TemporaryFile(dir=to) as file:
        try:
            for data in content(repository, placed) if placed is not None else ():
                file.write(data)
        except FileMissing:
            placed = None
        if placed is None:
            raise SnapshotDamaged(f"the {name} of {version} is missing")
        file.flush()
        if not file.tell():
            raise SnapshotDamaged(f"{placed.name} is empty")
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _pieces(data: mmap.mmap) -> Iterator[bytes]:
    return (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))


@contextmanager
def _destination(to: Path) -> Iterator[int]:
    """Gives a descriptor of the directory, made if only its last part is missing, and locked."""
    with _translated(to):
        with suppress(FileExistsError):
            to.mkdir(0o755)
            sync_directory(to.parent)
        fd = os.open(to, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld.restoring(to) from None
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _translated(to: Path) -> Iterator[None]:
    """Raises DestinationError for an OSError, also for one while the destination is closed."""
    try:
        yield
    except OSError as error:
        raise DestinationError.at(to, error) from error


class Unfinished:
    """Marks a directory while a restore into it is not finished. Raises OSError.

    A restored file has its size and time long before its content is on the disk. A power cut can
    leave the file with both, and with zeros as its content. The marker is on the disk before the
    first file is written, and it is removed after the last sync. While it is there, no file is
    taken for right because of its size and time: its content is compared.

    The marker names each restore that did not finish, by version and patterns. Only the same
    restore, or one of the whole version, has looked at all files that the earlier one may have
    left.

    Attributes:
        doubt: Whether an earlier restore into the directory did not finish.
    """

    def __init__(self, to: Path, root: int, version: str, patterns: Sequence[str]) -> None:
        self._path = to / MARKER
        self._root = root
        self._line = json.dumps([version, *sorted(patterns)])
        # Without patterns, this restore looks at all files of the version.
        settled = self._line[:-1] if not patterns else self._line
        for name in names_in(root):
            if name.startswith(f".{MARKER}."):  # A power cut has left it of one that was written.
                os.unlink(name, dir_fd=root)
        self.doubt = os.access(MARKER, os.F_OK, dir_fd=root, follow_symlinks=False)
        said = b""
        with suppress(OSError), closing_fd(os.open(MARKER, FILE, dir_fd=root)) as fd:
            said = os.read(fd, _MOST_MARKS)
        lines = said.decode("utf-8", "surrogateescape").splitlines()
        self._others = [one for one in lines if not one.startswith(settled)]
        self._write([*self._others, self._line])

    def end(self) -> None:
        """Removes the mark of this restore, once all of its files are durable."""
        if self._others:
            self._write(self._others)
        else:
            os.unlink(MARKER, dir_fd=self._root)

    def _write(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        write_durably(self._path, text.encode("utf-8", "surrogateescape"), 0o600)
