"""The kernel attaches a file system for a mount, and makes a file a loop device.

The calls are those that mount(8) makes. The older one, mount(2), takes one page of options, which
is enough for some dozen devices.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from ntt_backup.errors import MountImpossible

# Files as an image and as its devices; blocks of 512 bytes.
FILES_SINCE: Final = (6, 12)
BLOCKS_SINCE: Final = (6, 4)

_libc = ctypes.CDLL(None, use_errno=True)
# The same numbers on every architecture.
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_CLOEXEC: Final = 1
_SET_FLAG: Final = 0
_SET_STRING: Final = 1
_CREATE: Final = 6
_READ_ONLY_NOSUID_NODEV_NOEXEC: Final = 15
_AT_FDCWD: Final = -100
_FROM_DESCRIPTOR: Final = 4
_MNT_DETACH: Final = 2
_MS_PRIVATE_BELOW: Final = 0x44000
_CLONE_NEWNS: Final = 0x20000

_LOOP_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
# descriptor, block size, five numbers, four of which the last are flags, names and keys
_LOOP_CONFIG: Final = struct.Struct("II40x12xI176x64x")
_LOOP_READ_ONLY_AUTOCLEAR: Final = 1 | 4
_LOOP_ATTEMPTS: Final = 100


def require_erofs(since: tuple[int, int]) -> None:
    """Raises MountImpossible unless we may mount an image here, on Linux of that version."""
    if os.geteuid() != 0:
        raise MountImpossible("only root can mount packs")
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < since:
        raise MountImpossible(
            f"this mount needs Linux {since[0]}.{since[1]}, and this is {release}"
        )
    try:
        os.close(_call(_FSOPEN, b"erofs", _CLOEXEC))
    except OSError as error:
        raise MountImpossible(
            "this system cannot mount EROFS",
            detail="the kernel lacks EROFS" if error.errno == errno.ENODEV else str(error.strerror),
        ) from error


def require_fuse() -> None:
    """Raises MountImpossible unless we may mount by FUSE."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise MountImpossible(
            "this account cannot mount by FUSE",
            detail=f"/dev/fuse: {error.strerror}",
            hint="call the command as root; the kernel must have FUSE",
        ) from error
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise MountImpossible(
            "only root can mount without fusermount3", hint="install the system's package fuse3"
        )


def require_mount_point(directory: Path) -> None:
    """Raises MountImpossible unless directory is one on which nothing is mounted."""
    try:
        mounted = os.path.ismount(directory)
        os.listdir(directory)
    except OSError as error:
        hint = "first: umount -l" if error.errno == errno.ENOTCONN else "name another directory"
        raise MountImpossible(
            f"cannot mount on {directory}", detail=str(error.strerror), hint=hint
        ) from error
    if mounted:
        raise MountImpossible(
            f"something is mounted on {directory} already",
            hint=f"umount {directory}; where its reads fail, and it is busy: umount -l {directory}",
        )


def attach(image: str, devices: Sequence[str], directory: Path) -> None:
    """Mounts an image on a directory, read-only. Both it and its devices are files, or both are
    block devices. Raises MountImpossible.
    """
    with ExitStack() as stack:
        try:
            context = _call(_FSOPEN, b"erofs", _CLOEXEC)
            stack.callback(os.close, context)
            _call(_FSCONFIG, context, _SET_STRING, b"source", os.fsencode(image), 0)
            for device in devices:
                _call(_FSCONFIG, context, _SET_STRING, b"device", os.fsencode(device), 0)
            _call(_FSCONFIG, context, _SET_FLAG, b"ro", None, 0)
            _call(_FSCONFIG, context, _CREATE, None, None, 0)
            mount = _call(_FSMOUNT, context, _CLOEXEC, _READ_ONLY_NOSUID_NODEV_NOEXEC)
            stack.callback(os.close, mount)
            place = os.fsencode(directory)
            _call(_MOVE_MOUNT, mount, b"", _AT_FDCWD, place, _FROM_DESCRIPTOR)
        except OSError as error:
            if error.errno == errno.ENOTBLK:
                raise MountImpossible(
                    "the image is on a file system from which Linux cannot mount files",
                    hint="name a directory on a disk, not on tmpfs: --scratch",
                ) from error
            said = _said(context) or str(error.strerror)
            raise MountImpossible(f"cannot mount on {directory}", detail=said) from error


def loop_device(path: str, stack: ExitStack) -> str:
    """Returns a read-only loop device over a file. It goes when nobody has it open; stack closes
    what we have. Raises MountImpossible.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, file)
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, control)
        for attempt in range(_LOOP_ATTEMPTS):
            name = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            device = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                config = _LOOP_CONFIG.pack(file, 0, _LOOP_READ_ONLY_AUTOCLEAR)
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                # Another process was faster.
                if error.errno != errno.EBUSY or attempt == _LOOP_ATTEMPTS - 1:
                    raise
                continue
            stack.callback(os.close, device)
            return name
    except OSError as error:
        raise MountImpossible(
            "cannot make a loop device", detail=f"{error.filename or ''} {error.strerror}".strip()
        ) from error
    raise AssertionError("the last attempt returns or raises")


def leave_namespace() -> None:
    """Gives this process its own view of what is mounted: what it mounts, nobody else sees."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_PRIVATE_BELOW), None))


def detach(directory: Path) -> None:
    """Unmounts a directory; what is open stays readable."""
    _check(_libc.umount2(os.fsencode(directory), _MNT_DETACH))


def _said(context: int) -> str:
    """Returns why the kernel refused."""
    lines = []
    with suppress(OSError):
        while line := os.read(context, 1024):
            lines.append(line.decode("utf-8", "replace")[2:].strip())
    return "; ".join(lines)


def _call(number: int, *args: object) -> int:
    return _check(_libc.syscall(number, *args))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
