"""A small reader of EROFS images: names, sizes, and where contents lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ntt_backup.mount.erofs import BLOCK


class Inode(NamedTuple):
    mode: int
    size: int
    device: int
    block: int


class Image:
    """As much of the format as the images have."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        magic, _, _, bits, _, root, self.inodes = struct.unpack_from("<IIIBBHQ", data, 1024)
        assert (magic, bits) == (0xE0F5E1E2, 9)
        self.blocks, self.meta = struct.unpack_from("<II", data, 1024 + 36)
        devices, slot = struct.unpack_from("<HH", data, 1024 + 86)
        self.devices = [
            struct.unpack_from("<I", data, slot * 128 + number * 128 + 64)[0]
            for number in range(devices)
        ]
        self.root = root

    def inode(self, number: int) -> Inode:
        at = self.meta * BLOCK + number * 32
        layout, _, mode = struct.unpack_from("<HHH", self.data, at)
        assert layout >> 1 == 4
        size = struct.unpack_from("<Q" if layout & 1 else "<I", self.data, at + 8)[0]
        (chunk,) = struct.unpack_from("<H", self.data, at + 16)
        assert chunk & 0x20
        assert size <= BLOCK << (chunk & 0x1F), "more than one chunk"
        after = at + (64 if layout & 1 else 32)
        return Inode(mode, size, *struct.unpack_from("<HI", self.data, after + 2))

    def entries(self, number: int) -> Iterator[tuple[bytes, int, int]]:
        inode = self.inode(number)
        assert inode.device == len(self.devices), "directories lie in the image"
        start = inode.block * BLOCK
        for at in range(start, start + inode.size, BLOCK):
            block = self.data[at : min(at + BLOCK, start + inode.size)]
            (first,) = struct.unpack_from("<H", block, 8)
            heads = [struct.unpack_from("<QHB", block, n * 12) for n in range(first // 12)]
            ends = [offset for _, offset, _ in heads[1:]] + [len(block)]
            for (child, offset, kind), end in zip(heads, ends, strict=True):
                yield block[offset:end].rstrip(b"\0"), child, kind

    def tree(self, number: int | None = None, parent: int | None = None) -> dict[str, Inode]:
        """Path to inode, of all that are no directories."""
        number = self.root if number is None else number
        assert self.inode(number).mode == 0o040555
        entries = list(self.entries(number))
        names = [name for name, _, _ in entries]
        assert names == sorted(set(names)), "each block is searched by halves"
        assert entries[0][:2] == (b".", number)
        assert entries[1][:2] == (b"..", number if parent is None else parent)
        found: dict[str, Inode] = {}
        for name, child, kind in entries[2:]:
            if kind == 2:
                below = self.tree(child, number).items()
                found |= {f"{name.decode()}/{path}": inode for path, inode in below}
            else:
                found[name.decode()] = self.inode(child)
        return found


def path(digest: bytes) -> str:
    name = digest.hex()
    return f"{name[:2]}/{name[2:4]}/{name}"
