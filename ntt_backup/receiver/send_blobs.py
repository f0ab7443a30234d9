"""GET: blobs back to whoever asks for them by name; small ones together, large ones in pieces.

Nothing is checked here: the client hashes what arrives, which proves the disk, this machine and the
way in one. What cannot be read is told of, in its place, and the others come. Memory is one pack or
one piece.

A generator of frames: the receiver takes the next one when the last has gone out.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence

from ntt_backup.receiver.open_blob import Stock, Trouble, forget, trouble
from ntt_backup.receiver.workspace import words
from ntt_backup.wire import read_messages
from ntt_backup.wire.framing import DIGEST_BYTES, MAX_CHUNK, PACK_BYTES

_TABLE_ENTRY = DIGEST_BYTES + 4


class Giving:
    """One GET. offset: where the one blob that is asked for begins."""

    def __init__(self, stock: Stock, digests: Sequence[bytes], offset: int) -> None:
        self._stock = stock
        self._digests = digests
        self._offset = offset
        self._names: list[bytes] = []
        self._parts: list[bytes] = []
        self._room = PACK_BYTES

    def frames(self) -> Generator[bytes, None, None]:
        """An answer for every blob, in no order, and the GIVEN at the end."""
        for digest in self._digests:
            try:
                fd, size = self._stock.open(digest)
            except Trouble as said:
                yield read_messages.not_given(digest, said.verdict, said.text)
                continue
            try:
                # A pack's limit, less what one entry of its table takes.
                if self._offset or size > PACK_BYTES - _TABLE_ENTRY:
                    yield from self._large(digest, fd, size)
                else:
                    yield from self._small(digest, fd, size)
            finally:
                forget(fd)
                os.close(fd)
        yield from self._pack()
        yield read_messages.given(len(self._digests))

    def _small(self, digest: bytes, fd: int, size: int) -> Iterator[bytes]:
        try:
            content = _read(fd, size)
        except OSError as problem:
            said = trouble(problem)
            yield read_messages.not_given(digest, said.verdict, said.text)
            return
        if len(content) + _TABLE_ENTRY > self._room:
            yield from self._pack()
        self._names.append(digest)
        self._parts.append(content)
        self._room -= len(content) + _TABLE_ENTRY

    def _pack(self) -> Iterator[bytes]:
        if self._names:
            yield read_messages.contents(
                self._names, [len(part) for part in self._parts], self._parts
            )
        self._names, self._parts, self._room = [], [], PACK_BYTES

    def _large(self, digest: bytes, fd: int, size: int) -> Iterator[bytes]:
        at = min(self._offset, size)
        yield read_messages.blob(digest, size, at)
        os.lseek(fd, at, os.SEEK_SET)
        while at < size:
            try:
                data = os.read(fd, min(MAX_CHUNK, size - at))
            except OSError as problem:
                yield read_messages.blob_end(read_messages.BROKEN, words(problem))
                return
            if not data:
                yield read_messages.blob_end(
                    read_messages.BROKEN, f"it ends {size - at} bytes early"
                )
                return
            at += len(data)
            yield read_messages.piece(data)
        yield read_messages.blob_end(read_messages.COMPLETE)


def _read(fd: int, size: int) -> bytes:
    """Up to size bytes: what a blob has grown by meanwhile is left out."""
    data = os.read(fd, size)
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            break
        data += more
    return data
