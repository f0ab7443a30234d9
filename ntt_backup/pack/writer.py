"""Writes a pack as a stream: its bytes in order, none of them twice, so that it may be sent as it
is made.

The same blobs in the same order give the same bytes, as long as the zstd library is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from blake3 import blake3

from ntt_backup.blobdir.layout import BY_HASH, relative_path
from ntt_backup.pack.dense import Dense
from ntt_backup.pack.format import (
    BLOCK,
    DENSE_BELOW,
    DENSE_MEMBER,
    DICTIONARY_MEMBER,
    ENTRY_BYTES,
    INDEX_MEMBER,
    MAX_ENTRIES,
    RAW,
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

_END_OF_ARCHIVE: Final = bytes(2 * BLOCK)


class PackWriter:
    """Writes one pack. `write` takes the archive's bytes in their order; it must be done with a
    buffer when it returns. One dense member and the table are held in memory.

    The caller has compared each blob with its digest. One that is added twice is a ValueError at
    the end. size: the bytes that were written so far. pack_id may be set anew until the end. sign:
    signs the pack.
    """

    def __init__(
        self,
        write: Callable[[Buffer], object],
        store_id: bytes,
        pack_id: bytes,
        *,
        compress: bool = True,
        sign: Sign = unsigned,
    ) -> None:
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
