"""What this machine keeps of targets: a directory for each, and the tables of packs in it.

It is a help and nothing more: it may be deleted at any time, processes share it, what comes out of
it is checked like what comes from the bucket, and where nothing can be written nothing is kept.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from ntt_backup.config.sections import RemoteSettings

_MOST_BYTES: Final = 2 << 30
_LOOK_EVERY: Final = 64 << 20


def cache_directory() -> Path:
    """Returns where this user's programs keep what they can do without."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "ntt-backup"
    if os.geteuid() != 0:
        with suppress(RuntimeError):  # Not every user has a home.
            return Path.home() / ".cache" / "ntt-backup"
    return Path("/var/cache/ntt-backup")


def directory_for(kind: str, remote: RemoteSettings, *more: str) -> Path:
    """Returns where something is kept of a target. more: what else tells it from others."""
    place = " ".join((remote.endpoint or "", remote.url, *more))
    return cache_directory() / kind / blake3(place.encode()).hexdigest(length=16)


def cache_of(remote: RemoteSettings) -> Cache:
    """Returns what is kept of a bucket."""
    return Cache(f"{remote.endpoint or ''} {remote.url}")


class Cache:
    """The kept tables of one place, by name. most: bytes of all places together."""

    def __init__(self, place: str, root: Path | None = None, most: int = _MOST_BYTES) -> None:
        self._root = cache_directory() if root is None else root
        self._directory = self._root / blake3(place.encode()).hexdigest(length=16)
        self._most = most
        self._lock = threading.Lock()
        self._look_every = min(_LOOK_EVERY, most)
        # Each program may write less than that: so one of several looks, by chance.
        self._written = random.randrange(self._look_every)

    def load(self, name: str) -> bytes | None:
        """Returns what is kept under a name."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            return None

    def store(self, name: str, data: bytes) -> None:
        """Keeps data under a name."""
        path = self._path(name)
        new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_bytes(data)
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            return
        with self._lock:
            self._written += len(data)
            full = self._written > self._look_every
            if full:
                self._written = 0
        if full:
            self._shrink()

    def forget(self, name: str) -> None:
        """Removes what is kept under a name."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._directory / name[:2] / name

    def _shrink(self) -> None:
        """Removes what was kept first, until half of the room is free."""
        found = []
        for path in self._root.glob("*/??/*"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        if total <= self._most:
            return
        for _, size, path in sorted(found):
            with suppress(OSError):
                path.unlink()
            total -= size
            if total <= self._most // 2:
                return
