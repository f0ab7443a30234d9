"""A buffer takes memory of a process only while it is needed."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 128 * 1024


def new_buffer(size: int) -> mmap.mmap:
    """Returns a buffer of zeros; what was never written to takes no memory."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back_large_blocks() -> None:
    """Has this process give large blocks back to the system as soon as they are freed.

    By itself glibc keeps blocks of a size of which one was freed, and they are soon split.
    """
    with suppress(AttributeError):  # Not every C library has it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
