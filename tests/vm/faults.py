"""Faults that a guest survives without a boot: each lasts for a while, and is removed again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from tests.vm.guest import Guest

_LEAST_HOURS, _MOST_HOURS = 1.0, 40.0
# Nothing is written, so that the log of the disk stays small. The last line is the proof.
_FILL: Final = """
mkdir /data/full
for size in 256M 16M 1M 64K 4K; do
    while fallocate -l $size $(mktemp -p /data/full) 2>&-; do :; done
done
! head -c 1M /dev/zero 2>&- >/data/full/more
"""
# Without room for its log PostgreSQL ends, and its unit does not start it again.
_FREE: Final = """
rm -r /data/full
systemctl list-units --failed --plain --no-legend 'postgresql@*' | cut -d' ' -f1 |
    xargs -r systemctl start
"""


@contextmanager
def _frozen(guest: Guest, _: random.Random) -> Iterator[None]:
    with guest.frozen():
        yield


@contextmanager
def _full(guest: Guest, _: random.Random) -> Iterator[None]:
    guest.run(_FILL)
    try:
        yield
    finally:
        guest.run(_FREE)


@contextmanager
def _clock(guest: Guest, chance: random.Random) -> Iterator[None]:
    ahead = int(chance.uniform(_LEAST_HOURS, _MOST_HOURS) * 3600 * chance.choice((-1, 1)))
    guest.run(f"date -s @$(($(date +%s) + {ahead}))")
    try:
        yield
    finally:
        guest.run(f"date -s @$(($(date +%s) - {ahead}))")


@dataclass(frozen=True)
class Fault:
    """A fault that lasts.

    Args:
        strike: The guest has the fault until the context ends.
        seconds: How long it lasts, at least and at most.
        copies: Blobs must be copied meanwhile.
    """

    strike: Callable[[Guest, random.Random], AbstractContextManager[None]]
    seconds: tuple[float, float]
    copies: bool = False


LASTING: Final[Mapping[str, Fault]] = {
    "frozen": Fault(_frozen, (20, 90)),
    "full": Fault(_full, (10, 60)),
    "clock": Fault(_clock, (5, 30), copies=True),
}
