"""A volume joins objects of a bucket: so a mount needs few devices, not one a pack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from ntt_backup.mount.erofs import MAX_DEVICE
from ntt_backup.packstore.tables import LargeBlob, PackObject

# What is fetched at once. Each object begins at a multiple of it.
PIECE: Final = 1 << 20

Listed = PackObject | LargeBlob


@dataclass(slots=True)
class Volume:
    """Objects with their places, in order. size in bytes, a multiple of PIECE."""

    size: int = 0
    objects: list[tuple[int, Listed]] = field(default_factory=list)

    def add(self, one: Listed) -> int:
        """Lays an object behind the others; returns where it begins."""
        start = self.size
        self.objects.append((start, one))
        self.size += -(-one.size // PIECE) * PIECE
        return start

    def piece(self, number: int) -> tuple[Listed, int, int]:
        """Returns the object that has a piece of the volume, and which bytes of it these are: where
        they begin, and how many they are.
        """
        at = number * PIECE
        start, one = self.objects[bisect_right(self.objects, at, key=itemgetter(0)) - 1]
        return one, at - start, min(PIECE, one.size - (at - start))


def lay_out(objects: Iterable[Listed]) -> Iterator[tuple[Listed, Volume, int]]:
    """Yields each object with its volume, and where in that it begins."""
    volume = Volume()
    for one in objects:
        if volume.size + one.size > MAX_DEVICE - PIECE:
            volume = Volume()
        yield one, volume, volume.add(one)
