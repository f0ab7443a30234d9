"""The process that shows volumes of a bucket as files, by FUSE, as long as they are mounted.

Nobody else sees these files: they are mounted in a view of its own, and are detached there once the
image's loop devices have them open. When the image is unmounted the devices go, with them the last
file is closed, and the process ends. If it dies before, reads fail with EIO.
"""

from __future__ import annotations

import errno
import os
import stat
import syslog
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Final

import mfusepy

from ntt_backup.mount import kernel
from ntt_backup.mount.pieces import Fetch, Pieces
from ntt_backup.mount.volume import Volume

READY: Final = b"ready\n"
GO: Final = b"go\n"


class Files(mfusepy.Operations):  # type: ignore[misc]
    """Volumes as files `0`, `1` and so on. on_ready is told when they can be opened; say gets one
    line for each read that failed.
    """

    use_ns = True

    def __init__(
        self,
        pieces: Pieces,
        sizes: Sequence[int],
        on_ready: Callable[[], object],
        say: Callable[[str], object],
    ) -> None:
        self._pieces = pieces
        self._sizes = sizes
        self._on_ready = on_ready
        self._say = say

    def init(self, path: str) -> None:
        self._on_ready()

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
        try:
            return self._pieces.read(int(path[1:]), offset, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader must get an error
            self._say(str(error))
            raise mfusepy.FuseOSError(errno.EIO) from None


def serve(directory: Path, volumes: Sequence[Volume], open_fetch: Callable[[], Fetch]) -> int:
    """Shows the volumes in a directory until they are unmounted; returns the exit status.

    READY goes to stdout when they can be opened. After GO on stdin they are detached; when stdin
    ends without it, so does the process.
    """

    def say(text: str) -> None:
        syslog.syslog(syslog.LOG_ERR, f"mount on {directory}: a read failed: {text}")

    syslog.openlog("ntt-backup-mount", syslog.LOG_PID, syslog.LOG_DAEMON)
    kernel.leave_namespace()
    Thread(target=_follow, args=(directory,), daemon=True).start()
    files = Files(
        Pieces(volumes, open_fetch()),
        [volume.size for volume in volumes],
        on_ready=lambda: os.write(1, READY),
        say=say,
    )
    mfusepy.FUSE(files, str(directory), foreground=True, ro=True, fsname="ntt-backup")
    return 0


def _follow(directory: Path) -> None:
    if os.read(0, len(GO)) != GO:
        os._exit(1)
    kernel.detach(directory)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
