"""Ranges are asked for before they are wanted, so that a long link is never idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from ntt_backup.snapshot.repository.contract import Range

T = TypeVar("T")

# More than 100 MB/s carry in 100 ms.
_MOST_BYTES: Final = 16 << 20


def ask_ahead(
    ranges: Iterable[Range], most: int, ask: Callable[[Range], T], take: Callable[[T], bytes]
) -> Iterator[bytes]:
    """Yields what take makes of each answer, in order, while at most so many later ranges are asked
    for already.
    """
    asked: deque[tuple[int, T]] = deque()
    ahead = 0
    for one in ranges:
        while asked and (len(asked) == most or ahead + one.length > _MOST_BYTES):
            length, answer = asked.popleft()
            ahead -= length
            yield take(answer)
        asked.append((one.length, ask(one)))
        ahead += one.length
    while asked:
        yield take(asked.popleft()[1])
