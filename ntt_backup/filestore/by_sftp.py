"""An account that runs no command keeps the files of an area, by SFTP; see `contract.FileStore`.

The remote runs nothing of ours, so it sums nothing: what lies there is compared by its size. A file
is written under another name beside the others, and renamed. OpenSSH's server refuses a rename to a
name that is taken; one that overwrites is asked for the name before, and is not safe from another
client that takes the name at the same moment. A server without fsync@openssh.com makes files
durable when it likes to, and when a file arrived may be said by whoever has sent it.
"""

from __future__ import annotations

import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from threading import RLock
from typing import Final

from paramiko import Message, SFTPAttributes
from paramiko import sftp as fx

from ntt_backup.blobdir.layout import MAX_MARKER, read_marker
from ntt_backup.client.channel import Channel
from ntt_backup.client.remote_errors import explain_batch, explain_gone
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import (
    BackupError,
    BatchRejected,
    NameTaken,
    ProtocolViolation,
    RemoteCannotStore,
    RemoteDenied,
)
from ntt_backup.filestore.contract import (
    Area,
    Buffer,
    FileMissing,
    FileUnreadable,
    Hash,
    Progress,
    Range,
    StoredFile,
    Sum,
    ask_ahead,
    checksum,
    not_what_was_sent,
)
from ntt_backup.filestore.sftp_connection import Answers, SftpConnection
from ntt_backup.wire.framing import FORMAT
from ntt_backup.wire.stored_names import PACKS, arrival_us, is_trial, read_arrival, require_below

# Every server takes and gives so many bytes by one request.
_CHUNK: Final = 32768
_RANGES: Final = 64
_PIECE: Final = 1 << 22
_KEPT_OPEN: Final = 32
_DEAD_SECONDS: Final = 86400
_LEAST_FREE: Final = 1 << 20
_MOST_EXTENDED: Final = 64


class FileStoreBySftp:
    """See the module. Raises as `SftpConnection` does."""

    hashes = False

    def __init__(self, spec: SessionSpec, area: Area) -> None:
        self.root, self.area = spec.root, area
        self.incoming = f"{spec.root}/{area.name}/.incoming-"
        self._base = spec.root if area.name == PACKS else f"{spec.root}/{area.name}"
        self._lock = RLock()
        self._handles: OrderedDict[str, bytes] = OrderedDict()
        self._made = {self.root}
        self._swept = False
        self.added = self.unsent = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.connection = SftpConnection(spec, lambda: self.on_wait())
        self.syncs = b"fsync@openssh.com" in self.connection.extensions

    def close(self) -> None:
        if not self.channel.ended:
            self.channel.close()

    def abort(self) -> None:
        self.channel.abort()

    @property
    def channel(self) -> Channel:
        """The channel of the connection."""
        return self.connection.channel

    @property
    def placed(self) -> bool:
        return self.has(f"{self.root}/{FORMAT}") or self.has(f"{self.root}/by-hash")

    @property
    def identity(self) -> str:
        """The identity in the marker of the packs; "" where there is none that can be read."""
        path = f"{self.root}/{FORMAT}"
        with self.storing(path), suppress(FileNotFoundError, ValueError):
            handle = self.open(path, fx.SFTP_FLAG_READ)
            answer = self.connection.ask(fx.CMD_READ, handle, fx.int64(0), MAX_MARKER)
            self.close_handle(handle)
            return read_marker(answer.get_binary()).identity
        return ""

    def has(self, path: str) -> bool:
        """Returns whether anything has this path."""
        with self.storing(path):
            try:
                self.connection.ask(fx.CMD_LSTAT, path)
            except FileNotFoundError:
                return False
        return True

    def free(self) -> tuple[int | None, int | None]:
        """Returns the free bytes and inodes; None where the server does not say. Raises OSError."""
        self.connection.ask(fx.CMD_STAT, self.root)
        if b"statvfs@openssh.com" not in self.connection.extensions:
            return None, None
        said = self.connection.ask(fx.CMD_EXTENDED, "statvfs@openssh.com", self.root)
        _, unit, _, _, free, _, _, inodes = [said.get_int64() for _ in range(8)]
        return free * unit, inodes

    # --- files that are there ---------------------------------------------------------------------

    def list(self, below: str = "") -> Iterator[StoredFile]:
        if not require_below(self.area.name, below) or below.endswith("/"):
            return self._walk(below)
        return iter([one for one in [self.stat(below)] if one is not None])

    def read(self, ranges: Iterable[Range]) -> Iterator[bytes]:
        return ask_ahead(ranges, _RANGES, self._ask_for, self._content)

    def stat(self, name: str) -> StoredFile | None:
        try:
            answer = self.connection.ask(fx.CMD_LSTAT, self._path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(name, error) from error
        return _stored(name, *_attributes(answer))

    def fetch(self, name: str, start: int, length: int) -> bytes:
        return self._content(self._ask_for(Range(name, start, length)))

    def prove(self, name: str, by: Hash = "sha256") -> str:
        del name, by
        return ""

    def _ask_for(self, one: Range) -> tuple[Range, Answers]:
        answers = Answers(self.connection)
        path = self._path(one.name)
        try:
            with self._lock:
                if (handle := self._handles.pop(one.name, None)) is None:
                    handle = self.open(path, fx.SFTP_FLAG_READ)
                self._handles[one.name] = handle
                for at in range(0, one.length, _CHUNK):
                    place = fx.int64(one.start + at), min(_CHUNK, one.length - at)
                    answers.ask(fx.CMD_READ, handle, *place)
                if len(self._handles) > _KEPT_OPEN:
                    self.close_handle(self._handles.popitem(last=False)[1])
        except OSError as error:
            answers.error = error
        return one, answers

    def _content(self, asked: tuple[Range, Answers]) -> bytes:
        (name, start, length), answers = asked
        found = bytearray()
        try:
            answers.settle()
            for at, data in zip(range(0, length, _CHUNK), answers.data.values(), strict=False):
                end = min(at + _CHUNK, length)
                found += data
                while data and len(found) < end:  # A server may give fewer bytes.
                    rest = Range(name, start + len(found), end - len(found))
                    again = self._ask_for(rest)[1]
                    again.settle()
                    data = b"".join(again.data.values())
                    found += data
                if len(found) != end:
                    break
        except FileNotFoundError as error:
            raise FileMissing(name) from error
        except OSError as error:
            raise self._unreadable(name, error) from error
        if len(found) > length:
            raise ProtocolViolation(detail="more bytes than were asked for")
        return bytes(found)

    def _walk(self, directory: str) -> Iterator[StoredFile]:
        listed: dict[str, StoredFile | None] = {}
        for name, *attributes in self._entries(f"{self._base}/{directory}".rstrip("/")):
            with suppress(ValueError):
                if stat.S_ISDIR(attributes[0]):
                    listed[require_below(self.area.name, f"{directory}{name}/")] = None
                else:
                    path = self.area.require_name(directory + name)
                    listed[path] = _stored(path, *attributes)
        for name, file in sorted(listed.items()):
            if file is not None:
                yield file
            elif name.endswith("/"):
                yield from self._walk(name)

    def _entries(self, path: str) -> Iterator[tuple[str, int, int, int]]:
        """Yields names in a directory, with their attributes; none where there is no directory."""
        left = self.area.most
        try:
            handle = self.connection.ask(fx.CMD_OPENDIR, path).get_binary()
            while count := (answer := self.connection.ask(fx.CMD_READDIR, handle)).get_int():
                left -= count
                for _ in range(count):
                    name, _long = answer.get_binary(), answer.get_binary()
                    if left < 0 or not name:
                        raise ProtocolViolation(detail=f"the listing of {path} does not end")
                    yield name.decode("ascii", "replace"), *_attributes(answer)
            self.close_handle(handle)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, name: str, error: OSError) -> FileUnreadable:
        message, hint = f"{self.area.file} cannot be read", "look at its owner and mode there"
        return FileUnreadable(message, detail=f"{name}: {_text(error)}", hint=hint)

    def _path(self, name: str) -> str:
        return f"{self._base}/{self.area.require_name(name)}"

    # --- files on their way -----------------------------------------------------------------------

    def write(self, name: str, size: int = 0, *, look: bool = False) -> FileBySftp:
        del size
        self._path(name)
        self._sweep()
        return FileBySftp(self, name, known=look and self.stat(name) is not None)

    def wait(self, timeout: float) -> None:
        self.connection.poll(timeout)

    @property
    def progress(self) -> Progress:
        pace, wire = self.channel.pace, self.connection
        throttled = time.monotonic() if pace is not None and pace.delay() else 0.0
        # The connection itself bounds each wait for an answer.
        return Progress(wire.sent, self.added, self.unsent, 0, wire.heard, True, throttled)

    def try_out(self) -> None:
        trial = FileBySftp(self, "a trial")
        trial.add(b"0")
        trial.finish()
        trial.discard()

    def remove(self, names: Sequence[str]) -> int:
        if self.area.name == PACKS and not (self.area.replace or all(map(is_trial, names))):
            raise RemoteDenied("a run removes no packs", detail=", ".join(names)[:200])
        removed = 0
        for name, path in [(name, self._path(name)) for name in names]:
            with self.storing(path), suppress(FileNotFoundError):
                self.connection.ask(fx.CMD_REMOVE, path)
                removed += 1
            self._handles.pop(name, None)
            above = path.rpartition("/")[0]
            with suppress(OSError):  # It has other files.
                self.connection.ask(fx.CMD_RMDIR, above)
                self._made.discard(above)
        return removed

    def open(self, path: str, flags: int) -> bytes:
        """Returns a handle of a file. Raises OSError."""
        return self.connection.ask(fx.CMD_OPEN, path, flags, _private(0o600)).get_binary()

    def sync(self, name: str) -> None:
        """Makes a file with a name durable, where the server offers that."""
        if self.syncs:
            path = self._path(name)
            with self.storing(path):
                handle = self.open(path, fx.SFTP_FLAG_READ)
                try:
                    self.connection.ask(fx.CMD_EXTENDED, "fsync@openssh.com", handle)
                finally:
                    self.close_handle(handle)

    def close_handle(self, handle: bytes) -> None:
        """Closes a handle of a file or a directory, whose content does not matter any more."""
        Answers(self.connection).ask(fx.CMD_CLOSE, handle)

    def make_directory_of(self, path: str) -> None:
        """Makes the directories of a path below the root, which is never made."""
        above = path.rpartition("/")[0]
        if above not in self._made:
            self.make_directory_of(above)
            with suppress(OSError):  # That it is missing is found when a file is put there.
                self.connection.ask(fx.CMD_MKDIR, above, _private(0o700))
            self._made.add(above)

    def is_taken(self, path: str, name: str) -> bool:
        """Renames a file, and returns False; True where the name is taken."""
        target = self._path(name)
        self.make_directory_of(target)
        if self.has(target):
            return True
        with self.storing(target):
            try:
                self.connection.ask(fx.CMD_RENAME, path, target)
            except OSError:
                if not self.has(target):
                    raise
                return True
        return False

    def overwrites(self, name: str) -> bool:
        """Returns whether a rename overwrites this file, by trying."""
        file = FileBySftp(self, name)
        try:
            with suppress(OSError):
                self.connection.ask(fx.CMD_RENAME, file.path, self._path(name))
                return True
        finally:
            file.discard()
        return False

    @contextmanager
    def storing(self, path: str) -> Iterator[None]:
        """Raises the error for a request that the server refuses."""
        try:
            yield
        except FileNotFoundError as error:
            raise explain_gone(f"{path}: {_text(error)}") from error
        except PermissionError as error:
            raise RemoteDenied(
                "the remote account may not write below remote.path",
                detail=f"{path}: {_text(error)}",
                hint="give it the directory remote.path (chown), or name one that it owns",
            ) from error
        except OSError as error:
            detail = f"{path}: {_text(error)}"
            with suppress(OSError):  # Most servers tell no reason.
                free = self.free()[0]
                detail += ": no space left" if free is not None and free < _LEAST_FREE else ""
            found = explain_batch(detail)
            if not isinstance(found, BatchRejected):
                raise found from error
            raise RemoteCannotStore(
                f"the remote refuses {self.area.file}",
                detail=detail,
                hint="the server gives no reason: check the account's quota, and the disk",
            ) from error

    def _sweep(self) -> None:
        """Removes what was left of files whose sender died."""
        if self._swept:
            return
        self._swept = True
        above, _, prefix = self.incoming.rpartition("/")
        dead = time.time() - _DEAD_SECONDS
        left = [
            one[0] for one in self._entries(above) if one[0].startswith(prefix) and one[3] < dead
        ]
        for name in left:
            with suppress(OSError):
                self.connection.ask(fx.CMD_REMOVE, f"{above}/{name}")


class FileBySftp:
    """A file on its way; see `contract.CommittedFile`. known: the store has a file of that name,
    and nothing is sent.
    """

    def __init__(self, store: FileStoreBySftp, name: str, *, known: bool = False) -> None:
        self._store = store
        self._name = name
        self.path = store.incoming + secrets.token_hex(8)
        self._answers = Answers(store.connection)
        self._digest = sha256()
        self._size = self._sent = 0
        self._buffer = bytearray()
        self._handle = b""
        self._result: StoredFile | NameTaken | None = None
        self.poll = store.connection.poll
        # Whether the file is there under the other name.
        self._open = not known
        if not known:
            store.make_directory_of(self.path)
            flags = fx.SFTP_FLAG_WRITE | fx.SFTP_FLAG_CREATE | fx.SFTP_FLAG_EXCL
            with store.storing(self.path):
                self._handle = store.open(self.path, flags)

    def add(self, data: Buffer) -> None:
        self._digest.update(data)
        count = len(memoryview(data))
        self._size += count
        self._store.added += count
        if self._open:
            self._buffer += data
            self._store.unsent += count
            self._flush(_CHUNK)

    def finish(self) -> Sum:
        store = self._store
        self._flush(1)
        with store.storing(self.path):
            self._answers.settle()
            self._sync()
            if not store.syncs:
                self._close()
            there = _attributes(store.connection.ask(fx.CMD_LSTAT, self.path))[1]
        if there != self._size:
            found = f"{there} bytes: look at the quota of the account"
            raise not_what_was_sent(store.area, self._name, self._sum, found)
        return self._sum

    def publish(self) -> None:
        if self._store.is_taken(self.path, self._name):
            raise NameTaken(self._name, self._store.area.file)
        self._open = False
        with self._store.storing(self.path):
            # A file system makes a file durable with its new name.
            self._sync()
            self._close()

    def commit(self) -> None:
        """Does all at once: the server would take no other file meanwhile."""
        with suppress(NameTaken):
            if self._open:
                self.finish()
                self.publish()
                self._result = self._stored(datetime.now(UTC))
        # An earlier answer may have been lost: the name is taken by this very file.
        self._result = self._result or self._same() or NameTaken(self._name, self._store.area.file)
        self.discard()

    @property
    def settled(self) -> bool:
        return self._result is not None

    def result(self) -> StoredFile:
        assert self._result is not None
        if isinstance(self._result, NameTaken):
            raise self._result
        return self._result

    def discard(self) -> None:
        self._store.unsent -= len(self._buffer)
        self._buffer.clear()
        if self._open:
            self._open = False
            with suppress(BackupError, OSError):
                self._close()
                self._store.connection.ask(fx.CMD_REMOVE, self.path)

    @property
    def _sum(self) -> Sum:
        return Sum(self._size, self._digest.digest())

    def _stored(self, arrived: datetime) -> StoredFile:
        return StoredFile(self._name, self._size, arrived, checksum=checksum(self._sum.sha256))

    def _same(self) -> StoredFile | None:
        """Returns the file that has the name where its content, which is read, is the same.

        The file is made durable first: whoever gave it the name may have died before that.
        """
        found = self._store.stat(self._name)
        if found is None or found.size != self._size:
            return None
        self._store.sync(self._name)
        theirs = sha256()
        size, name = self._size, self._name
        ranges = (Range(name, at, min(_PIECE, size - at)) for at in range(0, size, _PIECE))
        with suppress(FileMissing, FileUnreadable):
            for data in self._store.read(ranges):
                theirs.update(data)
        return self._stored(found.arrived) if theirs.digest() == self._sum.sha256 else None

    def _flush(self, least: int) -> None:
        """Sends what is in the buffer, while that has at least so many bytes."""
        while len(self._buffer) >= least:
            piece = bytes(self._buffer[:_CHUNK])
            del self._buffer[:_CHUNK]
            self._store.unsent -= len(piece)
            self._answers.ask(fx.CMD_WRITE, self._handle, fx.int64(self._sent), piece)
            self._sent += len(piece)
            if self._answers.error is not None:
                with self._store.storing(self.path):
                    raise self._answers.error

    def _sync(self) -> None:
        if self._store.syncs:
            self._store.connection.ask(fx.CMD_EXTENDED, "fsync@openssh.com", self._handle)

    def _close(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, b""
            self._store.connection.ask(fx.CMD_CLOSE, handle)


def _private(mode: int) -> SFTPAttributes:
    attributes = SFTPAttributes()
    attributes.st_mode = mode
    return attributes


def _text(error: OSError) -> str:
    return error.strerror or str(error)


def _stored(name: str, mode: int, size: int, modified: int) -> StoredFile | None:
    """Returns a regular file; None for anything else."""
    arrived = read_arrival(arrival_us(modified * 10**9))
    return StoredFile(name, size, arrived) if stat.S_ISREG(mode) else None


def _attributes(answer: Message) -> tuple[int, int, int]:
    """Returns mode, size and modification time from an answer. paramiko's own way has no bound."""
    flags, size, mode, modified = answer.get_int(), -1, 0, 0
    if flags & SFTPAttributes.FLAG_SIZE:
        size = answer.get_int64()
    if flags & SFTPAttributes.FLAG_UIDGID:
        answer.get_bytes(8)
    if flags & SFTPAttributes.FLAG_PERMISSIONS:
        mode = answer.get_int()
    if flags & SFTPAttributes.FLAG_AMTIME:
        _, modified = answer.get_int(), answer.get_int()
    if flags & SFTPAttributes.FLAG_EXTENDED:
        for _ in range(2 * min(answer.get_int(), _MOST_EXTENDED)):
            answer.get_binary()
    return mode, size, modified
