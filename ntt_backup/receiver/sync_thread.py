"""Making things durable while the next batch comes in: one thread that does nothing but sync.

A sync takes from a millisecond to seconds; waiting for it in the loop that receives would leave the
link idle. Only the system call itself runs here, without the interpreter's lock, so it takes
nothing from that loop either.

With syncfs there is one descriptor, open from the session's start. Linux (5.8 and later) reports a
write-back error once to each open file description: one that was opened later could miss an error,
this one cannot. Without syncfs, files are synced by whoever writes them, and directories here.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection

from ntt_backup.blobdir.open import BlobDirectory
from ntt_backup.blobdir.syscalls import syncfs
from ntt_backup.receiver.workspace import Workspace


class Barrier:
    """One sync at a time. wake is a descriptor that gets a byte when a sync has ended."""

    def __init__(self, ground: Workspace, by_file: bool, wake: int) -> None:
        self._ground = ground
        self.by_file = by_file
        self._wake = wake
        # Its own description: errors that others have seen are still new to it.
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=ground.root)
        self._jobs: queue.SimpleQueue[Collection[str] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self.busy = False
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    def start(self, directories: Collection[str]) -> None:
        """Begin a sync of all that was done until now. directories: which of `by-hash` have new
        names; needed where syncs are by file.
        """
        self.busy = True
        self._jobs.put(directories)

    def result(self) -> tuple[bool, OSError | None]:
        """(whether the sync has ended, what went wrong with it)."""
        try:
            problem = self._results.get_nowait()
        except queue.Empty:
            return False, None
        self.busy = False
        return True, problem

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        os.close(self._fd)

    def _work(self) -> None:
        while True:
            directories = self._jobs.get()
            if directories is None:
                return
            problem: OSError | None = None
            try:
                self._sync(directories)
            except OSError as found:
                problem = found
            except BaseException as found:  # noqa: BLE001 - a sync without an end would be a hang
                problem = OSError(0, repr(found))
            self._results.put(problem)
            os.write(self._wake, b"\0")

    def _sync(self, directories: Collection[str]) -> None:
        if not self.by_file:
            syncfs(self._fd)
            return
        blobs = BlobDirectory(self._ground.by_hash, self._ground.device)
        try:
            for path in sorted(directories, reverse=True):
                os.fsync(blobs.directory(path))
        finally:
            blobs.close()
        os.fsync(self._ground.by_hash)
        os.fsync(self._ground.root)  # by-hash itself may be new.
