"""A group commit turns committed batches into receipts, with one sync for many of them.

A batch is written, synced, published (named), synced and answered. A sync covers all that was done
before it began. So one sync serves every batch at once: those that are written are published when
it ends, those that are published get their receipts. In steady state that is one sync a batch, and
the next batches are received meanwhile. A failed sync does not say whose pages were lost, so it
fails every batch without a receipt.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Collection

from ntt_backup.blobdir.open import BlobDirectory
from ntt_backup.blobdir.publish import Publisher
from ntt_backup.blobdir.staged_batch import StagedBatch
from ntt_backup.blobdir.syscalls import error_line, sync_directory, syncfs
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire.framing import MAX_BLOBS
from ntt_backup.wire.write_messages import (
    FAILED,
    MAX_UNSETTLED,
    REFUSED,
    SETTLED,
    Exceptional,
    Receipt,
)


class GroupCommit:
    """The batches between their COMMIT and their RECEIPT.

    hash: what was checked, for the receipts. answer: takes a receipt. on_failure: is called when a
    sync has failed, because the batch that is being received is affected too.
    """

    def __init__(
        self,
        sync: SyncThread,
        publisher: Publisher,
        stage: int,
        hash: int,
        answer: Callable[[Receipt], None],
        on_failure: Callable[[OSError], None],
    ) -> None:
        self._sync = sync
        self._publisher = publisher
        self._stage = stage
        self._hash = hash
        self._answer = answer
        self._on_failure = on_failure
        self._written: list[StagedBatch] = []
        self._published: list[StagedBatch] = []
        self._covered_written = 0
        self._covered_published = 0
        self._directories: set[str] = set()

    @property
    def waiting(self) -> int:
        """The number of batches without a receipt."""
        return len(self._written) + len(self._published)

    @property
    def full(self) -> bool:
        """Whether as many batches or blobs wait as may: then nothing more may be received."""
        batches = self._written + self._published
        return len(batches) >= MAX_UNSETTLED or sum(each.blobs for each in batches) >= MAX_BLOBS

    def add(self, batch: StagedBatch) -> None:
        """Takes a batch that is committed, and whole and right in the stage."""
        self._written.append(batch)

    def advance(self) -> None:
        """Handles the end of a sync, and starts the next one where there is something to sync."""
        ended, problem = self._sync.result() if self._sync.busy else (False, None)
        if ended and problem is not None:
            self._fail_all(problem)
        elif ended:
            for batch in self._published[: self._covered_published]:
                stored = batch.blobs - len(batch.exceptions)
                self._answer(Receipt(batch.number, SETTLED, self._hash, stored, batch.exceptions))
            del self._published[: self._covered_published]
            self._publish(self._covered_written)
        if self._sync.busy or not self.waiting:
            return
        if self._sync.by_file:
            self._publish(len(self._written))  # Each file was synced before it was closed.
            if not self._published:
                return
        self._covered_written = len(self._written)
        self._covered_published = len(self._published)
        self._sync.start(self._directories)
        self._directories = set()

    def fail(self, batch: StagedBatch, problem: OSError) -> None:
        """Removes all of a batch from the stage, and answers that nothing of it counts, and why."""
        batch.discard(self._stage, keep_partials=False)
        why = Exceptional(0, REFUSED, error_line(problem))
        self._answer(Receipt(batch.number, FAILED, self._hash, 0, [why]))

    def _publish(self, count: int) -> None:
        batches = self._written[:count]
        del self._written[:count]
        for batch in batches:
            try:
                self._directories |= self._publisher.publish_batch(batch, self._stage)
            except OSError as problem:
                self.fail(batch, problem)
            else:
                self._published.append(batch)

    def _fail_all(self, problem: OSError) -> None:
        failed = self._published + self._written
        self._published, self._written, self._directories = [], [], set()
        for batch in failed:
            self.fail(batch, problem)
        self._on_failure(problem)


class SyncThread:
    """One sync at a time, in a thread that makes no other system call, so that the link stays busy.

    With syncfs, one descriptor is open from the session's start. Linux (5.8 and later) reports a
    write-back error once to each open file description: one that was opened later could miss it.
    by_file: without syncfs, files are synced by who writes them, and directories here. wake: a
    descriptor that gets a byte when a sync has ended.
    """

    def __init__(self, workspace: Workspace, by_file: bool, wake: int) -> None:
        self._workspace = workspace
        self.by_file = by_file
        self._wake = wake
        # A description of its own: errors that were reported to others are still new to it.
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=workspace.root)
        self._jobs: queue.SimpleQueue[Collection[str] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self.busy = False
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    def start(self, directories: Collection[str]) -> None:
        """Starts a sync of all that was done until now. directories: those below `by-hash` with new
        names; needed where syncs are by file.
        """
        self.busy = True
        self._jobs.put(directories)

    def result(self) -> tuple[bool, OSError | None]:
        """Returns (whether the sync has ended, its error)."""
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
            except BaseException as found:  # noqa: BLE001 - without a result the session would hang
                problem = OSError(0, repr(found))
            self._results.put(problem)
            os.write(self._wake, b"\0")

    def _sync(self, directories: Collection[str]) -> None:
        if not self.by_file:
            syncfs(self._fd)
            return
        blobs = BlobDirectory(self._workspace.by_hash, self._workspace.device)
        try:
            for path in sorted(directories, reverse=True):
                sync_directory(blobs.directory(path))
        finally:
            blobs.close()
        sync_directory(self._workspace.by_hash)
        sync_directory(self._workspace.root)  # by-hash itself may be new.
