"""A process and its copies share a number: what one sets, all read."""

from __future__ import annotations

import mmap
from typing import Final

_FLOAT_BYTES: Final = 8


class SharedNumber:
    """Holds a float, for copies that are made after it."""

    def __init__(self, value: float) -> None:
        self._cell: memoryview[float] = memoryview(mmap.mmap(-1, _FLOAT_BYTES)).cast("d")
        self.value = value

    @property
    def value(self) -> float:
        return self._cell[0]

    @value.setter
    def value(self, value: float) -> None:
        self._cell[0] = value
