"""One pg_dump serves all targets of a daemon: what it wrote waits on this machine for each of them.

A pg_dump of a large database takes half an hour of a core and holds a snapshot of the database. So
the first target whose dump is due makes it, into a file of this machine; the others wait for that.
Each sends from the file: by its own link, sealed for its own keys, as a whole or as an increment on
what it has. A link that is cut repeats that copy only, and a target that is unreachable takes the
dump later. When all have it the file is removed; so is one that another replaces.

A file and not a pipe to all, because the slowest target must hold up no other. It is a help and
nothing more: where this machine has no room for it, each target makes a dump of its own. It is read
as any stranger's: its content is compared with the SHA-256 of what pg_dump wrote while it is sent.

Processes take turns by flock(2), so a killed one leaves no lock. The file has the form of a dump's
file: of a series all segments, compressed, else what pg_dump wrote.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Final

from blake3 import blake3
from pydantic import AwareDatetime, Field, TypeAdapter

from ntt_backup.blobdir.descriptors import closing as closing_fd
from ntt_backup.catalog import connection
from ntt_backup.dump.series import Writer, replay
from ntt_backup.dump.toc import DumpDamaged
from ntt_backup.errors import DumpFailed
from ntt_backup.filestore.local_cache import cache_directory
from ntt_backup.formatting import size

_META: Final = ".json"
_TEXT: Final = ".spool"
_TAKEN: Final = ".taken-"
_NO_ROOM: Final = "no-room"
_PIECE: Final = 1 << 20
_LOOK_EVERY: Final = 64 << 20
# So much of the disk stays free for others: this, or a twentieth of a small disk.
_LEAVE_FREE: Final = 1 << 30
_SHARE: Final = 20
_Count = Annotated[int, Field(ge=0)]


class NoSpool(Exception):
    """This machine cannot keep a dump for its targets. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """Describes a dump that waits on this machine.

    Attributes:
        name: Of its files, without their suffixes.
        begun: When pg_dump was started.
        database: The database's name; server: the version of its server.
        program: The version of pg_dump.
        options: Those of pg_dump.
        series: Whether the file has segments of a series.
        fingerprint: As `DumpRecord.fingerprint`.
        targets: For which it was made.
        copied: Those of them to which a blob was copied before.
        file_bytes: The size of its file.
        text: The size and the SHA-256 of what pg_dump wrote.
    """

    name: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]
    begun: AwareDatetime
    database: str
    server: str
    program: str
    options: tuple[str, ...]
    series: bool
    fingerprint: str
    targets: tuple[str, ...]
    copied: tuple[str, ...]
    file_bytes: _Count = 0
    text: tuple[_Count, str] = (0, "")


_FORM: Final = TypeAdapter(Spooled)


class Spool:
    """The dump that waits on this machine for the targets of one catalog."""

    def __init__(self, url: str) -> None:
        place, _ = connection.for_program(url, "")
        key = blake3(place.encode()).hexdigest(length=16)
        self.directory = cache_directory() / "spool" / key

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock, for which it waits as long as another process makes a dump.

        Raises:
            NoSpool: Nothing can be kept here; or the process that had the lock has found that.
        """
        since = time.time()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoSpool(f"{self.directory}: {error.strerror or error}") from error
        with closing_fd(fd):
            fcntl.flock(fd, fcntl.LOCK_EX)
            with suppress(OSError):
                if (self.directory / _NO_ROOM).stat().st_mtime >= since:
                    raise NoSpool((self.directory / _NO_ROOM).read_text("utf-8", "replace"))
            yield

    @contextmanager
    def dump_for(
        self, target: str, usable: Callable[[Spooled], bool], make: Callable[[], Spooled]
    ) -> Iterator[tuple[Spooled, Generator[bytes, None, None]]]:
        """Yields the dump that waits, and what pg_dump wrote; it is made if need be.

        The dump is the target's once the context ends without an error.

        Args:
            target: One of the targets that share the dump.
            usable: Returns whether the dump that waits is what this target would get now.
            make: Makes the dump, by `make` of this class.

        Raises:
            NoSpool: Nothing can be kept here.
            DumpFailed: The dump is damaged.
        """
        with self.locked():
            there = self.waiting()
            one = there if there is not None and usable(there) else make()
            file = self.open(one)
        with file:
            try:
                yield one, self.pieces(one, file)
            except DumpDamaged as error:
                self.clear_old(datetime.now(UTC))
                raise DumpFailed(
                    f"the dump that waits on this machine for its targets is damaged: {error}",
                    detail=f"in {self.directory}",
                    hint="the next run makes a new dump; check this disk for errors",
                ) from error
        self.took(one, target)

    def waiting(self) -> Spooled | None:
        """Returns the dump that waits; None where none does, or it is not complete."""
        with suppress(OSError, ValueError):
            for path in self.directory.glob(f"*{_META}"):
                one = _FORM.validate_json(path.read_bytes(), strict=False)
                if path.stem == one.name and self._file(one).stat().st_size == one.file_bytes:
                    return one
        return None

    def make(self, one: Spooled, pieces: Iterable[bytes]) -> Spooled:
        """Writes what pg_dump writes, in the place of what waited; returns it as it waits now.

        The lock must be held. What the pieces raise leaves nothing.

        Raises:
            NoSpool: There is no room.
        """
        self.clear()
        path, digest, text_bytes, written = self._file(one), hashlib.sha256(), 0, 0
        writer = Writer(None) if one.series else None
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                looked = -_LOOK_EVERY
                for piece in pieces:
                    digest.update(piece)
                    text_bytes += len(piece)
                    written += file.write(piece if writer is None else writer.add(piece))
                    if written - looked >= _LOOK_EVERY:
                        looked = written
                        self._require_room(fd)
                written += file.write(b"" if writer is None else writer.end())
            text = (text_bytes, digest.hexdigest())
            made = replace(one, file_bytes=written, text=text)
            new = path.with_suffix(".new")
            new.write_bytes(_FORM.dump_json(made))
            new.replace(path.with_suffix(_META))
        except OSError as error:
            self.clear()
            why = f"{self.directory}: {error.strerror or error}"
            with suppress(OSError):  # Who waits for the lock need not fill the disk once more.
                (self.directory / _NO_ROOM).write_text(why, "utf-8")
            raise NoSpool(why) from error
        except BaseException:
            self.clear()
            raise
        return made

    def open(self, one: Spooled) -> IO[bytes]:
        """Opens a dump. Nobody takes it from who has opened it while the lock is held."""
        try:
            return self._file(one).open("rb")
        except OSError as error:
            raise NoSpool(f"{self._file(one)}: {error.strerror or error}") from error

    @staticmethod
    def pieces(one: Spooled, file: IO[bytes]) -> Generator[bytes, None, None]:
        """Yields what pg_dump wrote. Raises DumpDamaged where the file is not what was written."""
        digest, text_bytes = hashlib.sha256(), 0
        try:
            stored = iter(partial(file.read, _PIECE), b"")
            for piece in replay(stored) if one.series else stored:
                digest.update(piece)
                text_bytes += len(piece)
                yield piece
        except OSError as error:
            raise DumpDamaged(error.strerror or str(error)) from error
        if (text_bytes, digest.hexdigest()) != one.text:
            raise DumpDamaged("its SHA-256 differs from its record")

    def took(self, one: Spooled, target: str) -> None:
        """Notes that a target has a dump. With the last of its targets the dump is removed."""
        with suppress(OSError):
            (self.directory / f"{one.name}{_TAKEN}{target}").touch(0o600)
            prefix = f"{one.name}{_TAKEN}"
            took = {path.name.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*")}
            if took.issuperset(one.targets):
                self._remove(f"{one.name}*")

    def clear(self) -> None:
        """Removes what waits, and what a killed process has left."""
        for pattern in (f"*{_META}", f"*{_TEXT}", f"*{_TAKEN}*", "*.new", _NO_ROOM):
            self._remove(pattern)

    def clear_old(self, since: datetime) -> None:
        """Removes what waits from before a time, unless another process makes a dump."""
        with suppress(OSError, NoSpool):
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CLOEXEC)
            with closing_fd(fd):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                one = self.waiting()
                if one is None or one.begun < since:
                    self.clear()

    def _file(self, one: Spooled) -> Path:
        return self.directory / f"{one.name}{_TEXT}"

    def _remove(self, pattern: str) -> None:
        for path in self.directory.glob(pattern):
            with suppress(OSError):
                path.unlink()

    def _require_room(self, fd: int) -> None:
        disk = os.fstatvfs(fd)
        free = disk.f_bavail * disk.f_frsize
        if free < min(_LEAVE_FREE, disk.f_blocks * disk.f_frsize // _SHARE):
            raise OSError(errno.ENOSPC, f"only {size(free)} of the disk are left")
