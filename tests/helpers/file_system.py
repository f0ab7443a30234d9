"""The file system as this process sees it: calls are noted, fail, or answer as on other systems."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.process import durable
from ntt_backup.restore import destination as target_module

Inode = tuple[int, int]


def inode(of: int | Path) -> Inode:
    status = os.fstat(of) if isinstance(of, int) else of.lstat()
    return status.st_dev, status.st_ino


def noted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Inode]:
    """What is synced from now on by a call of its own, in order."""
    synced: list[Inode] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.append(inode(fd))

    monkeypatch.setattr(os, "fsync", noted)
    return synced


def without_syncfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets restores meet a file system on which syncfs does not reach the disk."""
    for module in (durable, target_module):
        monkeypatch.setattr(module, "can_syncfs", lambda _: False)


def files_and_directories(top: Path) -> Iterator[Path]:
    """What below a directory, and it itself, can be synced."""
    yield top
    yield from (one for one in top.rglob("*") if one.is_dir() or one.is_file())


def put_on_bad_sectors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each call that reads this file fail, until the patches are undone."""
    inode = path.stat().st_ino
    for name in ("read", "readv", "pread", "preadv"):
        monkeypatch.setattr(os, name, partial(_read, getattr(os, name), inode))


def _read(real: Callable[..., Any], inode: int, fd: int, *rest: Any) -> Any:
    if os.fstat(fd).st_ino == inode:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(fd, *rest)


class _Scan:
    """Stands for what os.scandir returns."""

    def __init__(self, found: Any, known: set[str] | None) -> None:
        self._found = found
        self._known = known

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self

    def __next__(self) -> os.DirEntry[str]:
        while True:
            entry: os.DirEntry[str] = next(self._found)
            if self._known is None or entry.name in self._known:
                return entry

    def close(self) -> None:
        self._found.close()


@pytest.fixture
def stale_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has directories listed as they were when they were opened, as btrfs and sshfs list them.

    A descriptor of a directory lists the names that there were when it was opened, or last rewound.
    POSIX leaves it open whether it lists later ones.
    """
    open_, close, listdir, scandir = os.open, os.close, os.listdir, os.scandir
    known: dict[int, set[str]] = {}

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd = open_(path, flags, *args, **kwargs)
        known.pop(fd, None)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            known[fd] = set(listdir(fd))
        return fd

    def closed(fd: int) -> None:
        known.pop(fd, None)
        close(fd)

    def listed(path: Any = ".") -> list[str]:
        names = listdir(path)
        return [name for name in names if name in known.get(path, names)]

    def scanned(path: Any = ".") -> _Scan:
        return _Scan(scandir(path), known.get(path) if isinstance(path, int) else None)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "close", closed)
    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(os, "scandir", scanned)
