"""Directories that are listed as they were when they were opened, as btrfs and sshfs list them.

A descriptor of a directory lists the names that there were when it was opened, or last rewound.
POSIX leaves it open whether it lists later ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


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
    """Has every descriptor of this process behave so."""
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
