"""A file that somebody relies on is written whole, and is durable before anybody is told.

The obvious way, writing to a temporary name and renaming, leaves an empty file after a power cut:
the rename may reach the disk before the content does. So the content is synced first, and then each
directory in which a name has changed. The temporary name is random and made new, so a file, a link
or a FIFO that somebody has put there is never written through.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ntt_backup.blobdir.open import closing

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_durably(
    path: Path,
    data: bytes,
    mode: int = 0o644,
    *,
    owner: tuple[int, int] | None = None,
    replace: bool = True,
) -> None:
    """Writes a whole file, and makes the file and its name durable.

    Args:
        path: The file. Missing directories above it are made with the mode 0755.
        data: The content.
        mode: The permission bits of the file, whatever the umask says.
        owner: The user id and the group id of the file. None: those of this process.
        replace: Whether a file of that name is replaced; a symlink is replaced, never followed.

    Raises:
        FileExistsError: The name exists, and replace is False.
        OSError: The file could not be written. The name has its former content.
    """
    made = make_directories(path.parent)
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, _NEW, 0o600)
    try:
        with closing(fd):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            if owner is not None:
                os.fchown(fd, *owner)
            os.fchmod(fd, mode)
            os.fsync(fd)
        if replace:
            new.replace(path)
        else:
            path.hardlink_to(new)
            new.unlink()
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    for directory in (path.parent, *made):
        sync_directory(directory)


def make_directories(directory: Path) -> list[Path]:
    """Makes a directory and the missing ones above it, with the mode 0755.

    Returns:
        The directories in which one was made. Their entries are not durable yet.
    """
    missing = [directory, *directory.parents]
    while missing and missing[-1].is_dir():
        missing.pop()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    return [one.parent for one in missing]


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable.

    Raises:
        OSError: The directory cannot be opened, or the disk failed.
    """
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
