"""A group commit turns committed batches into receipts, with one sync for many of them.

A batch is written, synced, published (named), synced and answered. A sync covers all that was done
before it began. Each batch needs two syncs: after the first it is published, after the second it
gets its receipt. One sync is the first for some batches and the second for others. In steady state
that is one sync a batch, and the next batches are received meanwhile. A failed sync does not say
whose pages were lost, so it fails every batch without a receipt.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection

from ntt_backup.blobdir.descriptors import error_line, sync_directory, syncfs
from ntt_backup.blobdir.layout import BlobDirectory
from ntt_backup.receiver.staged_batch import BatchPublisher, StagedBatch
from ntt_backup.receiver.workspace import Workspace
from ntt_backup.wire.framing import MAX_BLOBS
from ntt_backup.wire.messages import FAILED, MAX_UNSETTLED, REFUSED, SETTLED, Exceptional, Receipt


class GroupCommit:
    """The batches between their COMMIT and their RECEIPT. The caller sends the receipts.

    hash: what was checked, for the receipts.
    """

    def __init__(self, sync: SyncThread, publisher: BatchPublisher, stage: int, hash: int) -> None:
        self._sync = sync
        self._publisher = publisher
        self._stage = stage
        self._hash = hash
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

    def finish_sync(self) -> tuple[list[Receipt], OSError | None]:
        """Handles the end of a sync. Does nothing while the sync runs.

        Returns:
            The receipts of the batches that are durable now, and None. Or, if the sync has failed,
            the receipts of all batches, which have failed, and the error: the batch that is being
            received has failed, too.
        """
        ended, problem = self._sync.result() if self._sync.busy else (False, None)
        if not ended:
            return [], None
        if problem is not None:
            failed = self._published + self._written
            self._published, self._written, self._directories = [], [], set()
            self._covered_written = 0
            return [self.fail_batch(batch, problem) for batch in failed], problem
        durable = self._published[: self._covered_published]
        del self._published[: self._covered_published]
        receipts = []
        for batch in durable:
            stored = batch.blobs - len(batch.exceptions)
            receipts.append(Receipt(batch.number, SETTLED, self._hash, stored, batch.exceptions))
        return receipts, None

    def start_sync(self) -> list[Receipt]:
        """Publishes the batches whose content is durable, and starts a sync if any batch waits.
        Does nothing while a sync runs.

        Returns:
            The receipts of the batches that cannot be published.
        """
        if self._sync.busy:
            return []
        # Where syncs are by file, each file was synced before it was closed.
        durable = len(self._written) if self._sync.by_file else self._covered_written
        receipts = self._publish(durable)
        self._covered_written = len(self._written)
        self._covered_published = len(self._published)
        if self.waiting:
            self._sync.start(self._directories)
            self._directories = set()
        return receipts

    def fail_batch(self, batch: StagedBatch, problem: OSError) -> Receipt:
        """Removes all of a batch from the stage. Returns the receipt that says why it failed."""
        batch.discard(self._stage, keep_partials=False)
        why = Exceptional(0, REFUSED, error_line(problem))
        return Receipt(batch.number, FAILED, self._hash, 0, [why])

    def _publish(self, count: int) -> list[Receipt]:
        """Publishes the first written batches. Returns the receipts of those that failed."""
        batches = self._written[:count]
        del self._written[:count]
        failed = []
        for batch in batches:
            try:
                self._directories |= self._publisher.publish_batch(batch, self._stage)
            except OSError as problem:
                failed.append(self.fail_batch(batch, problem))
            else:
                self._published.append(batch)
        return failed


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
