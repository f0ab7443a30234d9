"""SUMS and BLOCKS: a large blob block by block, for a client that has most of it already.

A file of gigabytes in which a few bytes have rotted need not travel again. The client asks for a
short hash of every block here, compares them with what it has, and asks for the blocks that differ.
The short hashes only say where to look: the client hashes the whole at the end.

Generators of frames, as in `giving`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence

from ntt_backup.receiver.open_blob import Stock, Trouble, forget, trouble
from ntt_backup.receiver.workspace import words
from ntt_backup.wire import read_messages


def sums(stock: Stock, digest: bytes, alive: Callable[[], None]) -> Generator[bytes, None, None]:
    """The hashes of all blocks of one blob, in order; alive is called while they are made."""
    try:
        fd, size = stock.open(digest)
    except Trouble as said:
        yield read_messages.not_given(digest, said.verdict, said.text)
        yield read_messages.given(1)
        return
    found: list[bytes] = []
    try:
        for at in range(0, size, read_messages.BLOCK_BYTES):
            found.append(read_messages.block_sum(os.pread(fd, read_messages.BLOCK_BYTES, at)))
            alive()
            if len(found) == read_messages.MAX_SUMS:
                yield read_messages.block_sums(size, found)
                found = []
        yield read_messages.block_sums(size, found)
    except OSError as problem:
        found_out = trouble(problem)
        yield read_messages.not_given(digest, found_out.verdict, found_out.text)
    finally:
        forget(fd)
        os.close(fd)
    yield read_messages.given(1)


def blocks(stock: Stock, digest: bytes, numbers: Sequence[int]) -> Generator[bytes, None, None]:
    """Some blocks of one blob, in the order they were asked for."""
    try:
        fd, size = stock.open(digest)
    except Trouble as said:
        yield read_messages.not_given(digest, said.verdict, said.text)
        yield read_messages.given(1)
        return
    try:
        yield read_messages.blob(digest, size, 0)
        for number in numbers:
            data = os.pread(fd, read_messages.BLOCK_BYTES, number * read_messages.BLOCK_BYTES)
            if not data:
                yield read_messages.blob_end(read_messages.BROKEN, "there is no such block")
                break
            yield read_messages.piece(data)
        else:
            yield read_messages.blob_end(read_messages.COMPLETE)
    except OSError as problem:
        yield read_messages.blob_end(read_messages.BROKEN, words(problem))
    finally:
        forget(fd)
        os.close(fd)
    yield read_messages.given(1)
