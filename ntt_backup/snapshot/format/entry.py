"""An entry of a manifest describes a file of a version, and says where its content lies.

What is read here may come from a hostile target: every field has its type and its bounds. What a
path may lead to is for those who write files to decide.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from re import compile as pattern
from typing import Any, Final, NamedTuple

from ntt_backup.snapshot.names import MAX_PACKS, SnapshotDamaged

# Entry.kind
FILE, DIRECTORY, SYMLINK, HARD_LINK, FIFO = "f", "d", "l", "h", "p"
KINDS: Final = frozenset((FILE, DIRECTORY, SYMLINK, HARD_LINK, FIFO))

MAX_PATH: Final = 64 << 10
# As many directories as a process may have open, as a rule: whoever follows a path opens each.
MAX_PARTS: Final = 1000
MAX_SUPER_BLOCK: Final = 16 << 20
# A frame of content that does not compress is a little larger than its content.
MAX_STORED: Final = MAX_SUPER_BLOCK + (1 << 17)
# Their numbers take 40 MB of memory in Python, and the line 20.
MAX_EXTENTS: Final = 5 << 14
# Extents take 64 bytes each, packs 90, a path 384 KiB where each character is escaped.
MAX_LINE: Final = 10 << 20
# Of all names and values of a file, which local users can give it.
MAX_XATTRS: Final = 1 << 20
MAX_NUMBER: Final = 1 << 63
# A list, an object or a text takes 60 to 230 bytes of memory for two or three of a line.
MAX_CONTAINERS: Final = 1 << 18
_TOO_DEEP: Final = f"a path of more than {MAX_PARTS:,} parts"
_MAX_VERSIONS: Final = 1 << 20
_MAX_INODE: Final = 1 << 64
MAX_ID: Final = 1 << 32
_BLOCKS: Final = frozenset((0, *(1 << bits for bits in range(12, 25))))
_DECODER: Final = json.JSONDecoder()
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_SUM: Final = pattern("[0-9a-f]{64}")


class Extent(NamedTuple):
    """Describes content of a file that lies in a super block, which is a zstd frame in a pack.

    Attributes:
        start: The position in the file, in bytes.
        length: The size of the content in bytes.
        version: The index of the version in `Header.chain`.
        pack: The number of the pack, from 1.
        offset: The position of the frame in the pack, in bytes.
        stored: The size of the frame in bytes.
        skip: The bytes of the super block before this content.
    """

    start: int
    length: int
    version: int
    pack: int
    offset: int
    stored: int
    skip: int


@dataclass(slots=True)
class Entry:
    """Describes a file of a version.

    Attributes:
        path: The path without a leading slash. Bytes that are not UTF-8 are surrogates.
        mode: The permission bits alone.
        mtime: The mtime in nanoseconds since the epoch.
        ctime: The ctime in nanoseconds since the epoch.
        size: The size in bytes; 0 for everything but files.
        target: The target of a symlink; the path of the same file for a hard link.
        digest: The BLAKE3 of the content, in hex.
        block: The bytes of a block of the map; 0 for a file that has no blocks.
        extents: The extents in the order of `start`. The gaps between them are holes.
        xattrs: The values in base64, by name.
        unsettled: Whether the file changed during every reading.
    """

    path: str
    kind: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    ctime: int = 0
    inode: int = 0
    size: int = 0
    target: str = ""
    digest: str = ""
    block: int = 0
    extents: list[Extent] = field(default_factory=list)
    xattrs: dict[str, str] = field(default_factory=dict)
    unsettled: bool = False

    @property
    def blocks(self) -> int:
        """Returns how many sums of 8 bytes the map has for it."""
        return self.blocks_of(self.size)

    def blocks_of(self, size: int) -> int:
        """Returns how many of them are in the first bytes, size of them."""
        return -(-min(size, self.size) // self.block) if self.block else 0

    def line(self) -> bytes:
        """Returns the entry as it stands in a manifest, without the line's end."""
        more = {
            "to": self.target,
            "b3": self.digest,
            "bs": self.block,
            "x": [number for extent in self.extents for number in extent],
            "xa": self.xattrs,
            "u": int(self.unsettled),
        }
        said = _ENCODER.encode({name: value for name, value in more.items() if value})
        owned = (self.mode, self.uid, self.gid)
        times = (self.mtime, self.ctime)
        begin = _beginning(self.path, self.kind, *owned, *times, self.inode, self.size)
        return begin + f"{said}]".encode("ascii")


def times_of(status: os.stat_result) -> tuple[int, int]:
    """Returns the mtime and the ctime of a file as an entry stores them.

    A time out of an entry's bounds becomes the bound. Any user can give a file a time in the year
    2300.
    """
    mtime = max(1 - MAX_NUMBER, min(status.st_mtime_ns, MAX_NUMBER - 1))
    return mtime, max(0, min(status.st_ctime_ns, _MAX_INODE - 1))


def beginning_of(path: str, kind: str, status: os.stat_result, size: int) -> bytes:
    """Returns the part of an entry's line that `lstat` decides."""
    mode, uid, gid = status.st_mode & 0o7777, status.st_uid, status.st_gid
    return _beginning(path, kind, mode, uid, gid, *times_of(status), status.st_ino, size)


def _beginning(path: str, kind: str, *numbers: int) -> bytes:
    return f'[{quoted(path)},"{kind}",{",".join(map(str, numbers))},'.encode("ascii")


def order(path: str) -> bytes:
    """Returns the key by which entries are sorted: a directory comes right before what is in it."""
    return path.encode("utf-8", "surrogateescape").replace(b"/", b"\0")


def parse(line: bytes) -> Entry:
    """Returns the entry of a line. Raises SnapshotDamaged."""
    return entries_of([line])[0]


def entries_of(lines: Sequence[bytes], versions: int = _MAX_VERSIONS) -> list[Entry]:
    """Returns the entries that lines describe, with content in that many versions.

    Raises:
        SnapshotDamaged: A line is not an entry.
    """
    try:
        # Many lines are read in a fifth of the time that each of them takes.
        together = b",".join(lines)
        if len(together) > 1 << 20:
            require_few(together, 7 * MAX_EXTENTS + MAX_CONTAINERS)
        text = f"[{together.decode('ascii')}]"
        del together
        found = json.loads(text)
        del text
        require(len(found) == len(lines))
        entries = [_entry(versions, values) for values in found]
        check_text(*[entry.path for entry in entries])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotDamaged(f"an entry of a manifest: {str(error)[:100]}") from error
    return entries


def _entry(versions: int, values: Any) -> Entry:
    path, kind, mode, uid, gid, mtime, ctime, inode, size, more = values
    # Bits of several numbers together are out of bounds where one of them is.
    if not (
        type(path) is str
        and path
        and kind in KINDS
        and type(mode) is type(uid) is type(gid) is type(mtime) is int
        and type(ctime) is type(inode) is type(size) is int
        and 0 <= mode < 0o10000
        and 0 <= uid | gid < MAX_ID
        and 0 <= ctime | inode < _MAX_INODE
        and 0 <= size < MAX_NUMBER
        and -MAX_NUMBER < mtime < MAX_NUMBER
        and type(more) is dict
    ):
        raise ValueError("a value out of bounds")
    if path.count("/") >= MAX_PARTS:
        raise ValueError(_TOO_DEEP)
    entry = Entry(path, kind, mode, uid, gid, mtime, ctime, inode, size)
    known = 0
    if "b3" in more:
        known = 1
        digest = entry.digest = more["b3"]
        if not is_sum(digest):
            raise ValueError("no digest")
    if "x" in more:
        known += 1
        entry.extents = _extents(more["x"], size, versions)
    if kind != FILE or known < len(more):
        _rarer(entry, more)
    return entry


def _extents(numbers: list[int], size: int, versions: int) -> list[Extent]:
    """Returns the extents of a file, which lie in its bytes, in order."""
    require(len(numbers) <= 7 * MAX_EXTENTS and {*map(type, numbers)} == {int})
    extents = []
    end = 0
    runs: Iterable[Sequence[int]]
    runs = [numbers] if len(numbers) == 7 else zip(*[iter(numbers)] * 7, strict=True)
    for run in runs:
        start, length, version, pack, offset, stored, skip = run
        if not (
            end <= start
            and 0 <= start | length | version | pack | offset | stored | skip < MAX_NUMBER
            and (end := start + length) <= size
            and version < versions
            and 0 < pack <= MAX_PACKS
            and 0 < stored <= MAX_STORED
            and 0 < length <= MAX_SUPER_BLOCK - skip
        ):
            raise ValueError("an extent out of bounds")
        extents.append(Extent._make(run))
    return extents


def _rarer(entry: Entry, more: dict[str, Any]) -> None:
    """Takes over what few entries have."""
    entry.target = more.get("to", "")
    entry.block = more.get("bs", 0)
    entry.unsettled = more.get("u", 0) == 1
    entry.xattrs = more.get("xa", {})
    check_text(entry.target, *entry.xattrs)
    require(bool(entry.target) == (entry.kind in (SYMLINK, HARD_LINK)))
    require(type(entry.block) is int and entry.block in _BLOCKS)
    if entry.kind == HARD_LINK and entry.target.count("/") >= MAX_PARTS:
        raise ValueError(_TOO_DEEP)
    require(entry.kind == FILE or not (entry.size or entry.extents or entry.block))
    for value in entry.xattrs.values():
        b64decode(value, validate=True)


def require_few(line: bytes, numbers: int) -> None:
    """Raises ValueError for a line of JSON that would take too much memory once it is read.

    Args:
        line: One line, or several.
        numbers: The most values that may stand in it.
    """
    require(line.count(b"[") + line.count(b"{") + line.count(b'"') // 2 <= MAX_CONTAINERS)
    require(line.count(b",") <= numbers)


def path_of(line: bytes) -> str:
    """Returns the path of an entry's line. Raises SnapshotDamaged."""
    try:
        text = line[: 6 * MAX_PATH + 9].decode("ascii")
        require(text.startswith('["'))
        path, end = _DECODER.raw_decode(text, 1)
        require(text.startswith(',"', end))
        check_text(path)
    except ValueError as error:
        raise SnapshotDamaged("an entry of the manifest has no path") from error
    return str(path)


def is_sum(value: str) -> bool:
    """Returns whether value is a hash of 32 bytes in hex."""
    return _SUM.fullmatch(value) is not None


def check_text(*values: str) -> None:
    """Raises ValueError for what is no name or path of the system."""
    together = "".join(values)
    require("\0" not in together and max(map(len, values), default=0) <= MAX_PATH)
    together.encode("utf-8", "surrogateescape")


def require(truth: bool) -> None:
    """Raises ValueError for what is not so."""
    if not truth:
        raise ValueError("a value out of bounds")
