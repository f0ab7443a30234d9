"""Reads a pack from wherever ranges of it can be read: a local file, or a file of a target.

A pack may be hostile: what is read and what is decompressed is bounded by what its own size allows,
and no content is given out before its hash is its name, except by `content`, which says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import Final, Self

import zstandard

from ntt_backup.blobdir.layout import BY_HASH, is_blobid, relative_path
from ntt_backup.name_hash import NEW_HASHER, HashOfNames
from ntt_backup.pack.age_encryption import (
    HEAD,
    SEALED_CHUNK,
    AgeContent,
    Unseal,
    is_sealed,
    no_identity,
)
from ntt_backup.pack.format import (
    BLOCK,
    RAW,
    TAIL_BYTES,
    ZSTD_DICTIONARY,
    Entry,
    PackError,
    Table,
    padding,
    read_header,
    read_trailer,
)

# One request brings the trailer, and the table of up to 1,300 blobs.
_FIRST_READ: Final = 1 << 16
_FIRST_SEALED: Final = 2 * SEALED_CHUNK
# Larger blobs that are not compressed need not be held in memory. A compressed one is no larger
# than MAX_RAW.
_PIECE: Final = 1 << 23

# Bytes that nobody wants cost less than one more request for what is behind them.
LARGEST_GAP: Final = 1 << 20
LARGEST_RANGE: Final = 16 << 20
_JOB_BLOBS: Final = 4096
_JOB_BYTES: Final = 2 * LARGEST_RANGE
# Of a damaged pack, at a time.
_WINDOW: Final = 1 << 20
_TRIED: Final = 8

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
        names: The hash of names.

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
        self.names = trailer.names
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
        if NEW_HASHER[self.names](content).digest() != entry.digest:
            raise PackError(other_content(entry.digest))
        return content

    def check(self, entry: Entry) -> None:
        """Reads a blob of any length, and raises PackError where its content is not its name's."""
        if entry.codec != RAW:
            self.read_blob(entry)
            return
        hasher = NEW_HASHER[self.names]()
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


class OpenFile:
    """A file that is read at any place. Raises OSError. A copy of this process opens it once more:
    the copy has no descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        # A pipe is a pack that is too short, and nothing to wait for.
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.size = os.fstat(self.fd).st_size

    def read_at(self, start: int, length: int) -> bytes:
        return os.pread(self.fd, length, start)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PackFile(OpenFile, PackReader):
    """A pack in a file. Raises OSError, and PackError as any pack."""

    def __init__(self, path: Path, unseal: Unseal = no_identity) -> None:
        OpenFile.__init__(self, path)
        try:
            # A pipe has no size, and is read nowhere.
            sealed = is_sealed(self.read_at(0, HEAD) if self.size else b"")
            PackReader.__init__(self, self.read_at, self.size, unseal if sealed else None)
        except BaseException:
            self.close()
            raise

    def range(self, start: int, length: int) -> bytes:
        """Returns these bytes, all of them. Raises PackError, also where the disk fails."""
        return read_range(self._read, start, length)


class Salvage(OpenFile):
    """A damaged pack in a file, whose blobs are found by the headers of its members.

    Each blob that is a member of its own is found as long as its header is whole. The small ones,
    which lie in dense members, cannot be told apart without the table. Nothing that is found is
    believed: only a blob whose content hashes to its name is one. Raises OSError.
    """

    def range(self, start: int, length: int) -> bytes:
        """Returns these bytes, all of them. Raises PackError."""
        return read_range(self.read_at, start, length)

    def content(self, entry: Entry, stored: bytes) -> bytes:
        """Returns the content of a member, which is never compressed."""
        return stored

    def entries(self) -> list[Entry]:
        """Returns what may be a blob: each blobid once."""
        return sorted({one.digest: one for one in find_members(self.fd, self.size)}.values())

    @cached_property
    def names(self) -> HashOfNames:
        """The hash of names. The pack cannot say it any more, but a blob that is right does."""
        for one in sorted(self.entries(), key=attrgetter("stored"))[:_TRIED]:
            with suppress(PackError):
                content = self.range(one.offset, one.stored)
                if sha256(content).digest() == one.digest:
                    return "sha256"
        return "blake3"


def find_members(fd: int, size: int) -> Iterator[Entry]:
    """Yields the blobs of a file of that size, in order. Raises OSError.

    Where no header stands, the next one is looked for; so what lies within a blob may be taken for
    a member, too.
    """
    at = 0
    while at + BLOCK <= size:
        window = os.pread(fd, _WINDOW, at)
        last = at + len(window) - BLOCK
        if last < at:
            return
        start = at
        while at <= last:
            member = read_header(window[at - start : at - start + BLOCK])
            at += BLOCK
            if member is None or at + member.size > size:
                continue
            blobid = member.name.rpartition("/")[2]
            if is_blobid(blobid) and member.name == f"{BY_HASH}/{relative_path(blobid)}":
                yield Entry(bytes.fromhex(blobid), at, member.size, member.size, RAW)
            at += member.size + padding(member.size)


def other_content(digest: bytes) -> str:
    """Returns the words for a blob that is not what its name says."""
    return f"{digest.hex()} has other content than its name says"


def _not_its_length(entry: Entry) -> str:
    return f"{entry.digest.hex()} has not the {entry.raw} bytes that the table says"


# --- which bytes are fetched for which blobs


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes that are fetched at once, and the entries that lie in them, in the order of offsets.

    length is larger than `most` only for a single entry.
    """

    start: int
    length: int
    entries: tuple[Entry, ...]


def jobs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Cuts entries, put in the order of their offsets, into pieces of work for several threads."""
    job: list[Entry] = []
    size = 0
    for entry in sorted(entries, key=attrgetter("offset")):
        if job and (len(job) == _JOB_BLOBS or size + entry.stored > _JOB_BYTES):
            yield job
            job, size = [], 0
        job.append(entry)
        size += entry.stored
    if job:
        yield job


def merge(
    entries: Iterable[Entry], gap: int = LARGEST_GAP, most: int = LARGEST_RANGE
) -> Iterator[Range]:
    """Yields the ranges that hold these entries, which come in the order of their offsets. gap: at
    most so many bytes that nobody wants are fetched with them; most: bytes of a range.
    """
    near: list[Entry] = []
    start = end = 0
    for entry in entries:
        new_end = max(end, entry.offset + entry.stored)
        far = entry.offset - end > gap or new_end - start > most
        if near and far:
            yield Range(start, end - start, tuple(near))
            near = []
        if not near:
            start, new_end = entry.offset, entry.offset + entry.stored
        near.append(entry)
        end = new_end
    if near:
        yield Range(start, end - start, tuple(near))
