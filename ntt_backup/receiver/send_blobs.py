"""GET, SUMS and BLOCKS send blobs, or the parts of one that differ, to a client that names them.

Small blobs travel together, large ones in pieces; memory is one pack or one piece. Nothing is
checked here: the client hashes what arrives, which proves the disk, this machine and the link in
one. A client that has most of a large blob asks for a short hash of every block (SUMS), then for
the blocks that differ (BLOCKS), and hashes the whole at the end.

All are generators of frames, and end with a GIVEN.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.open_blob import BlobError, BlobOpener, blob_error, forget
from ntt_backup.wire import read_messages
from ntt_backup.wire.framing import DIGEST_BYTES, MAX_CHUNK, PACK_BYTES
from ntt_backup.wire.read_messages import BLOCK_BYTES, BROKEN, COMPLETE, MAX_SUMS

_TABLE_ENTRY = DIGEST_BYTES + 4


def contents(
    opener: BlobOpener, digests: Sequence[bytes], offset: int
) -> Generator[bytes, None, None]:
    """Answers a GET: something for every blob, in no order. offset: where a single blob begins."""
    names: list[bytes] = []
    parts: list[bytes] = []
    room = PACK_BYTES
    for digest in digests:
        try:
            with _opened(opener, digest) as (fd, size):
                if offset or size > PACK_BYTES - _TABLE_ENTRY:
                    begin = min(offset, size)
                    begins = range(begin, size, MAX_CHUNK)
                    yield read_messages.blob(digest, size, begin)
                    yield from pieces(fd, size, begins, MAX_CHUNK)
                    continue
                content = _read(fd, size, 0)
        except BlobError as said:
            yield read_messages.not_given(digest, said.verdict, said.text)
            continue
        if len(content) + _TABLE_ENTRY > room:
            yield read_messages.contents(names, [len(part) for part in parts], parts)
            names, parts, room = [], [], PACK_BYTES
        names.append(digest)
        parts.append(content)
        room -= len(content) + _TABLE_ENTRY
    if names:
        yield read_messages.contents(names, [len(part) for part in parts], parts)
    yield read_messages.given(len(digests))


def sums(
    opener: BlobOpener, digest: bytes, alive: Callable[[], None]
) -> Generator[bytes, None, None]:
    """Answers a SUMS: the hashes of all blocks, in order. alive is called after each of them."""
    found: list[bytes] = []
    try:
        with _opened(opener, digest) as (fd, size):
            for at in range(0, size, BLOCK_BYTES):
                found.append(read_messages.block_sum(_read(fd, BLOCK_BYTES, at)))
                alive()
                if len(found) == MAX_SUMS:
                    yield read_messages.block_sums(size, found)
                    found = []
            yield read_messages.block_sums(size, found)
    except BlobError as said:
        yield read_messages.not_given(digest, said.verdict, said.text)
    yield read_messages.given(1)


def blocks(
    opener: BlobOpener, digest: bytes, numbers: Sequence[int]
) -> Generator[bytes, None, None]:
    """Answers a BLOCKS: these blocks, in this order."""
    try:
        with _opened(opener, digest) as (fd, size):
            begins = (number * BLOCK_BYTES for number in numbers)
            yield read_messages.blob(digest, size, 0)
            yield from pieces(fd, size, begins, BLOCK_BYTES)
    except BlobError as said:
        yield read_messages.not_given(digest, said.verdict, said.text)
    yield read_messages.given(1)


def pieces(fd: int, size: int, begins: Iterable[int], length: int) -> Iterator[bytes]:
    """Yields a file in pieces of that length, and its end. begins: where each of them begins."""
    status, why = COMPLETE, ""
    try:
        for at in begins:
            wanted = max(0, min(length, size - at))
            data = _read(fd, wanted, at)
            if not data or len(data) < wanted:
                status, why = BROKEN, f"it ends before byte {at + wanted}"
                break
            yield read_messages.piece(data)
    except OSError as problem:
        status, why = BROKEN, error_line(problem)
    yield read_messages.blob_end(status, why)


@contextmanager
def _opened(opener: BlobOpener, digest: bytes) -> Iterator[tuple[int, int]]:
    """Opens a blob: (descriptor, size). Raises BlobError, also for an OSError while it is read."""
    fd, size = opener.open(digest)
    try:
        yield fd, size
    except OSError as problem:
        raise blob_error(problem) from None
    finally:
        forget(fd)
        os.close(fd)


def _read(fd: int, length: int, at: int) -> bytes:
    """Returns length bytes from at on; fewer only where the file ends."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            break
        data += more
    return data
