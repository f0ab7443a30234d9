"""Reads a pack from wherever ranges of it can be read: a file, or an object in a bucket.

A pack may be hostile: what is read and what is decompressed is bounded by what its own size allows,
and no content is given out before its BLAKE3 is its name, except by `content`, which says so.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import zstandard
from blake3 import blake3

from ntt_backup.pack.format import (
    RAW,
    TAIL_BYTES,
    ZSTD_DICTIONARY,
    Entry,
    PackError,
    Table,
    read_trailer,
)
from ntt_backup.pack.seal import OpenKey, Read, Unsealed, no_key, read_seal, sealed_offset

# One request brings the trailer, and the table of up to 1,300 blobs.
FIRST_READ: Final = 1 << 16
# Larger blobs that are not compressed need not be held in memory. A compressed one is no larger
# than MAX_RAW.
_PIECE: Final = 1 << 23


class PackReader:
    """A pack of that size. read(start, length) returns these bytes of it, and raises whatever its
    owner raises; fewer bytes are a damaged pack. open_key is called for a pack that is sealed.
    first: bytes of its end that are read at once; kept: its end, where that is known.

    Offsets are those of the pack within, where it is sealed. end: the pack's last bytes, which
    were needed to open it and suffice to open it again; whoever needs none may clear it.

    Raises PackError for what is no pack, or has a table that is damaged.
    """

    def __init__(
        self,
        read: Read,
        size: int,
        open_key: OpenKey = no_key,
        first: int = FIRST_READ,
        kept: bytes = b"",
    ) -> None:
        tail = _Tail(read, size, first, kept)
        seal = read_seal(tail.data, size)
        self._read: Read = tail.read
        within = size
        if seal is not None:
            within, unsealed = seal.size, Unsealed.of(tail.read, seal, open_key)
            self._read = unsealed.read
        last = min(within, TAIL_BYTES)
        trailer = read_trailer(self.range(within - last, last), within)
        self.table = Table(self.range(trailer.table_offset, trailer.table_bytes), trailer)
        self.seal = seal
        self.sealed = seal is not None
        needed_from = trailer.table_offset
        if seal is None:
            self._read = read
        else:
            if trailer.store_id != seal.store_id:
                raise PackError("it was made for another bucket than its seal says")
            trailer = replace(trailer, pack_id=seal.pack_id)
            self._read = unsealed.over(read).read
            needed_from = sealed_offset(needed_from)
        self.trailer = trailer
        self.end = tail.read(needed_from, size - needed_from)

    def range(self, start: int, length: int) -> bytes:
        """Returns these bytes, all of them. Raises PackError."""
        return _exactly(self._read, start, length)

    def content(self, entry: Entry, stored: bytes) -> bytes:
        """Returns a blob from its stored bytes, decompressed and of the right length, but not
        compared with its name. Raises PackError.
        """
        if entry.codec == RAW:
            raw = stored
        else:
            try:
                # A frame that states its length makes the library allocate it.
                stated = zstandard.frame_content_size(stored)
                if stated not in (-1, entry.raw):
                    raise PackError(_not_its_length(entry))
                decompressor = (
                    self._with_dictionary if entry.codec == ZSTD_DICTIONARY else self._plain
                )
                raw = decompressor.decompress(
                    stored, max_output_size=entry.raw, allow_extra_data=False
                )
            except zstandard.ZstdError as problem:
                raise PackError(f"{entry.digest.hex()} cannot be decompressed: {problem}") from None
        if len(raw) != entry.raw:
            raise PackError(_not_its_length(entry))
        return raw

    def read_blob(self, entry: Entry) -> bytes:
        """Returns a blob whose content is its name's. Raises PackError. It is held in memory."""
        content = self.content(entry, self.range(entry.offset, entry.stored))
        if blake3(content).digest() != entry.digest:
            raise PackError(other_content(entry.digest))
        return content

    def check(self, entry: Entry) -> None:
        """Reads a blob of any length, and raises PackError where its content is not its name's."""
        if entry.codec != RAW:
            self.read_blob(entry)
            return
        hasher = blake3()
        end = entry.offset + entry.stored
        for at in range(entry.offset, end, _PIECE):
            hasher.update(self.range(at, min(_PIECE, end - at)))
        if hasher.digest() != entry.digest:
            raise PackError(other_content(entry.digest))

    @cached_property
    def _plain(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor()

    @cached_property
    def _with_dictionary(self) -> zstandard.ZstdDecompressor:
        trailer = self.trailer
        words = self.range(trailer.dictionary_offset, trailer.dictionary_bytes)
        return zstandard.ZstdDecompressor(
            dict_data=zstandard.ZstdCompressionDict(words, dict_type=zstandard.DICT_TYPE_FULLDICT)
        )


class _Tail:
    """The end of a pack, which is kept as far down as it was read."""

    def __init__(self, read: Read, size: int, first: int, kept: bytes) -> None:
        self._read = read
        self._begin = size - (len(kept) or min(first, size))
        self.data = kept or _exactly(read, self._begin, size - self._begin)

    def read(self, start: int, length: int) -> bytes:
        begin = self._begin
        if start + length < begin:
            return self._read(start, length)
        if start < begin:
            self.data = _exactly(self._read, start, begin - start) + self.data
            self._begin = start
        return self.data[start - self._begin :][:length]


def _exactly(read: Read, start: int, length: int) -> bytes:
    data = read(start, length) if length else b""
    if len(data) != length:
        raise PackError(f"{len(data)} bytes instead of {length} at {start}: it is cut off")
    return data


def read_range(read: Read, start: int, length: int) -> bytes:
    """Returns these bytes of a file, all of them. Raises PackError, also where the disk fails."""
    try:
        return _exactly(read, start, length)
    except OSError as error:
        raise PackError(f"the pack cannot be read where it lies: {error.strerror}") from error


class PackFile(PackReader):
    """A pack in a file. Raises OSError, and PackError as any pack."""

    def __init__(self, path: Path, open_key: OpenKey = no_key) -> None:
        self.path = path
        self.open()
        try:
            super().__init__(
                lambda start, length: os.pread(self.fd, length, start), self.size, open_key
            )
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        """Opens the file: once more in a copy of this process, which has no descriptors."""
        # A pipe is a pack that is too short, and nothing to wait for.
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.size = os.fstat(self.fd).st_size

    def range(self, start: int, length: int) -> bytes:
        """Returns these bytes, all of them. Raises PackError, also where the disk fails."""
        return read_range(self._read, start, length)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def other_content(digest: bytes) -> str:
    """Returns the words for a blob that is not what its name says."""
    return f"{digest.hex()} has other content than its name says"


def _not_its_length(entry: Entry) -> str:
    return f"{entry.digest.hex()} has not the {entry.raw} bytes that the table says"
