"""A file that goes by its path is read for the first time: its hash becomes its name.

A path comes from another program, and is bytes. It is checked before it is opened, and opened below
the root of the store, level by level, without following a symlink. A checksum of the application
shows whether the file is complete. Without one its age has to: a file that was changed a moment ago
may still be being written.
"""

from __future__ import annotations

import binascii
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable
from typing import Final

from ntt_backup.blobdir.layout import kind_of
from ntt_backup.model import BadFile, Blob, FileReason, ReadFile, Reason
from ntt_backup.name_hash import NEW_HASHER
from ntt_backup.source.paths import checked_path
from ntt_backup.source.store import READ_SIZE, SourceTree, Store
from ntt_backup.wire.framing import MAX_BLOB

_ALGORITHMS: Final = {16: "md5", 20: "sha1", 32: "sha256", 48: "sha384", 64: "sha512"}
_PREFIXED: Final = re.compile(r"([a-z0-9]{3,8})[:=-]")
_HEX: Final = re.compile(r"[0-9a-fA-F]+")


class FirstReader:
    """Reads files for the first time. Not thread-safe.

    Every method raises SourceError: the store cannot be read.

    Args:
        tree: The opened root.
        store: The store of that root.
        cancelled: Is called now and then while a large file is read, and may raise.
    """

    def __init__(
        self, tree: SourceTree, store: Store, cancelled: Callable[[], None] = lambda: None
    ) -> None:
        self._tree = tree
        self._store = store
        self._cancelled = cancelled
        self._buffer = memoryview(bytearray(READ_SIZE))

    def read(self, path: bytes, size: int | None, checksum: str | None) -> ReadFile | BadFile:
        """Reads a file, and compares it with what its origin says.

        Args:
            path: The path, as its origin gives it.
            size: The size in bytes that its origin gives, if any.
            checksum: The checksum that its origin gives, if any.
        """
        try:
            below = checked_path(path, self._store.root)
        except ValueError as error:
            return BadFile(FileReason.BAD_PATH, str(error))
        expected = parse_checksum(checksum) if checksum else None
        if checksum and expected is None:
            return BadFile(FileReason.WRONG_CHECKSUM, f"{checksum[:80]} is of no known form")
        hasher = hashlib.new(expected[0], usedforsecurity=False) if expected else None
        try:
            fd = self._tree.open(below)
            try:
                digest, length = self._hash(fd, hasher)
                # Its time of change is from before, unless it was changed while it was read.
                status = os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as error:
            return self._unreadable(below, error)
        young = self._store.is_young(status)
        if not stat.S_ISREG(status.st_mode):
            return BadFile(FileReason.NOT_A_FILE, f"it is {kind_of(status.st_mode)}")
        if young and not expected:
            return BadFile(FileReason.UNREADABLE, "it was changed a moment ago", young=True)
        if status.st_size != length:
            return BadFile(FileReason.UNREADABLE, "it was changed while it was read", young=True)
        if size is not None and size != length:
            said = f"{length} bytes in the store, {size} expected"
            return BadFile(FileReason.WRONG_SIZE, said, young)
        if expected and hasher and hasher.digest() != expected[1]:
            said = f"its {expected[0]} is {hasher.hexdigest()}, and {checksum} is expected"
            return BadFile(FileReason.WRONG_CHECKSUM, said, young)
        return ReadFile(Blob(digest, length), status.st_mtime_ns, stat.S_IMODE(status.st_mode))

    def _hash(self, fd: int, hasher: hashlib._Hash | None) -> tuple[str, int]:
        """Returns hash and length of a file; -1 for one that is being written. Mostly in one read.

        Raises:
            OSError: The file cannot be read, or is larger than a blob may be.
        """
        count = os.readv(fd, (self._buffer,))
        before = os.fstat(fd) if count == len(self._buffer) else None
        # A device may give bytes without end.
        if before is None or not stat.S_ISREG(before.st_mode):
            content = self._buffer[:count]
            if hasher is not None:
                hasher.update(content)
            return NEW_HASHER[self._store.hash](content).hexdigest(), count
        if before.st_size > MAX_BLOB:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        # It will be read when it is older: not each time somebody looks whether it is.
        if hasher is None and self._store.is_young(before):
            return "", -1

        def also(piece: memoryview) -> None:
            self._cancelled()
            if hasher is not None:
                hasher.update(piece)

        os.lseek(fd, 0, os.SEEK_SET)
        digest, length = self._tree.hash_content(fd, also)
        return digest, length if os.fstat(fd).st_mtime_ns == before.st_mtime_ns else -1

    def _unreadable(self, below: str, error: OSError) -> BadFile:
        error.filename = error.filename or below  # A read does not say which file it was.
        failure = self._tree.failure(Blob(""), error)
        young = failure.reason is Reason.MISSING and self._store.was_changed_lately(
            self._tree, below
        )
        return BadFile(FileReason(failure.reason.value), failure.detail, young)


def parse_checksum(text: str) -> tuple[str, bytes] | None:
    """Returns algorithm and digest of a checksum in hex digits or base64; None for other text.

    The algorithm may stand before it, as in `sha256:`; else its length says which it is.
    """
    text = text.strip()
    named = _PREFIXED.match(text)
    name = named[1] if named and named[1] in _ALGORITHMS.values() else ""
    bare = text[named.end() :] if named and name else text
    try:
        is_hex = _HEX.fullmatch(bare) and len(bare) // 2 in _ALGORITHMS and len(bare) % 2 == 0
        digest = bytes.fromhex(bare) if is_hex else binascii.a2b_base64(bare, strict_mode=True)
    except ValueError:
        return None
    algorithm = _ALGORITHMS.get(len(digest))
    return (algorithm, digest) if algorithm and name in ("", algorithm) else None
