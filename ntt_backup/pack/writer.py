"""Writes a pack as a stream: its bytes in order, none of them twice, so that it may be sent as it
is made.

The same blobs in the same order give the same bytes, as long as the zstd library is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

import zstandard
from blake3 import blake3

from ntt_backup.blobdir.layout import BY_HASH, relative_path
from ntt_backup.name_hash import HashOfNames
from ntt_backup.pack.format import (
    BLOCK,
    DENSE_BELOW,
    DENSE_MEMBER,
    DENSE_MEMBER_BYTES,
    DICTIONARY_MEMBER,
    DIGEST_BYTES,
    ENTRY_BYTES,
    INDEX_MEMBER,
    MAX_ENTRIES,
    RAW,
    ZSTD,
    ZSTD_DICTIONARY,
    Entry,
    Sign,
    Trailer,
    padding,
    unsigned,
    write_entry,
    write_header,
    write_table,
    write_trailer,
)

Buffer = bytes | bytearray | memoryview
Compress = Callable[[Buffer], bytes]

_END_OF_ARCHIVE: Final = bytes(2 * BLOCK)
_LEVEL: Final = 3
# Of the bytes that train, and of those that tell.
_TRAINING: Final = 1 << 20
_PROBE: Final = 1 << 18
# What is trained on less than this repeats it, and says nothing about the rest.
_LEAST_TRAINING: Final = 1 << 16
_DICTIONARY: Final = 1 << 15
# The parameters of zstd's trainer; to look for better ones takes a hundred times as long.
_SEGMENT: Final = 1024
_D: Final = 8
# 2 ** _F counters: with the default, 20, training takes 12 MiB instead of 4, and saves no more.
_F: Final = 18
# A saving that is worth decompressing for: a part of the whole.
_WORTH: Final = 0.03
# Blobs that save less as one piece have nothing to save, and nothing in common: no more is tried.
_COMMON: Final = 0.01
_QUICK: Final = 2


class PackWriter:
    """Writes one pack. `write` takes the archive's bytes in their order; it must be done with a
    buffer when it returns. One dense member and the table are held in memory.

    The caller has compared each blob with its digest. One that is added twice is a ValueError at
    the end. size: the bytes that were written so far. pack_id may be set anew until the end. sign:
    signs the pack. names: the hash of names.
    """

    def __init__(
        self,
        write: Callable[[Buffer], object],
        store_id: bytes,
        pack_id: bytes,
        *,
        compress: bool = True,
        sign: Sign = unsigned,
        names: HashOfNames = "blake3",
    ) -> None:
        self._names: HashOfNames = names
        self._write = write
        self._store_id = store_id
        self._sign = sign
        self.pack_id = pack_id
        self._dense = Dense(compress=compress)
        # As they will be written: an object for each would take five times as much memory.
        self._entries = bytearray()
        self._dictionary_at = 0
        self._dictionary = b""
        self._missing = 0
        self._room = MAX_ENTRIES
        self.size = 0

    def add(self, digest: bytes, content: Buffer) -> None:
        """Adds a blob of which all is at hand. content may be used again afterwards."""
        if len(content) >= DENSE_BELOW:
            self.begin(digest, len(content))
            self.more(content)
            return
        self._require_room()
        self._dense.add(digest, content)
        if self._dense.full:
            self._write_dense()

    def begin(self, digest: bytes, size: int) -> None:
        """Begins a blob whose content comes by `more`."""
        self._require_room()
        self._put(write_header(f"{BY_HASH}/{relative_path(digest.hex())}", size))
        self._entries += write_entry(Entry(digest, self.size, size, size, RAW))
        self._missing = size

    def more(self, data: Buffer) -> None:
        """Adds content of the blob that was begun last."""
        if len(data) > self._missing:
            raise ValueError("a blob is longer than was announced")
        self._missing -= len(data)
        self._put(data)
        if not self._missing:
            self._pad()

    def close(self) -> None:
        """Writes what is left, the table and the trailer."""
        self._require_whole()
        if self._dense:
            self._write_dense()
        table = write_table(self._entries)
        self._put(write_header(INDEX_MEMBER, len(table) + padding(len(table)) + BLOCK))
        trailer = Trailer(
            entries=len(table) // ENTRY_BYTES,
            table_offset=self.size,
            dictionary_offset=self._dictionary_at,
            dictionary_bytes=len(self._dictionary),
            table_sum=blake3(table).digest(),
            pack_id=self.pack_id,
            store_id=self._store_id,
            names=self._names,
        )
        self._put(table)
        self._pad()
        self._put(write_trailer(replace(trailer, signature=self._sign(trailer.signed))))
        self._put(_END_OF_ARCHIVE)

    def _require_room(self) -> None:
        if self._missing or not self._room:
            self._require_whole()
            raise ValueError(f"a pack has at most {MAX_ENTRIES:,} blobs")
        self._room -= 1

    def _require_whole(self) -> None:
        if self._missing:
            raise ValueError("a blob is shorter than was announced")

    def _write_dense(self) -> None:
        content = self._dense.finish()
        if self._dense.dictionary and not self._dictionary:
            self._dictionary = self._dense.dictionary
            self._dictionary_at = self._put_member(DICTIONARY_MEMBER, self._dictionary)
        at = self._put_member(DENSE_MEMBER, content)
        self._entries += b"".join(map(write_entry, self._dense.entries(at)))
        self._dense.clear()

    def _put_member(self, name: str, content: Buffer) -> int:
        """Returns where the content begins."""
        self._put(write_header(name, len(content)))
        at = self.size
        self._put(content)
        self._pad()
        return at

    def _pad(self) -> None:
        self._put(bytes(padding(self.size)))

    def _put(self, data: Buffer) -> None:
        self._write(data)
        self.size += len(data)


class Dense:
    """Gathers small blobs until `full`, in the order in which they are added. They lie in one piece
    of memory, and are compressed there where a sample says it pays.

    The first blobs of a pack are its sample: some of them train a dictionary, the others tell what
    is saved with it, and without. A dictionary is part of its pack, so it must save more than its
    own length. The answer holds for the whole pack.

    compress: whether blobs may be compressed at all. dictionary: what the blobs of the last member
    need; b"" as long as none is needed.
    """

    def __init__(self, *, compress: bool) -> None:
        self.dictionary = b""
        self._codec = RAW
        self._compress: Compress | None = None
        self._undecided = compress
        # Of its full size from the start: while it grew, there would be two of it.
        self._room = memoryview(bytearray(DENSE_MEMBER_BYTES + DENSE_BELOW))
        self.clear()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def full(self) -> bool:
        """Returns whether enough is gathered for a member."""
        return self._bytes >= DENSE_MEMBER_BYTES

    def add(self, digest: bytes, content: Buffer) -> None:
        """Copies a blob, which must be shorter than DENSE_BELOW."""
        self._digests += digest
        size = len(content)
        self._room[self._bytes : self._bytes + size] = content
        self._bytes += size
        self._sizes.append(size)

    def finish(self) -> memoryview:
        """Returns a member's content, until `clear`. Raises MemoryError."""
        try:
            if self._undecided:
                self._undecided = False
                self._decide()
            self._stored = self._sizes
            if self._compress is not None:
                self._stored = self._compressed(self._compress)
        except zstandard.ZstdError as error:  # There is no other reason.
            raise MemoryError(str(error)) from error
        return self._room[: sum(self._stored)]

    def clear(self) -> None:
        """Forgets what was gathered."""
        self._bytes = 0
        self._digests = bytearray()
        self._sizes: array[int] = array("I")
        self._stored = self._sizes

    def _compressed(self, compress: Compress) -> array[int]:
        """Compresses each blob that gets shorter, and moves it up; returns what they have then."""
        stored = array("I")
        to = start = 0
        for size in self._sizes:
            part: Buffer = self._room[start : start + size]
            packed = compress(part)
            part = packed if len(packed) < size else part
            self._room[to : to + len(part)] = part
            stored.append(len(part))
            to += len(part)
            start += size
        return stored

    def entries(self, offset: int) -> Iterator[Entry]:
        """Yields what is in the member that was finished. offset: where its content begins."""
        digests, at = bytes(self._digests), 0
        new = tuple.__new__  # A call less for each blob.
        for size, raw in zip(self._stored, self._sizes, strict=True):
            digest = digests[at : at + DIGEST_BYTES]
            yield new(Entry, (digest, offset, size, raw, RAW if size == raw else self._codec))
            at += DIGEST_BYTES
            offset += size

    def _decide(self) -> None:
        """Sets the codec for the whole pack."""
        total = self._bytes
        training, probe = _sample(_split(self._room, self._sizes), total)
        if not probe:
            return
        whole = b"".join([*training, *probe])
        if len(zstandard.compress(whole, _QUICK)) > len(whole) * (1 - _COMMON):
            return
        plain = _compressor(None)
        least = _packed(probe, None) * (1 - _WORTH)
        if (packed := _packed(probe, plain)) < least:
            self._codec, self._compress, least = ZSTD, plain, packed
        if sum(map(len, training)) < _LEAST_TRAINING:
            return
        try:
            words = zstandard.train_dictionary(
                _DICTIONARY, [*training], k=_SEGMENT, d=_D, f=_F, level=_LEVEL
            )
        except zstandard.ZstdError:  # Too few blobs, or all of them alike.
            return
        words.precompute_compress(level=_LEVEL)
        trained = _compressor(words)
        saved = least - _packed(probe, trained)
        if saved * total > len(words) * sum(map(len, probe)):
            self._codec, self._compress = ZSTD_DICTIONARY, trained
            self.dictionary = words.as_bytes()


def _split(content: memoryview, sizes: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield bytes(content[start : start + size])
        start += size


def _sample(contents: Iterator[bytes], total: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the blobs that train, at most three quarters of all, and some of those after them."""
    wanted = min(_TRAINING, total * 3 // 4)
    training: list[bytes] = []
    size = 0
    while size < wanted:
        training.append(next(contents))
        size += len(training[-1])
    probe: list[bytes] = []
    size = 0
    for content in contents:
        probe.append(content)
        size += len(content)
        if size >= _PROBE:
            break
    return training, probe


def _compressor(words: zstandard.ZstdCompressionDict | None) -> Compress:
    # What a frame would say of its content stands in the table, and the name is its checksum.
    return zstandard.ZstdCompressor(
        level=_LEVEL,
        dict_data=words,
        write_content_size=False,
        write_checksum=False,
        write_dict_id=False,
    ).compress


def _packed(probe: list[bytes], compress: Compress | None) -> int:
    """Returns the bytes that these blobs would take."""
    if compress is None:
        return sum(map(len, probe))
    return sum(min(len(one), len(compress(one))) for one in probe)
