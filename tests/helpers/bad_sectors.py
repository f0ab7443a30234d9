"""A file on a bad sector: it has its size, and reading it fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


def put_on_bad_sectors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each call that reads this file fail, until the patches are undone."""
    inode = path.stat().st_ino
    for name in ("read", "readv", "pread", "preadv"):
        monkeypatch.setattr(os, name, partial(_read, getattr(os, name), inode))


def _read(real: Callable[..., Any], inode: int, fd: int, *rest: Any) -> Any:
    if os.fstat(fd).st_ino == inode:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(fd, *rest)
