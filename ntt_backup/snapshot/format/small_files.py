"""Small files of a manifest are read many at once.

Most lines of a manifest are files without anything special, whose content lies in one super block,
as do its neighbours. One pattern reads all such lines of a block of text, and those in a row that
share directory, owner, mode and super block are one object. The pattern takes less than the format
allows, never more: every other line is read by `entry.entries_of`.
"""

from __future__ import annotations

from itertools import groupby, islice
from operator import add, itemgetter, le, lt
from re import compile as pattern
from typing import Final, NamedTuple

from ntt_backup.snapshot.format.entry import (
    FILE,
    MAX_ID,
    MAX_STORED,
    MAX_SUPER_BLOCK,
    Entry,
    Extent,
    entries_of,
    order,
    require,
)
from ntt_backup.snapshot.names import SnapshotDamaged

# Files that may be open at once while those in a row are restored.
MOST: Final = 250
# A piece with such a line has few others, and the pattern would copy it several times.
_LONG: Final = 1 << 20
_HEX_DIGITS: Final = b"0123456789abcdef"
_ID: Final = "(?:0|[1-9][0-9]{0,9}+)"
_SIGNED: Final = "(?:[1-8][0-9]{18}|-?[1-9][0-9]{0,17}+|0)"
_UNSIGNED: Final = "(?:[1-9][0-9]{0,18}+|0)"
_LINE: Final = pattern(
    # Directory and name; mode and owner; mtime; size; digest; the frame; skip.
    # So short that it cannot have too many parts.
    r'\["(?!/)(?:([ !#-\[\]-~]{0,998})/)?(?!\.\.?")([ !#-.0-\[\]-~]{1,255}+)","f",'
    rf"((?:0|[1-9][0-9]{{0,3}}+),{_ID},{_ID}),"
    rf"({_SIGNED}),{_UNSIGNED},{_UNSIGNED},([1-9][0-9]{{0,7}}+),"
    # Digits are looked at many at once.
    r'\{"b3":"([^"]{64})","x":\[0,\5,'
    r"((?:0|[1-9][0-9]{0,5}+),[1-9][0-9]{0,4}+,(?:0|[1-9][0-9]{0,17}+),[1-9][0-9]{0,7}+),"
    r"(0|[1-9][0-9]{0,7}+)\]\}\]\n"
    # Any other line.
    r"|([^\n]*)\n"
)
# Directory, mode and owner, frame.
_SHARED: Final = itemgetter(0, 2, 6)

# Name, bytes, bytes of the super block before the content, mtime, and digest in hex digits. (A
# plain tuple: one is made for each of millions.)
SmallFile = tuple[str, int, int, int, str]


class SmallFiles(NamedTuple):
    """Files of one directory that have the same owner and mode, and whose content lies in one super
    block, in their order. There is at least one, and at most as many as may be open at once.

    frame: version, pack, offset and stored as in Extent.
    """

    above: str
    mode: int
    uid: int
    gid: int
    frame: tuple[int, int, int, int]
    files: list[SmallFile]

    @property
    def extent(self) -> Extent:
        """Returns where the content of all of them lies, with what is between."""
        first, last = self.files[0], self.files[-1]
        return Extent(0, last[2] + last[1] - first[2], *self.frame, first[2])

    def path(self, file: SmallFile) -> str:
        """Returns the path of one of the files."""
        return f"{self.above}/{file[0]}" if self.above else file[0]

    def entry(self, file: SmallFile) -> Entry:
        """Returns the entry of one of the files, without ctime and inode."""
        _, size, skip, mtime, digest = file
        numbers = (self.mode, self.uid, self.gid, mtime, 0, 0, size)
        extents = [Extent(0, size, *self.frame, skip)]
        return Entry(self.path(file), FILE, *numbers, digest=digest, extents=extents)


Row = Entry | SmallFiles


def read_rows(lines: bytes, versions: int, last: str) -> list[Row]:
    """Returns what stands in whole lines, whose content lies in so many versions. last: the path
    before them. Raises SnapshotDamaged.
    """
    rows: list[Row] = []
    if len(lines) > _LONG:
        for entry in entries_of(lines.split(b"\n")[:-1], versions):
            _ascending(last, rows, entry.path)
            rows.append(entry)
        return rows
    try:
        found = _LINE.findall(lines.decode("ascii"))
        others = iter(entries_of([one[-1].encode() for one in found if not one[1]], versions))
        for (above, owned, frame), group in groupby(found, _SHARED):
            if not owned:
                for entry in islice(others, sum(1 for _ in group)):
                    _ascending(last, rows, entry.path)
                    rows.append(entry)
                continue
            _, names, _, mtimes, sizes, digests, _, skips, _ = zip(*group, strict=True)
            _ascending(last, rows, f"{above}/{names[0]}" if above else names[0])
            # In one directory, names alone tell the order.
            if not all(map(lt, names, names[1:])):
                raise _out_of_order()
            starts, lengths = [*map(int, skips)], [*map(int, sizes)]
            ends = [*map(add, starts, lengths)]
            require(max(ends) <= MAX_SUPER_BLOCK)
            require(not "".join(digests).encode().translate(None, _HEX_DIGITS))
            files = [*zip(names, lengths, starts, map(int, mtimes), digests, strict=True)]
            row = _row(above, owned, frame, versions, files)
            step = MOST if all(map(le, ends, starts[1:])) else 1
            rows += [row._replace(files=files[at : at + step]) for at in range(0, len(files), step)]
    except ValueError as error:
        raise SnapshotDamaged(f"an entry of a manifest: {str(error)[:100]}") from error
    return rows


def last_path(rows: list[Row], last: str) -> str:
    """Returns the last path of rows, or last where there are none."""
    if not rows:
        return last
    row = rows[-1]
    return row.path if isinstance(row, Entry) else row.path(row.files[-1])


def _ascending(last: str, rows: list[Row], path: str) -> None:
    """Raises SnapshotDamaged where it does not come behind those before it."""
    if not order(last_path(rows, last)) < order(path):
        raise _out_of_order()


def _out_of_order() -> SnapshotDamaged:
    return SnapshotDamaged("the entries of a manifest are not in order")


def _row(above: str, owned: str, frame: str, versions: int, files: list[SmallFile]) -> SmallFiles:
    mode, uid, gid = map(int, owned.split(","))
    version, pack, offset, stored = map(int, frame.split(","))
    require(mode < 0o10000 and uid | gid < MAX_ID and version < versions and stored <= MAX_STORED)
    return SmallFiles(above, mode, uid, gid, (version, pack, offset, stored), files)
