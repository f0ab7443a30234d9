"""Writes a pack as a stream: its bytes in order, none of them twice, so that it may be sent as it
is made.

The same blobs in the same order give the same bytes, as long as the zstd library is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.layout import BY_HASH, relative_path
from ntt_backup.pack.dense import Dense
from ntt_backup.pack.format import (
    DENSE_BELOW,
    DENSE_MEMBER,
    DICTIONARY_MEMBER,
    INDEX_MEMBER,
    MAX_ENTRIES,
    RAW,
    Entry,
    Trailer,
    write_table,
    write_trailer,
)
from ntt_backup.pack.ustar import BLOCK, padding, write_header

Buffer = bytes | bytearray | memoryview

_END_OF_ARCHIVE: Final = bytes(2 * BLOCK)


class PackWriter:
    """Writes one pack. `write` takes the archive's bytes in their order; it must be done with a
    buffer when it returns. At most two dense members are held in memory.

    The caller has compared each blob with its digest. One that is added twice is a ValueError.
    size: the bytes that were written so far. pack_id may be set anew until the end.
    """

    def __init__(
        self,
        write: Callable[[Buffer], object],
        store_id: bytes,
        pack_id: bytes,
        *,
        compress: bool = True,
    ) -> None:
        self._write = write
        self._store_id = store_id
        self.pack_id = pack_id
        self._dense = Dense(compress=compress)
        self._entries: dict[bytes, Entry] = {}
        self._dictionary_at = 0
        self._dictionary = b""
        self._missing = 0
        self.size = 0

    def add(self, digest: bytes, content: Buffer) -> None:
        """Adds a blob of which all is at hand. content may be used again afterwards."""
        if len(content) >= DENSE_BELOW:
            self.begin(digest, len(content))
            self.more(content)
            return
        self._make_room_for(digest)
        # Its place is known once its member is written.
        self._entries[digest] = Entry(digest, 0, 0, 0, RAW)
        self._dense.add(digest, bytes(content))
        if self._dense.full:
            self._write_dense()

    def begin(self, digest: bytes, size: int) -> None:
        """Begins a blob whose content comes by `more`."""
        self._make_room_for(digest)
        self._put(write_header(f"{BY_HASH}/{relative_path(digest.hex())}", size))
        self._entries[digest] = Entry(digest, self.size, size, size, RAW)
        self._missing = size

    def more(self, data: Buffer) -> None:
        """Adds content of the blob that was begun last."""
        if len(data) > self._missing:
            raise ValueError("a blob is longer than was announced")
        self._missing -= len(data)
        self._put(data)
        if not self._missing:
            self._pad()

    def close(self) -> tuple[Entry, ...]:
        """Writes what is left, the table and the trailer; returns the entries, sorted."""
        self._require_whole()
        if self._dense:
            self._write_dense()
        entries = tuple(sorted(self._entries.values()))
        table = write_table(entries)
        self._put(write_header(INDEX_MEMBER, len(table) + padding(len(table)) + BLOCK))
        trailer = Trailer(
            entries=len(entries),
            table_offset=self.size,
            dictionary_offset=self._dictionary_at,
            dictionary_bytes=len(self._dictionary),
            table_sum=blake3(table).digest(),
            pack_id=self.pack_id,
            store_id=self._store_id,
        )
        self._put(table)
        self._pad()
        self._put(write_trailer(trailer))
        self._put(_END_OF_ARCHIVE)
        return entries

    def _make_room_for(self, digest: bytes) -> None:
        self._require_whole()
        if digest in self._entries:
            raise ValueError(f"{digest.hex()} is in the pack already")
        if len(self._entries) == MAX_ENTRIES:
            raise ValueError(f"a pack has at most {MAX_ENTRIES:,} blobs")

    def _require_whole(self) -> None:
        if self._missing:
            raise ValueError("a blob is shorter than was announced")

    def _write_dense(self) -> None:
        content, blobs = self._dense.take()
        if self._dense.dictionary and not self._dictionary:
            self._dictionary = self._dense.dictionary
            self._dictionary_at = self._put_member(DICTIONARY_MEMBER, self._dictionary)
        at = self._put_member(DENSE_MEMBER, content)
        for digest, offset, stored, raw, codec in blobs:
            self._entries[digest] = Entry(digest, at + offset, stored, raw, codec)

    def _put_member(self, name: str, content: bytes) -> int:
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
