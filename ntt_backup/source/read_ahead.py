"""Claimed blobs are read ahead in the order of the disk, if the disk is slow.

Blobids are hashes: read in their order from a hard disk, each small blob costs a seek, and the disk
cannot choose the next one. So the claimed blobs are sorted by the position of their content on the
disk, and threads read many blobs at a time into the page cache, ahead of the sender. The threads
discard the content; the sender reads and hashes each batch when all of it was read. Asking for a
position reads the inode, so that is done in the order of the inodes, which a listing has.

A disk has one head: workers that read at the same time move it to and fro. So workers take turns,
by a time in shared memory. There is no lock: a worker that was killed blocks nobody, and two
workers that read at the same time are only slower.
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
from statistics import median
from threading import Event
from typing import Final, Literal, TypeVar

from ntt_backup.blobdir.descriptors import DIRECTORY, FILE, closing, open_untouched
from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.model import Blob
from ntt_backup.process.memory import SharedNumber, new_buffer
from ntt_backup.source.store import Store

Order = Literal["auto", "hash", "inode", "extent"]
Claimed = list[tuple[Blob, int]]
_T = TypeVar("_T")

# A disk chooses among 32 reads. More threads keep it busy while some wait for the CPU, and make
# network file systems faster.
_THREADS: Final = 48
_BESIDE: Final = 8  # threads for urgent reads
# How long the turn of a worker lasts that reads nothing, since it may have been killed.
_TURN_SECONDS: Final = 2.0
# The interval of waits for the turn, and for blobs that are read again.
_LOOK_SECONDS: Final = 0.02
# How long a batch waits for blobs that the kernel has dropped from the cache, and the interval at
# which dropped blobs are read again while the batch is sent.
_READ_AGAIN_SECONDS: Final = 5.0
_KEEP_SECONDS: Final = 0.5
_KEEP_LOOKS: Final = 1200  # A batch that takes ten minutes does not wait for the disk.
# The blobs of one task, which takes more memory than a small blob.
_A_TASK: Final = 16
# The number of batches that are claimed, sorted and read as one.
_BATCHES: Final = 4
# Larger blobs take longer to read than to seek, and the kernel reads them ahead.
_LARGEST: Final = 1024**2
_FEWEST: Final = 64
_SAMPLE: Final = 8
# A small blob that takes longer is on a hard disk: flash and page cache are faster.
_SLOW_SECONDS: Final = 0.001
_FIEMAP: Final = 0xC020660B
_EXTENT: Final = struct.Struct("=QQLLLL 5Q4L")


class ReadAhead:
    """Reads blobs of a store ahead.

    Args:
        store: The store.
        order: The setting `source.read_order`; `auto` is `extent` if a sample of the claimed blobs
            is slow to read, else `hash`.
        turn: The end of the turn of a worker in monotonic seconds, shared by all workers.
    """

    def __init__(self, store: Store, order: Order, turn: SharedNumber | None = None) -> None:
        self._store = store
        self._order = order
        self._turn = turn or SharedNumber(0.0)
        self._unread: set[str] = set()
        self._began = 0.0
        self._slow = order in ("inode", "extent")
        # The content is discarded, so all threads may read into one buffer. With its own buffer
        # each thread would keep megabytes of freed memory.
        self._waste = new_buffer(_LARGEST)

    @property
    def batches(self) -> int:
        """The number of batches to claim at a time."""
        return _BATCHES if self._slow or self._is_busy else 1

    @property
    def _is_busy(self) -> bool:
        """Whether any worker reads ahead, so that the disk is slow and busy."""
        return time.monotonic() < self._turn.value

    def arranged(self, claimed: Claimed) -> Claimed:
        """Returns the claimed blobs in the best order for sending, and begins to read them."""
        with suppress(RuntimeError):  # If no thread can be started, nothing is read ahead.
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
        """Whether blobs are being read, or wait for the turn.

        The value is False if no worker reads any more: then the disk does not answer, and the
        sender reports that.
        """
        last = max(self._began, self._turn.value)
        return bool(self._unread) and time.monotonic() < last + _TURN_SECONDS

    def has_read(self, blobs: Iterable[Blob]) -> bool:
        """Returns whether all of these blobs were read."""
        return self._unread.isdisjoint(one.blobid for one in blobs)

    @contextmanager
    def at_hand(self, blobs: Sequence[Blob]) -> Iterator[None]:
        """Keeps blobs in the page cache while they are sent in the block.

        Blobs that the kernel has dropped are read again together: the sender would wait for each of
        them while others keep the disk busy, and meanwhile more blobs would be dropped.
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
        """Has dropped blobs read again, and waits for them for some seconds."""
        until = time.monotonic() + _READ_AGAIN_SECONDS
        while blobs := list(compress(blobs, self._at_once(self._ask_again, blobs))):
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_SECONDS)

    def _ask_again(self, blob: Blob) -> bool:
        """Has the kernel read a blob again that it has dropped. Returns whether it was dropped."""
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            try:
                here = os.preadv(fd, [self._waste], 0, os.RWF_NOWAIT)
            except BlockingIOError:
                here = 0
            # Not the size in the catalog: a shorter file would never be complete.
            if here < min(os.fstat(fd).st_size, _LARGEST):
                # For one call the kernel reads at most one request of the disk.
                os.posix_fadvise(fd, here, _LARGEST - here, os.POSIX_FADV_WILLNEED)
                return True
        return False

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS + _BESIDE, "read-ahead")

    def _at_once(self, what: Callable[[Blob], _T], blobs: Sequence[Blob]) -> Iterator[_T]:
        """Yields the result of a function for each blob, in order, computed by all threads."""
        some = [blobs[at : at + _A_TASK] for at in range(0, len(blobs), _A_TASK)]
        for found in self._threads.map(lambda task: [what(one) for one in task], some):
            self._store.alive()
            yield from found

    def _is_slow(self, claimed: Claimed) -> bool:
        sample = [blob for blob, _ in claimed[:: len(claimed) // _SAMPLE]]
        # If other workers keep a slow disk busy, sequential reads would take seconds.
        read = self._threads.map if self._slow or self._is_busy else map
        took = read(self._read, sample)
        # Not the mean: on a busy machine one thread may have waited for the CPU.
        return median(took) > _SLOW_SECONDS

    def _by_inode(self, claimed: Claimed) -> Claimed:
        if self._store.paths is not None:  # Neighbours were mostly written one after the other.
            return sorted(claimed, key=lambda one: self._path(one[0]))
        directory = self._store.layout.directory
        places = sorted({directory(one.blobid) for one, _ in claimed if is_blobid(one.blobid)})
        inodes: dict[str, int] = {}
        for found in self._threads.map(self._listed, places):
            inodes.update(found)
            self._store.alive()
        return sorted(claimed, key=lambda one: inodes.get(one[0].blobid, 0))

    def _by_place(self, claimed: Claimed) -> Claimed:
        """Sorts by position, stably: blobs without a known position keep their order."""
        places = list(self._at_once(self._place, [one for one, _ in claimed]))
        return [claimed[nth] for nth in sorted(range(len(claimed)), key=places.__getitem__)]

    def _listed(self, place: str) -> list[tuple[str, int]]:
        """Returns blobids and inodes of a directory; nothing if it cannot be listed."""
        path = str(self._store.root / place)
        before = place.replace("/", "") if self._store.layout.file_at else ""
        found: list[tuple[str, int]] = []
        with (
            suppress(OSError),
            closing(open_untouched(path, DIRECTORY)) as fd,
            os.scandir(fd) as listing,
        ):
            found.extend((before + entry.name, entry.inode()) for entry in listing)
        return found

    def _opened(self, blob: Blob) -> AbstractContextManager[int]:
        path = self._store.root / self._store.path_of(blob.blobid)
        return closing(open_untouched(str(path), FILE))

    def _path(self, blob: Blob) -> str:
        with suppress(OSError):
            return self._store.path_of(blob.blobid)
        return ""

    def _read(self, blob: Blob) -> float:
        """Reads the start of a blob, and returns the time in seconds that the read took.

        Errors are ignored, since the sender reports them.
        """
        began = time.monotonic()
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            os.readv(fd, [self._waste])
        return time.monotonic() - began

    def _read_in_turn(self, blobs: list[Blob]) -> None:
        """Reads blobs with all threads when it is the turn of this worker."""
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
        """Reads blobs until None, which one thread gets: it ends the turn."""
        for blob in blobs:
            now = time.monotonic()
            if blob is None:
                self._turn.value = now
            else:
                self._turn.value = now + _TURN_SECONDS
                self._read(blob)
                self._unread.discard(blob.blobid)

    def _place(self, blob: Blob) -> int:
        """Returns the position of a blob on the disk; 0 if it is not known."""
        place = 0
        with suppress(OSError, ValueError), self._opened(blob) as fd:
            asked = _EXTENT.pack(0, 1, 0, 0, 1, 0, *(0,) * 9)
            place = _EXTENT.unpack(fcntl.ioctl(fd, _FIEMAP, asked))[7]
        return place
