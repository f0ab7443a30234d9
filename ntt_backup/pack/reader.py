"""Reads a pack from wherever ranges of it can be read: a local file, or a file of a target.

A pack may be hostile: what is read and what is decompressed is bounded by what its own size allows,
and no content is given out before its BLAKE3 is its name, except by `content`, which says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import zstandard
from blake3 import blake3

from ntt_backup.pack.age import HEAD, SEALED_CHUNK, AgeContent, Unseal, is_sealed, no_identity
from ntt_backup.pack.format import (
    RAW,
    TAIL_BYTES,
    ZSTD_DICTIONARY,
    Entry,
    PackError,
    Table,
    read_trailer,
)

# One request brings the trailer, and the table of up to 1,300 blobs.
_FIRST_READ: Final = 1 << 16
_FIRST_SEALED: Final = 2 * SEALED_CHUNK
# Larger blobs that are not compressed need not be held in memory. A compressed one is no larger
# than MAX_RAW.
_PIECE: Final = 1 << 23

Read = Callable[[int, int], bytes]


class PackReader:
    """A pack that is read by ranges. Offsets are those of the pack within, where it is sealed.

    Args:
        read: Returns bytes of the pack as it is stored, from an offset on and of a length. Fewer
            bytes are a damaged pack. It raises whatever its owner raises.
        size: The size of the pack as it is stored, in bytes.
        unseal: Opens the pack; None: the pack is not sealed.
        kept: The `end` of another reader of the same pack, where that is known.

    Attributes:
        end: What was needed to open the pack, and suffices to open it again; whoever needs that no
            more may clear it.

    Raises:
        PackError: It is no pack, or has a table that is damaged.
    """

    def __init__(
        self, read: Read, size: int, unseal: Unseal | None = None, kept: bytes = b""
    ) -> None:
        content: AgeContent | None = None
        head, within, first = b"", size, _FIRST_READ
        if unseal is not None:
            head = kept[:HEAD] or _exactly(read, 0, min(HEAD, size))
            content, first = unseal(head, size), _FIRST_SEALED
            within = content.size
        tail = _Tail(read, size, first, kept[len(head) :])
        self._read = _opened(tail.read, content)
        last = min(within, TAIL_BYTES)
        trailer = read_trailer(self.range(within - last, last), within)
        self.table = Table(self.range(trailer.table_offset, trailer.table_bytes), trailer)
        self.trailer = trailer
        self.sealed = content is not None
        self._read = _opened(read, content)
        needed = trailer.table_offset
        if content is not None:
            needed, _ = content.place(needed, 1)
        self.end = head + tail.read(needed, size - needed)

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


def _opened(read: Read, content: AgeContent | None) -> Read:
    """Returns what reads the pack within, by what reads the pack as it is stored."""
    if content is None:
        return read

    def read_within(start: int, length: int) -> bytes:
        return content.open(start, length, read(*content.place(start, length)))

    return read_within


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

    def __init__(self, path: Path, unseal: Unseal = no_identity) -> None:
        self.path = path
        self.open()
        try:

            def read(start: int, length: int) -> bytes:
                return os.pread(self.fd, length, start)

            # A pipe has no size, and is read nowhere.
            sealed = is_sealed(read(0, HEAD) if self.size else b"")
            super().__init__(read, self.size, unseal if sealed else None)
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
