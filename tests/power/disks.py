"""File systems on a disk whose every write and flush is logged, and mounts of their images.

file system -> loop device (direct I/O) -> powerdisk (FUSE) -> image, and log
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.process.spawn import die_with_parent

FILE_SYSTEMS: Final = ("ext4", "xfs", "btrfs")
# Where kinds keep what they write: an empty directory on each new disk.
REMOTE: Final = "remote"
_SOURCE: Final = Path(__file__).with_name("powerdisk.c")
_MKFS: Final = {
    "ext4": "mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard",
    "xfs": "mkfs.xfs -q -f -K",
    "btrfs": "mkfs.btrfs -q -f -K",
}
_OPTIONS: Final = {"ext4": "noatime", "xfs": "noatime,nouuid", "btrfs": "noatime,nodiscard"}
_CHECK: Final = {
    "ext4": "e2fsck -fn",
    "xfs": "xfs_repair -n -f",
    "btrfs": "btrfs check --readonly",
}
_TRIES: Final = 600
_END_SECONDS: Final = 5


def call(*argv: str | Path, ok: bool = True) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end. ok: it must end with 0."""
    done = subprocess.run([str(one) for one in argv], capture_output=True, timeout=600, check=False)
    if ok and done.returncode != 0:
        raise RuntimeError(
            f"{argv}: {done.returncode} {done.stdout[-900:]!r} {done.stderr[-900:]!r}"
        )
    return done


def lacking() -> str:
    """What the lab needs and this machine does not have, "" where nothing is missing."""
    if os.geteuid() != 0:
        return "only root can mount"
    needed = ["gcc", "losetup", "fusermount3", *(one.split()[0] for one in _MKFS.values())]
    missing = [one for one in needed if shutil.which(one) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if call("pkg-config", "--exists", "fuse3", ok=False).returncode != 0:
        return "not installed: libfuse3-dev"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no FUSE here"
    if call("losetup", "-f", ok=False).returncode != 0:
        return "no loop devices here"
    return ""


def copy(source: Path, target: Path) -> None:
    """Copy an image, and its holes as holes."""
    call("cp", "--sparse=auto", source, target)


def mount(fs: str, image: Path, where: Path, *, loop: bool = True) -> str:
    """Mount an image, or a device; what mount says, "" where it is mounted.

    With `loop`, mount finds a device for the image. An image must be a new file each time: mount
    takes a device that has the same file already, and with it the superblock of an earlier mount.
    """
    where.mkdir(parents=True, exist_ok=True)
    options = f"loop,{_OPTIONS[fs]}" if loop else _OPTIONS[fs]
    done = call("mount", "-t", fs, "-o", options, image, where, ok=False)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def unmount(where: Path) -> None:
    for _ in range(_TRIES):
        done = call("umount", where, ok=False)
        if done.returncode == 0 or b"not mounted" in done.stderr:
            return
        time.sleep(0.05)
    raise RuntimeError(f"umount {where}: {done.stderr!r}")


@contextmanager
def mounted(fs: str, image: Path, where: Path) -> Iterator[str]:
    """An image while it is mounted; the value is what mount said against it."""
    said = mount(fs, image, where)
    try:
        yield said
    finally:
        if not said:
            unmount(where)


def check(fs: str, image: Path) -> str:
    """What the file system's checker says of an image that was mounted, "" for nothing."""
    done = call(*_CHECK[fs].split(), image, ok=False)
    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    said = [one for one in lines if one.strip() and not one.startswith(("Phase", " "))]
    return f"{done.returncode}: {'; '.join(said)[:600]}" if done.returncode else ""


def new_image(fs: str, size: int, work: Path) -> Path:
    """An image of a new file system with the directory `remote`; made once for each size."""
    path = work / "base" / f"{fs}-{size}.img"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            file.truncate(size)
        call(*_MKFS[fs].split(), part)
        with mounted(fs, part, path.with_suffix(f".mnt{os.getpid()}")) as said:
            if said:
                raise RuntimeError(said)
            (path.with_suffix(f".mnt{os.getpid()}") / REMOTE).mkdir()
        path.with_suffix(f".mnt{os.getpid()}").rmdir()
        call("fallocate", "--dig-holes", part)
        part.rename(path)
    return path


@dataclass(slots=True)
class LoggedDisk:
    """A disk, the file `device`, whose writes and flushes are logged in `log`.* of directory.

    Args:
        base: The image that the log begins with.
        directory: For all that the disk has on this machine.
        work: Where the program is built that serves it.
        flush_us: How long a flush takes, in microseconds.
        write_us: How long a write takes, in microseconds.
    """

    base: Path
    directory: Path
    work: Path
    flush_us: int
    write_us: int = 0
    _daemon: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def device(self) -> Path:
        return self.directory / "fuse/disk"

    @property
    def live(self) -> Path:
        """The image that is written to."""
        return self.directory / "live.img"

    def start(self) -> None:
        copy(self.base, self.live)
        self.device.parent.mkdir(exist_ok=True)
        delays = (str(self.flush_us), str(self.write_us))
        self._daemon = subprocess.Popen(
            [_powerdisk(self.work), self.live, self.log, self.device.parent, *delays],
            preexec_fn=die_with_parent(),
        )
        _await(self.device.exists, "the disk")

    def stop(self) -> None:
        """Take it away, once nobody uses it."""
        if self._daemon is not None:
            unmount(self.device.parent)
            # It ends with its last mount, and another mount namespace may have a copy of that.
            with suppress(subprocess.TimeoutExpired):
                self._daemon.wait(_END_SECONDS)
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None


@dataclass(slots=True)
class Disk:
    """A file system on a disk whose writes and flushes are logged, and which begins empty.

    Args:
        fs: Its type.
        size: Bytes.
        directory: An empty directory for all that the disk has on this machine.
        work: Where images of new file systems are kept.
        flush_us: How long a flush takes, in microseconds.
        write_us: How long a write takes, in microseconds.
    """

    fs: str
    size: int
    directory: Path
    work: Path
    flush_us: int = 3000
    write_us: int = 0
    _logged: LoggedDisk | None = None
    _loop: str = ""

    @property
    def mnt(self) -> Path:
        return self.directory / "mnt"

    @property
    def logged(self) -> LoggedDisk:
        """The disk below the file system, once that was started."""
        assert self._logged is not None
        return self._logged

    def start(self) -> None:
        base = new_image(self.fs, self.size, self.work)
        self._logged = LoggedDisk(base, self.directory, self.work, self.flush_us, self.write_us)
        self.logged.start()
        found = call("losetup", "-f", "--show", "--direct-io=on", self.logged.device)
        self._loop = found.stdout.decode().strip()
        if said := mount(self.fs, Path(self._loop), self.mnt, loop=False):
            raise RuntimeError(said)

    def stop(self) -> None:
        """Unmount it; what that writes comes after all moments that count."""
        if self._logged is None:
            return
        unmount(self.mnt)
        if self._loop:
            call("losetup", "-d", self._loop)
        self.logged.stop()
        self.logged.live.unlink(missing_ok=True)


def _powerdisk(work: Path) -> Path:
    program = work / "powerdisk"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        work.mkdir(parents=True, exist_ok=True)
        flags = call("pkg-config", "--cflags", "--libs", "fuse3").stdout.decode().split()
        part = program.with_suffix(f".{os.getpid()}")
        call("gcc", "-O2", "-Wall", "-Wextra", "-o", part, _SOURCE, *flags)
        part.rename(program)
    return program


def _await(condition: Callable[[], bool], what: str) -> None:
    for _ in range(_TRIES):
        if condition():
            return
        time.sleep(0.02)
    raise RuntimeError(f"waited in vain for {what}")
