"""VERIFY: blobs hashed where they lie, by several threads, and a verdict for each.

One thread would leave processors and disks idle: reading and hashing let go of the interpreter's
lock, so a few threads do it side by side, each a blob at a time. Memory is a buffer a thread,
however large a blob is. What is hashed is read from the disk, not from the page cache.

A generator of frames for the receiver's loop: empty ones while the threads are at work; each of
them wakes the loop through its pipe when it is done. Used by `answering`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from ntt_backup.remote import asking
from ntt_backup.remote.ground import Ground
from ntt_backup.remote.stock import Stock, Trouble, forget, trouble

if TYPE_CHECKING:
    from ntt_backup.remote.hashing import NewHasher

_CHUNK = 1 << 20
_MOST_THREADS = 8
_NOTHING = bytes(32)


class Verifying:
    """One VERIFY. wake is a descriptor that gets a byte when a thread has ended."""

    def __init__(self, ground: Ground, digests: Sequence[bytes], new: NewHasher, wake: int) -> None:
        self._ground = ground
        self._digests = digests
        self._new = new
        self._wake = wake
        self._work: queue.SimpleQueue[int] = queue.SimpleQueue()
        # In order of digest: each directory is opened once or twice.
        for position in sorted(range(len(digests)), key=lambda one: digests[one]):
            self._work.put(position)
        self._lock = threading.Lock()
        self._bytes = 0
        self._exceptions: list[asking.Exceptional] = []
        self._defects: list[BaseException] = []
        self._stopped = False
        self._running = 0

    def frames(self) -> Generator[bytes, None, None]:
        """Nothing until all is hashed, then the one answer."""
        count = min(_MOST_THREADS, os.cpu_count() or 1, len(self._digests))
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        self._running = count
        for thread in threads:
            thread.start()
        try:
            while self._running:
                yield b""
        finally:
            self._stopped = True
            for thread in threads:
                thread.join()
        if self._defects:
            raise self._defects[0]
        exceptions = sorted(self._exceptions)
        count = len(self._digests)
        yield asking.verdicts(
            asking.Verdicts(count, count - len(exceptions), self._bytes, exceptions)
        )

    def _run(self) -> None:
        stock = Stock(self._ground)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while not self._stopped:
                position = self._work.get_nowait()
                self._judge(stock, position, buffer)
        except queue.Empty:
            pass
        except BaseException as defect:  # noqa: BLE001 - raised in the loop, where it is told of
            self._defects.append(defect)
        finally:
            stock.close()
            with self._lock:
                self._running -= 1
            os.write(self._wake, b"\0")

    def _judge(self, stock: Stock, position: int, buffer: memoryview) -> None:
        digest = self._digests[position]
        size, found, verdict, text = 0, _NOTHING, asking.WRONG, ""
        try:
            fd, _ = stock.open(digest)
            try:
                size, found = self._hash(fd, buffer)
            except OSError as problem:
                raise trouble(problem) from None
            finally:
                os.close(fd)
        except Trouble as said:
            verdict, text = said.verdict, said.text
        with self._lock:
            self._bytes += size
            if found != digest:
                one = asking.Exceptional(position, verdict, size, found, text)
                self._exceptions.append(one)

    def _hash(self, fd: int, buffer: memoryview) -> tuple[int, bytes]:
        """(length, digest) of all of it; zeros where we were stopped."""
        forget(fd)
        hasher = self._new(b"")
        size = 0
        while not self._stopped:
            count = os.readv(fd, [buffer])
            if not count:
                forget(fd)
                return size, hasher.digest()
            hasher.update(buffer[:count])
            size += count
        return size, _NOTHING
