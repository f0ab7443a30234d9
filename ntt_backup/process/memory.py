"""Memory of a process: buffers, what happens when there is none, and numbers shared with forks."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ntt_backup.errors import SourceError

_FLOAT_BYTES: Final = 8
_M_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 128 * 1024
# What Python says where the system gives no memory for a thread's stack.
_NO_THREAD: Final = "can't start new thread"


def new_buffer(size: int) -> mmap.mmap:
    """Returns a buffer of zeros; what was never written to takes no memory."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@contextmanager
def memory_needed() -> Iterator[None]:
    """Raises SourceError where there is no memory for what is done meanwhile: that may pass."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        if isinstance(error, RuntimeError) and str(error) != _NO_THREAD:
            raise
        raise SourceError(
            "this machine has no memory left",
            detail=str(error),
            hint="use fewer workers (run.workers), or end other programs",
        ) from error


def give_back_large_blocks() -> None:
    """Has this process give large blocks back to the system as soon as they are freed.

    By itself glibc keeps blocks of a size of which one was freed, and they are soon split.
    """
    with suppress(AttributeError):  # Not every C library has it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


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
