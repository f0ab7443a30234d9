"""Reads claimed blobs ahead in the order of the disk, where the disk is slow.

Blobids are hashes: read in their order from a hard disk, each small blob costs a seek, and the disk
cannot choose the next one. So the claimed blobs are sorted by the place of their content on the
disk, and threads read many of them at a time into the page cache, ahead of the sender. They throw
away what they read; the sender reads and hashes as before, each batch when all of it was read. To
ask for a place reads the inode: that is done in the order of the inodes, which a listing of the
directories has.

A disk has one head: workers that read at the same time send it from one place to another. So they
take turns, by a time in the memory that they share. Nothing is locked: a worker that was killed
holds nobody up, and where two read at the same time after all, that is only slower.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from itertools import compress
from pathlib import Path
from statistics import median
from threading import Event
from typing import Final, Literal, TypeVar

from ntt_backup.blobdir.layout import is_blobid, relative_path
from ntt_backup.blobdir.open import FILE, closing, open_untouched
from ntt_backup.blobdir.syscalls import DIRECTORY
from ntt_backup.model import Blob
from ntt_backup.process.memory import SharedNumber, new_buffer

Order = Literal["auto", "hash", "inode", "extent"]
Claimed = list[tuple[Blob, int]]
_T = TypeVar("_T")

# A disk chooses among 32 reads. More keep it busy while some threads wait for the CPU, and a file
# system on a network gives more the more are asked for.
_THREADS: Final = 48
_BESIDE: Final = 8  # threads for what cannot wait until these are done
# How long the turn of a worker lasts that reads nothing: it may have been killed.
_TURN_SECONDS: Final = 2.0
# From one look whether it is our turn, or whether all is read again, to the next.
_LOOK_SECONDS: Final = 0.02
# How long a batch waits for what the kernel has dropped, and how often that is looked for while it
# is sent.
_READ_AGAIN_SECONDS: Final = 5.0
_KEEP_SECONDS: Final = 0.5
_KEEP_LOOKS: Final = 1200  # What takes ten minutes to be sent does not wait for the disk.
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
    turn: until when the disk is a worker's, in monotonic seconds; all workers share it.
    """

    def __init__(
        self,
        root: Path,
        order: Order,
        alive: Callable[[], None] = lambda: None,
        turn: SharedNumber | None = None,
    ) -> None:
        self._root = root
        self._order = order
        self._alive = alive
        self._turn = turn or SharedNumber(0.0)
        self._unread: set[str] = set()
        self._began = 0.0
        self._slow = order in ("inode", "extent")
        # What is read is thrown away, so all threads may read to one place. With buffers of their
        # own, each would keep megabytes of freed memory.
        self._waste = new_buffer(_LARGEST)

    @property
    def batches(self) -> int:
        """Returns the number of batches to claim at a time."""
        return _BATCHES if self._slow or self._is_busy else 1

    @property
    def _is_busy(self) -> bool:
        """Returns whether any worker reads ahead: the disk is slow then, and not free."""
        return time.monotonic() < self._turn.value

    def arranged(self, claimed: Claimed) -> Claimed:
        """Returns the claimed blobs in the best order to send them, and begins to read them."""
        with suppress(RuntimeError):  # Where no thread can be started, nothing is read ahead.
            if self._order == "auto" and len(claimed) >= _FEWEST:
                self._slow = self._is_slow(claimed)
            if self._slow and len(claimed) > 1:
                claimed = self._by_inode(claimed)
                if self._order != "inode":
                    claimed = self._by_place(claimed)
                small = [one for one, _ in claimed if one.size is None or one.size <= _LARGEST]
                self._unread.update(one.blobid for one in small)
                self._began = time.monotonic()
                self._threads.submit(self._read_in_turn, small)
        return claimed

    @property
    def reading(self) -> bool:
        """Returns whether it waits for its turn, or reads. Not where nobody reads any more: then a
        disk does not answer, which the sender is to meet.
        """
        last = max(self._began, self._turn.value)
        return bool(self._unread) and time.monotonic() < last + _TURN_SECONDS

    def has_read(self, blobs: Iterable[Blob]) -> bool:
        """Returns whether it is through with these."""
        return self._unread.isdisjoint(one.blobid for one in blobs)

    @contextmanager
    def at_hand(self, blobs: Sequence[Blob]) -> Iterator[None]:
        """Has the kernel keep at hand what is sent in the block. What it has dropped is read again
        all at once: the sender would wait for one after another, each as long as others keep the
        disk busy; and while it waits, more is dropped.
        """
        sent = Event()
        with suppress(RuntimeError):
            if self._slow:
                self._read_again(blobs)
                self._threads.submit(self._keep, blobs, sent)
        try:
            yield
        finally:
            sent.set()

    def _keep(self, blobs: Sequence[Blob], sent: Event) -> None:
        for _ in range(_KEEP_LOOKS):
            if sent.wait(_KEEP_SECONDS):
                break
            for one in blobs:
                self._ask_again(one)

    def _read_again(self, blobs: Sequence[Blob]) -> None:
        """Has all read again that was dropped, and waits a moment for that."""
        until = time.monotonic() + _READ_AGAIN_SECONDS
        while blobs := list(compress(blobs, self._at_once(self._ask_again, blobs))):
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)

    def _ask_again(self, blob: Blob) -> bool:
        """Has the kernel begin to read a blob that it has dropped; returns whether it had."""
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            try:
                here = os.preadv(fd, [self._waste], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                here = 0
            # Not what the catalog says: the file may have less, and would never be complete.
            if here < min(os.fstat(fd).st_size, _LARGEST):
                # The kernel reads no more for one call than the disk takes at a time.
                os.posix_fadvise(fd, here, _LARGEST - here, os.POSIX_FADV_WILLNEED)
                return True
        return False

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS + _BESIDE, "read-ahead")

    def _at_once(self, what: Callable[[Blob], _T], blobs: Sequence[Blob]) -> Iterator[_T]:
        """Yields what all threads together find for the blobs, in their order."""
        some = [blobs[at : at + _A_TASK] for at in range(0, len(blobs), _A_TASK)]
        for found in self._threads.map(lambda task: [what(one) for one in task], some):
            self._alive()
            yield from found

    def _is_slow(self, claimed: Claimed) -> bool:
        sample = [blob for blob, _ in claimed[:: len(claimed) // _SAMPLE]]
        # Where others keep a slow disk busy, one after another would take seconds.
        read = self._threads.map if self._slow or self._is_busy else map
        took = read(self._read, sample)
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
        places = list(self._at_once(self._place, [one for one, _ in claimed]))
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

    def _read(self, blob: Blob) -> float:
        """Reads the start of a blob; returns the seconds that took. Errors are ignored: the sender
        will meet and report them.
        """
        began = time.monotonic()
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            os.readv(fd, [self._waste])
        return time.monotonic() - began

    def _read_in_turn(self, blobs: list[Blob]) -> None:
        """Reads them with all threads, while no other worker does. Those of several workers lie in
        several places, and a disk has one head.
        """
        try:
            while (now := time.monotonic()) < self._turn.value:
                time.sleep(_LOOK_SECONDS)
            self._turn.value = now + _TURN_SECONDS
            following = iter([*blobs, None])  # One list for all threads.
            with suppress(RuntimeError):
                for _ in range(_THREADS - 1):
                    self._threads.submit(self._read_all, following)
            self._read_all(following)
        finally:
            self._unread.difference_update(one.blobid for one in blobs)

    def _read_all(self, blobs: Iterator[Blob | None]) -> None:
        """Reads blobs until None, which one of the threads gets: that is the end of the turn."""
        for blob in blobs:
            now = time.monotonic()
            if blob is None:
                self._turn.value = now
            else:
                self._turn.value = now + _TURN_SECONDS
                self._read(blob)
                self._unread.discard(blob.blobid)

    def _place(self, blob: Blob) -> int:
        """Returns where on the disk a blob begins; 0 where that is not known."""
        place = 0
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            asked = _EXTENT.pack(0, 1, 0, 0, 1, 0, *(0,) * 9)
            place = _EXTENT.unpack(fcntl.ioctl(fd, _FIEMAP, asked))[7]
        return place
