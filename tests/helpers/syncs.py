"""Which files and directories a test has seen synced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.process import durable
from ntt_backup.restore import target as target_module

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
