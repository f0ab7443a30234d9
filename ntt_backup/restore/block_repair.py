"""Repairs a large local blob by the blocks that differ, so that the rest need not be fetched again.

Both ends hash the blob block by block. It is put together in scratch space, beside the wrong one,
and takes its place only when the whole hashes to its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ntt_backup.client.read_session import ReadSession
from ntt_backup.restore.target_writer import TargetWriter
from ntt_backup.wire.read_messages import BLOCK_BYTES, BLOCK_SUM_BYTES, block_sum
from ntt_backup.wire.write_messages import Large

_ASKED_AT_ONCE: Final = 1024
# Local blocks are copied while an answer waits, and the remote ends a session whose client takes
# nothing for an hour: from the first block of a question to its last are at most 4 GiB.
_SPAN: Final = 16 * 1024


def repair(session: ReadSession, writer: TargetWriter, digest: bytes, listed: int | None) -> None:
    """Puts the blob together from local blocks and fetched ones. listed: its size in bytes in the
    remote's listing, if that is known.
    """
    found = session.sums(digest, writer.not_given, listed)
    if found is None:
        return
    size, joined = found
    sums = memoryview(joined)
    count = -(-size // BLOCK_BYTES)
    with writer.base(digest) as base:
        differing = []
        for number in range(count):
            session.show_life()
            known = sums[number * BLOCK_SUM_BYTES :][:BLOCK_SUM_BYTES]
            if block_sum(_block(base, number)) != known:
                differing.append(number)
        writer.begin(Large(digest, size, 0))
        wanted = iter(differing)
        done = 0

        def keep(end: int, alive: Callable[[], None] = lambda: None) -> None:
            nonlocal done
            for number in range(done, end):
                alive()
                writer.add(memoryview(_block(base, number)))
            done = end

        def take(block: memoryview) -> None:
            nonlocal done
            keep(next(wanted))
            writer.piece(block)
            done += 1

        for numbers in _questions(differing):
            keep(numbers[0], session.show_life)
            if problem := session.blocks(digest, size, numbers, take):
                writer.end(problem)
                return
        keep(count)
    writer.end("")


def _questions(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields blocks to ask for at once, few and near to each other."""
    first = 0
    for after, number in enumerate(numbers):
        if after - first == _ASKED_AT_ONCE or number - numbers[first] >= _SPAN:
            yield numbers[first:after]
            first = after
    if numbers:
        yield numbers[first:]


def _block(fd: int, number: int) -> bytes:
    """Returns a block; nothing where the disk cannot read it, so that it is fetched."""
    try:
        return os.pread(fd, BLOCK_BYTES, number * BLOCK_BYTES)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
