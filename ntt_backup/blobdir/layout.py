"""A blob directory has the layout `aa/bb/<blobid>`, and is opened without following a symlink.

A blobid is the BLAKE3-256 or the SHA-256 of a blob's content as 64 lowercase hex digits.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import OrderedDict
from typing import NamedTuple

from ntt_backup.blobdir.descriptors import (
    DIRECTORY,
    FILE,
    closing,
    make_directory,
    open_file,
    open_untouched,
    opened_anew,
)
from ntt_backup.wire.framing import FORMAT, IDENTITY, IDENTITY_BYTES

BY_HASH = "by-hash"
# What `find_marker` returns for a marker that this program cannot read.
UNKNOWN_IDENTITY = "?"
# The latest version of the form of both markers, which says the hash of names, where that is not
# BLAKE3; and the most bytes of a marker.
MARKER_VERSION = 2
MAX_MARKER = 4096

_DIGITS = 64
_HEX = re.compile(r"[0-9a-f]+")
_LAYOUT = re.compile(r"0:([2-4])/(?:([2-8]):([4-8])/)?([0-8]):")
_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def is_blobid(text: str) -> bool:
    """Returns whether text is exactly 64 lowercase hex digits (no newline, no prefix, no upper
    case).
    """
    try:
        # In half the time that a pattern takes, and each blob is asked for several times.
        return len(text) == _DIGITS and bytes.fromhex(text).hex() == text
    except ValueError:
        return False


class Layout:
    """Says where below its root a blob directory has the file of a blob, by slices of the blobid.

    `0:2/2:4/0:` is aa/bb/<blobid>. One or two directories have the first digits, two to four each;
    the file is named by the whole blobid, or by the digits that follow. So a path belongs to one
    blobid, and directories in their order have the blobids in theirs. Raises ValueError for any
    other text.
    """

    def __init__(self, text: str) -> None:
        found = _LAYOUT.fullmatch(text)
        if found is None:
            raise ValueError(f"not a layout: {text!r}")
        first, begin, end, file = (int(one or 0) for one in found.groups())
        self.text = text
        self.widths = (first, end - begin) if end else (first,)
        self.digits = sum(self.widths)
        self.file_at = file
        if min(self.widths) < 2 or max(self.widths) > 4 or (end and begin != first):
            raise ValueError(f"not a layout: {text!r}")
        if file not in (0, self.digits):
            raise ValueError(f"not a layout: {text!r}")

    def directory(self, digits: str) -> str:
        """Returns the path of the directory of a blobid, or of its first digits."""
        first, end = self.widths[0], self.digits
        return f"{digits[:first]}/{digits[first:end]}" if first < end else digits[:first]

    def path_of(self, blobid: str) -> str:
        """Returns the path of a blob. Raises ValueError for what is no blobid: no id becomes a path
        anywhere else, so nothing from a catalog or a client reaches a file system unchecked.
        """
        if not is_blobid(blobid):
            raise ValueError(f"not a blobid: {blobid!r}")
        return f"{self.directory(blobid)}/{blobid[self.file_at :]}"

    def is_directory(self, path: str) -> bool:
        """Returns whether a directory of this path may have blobs below it."""
        *above, name = path.split("/")
        level = len(above)
        return (
            level < len(self.widths)
            and len(name) == self.widths[level]
            and _HEX.fullmatch(name) is not None
        )


# The layout of every target.
BY_HASH_LAYOUT = Layout("0:2/2:4/0:")


def relative_path(blobid: str) -> str:
    """Returns the path of a blob below its blob directory: `aa/bb/<blobid>`.

    Raises ValueError for anything that is not a blobid.
    """
    return BY_HASH_LAYOUT.path_of(blobid)


def kind_of(mode: int) -> str:
    """Returns what the type of a file is called."""
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


class Marker(NamedTuple):
    """The content of a marker, `format.json` or `.ntt-target.json`. hash: of names, blake3 or
    sha256; "" where there is no marker, or none that can be read.
    """

    version: int
    identity: str
    hash: str


def marker_text(identity: str, hash: str = "blake3") -> bytes:
    """Returns the content of a marker. hash: of names."""
    said: dict[str, object] = {"format": 1, "store": identity}
    if hash != "blake3":
        said.update(format=MARKER_VERSION, names=hash)
    return json.dumps(said).encode("ascii") + b"\n"


def read_marker(text: bytes) -> Marker:
    """Returns what a marker says. Raises ValueError for any other text.

    Of a later version the identity is "?".
    """
    try:
        found = json.loads(text)
        version, identity = found["format"], found["store"]
        names = found["names"] if version == MARKER_VERSION else "blake3"
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("not a marker") from None
    if isinstance(version, int) and version > MARKER_VERSION:
        return Marker(version, UNKNOWN_IDENTITY, "")
    known = version in (1, MARKER_VERSION) and names in ("blake3", "sha256")
    if not known or not isinstance(identity, str) or not is_identity(identity):
        raise ValueError("not a marker")
    return Marker(version, identity, names)


def is_identity(text: str) -> bool:
    """Returns whether text is the identity of a target: 32 lowercase hex digits."""
    try:
        return len(text) == 2 * IDENTITY_BYTES and bytes.fromhex(text).hex() == text
    except ValueError:
        return False


def find_marker(root: int) -> Marker:
    """Returns the marker of the target in a directory: that of its packs, else that of its plain
    files. The identity is "" where it has no marker, "?" for a marker that cannot be read.
    """
    for name in (FORMAT, IDENTITY):
        try:
            with closing(open_file(root, name)) as fd:
                return read_marker(os.read(fd, MAX_MARKER))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return Marker(0, UNKNOWN_IDENTITY, "")
    return Marker(0, "", "")


class NotAFile(Exception):
    """A blob's name belongs to something else, of the kind that is said."""


class BlobDirectory:
    """A directory of blobs, by a descriptor that stays the caller's. Not for several threads.

    Directories below it go by their path, "aa" or "aa/bb"; "" is the directory itself. At most
    `kept` of them stay open. device: the file system on which all of them must lie; None where a
    prefix may be on another disk. layout: where the blobs lie. Methods raise OSError.
    """

    def __init__(
        self, fd: int, device: int | None = None, kept: int = 2, layout: Layout = BY_HASH_LAYOUT
    ) -> None:
        self.fd = fd
        self.layout = layout
        self._device = device
        self._kept = kept
        self._opened: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        """Closes the directories that are kept open."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def directory(self, path: str, make: bool = False) -> int:
        """Returns a descriptor that is kept here. make: makes what is missing."""
        if not path:
            return self.fd
        fd = self._opened.get(path)
        if fd is not None:
            self._opened.move_to_end(path)
            return fd
        fd = self._opened[path] = self.open_directory(path, make)
        if len(self._opened) > self._kept:
            os.close(self._opened.popitem(last=False)[1])
        return fd

    def open_directory(self, path: str, make: bool = False) -> int:
        """Returns a new descriptor to list a directory by, for the caller to close."""
        if not path:
            return opened_anew(self.fd)
        parent, _, name = path.rpartition("/")
        above = self.directory(parent, make)
        try:
            try:
                return self._open_level(above, name)
            except FileNotFoundError:
                if not make:
                    raise
                make_directory(above, name, 0o755)
                return self._open_level(above, name)
        except OSError as error:
            raise self.error_at(path, error) from None

    def open(self, path: str) -> int:
        """Returns a descriptor of whatever lies at path, for the caller to close.

        The `filename` of its OSError is the part of path that could not be opened.
        """
        parent, _, name = path.rpartition("/")
        directory = self.directory(parent)
        try:
            return open_untouched(name, FILE, directory)
        except OSError as error:
            raise self.error_at(path, error) from None

    def open_blob(self, blobid: str) -> tuple[int, os.stat_result]:
        """Returns a descriptor for the caller to close, and its status. Raises NotAFile, OSError,
        and ValueError for what is no blobid.
        """
        fd = self.open(self.layout.path_of(blobid))
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                return fd, status
            raise NotAFile(f"it is {kind_of(status.st_mode)}")
        except BaseException:
            os.close(fd)
            raise

    def lstat(self, path: str) -> os.stat_result:
        """Returns the status of what lies at path, without following a link."""
        parent, _, name = path.rpartition("/")
        directory = self.directory(parent)
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise self.error_at(path, error) from None

    def error_at(self, path: str, error: OSError) -> Exception:
        """Returns what is raised for an error at path."""
        error.filename = path
        return error

    def _open_level(self, above: int, name: str) -> int:
        if self._device is None:
            return open_untouched(name, DIRECTORY, above)
        try:
            fd = open_untouched(name, DIRECTORY, above)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
            raise
        if os.fstat(fd).st_dev != self._device:
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
        return fd
