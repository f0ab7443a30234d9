"""An EROFS image is a tree of blobs whose contents lie in other files, its devices.

An image holds names and inodes. A blob's content is a run of blocks of a device: what begins at a
multiple of 512 bytes in a pack is not copied. The kernel reads it without help, and compares
contents with nothing. The image is its own last device, for the contents that it holds: for what
lies in no device the kernel asks one after the other whether it is that, which takes 8 ms with
33,000 of them.

The image is written from front to back: superblock, table of devices, contents, then the tree. Only
the superblock and the directories above `aa/bb` are written last, in their places at the front. The
format is that of `fs/erofs/erofs_fs.h` in Linux.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import BinaryIO, Final, NamedTuple

BLOCK: Final = 512
# Addresses of blocks and numbers of devices have 32 and 16 bits; the image is a device as well.
MAX_DEVICE: Final = (BLOCK << 32) - BLOCK
MAX_DEVICES: Final = (1 << 16) - 2
# A blob's size in a record has 40 bits.
MAX_BLOB: Final = (1 << 40) - 1

# A blob of a tree: digest, device, first block, size. They are sorted as they are.
RECORD: Final = struct.Struct(">32sHIBI")

_BLOCK_BITS: Final = 9
_SUPER_AT: Final = 1024
_MAGIC: Final = 0xE0F5E1E2
_COMPATIBLE: Final = 1  # The superblock has a checksum.
_INCOMPATIBLE: Final = 4 | 8  # Files made of chunks; a table of devices.
# magic, checksum, compatible features, bits of a block, slots, root, inodes, time, nanoseconds,
# blocks, first blocks of the inodes and of the attributes, uuid, name, incompatible features,
# compression, devices, slot of their table
_SUPER: Final = struct.Struct("<IIIBBHQQIIII16s16sIHHH38x")
# tag, blocks
_DEVICE: Final = struct.Struct("<64sI60x")
_DEVICES_AT: Final = _SUPER_AT + BLOCK

# Inodes are numbered by their places, in units of this size.
_UNIT: Final = 32
_FILE: Final = 0o100444
_DIRECTORY: Final = 0o040555
# An inode whose content is one chunk: format, attributes, mode, links, size, chunk's format; and
# behind it the chunk's device and first block.
_SMALL: Final = struct.Struct("<HHHHI4xH14x2xHI24x")
# The same with a size of 64 bits: format, attributes, mode, size, the chunk's format, links, ...
_LARGE: Final = struct.Struct("<HHH2xQH26xI16x2xHI24x")
_FORMAT_SMALL: Final = 4 << 1
_FORMAT_LARGE: Final = _FORMAT_SMALL | 1
_HAS_DEVICE: Final = 0x20

_ENTRY_BYTES: Final = 12
_TYPE_FILE: Final = 1
_TYPE_DIRECTORY: Final = 2


class Tree(NamedTuple):
    """Holds what was written: blobs, and the bytes that they have."""

    blobs: int
    bytes: int


class ImageWriter:
    """Writes one image to a file that can seek. devices: the size of each in bytes; device 1 is the
    first. First come the contents that the image itself holds (`store`), then, once, the tree.

    itself: the image's number as a device.
    """

    def __init__(self, file: BinaryIO, devices: Sequence[int]) -> None:
        if len(devices) > MAX_DEVICES or max(devices, default=0) > MAX_DEVICE:
            raise ValueError("more devices, or larger ones, than an image can have")
        self._file = file
        self._blocks = [_blocks(size) for size in devices]
        self.itself = len(devices) + 1
        self._at = _DEVICES_AT + self.itself * _DEVICE.size
        self._inodes = 0
        file.seek(self._at)
        self._align()

    @property
    def size(self) -> int:
        """Returns the bytes written so far."""
        return self._at

    def store(self, content: bytes | memoryview) -> int:
        """Keeps a blob's content in the image; returns its first block, for a record."""
        first = self._at // BLOCK
        self._write(content)
        self._align()
        return first

    def write_tree(self, records: Iterable[bytes]) -> Tree:
        """Writes the tree of blobs, records in their order, and then the superblock. A blob that
        comes twice gets the first record's content. Raises ValueError for one that leads outside of
        its device.
        """
        self._base = self._at
        self._blocks.append(self._base // BLOCK)
        # The root's number has 16 bits, so it comes first; those below are numbered from there.
        self._write(bytes(_SMALL.size * (1 + 256)))
        self._align()
        below: dict[int, list[tuple[int, int]]] = {}
        blobs = total = 0
        for two, group in groupby(records, lambda record: record[:2]):
            number, tree = self._write_lower(_upper(two[0]), group)
            below.setdefault(two[0], []).append((two[1], number))
            blobs += tree.blobs
            total += tree.bytes
        tops = [(byte, _upper(byte)) for byte in sorted(below)]
        nodes = {0: self._write_upper(0, 0, tops)}
        for byte, number in tops:
            nodes[number] = self._write_upper(number, 0, below[byte])
        for number, node in nodes.items():
            self._file.seek(self._base + number * _UNIT)
            self._file.write(node)
        self._inodes += len(nodes)
        self._write_front()
        self._file.flush()
        return Tree(blobs, total)

    def _write_lower(self, parent: int, records: Iterable[bytes]) -> tuple[int, Tree]:
        """Writes a directory of blobs with their inodes; returns its number."""
        start = self._number()
        number = start + _SMALL.size // _UNIT
        nodes: list[bytes] = []
        numbers: list[int] = []
        digests: list[bytes] = []
        last = b""
        total = 0
        for digest, device, block, high, low in map(RECORD.unpack, records):
            if digest == last:
                continue
            last = digest
            size = high << 32 | low
            digests.append(digest)
            numbers.append(number)
            total += size
            if not 0 < device <= self.itself or block + _blocks(size) > self._blocks[device - 1]:
                raise ValueError(f"{digest.hex()} leads outside of device {device}")
            nodes.append(_node(_FILE, 1, size, device, block))
            number += len(nodes[-1]) // _UNIT
        names = b"".join(digests).hex().encode()
        entries = _directory(start, parent, names, numbers, _TYPE_FILE)
        data = b"".join(nodes)
        first = _blocks(self._at + _SMALL.size + len(data))
        self._write(_node(_DIRECTORY, 2, len(entries), self.itself, first) + data)
        self._align()
        self._write(entries)
        self._align()
        self._inodes += 1 + len(digests)
        return start, Tree(len(digests), total)

    def _write_upper(self, number: int, parent: int, below: Sequence[tuple[int, int]]) -> bytes:
        """Writes a directory of directories; returns its inode."""
        names = bytes(byte for byte, _ in below).hex().encode()
        entries = _directory(number, parent, names, [one for _, one in below], _TYPE_DIRECTORY)
        first = self._at // BLOCK
        self._write(entries)
        self._align()
        return _node(_DIRECTORY, 2 + len(below), len(entries), self.itself, first)

    def _write_front(self) -> None:
        self._blocks[-1] = self._at // BLOCK
        fields = [
            _COMPATIBLE,
            _BLOCK_BITS,
            0,
            0,
            self._inodes,
            0,
            0,
            self._at // BLOCK,
            self._base // BLOCK,
            0,
            bytes(16),
            b"ntt-backup",
            _INCOMPATIBLE,
            0,
            len(self._blocks),
            _DEVICES_AT // _DEVICE.size,
        ]
        checksum = _crc32c(_SUPER.pack(_MAGIC, 0, *fields).ljust(BLOCK, b"\0"))
        self._file.seek(_SUPER_AT)
        self._file.write(_SUPER.pack(_MAGIC, checksum, *fields))
        self._file.seek(_DEVICES_AT)
        self._file.write(b"".join(_DEVICE.pack(b"", count) for count in self._blocks))

    def _number(self) -> int:
        return (self._at - self._base) // _UNIT

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._at += len(data)

    def _align(self) -> None:
        self._write(bytes(-self._at % BLOCK))


def _upper(byte: int) -> int:
    """Returns the number of the directory `aa`: its place is the same in every image."""
    return (1 + byte) * _SMALL.size // _UNIT


def _node(mode: int, links: int, size: int, device: int, block: int) -> bytes:
    """Returns an inode with its chunk."""
    chunk = _HAS_DEVICE | max((size - 1).bit_length() - _BLOCK_BITS, 0)
    if size >> 32:
        return _LARGE.pack(_FORMAT_LARGE, 0, mode, size, chunk, links, device, block)
    return _SMALL.pack(_FORMAT_SMALL, 0, mode, links, size, chunk, device, block)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _directory(number: int, parent: int, names: bytes, numbers: Sequence[int], kind: int) -> bytes:
    """Returns the entries of a directory, in blocks; each block is searched by itself. names: those
    of `numbers`, in their order, all of one length.
    """
    width = len(names) // len(numbers) if numbers else 0
    dots = [(number, b"."), (parent, b"..")]
    blocks: list[bytes] = []
    at = 0
    while dots or at < len(numbers):
        room = BLOCK - len(dots) * _ENTRY_BYTES - sum(len(name) for _, name in dots)
        chosen = numbers[at : at + room // (_ENTRY_BYTES + width)]
        offset = (len(dots) + len(chosen)) * _ENTRY_BYTES
        values: list[int] = []
        for one, name in dots:
            values += (one, offset, _TYPE_DIRECTORY)
            offset += len(name)
        for one in chosen:
            values += (one, offset, kind)
            offset += width
        head = b"".join(name for _, name in dots)
        texts = head + names[at * width : (at + len(chosen)) * width]
        block = struct.pack("<" + "QHBx" * (len(dots) + len(chosen)), *values) + texts
        at += len(chosen)
        dots = []
        blocks.append(block if at == len(numbers) else block.ljust(BLOCK, b"\0"))
    return b"".join(blocks)


def _crc32c(data: bytes) -> int:
    """Returns the CRC-32C of data as Linux computes it, without the last complement."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc
