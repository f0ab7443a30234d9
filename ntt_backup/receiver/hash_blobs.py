"""VERIFY has several threads hash blobs from the disk, and each blob gets a verdict.

Reading and hashing let go of the interpreter's lock, so a few threads keep processors and disks
busy, with a buffer each, however large a blob is. Blobs are read from the disk, not from the page
cache. Where Python has no BLAKE3, each thread gives some blobs at a time to the program b3sum.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ntt_backup.blobdir.syscalls import error_line
from ntt_backup.receiver.b3sum import B3sum, by_descriptor
from ntt_backup.receiver.open_blob import BlobError, BlobOpener, blob_error, forget
from ntt_backup.receiver.workspace import Refusal, Workspace
from ntt_backup.wire import messages

if TYPE_CHECKING:
    from ntt_backup.receiver.hashing import NewHasher

_CHUNK = 1 << 20
_MOST_THREADS = 8
_NOTHING = bytes(32)
# For one process of b3sum: enough files to make its start cheap, few enough that the descriptors
# of all threads stay far below what a process may have.
_FILES = 32
_BYTES = 64 << 20


class _Stopped(Exception):
    """The client does not wait for the verdicts any more."""


class _Open(NamedTuple):
    """A blob that is being hashed by b3sum."""

    position: int
    fd: int
    size: int


class HashJob:
    """One VERIFY. new: begins a hash by BLAKE3; without it the program b3sum is needed. wake: a
    descriptor that gets a byte when a thread has ended.
    """

    def __init__(
        self,
        workspace: Workspace,
        digests: Sequence[bytes],
        new: NewHasher | None,
        b3sum: B3sum | None,
        wake: int,
    ) -> None:
        self._workspace = workspace
        self._digests = digests
        self._new = new
        self._b3sum = b3sum
        self._wake = wake
        self._work: queue.SimpleQueue[int] = queue.SimpleQueue()
        # In order of digest: each directory is opened once or twice.
        for position in sorted(range(len(digests)), key=lambda one: digests[one]):
            self._work.put(position)
        self._lock = threading.Lock()
        self._bytes = 0
        self._right = 0
        self._exceptions: list[messages.BadBlob] = []
        self._defects: list[BaseException] = []
        self._stopped = False
        self._running = 0

    def frames(self) -> Generator[bytes, None, None]:
        """Yields empty frames until all is hashed, then the one answer."""
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
        yield messages.VERDICTS.frame(count, self._right, self._bytes, exceptions)

    def _run(self) -> None:
        opener = BlobOpener(self._workspace)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while not self._stopped:
                position = self._work.get_nowait()
                if self._new is not None:
                    self._judge(opener, position, self._new, buffer)
                elif self._b3sum is not None:
                    self._judge_several(opener, position, self._b3sum, buffer)
        except (queue.Empty, _Stopped):
            pass
        except BaseException as defect:  # noqa: BLE001 - raised again by `frames`
            self._defects.append(defect)
        finally:
            opener.close()
            with self._lock:
                self._running -= 1
            os.write(self._wake, b"\0")

    def _judge(self, opener: BlobOpener, position: int, new: NewHasher, buffer: memoryview) -> None:
        size, found, verdict, text = 0, _NOTHING, messages.WRONG, ""
        try:
            fd, _ = opener.open(self._digests[position])
            try:
                size, found = self._hash(fd, new, buffer)
            except OSError as problem:
                raise blob_error(problem) from None
            finally:
                os.close(fd)
        except BlobError as said:
            verdict, text = said.verdict, said.text
        self._count(messages.BadBlob(position, verdict, size, found, text))

    def _judge_several(
        self, opener: BlobOpener, position: int, b3sum: B3sum, buffer: memoryview
    ) -> None:
        """Judges this blob, and the next few with it. Raises Refusal where b3sum fails, which says
        nothing about any blob.
        """
        blobs: dict[str, _Open] = {}
        total = 0
        try:
            while True:
                try:
                    fd, size = opener.open(self._digests[position])
                except BlobError as said:
                    one = messages.BadBlob(position, said.verdict, 0, _NOTHING, said.text)
                    self._count(one)
                else:
                    forget(fd)
                    blobs[by_descriptor(fd)] = _Open(position, fd, size)
                    total += size
                if len(blobs) == _FILES or total >= _BYTES:
                    break
                try:
                    position = self._work.get_nowait()
                except queue.Empty:
                    break
            if blobs:
                self._hash_by_program(b3sum, blobs, total, buffer)
        except OSError as problem:
            raise Refusal("internal", error_line(problem)) from None
        finally:
            for blob in blobs.values():
                forget(blob.fd)
                os.close(blob.fd)

    def _hash_by_program(
        self, b3sum: B3sum, blobs: dict[str, _Open], total: int, buffer: memoryview
    ) -> None:
        expected = {name: self._digests[blob.position] for name, blob in blobs.items()}
        fds = [blob.fd for blob in blobs.values()]
        found = b3sum.digests(expected, total, self._require_going, fds=fds)
        for name, blob in blobs.items():
            digest, verdict, text = found.get(name, _NOTHING), messages.WRONG, ""
            if name not in found:
                said = self._why_unreadable(blob.fd, buffer)
                verdict, text = said.verdict, said.text
            self._count(messages.BadBlob(blob.position, verdict, blob.size, digest, text))

    def _why_unreadable(self, fd: int, buffer: memoryview) -> BlobError:
        """Returns the system's error for a blob that b3sum could not read. Raises OSError where
        this process can read it.
        """
        try:
            while os.readv(fd, [buffer]):
                self._require_going()
        except OSError as problem:
            return blob_error(problem)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "b3sum reads no blob")

    def _require_going(self) -> None:
        if self._stopped:
            raise _Stopped

    def _count(self, said: messages.BadBlob) -> None:
        """Counts one blob; it is an exception unless its content has its name."""
        with self._lock:
            self._bytes += said.size
            if said.found == self._digests[said.position]:
                self._right += 1
            else:
                self._exceptions.append(said)

    def _hash(self, fd: int, new: NewHasher, buffer: memoryview) -> tuple[int, bytes]:
        """Returns (length, digest) of a whole file; a digest of zeros after a stop."""
        forget(fd)
        hasher = new(b"")
        size = 0
        while not self._stopped:
            count = os.readv(fd, [buffer])
            if not count:
                forget(fd)
                return size, hasher.digest()
            hasher.update(buffer[:count])
            size += count
        return size, _NOTHING
