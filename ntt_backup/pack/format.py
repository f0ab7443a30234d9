"""A pack ends with a table and a trailer, and all of its lengths are bounded.

A pack is an ustar archive whose last member, `.ntt/index`, is a table of its blobs and a trailer of
512 bytes. After it come the two zero blocks that end an archive, so the trailer always begins 1536
bytes before the end of the file. Larger blobs are members of their own, `by-hash/aa/bb/<blobid>`;
small ones lie back to back in members `.ntt/dense`, each as it is or compressed. A dictionary for
these is the member `.ntt/dict`.

Everything that comes from a pack may be hostile: each length is bounded before it is believed, and
the table holds digests and no names, so nothing in it can lead out of a directory. See
`docs/pack-format.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from blake3 import blake3

from ntt_backup.name_hash import HashOfNames, hash_of_names
from ntt_backup.wire.messages import BLAKE3, SHA256

# The second version says the hash of names, where that is not BLAKE3.
VERSION: Final = 2
_FIRST: Final = 1
BLOCK: Final = 512
DIGEST_BYTES: Final = 32
ID_BYTES: Final = 16
# The trailer and the two zero blocks that end the archive.
TAIL_BYTES: Final = 3 * BLOCK
MAX_ENTRIES: Final = 1 << 20
MAX_PACK: Final = 1 << 44
# Smaller blobs are dense, unless they are written in pieces. A dense member is written when its
# blobs have so many bytes together, before compression.
DENSE_BELOW: Final = 1 << 14
DENSE_MEMBER_BYTES: Final = 1 << 22
# Of a compressed blob, before compression. Larger blobs are stored as they are.
MAX_RAW: Final = 1 << 24
MAX_DICTIONARY: Final = 1 << 20

# The codecs of an entry.
RAW: Final = 0
ZSTD: Final = 1
ZSTD_DICTIONARY: Final = 2

INDEX_MEMBER: Final = ".ntt/index"
DENSE_MEMBER: Final = ".ntt/dense"
DICTIONARY_MEMBER: Final = ".ntt/dict"

# --- the header of a member
_NAME_BYTES: Final = 100
_SIZE: Final = slice(124, 136)
_CHECKSUM: Final = slice(148, 156)
_USTAR_MAGIC: Final = slice(257, 263)
# A size of up to 11 octal digits is written as such; larger ones by GNU's base 256.
_OCTAL_BELOW: Final = 1 << 33
_BASE_256: Final = 0x80
# The mode, both ids, and the time; the checksum is reckoned as if it were spaces.
_BEFORE_SIZE: Final = b"0000444\0" + b"0000000\0" * 2
_AFTER_SIZE: Final = b"00000000000\0" + b" " * 8 + b"0"
_REST: Final = (b"\0" * _NAME_BYTES + b"ustar\x0000" + b"\0" * 64 + b"0000000\0" * 2).ljust(
    355, b"\0"
)

# --- the trailer
_MAGIC: Final = b"NTTPACK\n"
_HEAD: Final = struct.Struct("!8sH")
# After the magic and the version: codecs' highest number, entries, table's offset and bytes,
# dictionary's offset and bytes, BLAKE3 of the table, pack id, store id, name of the key that
# signed, MAC
_TRAILER: Final = struct.Struct("!HIQQQQ32s16s16s8s32s")
# Behind it in the second version: as in `wire.messages`.
_NAMES: Final = struct.Struct("!B")
_HASHES: Final = {SHA256: "sha256", BLAKE3: "blake3"}
_UNSIGNED: Final = (bytes(8), bytes(32))
_ENTRY: Final = struct.Struct("!32sHIBIIB")
ENTRY_BYTES: Final = _ENTRY.size
_SELF_AT: Final = BLOCK - DIGEST_BYTES


# Returns the signature of data, `NAME:MAC` in hex; "" where there is none.
Sign = Callable[[bytes], str]


def unsigned(_data: bytes) -> str:
    """Is the `Sign` of a host without a key."""
    return ""


class PackError(Exception):
    """The bytes are no pack, or no whole one. The text is one line for the operator."""


class Entry(NamedTuple):
    """A blob in a pack. digest: its blobid in binary. offset and stored: where its bytes lie, and
    how many; raw: how many they are once decompressed. codec: RAW, ZSTD or ZSTD_DICTIONARY.
    """

    digest: bytes
    offset: int
    stored: int
    raw: int
    codec: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last block of a pack's index. Offsets and sizes are in bytes.

    dictionary_bytes is 0 where there is none. table_sum is the BLAKE3 of the table. signature:
    `NAME:MAC` in hex, of whoever made the pack; "" where there is none. names: the hash of names.
    """

    entries: int
    table_offset: int
    dictionary_offset: int
    dictionary_bytes: int
    table_sum: bytes
    pack_id: bytes
    store_id: bytes
    signature: str = ""
    names: HashOfNames = "blake3"

    @property
    def signed(self) -> bytes:
        """Returns the data that the signature is of. The table has the digests of all blobs."""
        return self.table_sum + self.pack_id + self.store_id

    @property
    def table_bytes(self) -> int:
        return self.entries * ENTRY_BYTES


def pack_id(store_id: bytes, digests: Iterable[bytes]) -> bytes:
    """Returns the id of the pack of these blobs: 16 bytes, known before a blob is read.

    The same blobs of the same store always give the same id, in whichever order they come.
    """
    whole = blake3(b"ntt-pack %d\n" % _FIRST + store_id)
    whole.update(b"".join(sorted(digests)))
    return whole.digest(length=ID_BYTES)


def write_entry(entry: Entry) -> bytes:
    """Returns an entry as it stands in the table."""
    digest, offset, stored, raw, codec = entry
    return _ENTRY.pack(
        digest,
        offset >> 32,
        offset & 0xFFFFFFFF,
        stored >> 32,
        stored & 0xFFFFFFFF,
        0 if codec == RAW else raw,
        codec,
    )


def write_table(entries: bytes | bytearray) -> bytes | bytearray:
    """Returns the table: these entries, one behind the other, in the order of their digests. Raises
    ValueError for a blob that has two.
    """
    starts = range(0, len(entries), ENTRY_BYTES)
    if all(one < following for one, following in pairwise(_digests(entries))):
        return entries
    table = b"".join(sorted(bytes(entries[at : at + ENTRY_BYTES]) for at in starts))
    for one, following in pairwise(_digests(table)):
        if one == following:
            raise ValueError(f"{one.hex()} is in the pack twice")
    return table


def _digests(table: bytes | bytearray) -> Iterator[bytes | bytearray]:
    for at in range(0, len(table), ENTRY_BYTES):
        yield table[at : at + DIGEST_BYTES]


def write_trailer(trailer: Trailer) -> bytes:
    """Returns the block that `read_trailer` reads."""
    name, _, mac = trailer.signature.partition(":")
    fields = _TRAILER.pack(
        ZSTD_DICTIONARY,
        trailer.entries,
        trailer.table_offset,
        trailer.table_bytes,
        trailer.dictionary_offset,
        trailer.dictionary_bytes,
        trailer.table_sum,
        trailer.pack_id,
        trailer.store_id,
        bytes.fromhex(name),
        bytes.fromhex(mac),
    )
    if trailer.names == "sha256":
        return write_block(VERSION, fields + _NAMES.pack(SHA256))
    return write_block(_FIRST, fields)


def write_block(version: int, fields: bytes) -> bytes:
    """Returns the block of a trailer of this version."""
    head = (_HEAD.pack(_MAGIC, version) + fields).ljust(_SELF_AT, b"\0")
    return head + blake3(head).digest()


def read_trailer(tail: bytes, size: int) -> Trailer:
    """Returns the trailer of a pack of that size, whose last bytes, TAIL_BYTES at least, are tail.

    Raises PackError. What it returns is consistent: all it points to lies within the pack, and the
    table directly before the trailer.
    """
    if len(tail) < TAIL_BYTES or not TAIL_BYTES <= size <= MAX_PACK:
        raise PackError("it is too short, or too long, for a pack")
    block = bytes(tail[len(tail) - TAIL_BYTES :][:BLOCK])
    magic, version = _HEAD.unpack_from(block)
    if magic != _MAGIC:
        raise PackError("no trailer: it is no pack, or its end is missing")
    if blake3(block[:_SELF_AT]).digest() != block[_SELF_AT:]:
        raise PackError("its trailer was altered")
    codecs, entries, table, table_bytes, words, words_bytes, table_sum, *ids = _TRAILER.unpack_from(
        block, _HEAD.size
    )
    said = BLAKE3
    if version == VERSION:
        (said,) = _NAMES.unpack_from(block, _HEAD.size + _TRAILER.size)
    if not _FIRST <= version <= VERSION or codecs > ZSTD_DICTIONARY or said not in _HASHES:
        raise PackError(
            f"it has version {version} of the format, and this program reads up to {VERSION}"
        )
    of_pack, of_store, name, mac = ids
    signature = "" if (name, mac) == _UNSIGNED else f"{name.hex()}:{mac.hex()}"
    names = hash_of_names(_HASHES[said])
    trailer = Trailer(
        entries, table, words, words_bytes, table_sum, of_pack, of_store, signature, names
    )
    if entries > MAX_ENTRIES or table_bytes != trailer.table_bytes:
        raise PackError("its trailer is inconsistent")
    # What is behind the table's begin is kept in memory, so only padding may follow the table.
    if not 0 <= size - TAIL_BYTES - table - table_bytes < BLOCK:
        raise PackError("its trailer is inconsistent")
    if words_bytes > MAX_DICTIONARY or words + words_bytes > table:
        raise PackError("its trailer is inconsistent")
    return trailer


class Table:
    """The entries of a pack, in the order of their digests; nothing is unpacked before it is asked
    for.
    """

    def __init__(self, data: bytes, trailer: Trailer) -> None:
        """Raises PackError for a table that is not the trailer's, is not sorted, points outside of
        the pack's members, or has more in them than they can hold.
        """
        if len(data) != trailer.table_bytes or blake3(data).digest() != trailer.table_sum:
            raise PackError("its table was altered")
        self._data = data
        # Checked as it is unpacked: a tenth of a second for a large table, and twice that by Entry.
        previous, limit, total = b"", trailer.table_offset, 0
        for digest, high, low, stored_high, stored, raw, codec in _ENTRY.iter_unpack(data):
            stored |= stored_high << 32
            if digest <= previous:
                raise PackError("its table is not in order")
            if codec != RAW and not (codec <= ZSTD_DICTIONARY and stored < raw <= MAX_RAW):
                raise PackError(f"its table has an invalid entry, {digest.hex()}")
            if (high << 32) + low + stored > limit:
                raise PackError(
                    f"an entry of its table points outside of the blobs, {digest.hex()}"
                )
            previous = digest
            total += stored
        if total > limit:
            raise PackError("blobs in its table overlap")

    def __len__(self) -> int:
        return len(self._data) // ENTRY_BYTES

    def __getitem__(self, number: int) -> Entry:
        return _entry(_ENTRY.unpack_from(self._data, number * ENTRY_BYTES))

    def __iter__(self) -> Iterator[Entry]:
        return map(_entry, _ENTRY.iter_unpack(self._data))

    def position(self, digest: bytes) -> int:
        """Returns the number of the first entry from a digest on."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            at = middle * ENTRY_BYTES
            if self._data[at : at + DIGEST_BYTES] < digest:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, digest: bytes) -> Entry | None:
        """Returns the entry of a blob, None where the pack does not have it."""
        number = self.position(digest)
        found = self[number] if number < len(self) else None
        return found if found is not None and found.digest == digest else None


def _entry(values: tuple[bytes, int, int, int, int, int, int]) -> Entry:
    digest, offset_high, offset, stored_high, stored, raw, codec = values
    stored |= stored_high << 32
    return Entry(digest, offset_high << 32 | offset, stored, stored if codec == RAW else raw, codec)


# --- headers of the archive


class Member(NamedTuple):
    """A member of an archive, as its header says. size is in bytes."""

    name: str
    size: int


def write_header(name: str, size: int) -> bytes:
    """Returns the header of a regular file that anyone may read, of no owner and no time. name has
    at most 100 letters of ASCII.
    """
    written = b"%011o\0" % size if size < _OCTAL_BELOW else b"\x80" + size.to_bytes(11, "big")
    path = name.encode("ascii").ljust(_NAME_BYTES, b"\0")
    header = bytearray(path + _BEFORE_SIZE + written + _AFTER_SIZE + _REST)
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


def read_header(block: bytes) -> Member | None:
    """Returns what a header says; None for a block that is none."""
    if block[_USTAR_MAGIC] != b"ustar\0":
        return None
    summed = bytearray(block)
    summed[_CHECKSUM] = b" " * 8
    try:
        if _octal(block[_CHECKSUM]) != sum(summed):
            return None
        written = block[_SIZE]
        base_256 = written[0] == _BASE_256
        size = int.from_bytes(written[1:], "big") if base_256 else _octal(written)
        return Member(block[:_NAME_BYTES].rstrip(b"\0").decode("ascii"), size)
    except ValueError:
        return None


def _octal(field: bytes) -> int:
    text = field.strip(b"\0 ")
    if not text.isdigit():
        raise ValueError(text)
    return int(text, 8)


def padding(size: int) -> int:
    """Returns how many zero bytes follow a member of that size."""
    return -size % BLOCK
