"""GET sends blobs to a client that names them, one whole or from an offset on.

Small blobs travel together, large ones in pieces; memory is one pack or one piece. Nothing is
checked here: the client hashes what arrives, which proves the disk, this machine and the link in
one.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.open_blob import BlobError, BlobOpener, blob_error, forget
from ntt_backup.wire import messages
from ntt_backup.wire.framing import DIGEST_BYTES, MAX_CHUNK, PACK_BYTES
from ntt_backup.wire.messages import BROKEN, COMPLETE

_TABLE_ENTRY = DIGEST_BYTES + 4


def contents(
    opener: BlobOpener, digests: Sequence[bytes], offset: int
) -> Generator[bytes, None, None]:
    """Yields the frames that answer a GET: something for every blob, in no order, then a GIVEN.
    offset: where a single blob begins.
    """
    names: list[bytes] = []
    parts: list[bytes] = []
    room = PACK_BYTES
    for digest in digests:
        try:
            with _opened(opener, digest) as (fd, size):
                if offset or size > PACK_BYTES - _TABLE_ENTRY:
                    begin = min(offset, size)
                    yield messages.BLOB.frame(digest, size, begin)
                    yield from pieces(fd, begin, size)
                    continue
                content = _read(fd, size, 0)
        except BlobError as said:
            yield messages.NOT_GIVEN.frame(digest, said.verdict, said.text)
            continue
        if len(content) + _TABLE_ENTRY > room:
            yield messages.contents(names, [len(part) for part in parts], parts)
            names, parts, room = [], [], PACK_BYTES
        names.append(digest)
        parts.append(content)
        room -= len(content) + _TABLE_ENTRY
    if names:
        yield messages.contents(names, [len(part) for part in parts], parts)
    yield messages.GIVEN.frame(len(digests))


def pieces(fd: int, begin: int, end: int) -> Iterator[bytes]:
    """Yields a file from begin up to end in pieces, and its BLOB_END."""
    status, why = COMPLETE, ""
    try:
        for at in range(begin, end, MAX_CHUNK):
            wanted = min(MAX_CHUNK, end - at)
            data = _read(fd, wanted, at)
            if len(data) < wanted:
                status, why = BROKEN, f"it ends before byte {at + wanted}"
                break
            yield messages.piece(data)
    except OSError as problem:
        status, why = BROKEN, error_line(problem)
    yield messages.BLOB_END.frame(status, why)


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
