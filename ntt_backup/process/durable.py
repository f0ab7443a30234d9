"""Files are written whole, and are durable before their names appear.

Writing to a temporary name and renaming alone would leave an empty file after a power cut: the
rename may reach the disk before the content does. So the content is synced first, then each
directory in which a name has changed. The temporary name is random, and the file is created
exclusively, so that nothing is written through a file, symlink or FIFO of somebody else.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from ntt_backup.blobdir.descriptors import FILE, can_syncfs, closing, rename_new, syncfs
from ntt_backup.blobdir.descriptors import sync_directory as sync_descriptor

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BUFFER: Final = 1 << 20


def write_durably(
    path: Path,
    data: bytes,
    mode: int = 0o644,
    *,
    owner: tuple[int, int] | None = None,
    replace: bool = True,
) -> None:
    """Writes a whole file, see `durable_file`. Missing parent directories are made, mode 0755.

    Raises:
        FileExistsError: The name exists, and replace is False.
        OSError: As `durable_file`.
    """
    missing = [path.parent, *path.parent.parents]
    while missing and missing[-1].is_dir():
        missing.pop()
    for directory in reversed(missing):
        directory.mkdir(mode=0o755, exist_ok=True)
    with durable_file(path, mode, owner=owner, replace=replace) as file:
        file.write(data)
    for directory in missing:
        sync_directory(directory.parent)


@contextmanager
def durable_file(
    path: Path, mode: int = 0o644, *, owner: tuple[int, int] | None = None, replace: bool = True
) -> Iterator[BinaryIO]:
    """Yields a file to write.

    The file gets its name when it is durable at the end of the block, and none if the block raises.

    Args:
        path: The file.
        mode: The permission bits of the file, whatever the umask says.
        owner: The user id and the group id of the file. None: those of this process.
        replace: Whether a file of that name is replaced; a symlink is replaced, never followed.

    Raises:
        FileExistsError: The name exists, and replace is False.
        OSError: The file could not be written, and the name has its former content. Only where the
            directory could not be synced, it has the new content, and a power cut may undo that.
    """
    if not replace and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    new = f".{path.name[:200]}.{secrets.token_hex(8)}"
    with closing(os.open(path.parent, _DIRECTORY)) as directory:
        file = open(os.open(new, _NEW, 0o600, dir_fd=directory), "wb", _BUFFER)  # noqa: SIM115
        try:
            with file:
                yield file
                file.flush()
                if owner is not None:
                    os.fchown(file.fileno(), *owner)
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            if replace:
                os.rename(new, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            else:
                rename_new(directory, os.fsencode(new), directory, os.fsencode(path.name))
            sync_descriptor(directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(new, dir_fd=directory)
            raise


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    with closing(os.open(directory, _DIRECTORY)) as fd:
        sync_descriptor(fd)


def sync_below(directory: int, *, files: bool = True) -> int:
    """Makes a directory tree durable, and returns the number of files and directories left out.

    One call syncs the whole file system. On a file system that passes only fsync to its disk, such
    as sshfs, each file and directory is synced separately; those that this user may not open are
    left out, and may not be durable.

    Args:
        directory: A descriptor of the directory, open since before the first write: Linux reports
            a failed write once to each descriptor.
        files: Whether files must be synced, or names only.

    Raises:
        OSError: The disk failed, now or while it was written to before.
    """
    if can_syncfs(os.fstat(directory).st_dev):
        syncfs(directory)
        return 0
    left_out = 0

    def leave_out(error: OSError) -> None:
        nonlocal left_out
        if isinstance(error, PermissionError):
            left_out += 1
        elif not isinstance(error, FileNotFoundError):
            raise error

    for _, _, names, above in os.fwalk(".", dir_fd=directory, onerror=leave_out):
        for name in names if files else ():
            try:
                if stat.S_ISREG(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    with closing(os.open(name, FILE, dir_fd=above)) as fd:
                        os.fsync(fd)
            except (FileNotFoundError, PermissionError) as error:
                leave_out(error)
        sync_descriptor(above)
    return left_out
