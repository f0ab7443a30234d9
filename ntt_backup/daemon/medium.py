"""Another medium of a target has its turn: no process is needed to see whether it still has.

A probe of the place starts a worker and a receiver, and asks the catalog. While a medium is in a
safe for a week, that would be two processes at each look. So the coordinator reads the marker of
the place by itself, and probes the place once the marker is another one.

A file system that does not answer would hold up the coordinator. Only those of disks of this
machine are read, as /proc tells, which waits for none: each directory on the path, and each link,
is looked up among the mounts before it is touched. Of other places the coordinator knows nothing,
and probes them, ever more rarely.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Final

from ntt_backup.blobdir.descriptors import DIRECTORY, closing
from ntt_backup.blobdir.layout import find_marker

_MOUNTS: Final = Path("/proc/self/mountinfo")
# File systems of disks and of memory, which answer, or tell an error, within a moment.
_OF_DISKS: Final = frozenset(
    {"bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfsplus", "ntfs3", "overlay"}
    | {"devtmpfs", "ramfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"}
)
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_MOST_STEPS: Final = 200


def identity_at(place: str, mounts: Path = _MOUNTS) -> str | None:
    """Returns the identity of the target in a directory, without waiting for a file system.

    Args:
        place: The absolute path of the directory.
        mounts: The table of mounts.

    Returns:
        The identity; "" where there is none; None where reading it might take long.
    """
    try:
        path = _real_path(place, _types_of_mounts(mounts))
        if path is None:
            return None
        with closing(os.open(path, DIRECTORY)) as fd:
            return find_marker(fd).identity
    except OSError as error:
        return "" if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else None


def _types_of_mounts(mounts: Path) -> dict[str, str]:
    """Returns the type of the file system at each mount point; the last mount covers the others."""
    found = {}
    for line in mounts.read_bytes().decode("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split()[4])
        found[point] = after.split()[0]
    return found


def _real_path(path: str, types: dict[str, str]) -> str | None:
    """Returns a path without links; None if a part is on a file system that may not answer."""
    at, names = "/", path.split("/")[::-1]
    for _ in range(_MOST_STEPS):
        if not names:
            return at
        name = names.pop()
        if name == "..":
            at = os.path.dirname(at)
        if name in ("", ".", ".."):
            continue
        below = os.path.join(at, name)
        above = below
        while above not in types and above != "/":
            above = os.path.dirname(above)
        if types.get(above) not in _OF_DISKS:
            return None
        try:
            link = str(Path(below).readlink())
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: it is no link.
                raise
            at = below
        else:
            at = "/" if link.startswith("/") else at
            names += link.split("/")[::-1]
    return None
