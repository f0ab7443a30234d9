"""An area has files of one purpose below the root: of snapshots, dumps of catalogs, or packs.

Each level is opened from the one above, without following links and on one file system, and names
have one form, so nothing outside can be named. What a client may do with its own area, each class
says.

A file is written as `.incoming-<token>`, gets its name when it is on stable storage and was read
from there, and never changes. Syncing and reading go on behind the writing, so that a large file is
not waited for at its end.

A client may be hostile, and have seen to it that the newest dumps are worthless. So which dumps a
client cannot remove is decided by when they came in, which no client can choose.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from ntt_backup.blobdir.descriptors import (
    NEW,
    closing,
    forget,
    lock_file,
    lock_new,
    names_in,
    open_below,
    open_file,
    rename_new,
    sync_directory,
    write_all,
)
from ntt_backup.receiver.workspace import Refusal
from ntt_backup.wire import stored_names
from ntt_backup.wire.framing import FORMAT, ProtocolError
from ntt_backup.wire.stored_names import (
    MAX_DUMPS,
    MAX_PINS,
    MAX_RECORD,
    PLACES,
    RECORD,
    SEALED,
    arrival_us,
    has_form,
    is_pin,
)

# So many sets lie on a remote at most, and so many versions in each. A version has as many files as
# there are names.
MAX_SETS = 1000
MAX_VERSIONS = 10_000
# Files of checks that were killed. Each session that adds a file reads their directory.
MAX_TRIALS = 1000

_KEPT_OPEN = 16
_TRIES = 20
# Clocks differ.
_AHEAD = timedelta(days=1)
_DAY_US = 86_400_000_000
# Of each catalog stay so many of the newest dumps, and the first of each of so many days.
_NEWEST = 2
_DAYS = 7
# What is read of a record. 10,000 records would take too much memory.
_KNOWN = ("target", "database", "bytes", "sha256", "base", "places_bytes", "places_sha256")

INCOMING = ".incoming-"
_STALE_SECONDS = 3600
# So many bytes are written before those behind them are synced and summed.
_STEP = 32 << 20


class Incoming:
    """A file that is being received, under a temporary name. Methods raise OSError."""

    def __init__(self, directory: int) -> None:
        self.name = INCOMING + os.urandom(4).hex()
        self._fd = os.open(self.name, NEW, 0o600, dir_fd=directory)
        # The area opens its directory anew for the next file.
        self._directory = os.dup(directory)
        with contextlib.suppress(OSError):
            lock_new(self._fd)
        self._digest = hashlib.sha256()
        self._written = 0
        self._summed = 0
        self._behind: threading.Thread | None = None
        self._problem: OSError | None = None
        self.stopped = False

    def write(self, data: memoryview) -> None:
        write_all(self._fd, memoryview(data))
        self._written += len(data)
        thread = self._behind
        if self._written - self._summed >= _STEP and (thread is None or not thread.is_alive()):
            self._raise()
            self._behind = threading.Thread(target=self._follow, daemon=True)
            self._behind.start()

    def sync(self) -> tuple[int, bytes]:
        """Makes all of it durable, with this moment as its time of arrival.

        Returns:
            The size in bytes, and the SHA-256 of what is on the disk. Ends early when `stopped` is
            set.
        """
        self._wait()
        # A client could write today and ask for the name next week. A few file systems keep no
        # times: no client chooses on which one the receiver works.
        with contextlib.suppress(OSError):
            os.utime(self._fd)
        self._follow()
        self._raise()
        return self._summed, self._digest.digest()

    def remove(self) -> None:
        """Closes the file, and removes it where it has got no name."""
        self.stopped = True
        self._wait()
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self._directory)
        os.close(self._directory)
        os.close(self._fd)

    def _follow(self) -> None:
        """Syncs what is written, and sums it from the disk. The system tells once of an error."""
        end = self._written
        try:
            os.fsync(self._fd)
            forget(self._fd)
            while not self.stopped and self._summed < end:
                data = os.pread(self._fd, min(1 << 20, end - self._summed), self._summed)
                if not data:
                    break
                self._digest.update(data)
                self._summed += len(data)
        except OSError as problem:
            self._problem = self._problem or problem

    def _wait(self) -> None:
        if self._behind is not None:
            self._behind.join()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem


def remove_if_stale(directory: int, name: str) -> None:
    """Removes a file that was not changed for an hour, unless it is locked: its session lives, and
    may have nothing to write for hours.
    """
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if status.st_mtime >= time.time() - _STALE_SECONDS:
        return
    with contextlib.ExitStack() as after:
        with contextlib.suppress(OSError):  # Where there are no locks, its age decides.
            lock = lock_file(directory, name, create=False)
            if lock is None:
                return
            after.callback(os.close, lock)
        os.unlink(name, dir_fd=directory)


class FoundFile(NamedTuple):
    """A file in an area. size: in bytes. arrived_us: when the file got its name, in microseconds
    since 1970.
    """

    name: str
    size: int
    arrived_us: int


class FileArea:
    """The files of one area. root: the descriptor of the root. Files without a name lie in the
    directory `called` below the root.

    Methods raise OSError, and Misplaced where a directory is a symlink, no directory, or on another
    file system.
    """

    called = ""  # The name of the area, and of a directory below the root.
    word = ""  # Of `--allow`.

    def __init__(self, root: int) -> None:
        self.root = root
        self._fd = -1
        self._made = False
        self._opened: OrderedDict[str, int] = OrderedDict()

    # --- what one kind of area decides ------------------------------------------------------------

    # How many directories there may be in each level of directories above the files.
    levels: Sequence[int] = ()
    # Whether files are removed durably, and directories that are empty then.
    tidy = True

    @property
    def base(self) -> int:
        """The descriptor of the directory that names are relative to."""
        return self.fd()

    def require_publishable(self, name: str, size: int, digest: bytes) -> None:
        """Raises Refusal, ProtocolError or OSError where a file may not get a name.

        Args:
            name: The name that the client asks for.
            size: The size of the file in bytes.
            digest: The SHA-256 of the file, as it lies on the disk.
        """
        raise NotImplementedError

    def require_pin(self, size: int, below: str, kept: set[str]) -> None:
        """Raises Refusal, ProtocolError or OSError where a pin may not get its name.

        Args:
            size: The size of the pin in bytes.
            below: The directory of the pin, as in `found`.
            kept: The files of which one must be there.
        """
        if size > MAX_RECORD:
            raise ProtocolError("a pin that is too long")
        beside = {one.name for one in self.found(below)}
        if not kept & beside:
            raise Refusal("refused", "a pin of what is not there")
        if sum(map(is_pin, beside)) >= MAX_PINS:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self.called)

    def removable(self, names: Iterable[str], allow: frozenset[str]) -> list[str]:
        """Returns those of the names that the client may remove, in their order. Raises Refusal.

        Args:
            names: What the client asks to remove.
            allow: The words of `--allow`.
        """
        raise NotImplementedError

    # --- what all do ------------------------------------------------------------------------------

    def begin(self) -> Incoming:
        """Returns a new file without a name. Removes old files without a name whose sessions were
        killed.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.called, 0o700, dir_fd=self.root)
            self._made = True
        self._let_go()  # Another session may have removed, as its own, the one that is open.
        directory = self.fd()
        for name in names_in(directory):
            if name.startswith(INCOMING):
                with contextlib.suppress(OSError):
                    remove_if_stale(directory, name)
        return Incoming(directory)

    def fd(self) -> int:
        """Returns the directory of the area, which is kept open."""
        if self._fd < 0:
            self._fd = open_below(self.root, self.called, os.fstat(self.root).st_dev)
        return self._fd

    def found(self, below: str = "") -> Iterator[FoundFile]:
        """Yields the files below a directory, in the order of names, or the file of that name; none
        where the directory or the file is missing.
        """
        with contextlib.suppress(FileNotFoundError):
            yield from self._found(self.base, "", below.split("/"))

    def open(self, name: str) -> int:
        """Returns a descriptor, which this object closes. The content is read from the disk."""
        fd = self._opened.get(name)
        if fd is not None:
            self._opened.move_to_end(name)
            return fd
        with self._parents(name) as parents:
            fd = open_file(parents[-1], name.rpartition("/")[2])
        forget(fd)
        if len(self._opened) == _KEPT_OPEN:
            os.close(self._opened.popitem(last=False)[1])
        self._opened[name] = fd
        return fd

    def publish(self, incoming: Incoming, name: str) -> None:
        """Gives a file its name, which is durable when this returns. The time of arrival is now:
        the client chooses how long it waits. Raises FileExistsError.
        """
        self.require_publishable(name, *incoming.sync())
        file = name.rpartition("/")[2]
        # A plain and a sealed file of one name would leave open which of them counts.
        other = file[: -len(SEALED)] if file.endswith(SEALED) else file + SEALED
        for _ in range(_TRIES):
            # Again where another session that removes files has taken an empty directory away.
            with contextlib.suppress(FileNotFoundError), self._parents(name, make=True) as parents:
                with contextlib.suppress(FileNotFoundError):
                    os.stat(other, dir_fd=parents[-1], follow_symlinks=False)
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other)
                rename_new(self.fd(), incoming.name.encode(), parents[-1], file.encode())
                self._sync_names(parents)
                return
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def open_durable(self, name: str) -> int:
        """Opens a file like `open`, and makes it durable under its name.

        A session that gave the file its name may have died before it synced the directories, and a
        copy may have been made by another program.
        """
        fd = self.open(name)
        with self._parents(name) as parents:
            try:
                os.fsync(fd)
                self._sync_names(parents)
            except OSError as problem:
                if problem.errno != errno.EROFS:  # There nothing is left to write.
                    raise
        return fd

    def _sync_names(self, parents: Sequence[int]) -> None:
        """Makes the names in these directories durable; the first of them may be new itself."""
        for fd in dict.fromkeys((*reversed(parents), self.root)):
            sync_directory(fd)

    def remove(self, names: Iterable[str], allow: frozenset[str]) -> int:
        """Removes files, each durably before the next one, and directories that are empty then.

        Args:
            names: The files, in this order. One that does not exist is ignored.
            allow: The words of `--allow`.

        Returns:
            How many files were removed.
        """
        self._close_files()
        count = 0
        for name in self.removable(names, allow):
            *above, file = name.split("/")
            with contextlib.suppress(FileNotFoundError), self._parents(name) as parents:
                os.unlink(file, dir_fd=parents[-1])
                count += 1
                if not self.tidy:
                    continue
                sync_directory(parents[-1])
                with contextlib.suppress(OSError):
                    for fd, directory in zip(parents[-2::-1], reversed(above)):
                        os.rmdir(directory, dir_fd=fd)
        return count

    def close(self) -> None:
        """Closes all, and removes the directory of the area if it was made for nothing."""
        self._close_files()
        self._let_go()
        if self._made:
            with contextlib.suppress(OSError):
                os.rmdir(self.called, dir_fd=self.root)

    def _close_files(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _let_go(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @contextlib.contextmanager
    def _parents(self, name: str, make: bool = False) -> Iterator[list[int]]:
        """Gives the directories above a file, from the base on. make: makes missing ones, as long
        as there are not too many.
        """
        with contextlib.ExitStack() as opened:
            parents = [self.base]
            for most, directory in zip(self.levels, name.split("/")[:-1]):
                if make:
                    _make(parents[-1], directory, most)
                parents.append(opened.enter_context(self._level(parents[-1], directory)))
            yield parents

    def _level(self, above: int, name: str) -> contextlib.AbstractContextManager[int]:
        return closing(open_below(above, name, os.fstat(self.root).st_dev))

    def _found(self, directory: int, prefix: str, wanted: Sequence[str]) -> Iterator[FoundFile]:
        wanted_name, *wanted_below = wanted or [""]
        there = [wanted_name] if wanted_name else names_in(directory)
        is_directory = {
            name: has_form(stored_names.require_below, self.called, f"{prefix}{name}/")
            for name in there
        }
        for name in sorted(there, key=lambda name: f"{name}/" if is_directory[name] else name):
            path = prefix + name
            if not (is_directory[name] or has_form(stored_names.require_name, self.called, path)):
                continue
            # A directory that is removed meanwhile hides none of the others.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if is_directory[name] and stat.S_ISDIR(status.st_mode):
                    with self._level(directory, name) as below:
                        yield from self._found(below, f"{path}/", wanted_below)
                elif not is_directory[name] and stat.S_ISREG(status.st_mode):
                    yield FoundFile(path, status.st_size, arrival_us(status.st_mtime_ns))


class SnapshotArea(FileArea):
    """`snapshots` has `<set>/<version>/<file>`."""

    called = stored_names.SNAPSHOTS
    word = "snapshot"

    levels = (MAX_SETS, MAX_VERSIONS)

    def require_publishable(self, name: str, size: int, digest: bytes) -> None:
        above = name.rpartition("/")[0]
        _require_time(name, stored_names.begun(above.split("/")[1]))
        if is_pin(name):
            manifest = f"{above}/manifest"
            self.require_pin(size, f"{above}/", {manifest, manifest + SEALED})

    def removable(self, names: Iterable[str], allow: frozenset[str]) -> list[str]:
        _require_words(allow, "replace")
        return list(names)


class DumpArea(FileArea):
    """`pgdump` has dumps of catalogs. The record of each, JSON, lies beside it and comes first: a
    record without its dump is told from a good one, a dump without a record is not. So does the
    list of the files that go by their paths.
    """

    called = stored_names.DUMPS
    word = "dump"

    def require_publishable(self, name: str, size: int, digest: bytes) -> None:
        dump = stored_names.dump_of(name)
        _require_time(name, stored_names.dump_begun(dump))
        if is_pin(name):
            self.require_pin(size, "", {dump, dump + SEALED})
            return
        if name.endswith(RECORD):
            if size > MAX_RECORD:
                raise ProtocolError("a record that is too long")
            if sum(one.name.endswith(RECORD) for one in self.found()) >= MAX_DUMPS:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self.called)
            return
        try:
            record = self._record(dump)
        except FileNotFoundError:
            raise ProtocolError("a dump before its record") from None
        of = "places_" if PLACES in name else ""
        said = (record.get(f"{of}bytes"), record.get(f"{of}sha256"))
        if not name.endswith(SEALED) and said != (size, digest.hex()):
            raise ProtocolError("the record of another dump")

    def removable(self, names: Iterable[str], allow: frozenset[str]) -> list[str]:
        """Returns the names of dumps that have a record, but those that must stay; see the module.
        Pins are removed with `replace` alone.

        Without `replace` these stay: of each catalog the newest whole dumps, and the first one of
        each of the last days that have one; those that have a pin, whoever has put it there; and
        the whole dumps that increments among those need.
        So the dump that was the newest yesterday cannot be removed today, whatever came after it.
        Records that cannot be read belong to somebody else.
        """
        replace = "replace" in allow
        found = {one.name: one for one in self.found()}
        dumps = [name[: -len(RECORD)] for name in found if name.endswith(RECORD)]
        records = {}
        for dump in dumps:
            # Another session may remove it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                records[dump] = self._record(dump)
        stay = set() if replace else self._irreplaceable(found, records)
        asked = dict.fromkeys(names)
        chosen = []
        for name in asked:
            dump = stored_names.dump_of(name)
            if is_pin(name):
                chosen += [name] if replace else []
                continue
            # A dump without its record would stay for ever.
            left = (
                {dump + end for end in ("", SEALED, PLACES, PLACES + SEALED)}
                & found.keys() - asked.keys()
                if name == dump + RECORD
                else ()
            )
            if dump in records and dump not in stay and not left:
                chosen.append(name)
        # This machine may fail between two files, so a record goes behind its dump.
        last = {stored_names.dump_of(name): at for at, name in enumerate(asked)}
        return sorted(
            chosen, key=lambda name: (last[stored_names.dump_of(name)], name.endswith(RECORD))
        )

    def _record(self, dump: str) -> dict[str, Any]:
        """Returns what a record says of its dump; nothing where the record cannot be read. Raises
        FileNotFoundError.
        """
        try:
            with closing(open_file(self.fd(), dump + RECORD)) as fd:
                said = json.loads(os.read(fd, MAX_RECORD))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError):
            return {}
        return {name: said.get(name) for name in _KNOWN} if isinstance(said, dict) else {}

    @staticmethod
    def _irreplaceable(found: dict[str, FoundFile], records: dict[str, dict[str, Any]]) -> set[str]:
        stay = {dump for dump, record in records.items() if not record}
        stay.update(stored_names.dump_of(name) for name in found if is_pin(name))
        catalogs: dict[str, list[tuple[int, str]]] = {}
        for dump, record in records.items():
            plain, sealed = found.get(dump), found.get(dump + SEALED)
            whole = [sealed] if sealed else []
            if plain and record.get("bytes") == plain.size:
                whole.append(plain)
            if record and whole:
                catalog = repr([record.get("target"), record.get("database")])
                # What a client puts beside a dump of its own makes the dump no younger.
                arrived_us = min(one.arrived_us for one in whole)
                catalogs.setdefault(catalog, []).append((arrived_us, dump))
        for dumps in map(sorted, catalogs.values()):
            first: dict[int, str] = {}
            for arrived_us, dump in dumps:
                first.setdefault(arrived_us // _DAY_US, dump)
            stay.update([*first.values()][-_DAYS:], (dump for _, dump in dumps[-_NEWEST:]))
        bases = [records[dump].get("base") for dump in stay]
        stay.update(base for base in bases if isinstance(base, str))
        return stay


class PackArea(FileArea):
    """`packs`, `blobs` and `format.json` below the root have blobs in packs. A client adds files,
    and removes what a check has stored; packs and large blobs only where `--allow` lists prune and
    replace, and the marker never.
    """

    called = stored_names.PACKS
    word = "packs"
    # The forms of the names allow only a few directories.
    levels = (MAX_VERSIONS,) * 3

    @property
    def base(self) -> int:
        return self.root

    def require_publishable(self, name: str, size: int, digest: bytes) -> None:
        trial = stored_names.is_trial(name)
        if (trial or name == FORMAT) and size > MAX_RECORD:
            raise ProtocolError("a marker, or a file of a check, that is too long")
        beside = (f"{self.called}/{one}" for one in names_in(self.fd()) if trial)
        if sum(map(stored_names.is_trial, beside)) >= MAX_TRIALS:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self.called)

    def removable(self, names: Iterable[str], allow: frozenset[str]) -> list[str]:
        asked = list(names)
        if FORMAT in asked:
            raise Refusal("refused", "a receiver never removes the marker of the packs")
        if not all(map(stored_names.is_trial, asked)):
            _require_words(allow, "prune", "replace")
        return asked


class BlobArea(FileArea):
    """`by-hash` has the blobs that are plain files, which a client can remove, and nothing else.

    Their directories stay: a session that writes may have them open. What a power cut brings back
    is a blob that no catalog has marked.
    """

    called = stored_names.BY_HASH
    word = "prune"
    levels = (256, 256)
    tidy = False

    def removable(self, names: Iterable[str], allow: frozenset[str]) -> list[str]:
        _require_words(allow, "prune", "replace")
        return list(names)


AREAS: dict[str, type[FileArea]] = {
    one.called: one for one in (SnapshotArea, DumpArea, PackArea, BlobArea)
}


def _require_words(allow: frozenset[str], *words: str) -> None:
    """Raises Refusal where `--allow` lacks a word."""
    for word in words:
        if word not in allow:
            raise Refusal("refused", f"this receiver's --allow does not list {word}")


def _require_time(name: str, begun: datetime) -> None:
    """Raises Refusal where the time in a file's name lies in the future by the clock of this
    machine: such a file would stay the newest one until then.
    """
    if begun > datetime.now(timezone.utc) + _AHEAD:
        raise Refusal("time", f"{name} is more than a day ahead of this machine's clock")


def _make(above: int, name: str, most: int) -> None:
    """Makes a directory where it is missing, and fewer than most are there."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=above, follow_symlinks=False)
        return
    if sum(not one.startswith(".") for one in names_in(above)) >= most:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
