"""SUMS and BLOCKS: a large blob block by block, for a client that has most of it already.

A file of gigabytes in which a few bytes have rotted need not travel again. The client asks for a
short hash of every block here, compares them with what it has, and asks for the blocks that differ.
The short hashes only say where to look: the client hashes the whole at the end.

Generators of frames, as in `giving`. Used by `answering`; `block_sum` by `mending` at the other
end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b

from ntt_backup.remote import asking
from ntt_backup.remote.ground import words
from ntt_backup.remote.stock import Stock, Trouble, forget, trouble


def sums(stock: Stock, digest: bytes, alive: Callable[[], None]) -> Generator[bytes, None, None]:
    """The hashes of all blocks of one blob, in order; alive is called while they are made."""
    try:
        fd, size = stock.open(digest)
    except Trouble as said:
        yield asking.not_given(digest, said.verdict, said.text)
        yield asking.given(1)
        return
    found: list[bytes] = []
    try:
        for at in range(0, size, asking.BLOCK_BYTES):
            found.append(block_sum(os.pread(fd, asking.BLOCK_BYTES, at)))
            alive()
            if len(found) == asking.MAX_SUMS:
                yield asking.block_sums(size, found)
                found = []
        yield asking.block_sums(size, found)
    except OSError as problem:
        found_out = trouble(problem)
        yield asking.not_given(digest, found_out.verdict, found_out.text)
    finally:
        forget(fd)
        os.close(fd)
    yield asking.given(1)


def blocks(stock: Stock, digest: bytes, numbers: Sequence[int]) -> Generator[bytes, None, None]:
    """Some blocks of one blob, in the order they were asked for."""
    try:
        fd, size = stock.open(digest)
    except Trouble as said:
        yield asking.not_given(digest, said.verdict, said.text)
        yield asking.given(1)
        return
    try:
        yield asking.large(digest, size, 0)
        for number in numbers:
            data = os.pread(fd, asking.BLOCK_BYTES, number * asking.BLOCK_BYTES)
            if not data:
                yield asking.end(asking.BROKEN, "there is no such block")
                break
            yield asking.piece(data)
        else:
            yield asking.end(asking.COMPLETE)
    except OSError as problem:
        yield asking.end(asking.BROKEN, words(problem))
    finally:
        forget(fd)
        os.close(fd)
    yield asking.given(1)


def block_sum(data: bytes) -> bytes:
    """What tells one block from another; the same at both ends."""
    return blake2b(data, digest_size=asking.SUM_BYTES).digest()
