"""A blob directory has the layout `aa/bb/<blobid>`; whatever else lies in it has a name, too.

A blobid is the BLAKE3-256 of a blob's content as 64 lowercase hex digits.
"""

from __future__ import annotations

import os
import re
import stat
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    Entry = os.DirEntry[str]

BY_HASH = "by-hash"

_DIGITS = 64
_PREFIX = re.compile(r"[0-9a-f]{2}")
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


def is_prefix(name: str) -> bool:
    """Returns whether a directory `aa` or `bb` may have that name."""
    return _PREFIX.fullmatch(name) is not None


def relative_path(blobid: str) -> str:
    """Returns the path of a blob below its blob directory: `aa/bb/<blobid>`.

    Raises ValueError for anything that is not a blobid: this is the only place where an id becomes
    a path, so nothing from a catalog or a client reaches a file system unchecked.
    """
    if not is_blobid(blobid):
        raise ValueError(f"not a blobid: {blobid!r}")
    return f"{blobid[:2]}/{blobid[2:4]}/{blobid}"


class StrayKind(str, Enum):
    """Says why an entry is no blob. Operators read the words; the protocol counts them in this
    order.
    """

    NOT_A_BLOBID = "not-a-blobid"
    WRONG_DIRECTORY = "wrong-directory"
    SYMLINK = "symlink"
    NOT_A_FILE = "not-a-file"
    UNREADABLE = "unreadable"

    __str__ = str.__str__


class Stray(NamedTuple):
    r"""An entry that is no blob. path is relative to the root; what is not UTF-8 shows as \xNN."""

    path: str
    kind: StrayKind
    detail: str = ""


def stray(parent: str, entry: Entry) -> Stray:
    """Returns what is wrong with an entry of the directory parent that is known to be no blob."""
    path = f"{parent}/{entry.name}" if parent else entry.name
    if entry.is_symlink():
        kind = StrayKind.SYMLINK
    elif not entry.is_file(follow_symlinks=False):
        kind = StrayKind.NOT_A_FILE
    elif is_blobid(entry.name):
        kind = StrayKind.WRONG_DIRECTORY
    else:
        kind = StrayKind.NOT_A_BLOBID
    return Stray(os.fsencode(path).decode("utf-8", "backslashreplace"), kind)


def kind_of(mode: int) -> str:
    """Returns what the type of a file is called."""
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")
