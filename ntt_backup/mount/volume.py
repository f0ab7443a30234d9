"""Objects of a bucket, laid one behind the other: so a mount needs few devices, not one a pack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.mount.erofs import MAX_DEVICE
from ntt_backup.objects.bucket import Bucket, ObjectInfo
from ntt_backup.objects.keys import PackKey, blob_prefix, blobid_of, pack_prefixes

# What is fetched at once. Each object begins at a multiple of it.
PIECE: Final = 1 << 20


@dataclass(slots=True)
class Volume:
    """Objects with their places, in order. size in bytes, a multiple of PIECE."""

    size: int = 0
    objects: list[tuple[int, ObjectInfo]] = field(default_factory=list)

    def add(self, one: ObjectInfo) -> int:
        """Lays an object behind the others; returns where it begins."""
        start = self.size
        self.objects.append((start, one))
        self.size += -(-one.size // PIECE) * PIECE
        return start

    def piece(self, number: int) -> tuple[ObjectInfo, int, int]:
        """Returns the object that has a piece of the volume, and which bytes of it these are: where
        they begin, and how many they are.
        """
        at = number * PIECE
        start, one = self.objects[bisect_right(self.objects, at, key=itemgetter(0)) - 1]
        return one, at - start, min(PIECE, one.size - (at - start))


def lay_out(objects: Iterable[ObjectInfo]) -> Iterator[tuple[ObjectInfo, Volume, int]]:
    """Yields each object with its volume, and where in that it begins."""
    volume = Volume()
    for one in objects:
        if volume.size + one.size > MAX_DEVICE - PIECE:
            volume = Volume()
        yield one, volume, volume.add(one)


def find(bucket: Bucket, prefix: str) -> Iterator[ObjectInfo]:
    """Yields the packs that may have a blob of that prefix, and the blobs that are objects of their
    own.
    """
    for below in pack_prefixes(prefix):
        for one in bucket.list(below):
            key = PackKey.read(one.key)
            if key is not None and one.size and key.may_have(prefix):
                yield one
    for one in bucket.list(blob_prefix(prefix)):
        blobid = blobid_of(one.key)
        if blobid is not None and one.size and blobid.startswith(prefix):
            yield one


def digest_of(one: ObjectInfo) -> bytes:
    """Returns the digest of a blob that is an object of its own; b"" for a pack."""
    blobid = one.key.rpartition("/")[2]
    return bytes.fromhex(blobid) if is_blobid(blobid) else b""
