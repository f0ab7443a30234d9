"""Finds blobs in a pack whose table or trailer is damaged, by the headers of its members.

Each blob that is a member of its own is found as long as its header is whole. The small ones, which
lie in dense members, cannot be told apart without the table. Nothing that is found is believed:
only a blob whose content hashes to its name is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.layout import BY_HASH, is_blobid, relative_path
from ntt_backup.pack.format import RAW, Entry
from ntt_backup.pack.reader import read_range
from ntt_backup.pack.ustar import BLOCK, padding, read_header

_WINDOW: Final = 1 << 20


class Salvage:
    """A damaged pack in a file. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        """Opens the file: once more in a copy of this process, which has no descriptors."""
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        os.close(self.fd)

    def range(self, start: int, length: int) -> bytes:
        """Returns these bytes, all of them. Raises PackError."""
        return read_range(lambda at, count: os.pread(self.fd, count, at), start, length)

    def content(self, entry: Entry, stored: bytes) -> bytes:
        """Returns the content of a member, which is never compressed."""
        return stored

    def entries(self) -> list[Entry]:
        """Returns what may be a blob: each blobid once."""
        size = os.fstat(self.fd).st_size
        return sorted({one.digest: one for one in find_members(self.fd, size)}.values())


def find_members(fd: int, size: int) -> Iterator[Entry]:
    """Yields the blobs of a file of that size, in order. Raises OSError.

    Where no header stands, the next one is looked for; so what lies within a blob may be taken for
    a member, too.
    """
    at = 0
    while at + BLOCK <= size:
        window = os.pread(fd, _WINDOW, at)
        last = at + len(window) - BLOCK
        if last < at:
            return
        start = at
        while at <= last:
            member = read_header(window[at - start : at - start + BLOCK])
            at += BLOCK
            if member is None or at + member.size > size:
                continue
            blobid = member.name.rpartition("/")[2]
            if is_blobid(blobid) and member.name == f"{BY_HASH}/{relative_path(blobid)}":
                yield Entry(bytes.fromhex(blobid), at, member.size, member.size, RAW)
            at += member.size + padding(member.size)
