"""Reads claimed blobs ahead in the order of the disk, where the disk is slow.

Blobids are hashes: read in their order from a hard disk, each small blob costs a seek, and the disk
cannot choose the next one. So the claimed blobs are sorted by the place of their content on the
disk, and threads read many of them at a time into the page cache, ahead of the sender. They throw
away what they read; the sender reads and hashes as before. To ask for a place reads the inode: that
is done in the order of the inodes, which a listing of the directories has.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Final, Literal

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.blobdir.open import FILE, closing, open_untouched
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.model import Blob
from ntt_backup.process.memory import new_buffer

Order = Literal["auto", "hash", "inode", "extent"]
Claimed = list[tuple[Blob, int]]

_THREADS: Final = 12
# A task takes more memory than some blobs do: so many share one.
_A_TASK: Final = 16
# The number of batches that are claimed, sorted and read as one.
_BATCHES: Final = 4
# Reading a larger blob takes longer than the seek, and the kernel reads it ahead.
_LARGEST: Final = 1024**2
_FEWEST: Final = 64
_SAMPLE: Final = 8
# A small blob that takes longer comes from a hard disk: flash and page cache are faster.
_SLOW_SECONDS: Final = 0.001
_FIEMAP: Final = 0xC020660B
_EXTENT: Final = struct.Struct("=QQLLLL 5Q4L")


class ReadAhead:
    """Reads ahead in the store at root. order: see `source.read_order`; `auto` is `extent` where a
    sample of the claimed blobs took long to read, else `hash`. alive is called while it waits.
    """

    def __init__(self, root: Path, order: Order, alive: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._order = order
        self._alive = alive
        self._slow = order in ("inode", "extent")
        # What is read is thrown away, so all threads may read to one place. With buffers of their
        # own, each would keep megabytes of freed memory.
        self._waste = new_buffer(_LARGEST)

    @property
    def batches(self) -> int:
        """Returns the number of batches to claim at a time."""
        return _BATCHES if self._slow else 1

    def arranged(self, claimed: Claimed) -> Claimed:
        """Returns the claimed blobs in the best order to send them, and begins to read them."""
        if self._order == "auto" and len(claimed) >= _FEWEST:
            self._slow = self._is_slow(claimed)
        if not self._slow or len(claimed) < _FEWEST:
            return claimed
        with suppress(RuntimeError):  # Where no thread can be started, nothing is read ahead.
            claimed = self._by_inode(claimed)
            if self._order != "inode":
                claimed = self._by_place(claimed)
            # One list for all threads.
            small = [one for one, _ in claimed if one.size is None or one.size <= _LARGEST]
            following = iter(small)
            for _ in range(_THREADS):
                self._threads.submit(self._read_all, following)
        return claimed

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "read-ahead")

    def _is_slow(self, claimed: Claimed) -> bool:
        took = []
        for blob, _ in claimed[:: len(claimed) // _SAMPLE]:
            began = time.monotonic()
            self._read(blob)
            took.append(time.monotonic() - began)
        # Not the mean: on a busy machine one of them may have had to wait for the CPU.
        return median(took) > _SLOW_SECONDS

    def _by_inode(self, claimed: Claimed) -> Claimed:
        prefixes = sorted({one.blobid[:4] for one, _ in claimed if is_blobid(one.blobid)})
        inodes: dict[str, int] = {}
        for found in self._threads.map(self._listed, prefixes):
            inodes.update(found)
            self._alive()
        return sorted(claimed, key=lambda one: inodes.get(one[0].blobid, 0))

    def _by_place(self, claimed: Claimed) -> Claimed:
        """Sorts stably: where no place is known, the order stays as it is."""
        places: list[int] = []
        some = [claimed[at : at + _A_TASK] for at in range(0, len(claimed), _A_TASK)]
        for found in self._threads.map(self._places, some):
            places += found
            self._alive()
        return [claimed[nth] for nth in sorted(range(len(claimed)), key=places.__getitem__)]

    def _listed(self, prefix: str) -> list[tuple[str, int]]:
        """Returns names and inodes of what is in a directory, as far as it can be listed."""
        path = str(self._root / prefix[:2] / prefix[2:])
        found: list[tuple[str, int]] = []
        with (
            suppress(OSError),
            closing(open_untouched(path, DIRECTORY)) as fd,
            os.scandir(fd) as listing,
        ):
            found.extend((entry.name, entry.inode()) for entry in listing)
        return found

    def _opened(self, blob: Blob) -> AbstractContextManager[int]:
        return closing(open_untouched(str(self._root / relative_path(blob.blobid)), FILE))

    def _read(self, blob: Blob) -> None:
        """Reads the start of a blob. Errors are ignored: the sender will meet and report them."""
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            os.readv(fd, [self._waste])

    def _read_all(self, blobs: Iterator[Blob]) -> None:
        for blob in blobs:
            self._read(blob)

    def _places(self, claimed: Claimed) -> list[int]:
        return [self._place(one) for one, _ in claimed]

    def _place(self, blob: Blob) -> int:
        """Returns where on the disk a blob begins; 0 where that is not known."""
        place = 0
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            asked = _EXTENT.pack(0, 1, 0, 0, 1, 0, *(0,) * 9)
            place = _EXTENT.unpack(fcntl.ioctl(fd, _FIEMAP, asked))[7]
        return place
