"""Packs for the tests of mounts, places where they are mounted, and what shows them."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from ntt_backup.errors import MountImpossible
from ntt_backup.mount import kernel
from ntt_backup.mount.image import Source
from tests.helpers import blobs as made

_SIZES = (0, 1, 100, 3000, 15_000, 16_384, 20_000, 70_001)


def contents(number: int, seed: int = 1, sizes: Sequence[int] = _SIZES) -> dict[bytes, bytes]:
    """Blobs by digest, of all kinds: each size, some compressible."""
    chance = random.Random(seed)
    found = {}
    for _ in range(number):
        content = chance.randbytes(chance.choice(sizes))
        if chance.random() < 0.2:
            content = content[:8] * (len(content) // 8)
        found[blake3(content).digest()] = content
    return found


def pack(blobs: dict[bytes, bytes]) -> tuple[str, bytes]:
    """A pack's key in a bucket, and the pack."""
    data = made.pack(blobs.values())
    return made.key_of(made.reader(data)).key, data


def packs(blobs: dict[bytes, bytes], each: int) -> dict[str, bytes]:
    """Packs by key, of so many blobs each."""
    digests = sorted(blobs)
    return dict(
        pack({digest: blobs[digest] for digest in digests[at : at + each]})
        for at in range(0, len(digests), each)
    )


def source(data: bytes, device: int, start: int = 0) -> Source:
    return Source(f"pack-{device}", len(data), made.ranges(data), device, start)


def write(directory: Path, objects: dict[str, bytes]) -> Path:
    """Objects as files, as a copy of a bucket has them."""
    for key, data in objects.items():
        (directory / key).parent.mkdir(parents=True, exist_ok=True)
        (directory / key).write_bytes(data)
    return directory


def _require_packs() -> None:
    kernel.require_erofs(kernel.FILES_SINCE)


@contextmanager
def mount_point(require: Callable[[], None] = _require_packs) -> Iterator[Path]:
    """An empty directory on a disk; skips where nothing can be mounted."""
    try:
        require()
    except MountImpossible as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(prefix="ntt-mount-", dir="/var/tmp") as place:
        try:
            yield Path(place)
        finally:
            while Path(place).is_mount():
                subprocess.run(["umount", "-l", place], check=True)


def servers() -> set[int]:
    """The processes of this one that show packs or a version."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except OSError:
            continue
        if lines["Name"] == "ntt-mount" and int(lines["PPid"]) == os.getpid():
            found.add(int(lines["Pid"]))
    return found


def ended(pid: int) -> Callable[[], bool]:
    """Whether a child of ours ended; a command's own would be left to init."""
    return lambda: os.waitpid(pid, os.WNOHANG)[0] == pid


def wrong(directory: Path, blobs: dict[bytes, bytes]) -> list[str]:
    """The blobids that directory has not, or not with their content; and what it has besides."""
    found = {path.name: path for path in directory.glob("??/??/*")}
    bad = set(found) ^ {digest.hex() for digest in blobs}
    bad |= {
        name
        for name, path in found.items()
        if path.parts[-3:-1] != (name[:2], name[2:4])
        or blake3(path.read_bytes()).hexdigest() != name
    }
    return sorted(bad)
