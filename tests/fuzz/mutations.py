"""What is valid is changed at random, as somebody would who knows its form, and as a disk would."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

# Lengths and counts that bounds are forgotten for.
_EXTREMES = (0, 1, 2, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_TEXTS = (b"../", b"/etc/passwd", b"\0", b"\n", b"\x1b]0;x\x07", b"\xff\xfe", b"99991231T235959Z")


def flip(data: bytearray, chance: random.Random) -> None:
    """Changes some bits."""
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    """Removes a piece."""
    begin = chance.randrange(len(data))
    del data[begin : begin + chance.choice((1, 4, 32, len(data)))]


def repeat(data: bytearray, chance: random.Random) -> None:
    """Doubles a piece."""
    begin = chance.randrange(len(data))
    data[begin:begin] = data[begin : begin + chance.choice((1, 4, 32, 512))]


def extreme(data: bytearray, chance: random.Random) -> None:
    """Writes a number over what stands there: the ends of what fits, in 1 to 8 bytes."""
    width, form = chance.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
    number = chance.choice(_EXTREMES) & ((1 << 8 * width) - 1)
    begin = chance.randrange(len(data))
    data[begin : begin + width] = struct.pack(chance.choice("<>") + form, number)


def text(data: bytearray, chance: random.Random) -> None:
    """Writes a hostile name over what stands there."""
    words = chance.choice(_TEXTS)
    begin = chance.randrange(len(data))
    data[begin : begin + len(words)] = words


Way = Callable[[bytearray, random.Random], None]
_WAYS: Sequence[Way] = (flip, flip, cut, repeat, extreme, text)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Returns data, changed in one to three ways."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        if changed:
            chance.choice(_WAYS)(changed, chance)
    return bytes(changed)
