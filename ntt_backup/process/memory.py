"""Memory of a process: large buffers, the error where there is none, garbage, shared numbers."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ntt_backup.errors import SourceError

_FLOAT_BYTES: Final = 8
_M_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 128 * 1024
# The thresholds of `gc` in a process that lives long: new objects until the youngest generation is
# collected, and collections until each older generation is.
_NEW_OBJECTS: Final = (5_000, 4, 2)
# The message of Python if the system has no memory for the stack of a thread.
_NO_THREAD: Final = "can't start new thread"


def new_buffer(size: int) -> mmap.mmap:
    """Returns a buffer of zeros. Pages take memory only once they are written to."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@contextmanager
def memory_needed() -> Iterator[None]:
    """Raises a SourceError if the block runs out of memory, or no thread can be started."""
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
    """Has this process return large blocks to the system as soon as they are freed.

    By default glibc keeps blocks of a size of which one was freed, and soon splits them.
    """
    with suppress(AttributeError):  # Not every C library has it.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def collect_often() -> None:
    """Has this process, which lives long, look for garbage often.

    A command that ends soon looks once in 200,000 new objects, see `__main__`. In a daemon these
    would be tens of megabytes, and the descriptors that some of them hold. What is loaded now
    stays, and is not looked through.
    """
    gc.freeze()
    gc.set_threshold(*_NEW_OBJECTS)


class SharedNumber:
    """A float that this process and its later forks share."""

    def __init__(self, value: float) -> None:
        self._cell: memoryview[float] = memoryview(mmap.mmap(-1, _FLOAT_BYTES)).cast("d")
        self.value = value

    @property
    def value(self) -> float:
        return self._cell[0]

    @value.setter
    def value(self, value: float) -> None:
        self._cell[0] = value
