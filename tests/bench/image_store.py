"""Stores of millions of blobs: an EROFS image, mounted read-only. As files they would take 5 KB of
memory, or of a disk, each.

Needs root and Linux 6.12, and a directory that is not on tmpfs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from ntt_backup.mount import kernel
from ntt_backup.mount.erofs import RECORD, ImageWriter
from tests.bench.stores import Recipe, Store, sizes, stream_of


@contextmanager
def mounted(recipe: Recipe, directory: Path) -> Iterator[Store]:
    """Makes the store of a recipe of small blobs, and mounts it until the end."""
    kernel.require_erofs(kernel.FILES_SINCE)
    path, root = directory / f"{recipe.name}.erofs", directory / recipe.name
    root.mkdir(parents=True)
    records = [bytearray() for _ in range(256)]
    with path.open("wb", 1 << 20) as file:
        image = ImageWriter(file, [])
        for number, size in enumerate(sizes(recipe)):
            content = stream_of(recipe, number).read(size)
            digest = blake3(content).digest()
            record = RECORD.pack(digest, image.itself, image.store(content), 0, size)
            records[digest[0]] += record
        tree = image.write_tree(_sorted(records))
    kernel.attach(str(path), [str(path)], root)
    try:
        directories = {record[:2] for record in _sorted(records)}
        yield Store(recipe, root, tree.blobs, tree.bytes, len(directories) + 256)
    finally:
        kernel.detach(root)
        path.unlink()


def _sorted(records: list[bytearray]) -> Iterator[bytes]:
    for some in records:
        yield from sorted(
            bytes(some[at : at + RECORD.size]) for at in range(0, len(some), RECORD.size)
        )
