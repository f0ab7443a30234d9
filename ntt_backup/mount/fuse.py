"""FUSE shows files as long as they are mounted: volumes, or the tree of a version.

Each mount has a process of its own. Nobody else sees the volumes of a target: they are mounted in a
view of that process, and are detached there once the image's loop devices have them open. When the
image is unmounted the devices go, with them the last file is closed, and the process ends. If the
process dies before, reads fail with EIO. A version's tree is itself what is mounted.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import syslog
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Final, TypeVar

import mfusepy

from ntt_backup.mount import kernel
from ntt_backup.mount.version import OpenFile, SuperBlockCache, VersionTree
from ntt_backup.mount.volumes import Fetch, Pieces, Volume
from ntt_backup.snapshot.format.entry import DIRECTORY, FIFO, FILE, SYMLINK, Entry

T = TypeVar("T")

READY: Final = b"ready\n"
GO: Final = b"go\n"
# A version does not change.
_KEPT_SECONDS: Final = 86400
# A hard link is shown as its file. One whose file is missing cannot be read.
_KINDS: Final = {
    FILE: stat.S_IFREG,
    DIRECTORY: stat.S_IFDIR,
    SYMLINK: stat.S_IFLNK,
    FIFO: stat.S_IFIFO,
}


class _Shown(mfusepy.Operations):  # type: ignore[misc]
    """on_ready is told when files can be opened; say gets one line for each read that failed."""

    use_ns = True

    def __init__(self, on_ready: Callable[[], object], say: Callable[[str], object]) -> None:
        self._on_ready = on_ready
        self._say = say

    def init(self, path: str) -> None:
        self._on_ready()

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader must get an error
            self._say(str(error))
            raise mfusepy.FuseOSError(errno.EIO) from None


class Files(_Shown):
    """Volumes as files `0`, `1` and so on."""

    def __init__(
        self,
        pieces: Pieces,
        sizes: Sequence[int],
        on_ready: Callable[[], object],
        say: Callable[[str], object],
    ) -> None:
        super().__init__(on_ready, say)
        self._pieces = pieces
        self._sizes = sizes

    def getattr(self, path: str, fh: int | None = None) -> Mapping[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2}
        try:
            size = self._sizes[int(path[1:])]
        except (ValueError, IndexError):
            raise mfusepy.FuseOSError(errno.ENOENT) from None
        return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": size}

    def readdir(self, path: str, fh: int) -> Sequence[str]:
        return [".", "..", *map(str, range(len(self._sizes)))]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._guarded(lambda: self._pieces.read(int(path[1:]), offset, size))


class VersionFiles(_Shown):
    """The tree of a version."""

    def __init__(
        self,
        tree: VersionTree,
        content: SuperBlockCache,
        on_ready: Callable[[], object],
        say: Callable[[str], object],
    ) -> None:
        super().__init__(on_ready, say)
        self._tree = tree
        self._content = content
        self._numbers = count(1)
        self._open: dict[int, OpenFile] = {}

    def getattr(self, path: str, fh: int | None = None) -> Mapping[str, int]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
        one = self._find(path)
        return {
            "st_mode": _KINDS[one.kind] | one.mode,
            "st_nlink": 2 if one.kind == DIRECTORY else 1,
            "st_uid": one.uid,
            "st_gid": one.gid,
            "st_size": len(os.fsencode(one.target)) if one.kind == SYMLINK else one.size,
            "st_blocks": -(-one.size // 512),
            "st_atime": one.mtime,
            "st_mtime": one.mtime,
            "st_ctime": one.ctime,
        }

    def readdir(self, path: str, fh: int) -> Sequence[str]:
        return [".", "..", *self._guarded(lambda: list(self._tree.names(path[1:])))]

    def readlink(self, path: str) -> str:
        return self._find(path).target

    def listxattr(self, path: str) -> list[str]:
        return list(self._find(path, whole=True).xattrs) if path != "/" else []

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        found = self._find(path, whole=True).xattrs.get(name) if path != "/" else None
        if found is None:
            raise mfusepy.FuseOSError(errno.ENODATA)
        return self._guarded(lambda: b64decode(found, validate=True))

    def open(self, path: str, flags: int) -> int:
        number = next(self._numbers)
        self._open[number] = OpenFile(self._find(path, whole=True))
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._guarded(lambda: self._open[fh].read(self._content, offset, size))

    def release(self, path: str, fh: int) -> int:
        del self._open[fh]
        return 0

    def _find(self, path: str, *, whole: bool = False) -> Entry:
        found = self._guarded(lambda: self._tree.find(path[1:], whole=whole))
        if found is None:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return found


def serve(directory: Path, volumes: Sequence[Volume], open_fetch: Callable[[], Fetch]) -> int:
    """Shows the volumes in a directory until they are unmounted; returns the exit status.

    READY goes to stdout when they can be opened. After GO on stdin they are detached; when stdin
    ends without it, so does the process.
    """
    kernel.leave_namespace()
    pieces, sizes = Pieces(volumes, open_fetch()), [volume.size for volume in volumes]
    _show(directory, lambda say: Files(pieces, sizes, _tell_ready, say), hidden=True)
    return 0


def serve_version(directory: Path, tree: VersionTree, content: SuperBlockCache) -> int:
    """Shows a version's tree in a directory until it is unmounted; returns the exit status.

    READY goes to stdout when it is mounted. When stdin ends without GO it is unmounted.
    """
    options: dict[str, object] = dict.fromkeys(("entry_timeout", "attr_timeout"), _KEPT_SECONDS)
    options["kernel_cache"] = True
    if os.geteuid() == 0:
        options |= {"allow_other": True, "default_permissions": True}
    try:
        files = partial(VersionFiles, tree, content, _tell_ready)
        _show(directory, files, hidden=False, **options)
    except RuntimeError:  # libfuse has said on stderr why
        return 1
    finally:
        content.close()
    return 0


def _show(
    directory: Path,
    files: Callable[[Callable[[str], object]], mfusepy.Operations],
    *,
    hidden: bool,
    **options: object,
) -> None:
    def say(text: str) -> None:
        syslog.syslog(syslog.LOG_ERR, f"mount on {directory}: a read failed: {text}")

    syslog.openlog("ntt-backup-mount", syslog.LOG_PID, syslog.LOG_DAEMON)
    Thread(target=_follow, args=(directory, hidden), daemon=True).start()
    repository = str(directory)
    mfusepy.FUSE(files(say), repository, foreground=True, ro=True, fsname="ntt-backup", **options)


def _tell_ready() -> None:
    os.write(1, READY)


def _follow(directory: Path, hidden: bool) -> None:
    if os.read(0, len(GO)) != GO:
        if hidden:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)  # libfuse unmounts it
        return
    if hidden:
        kernel.detach(directory)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
