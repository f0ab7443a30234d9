"""A session that writes turns frames into files in its stage, batch after batch.

Small blobs come many in a frame, a large one comes in pieces. Content that does not have its
checksum is never published. When storing fails, the batch is answered at once, and what still comes
of it is dropped: a client on a slow link hears of a full disk before it has sent the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ntt_backup.receiver.codec import unpacked
from ntt_backup.receiver.group_commit import GroupCommit, SyncThread
from ntt_backup.receiver.large_blob import LargeBlob, ResumeOffers, open_partial
from ntt_backup.receiver.staged_batch import CREATE, BatchPublisher, StagedBatch, StageWriter
from ntt_backup.receiver.workspace import Refusal, gone
from ntt_backup.receiver.write_workspace import WriteWorkspace
from ntt_backup.wire import messages
from ntt_backup.wire.framing import DIGEST_BYTES, ProtocolError
from ntt_backup.wire.messages import (
    BLAKE3,
    COMPLETE,
    MISMATCH,
    RESUMABLE,
    SETTLED,
    SHA256,
    WITHDREW,
    Receipt,
)

if TYPE_CHECKING:
    from ntt_backup.receiver.connection import Connection
    from ntt_backup.receiver.large_blob import Sums
    from ntt_backup.receiver.terms import Terms

# Each holds two descriptors until its batch is answered, and there may be eight such batches.
_MOST_PARTIALS = 32


class WriteSession:
    """The batch that is being received, the large blob within it, and the group commit behind it.

    hash: of the session. Names are checked by their own hash whatever that is: with a hasher as
    content comes, else, of BLAKE3, by the program b3sum once the batch is committed, as far as this
    machine has either. by_file: sync each file, because no syncfs does. names: the hash of names.
    """

    def __init__(
        self,
        workspace: WriteWorkspace,
        terms: Terms,
        connection: Connection,
        hash: int,
        by_file: bool,
        names: int = BLAKE3,
    ) -> None:
        self._workspace = workspace
        self._connection = connection
        self._codecs = terms.codecs
        self._by_file = by_file
        self._by_blob = hash == names
        self._names = names
        self._names_fit = False
        self._new_hasher = terms.hashes[hash]
        self._new_name = terms.hashes.get(names)
        self._b3sum = terms.b3sum if names == BLAKE3 else None
        self._writer = StageWriter(workspace.stage, workspace.by_hash, self._new_name, by_file)
        self._offers = ResumeOffers(workspace, self._begin_sums, self._alive)
        checked = terms.checked_with != "none" or names == SHA256
        may_replace = checked or "replace" in terms.allow
        self._sync = SyncThread(workspace, by_file, connection.wake)
        places = BatchPublisher(workspace.by_hash, workspace.device, may_replace, by_file)
        self._commits = GroupCommit(self._sync, places, workspace.stage, hash)
        self._counter = 0
        self._last_number = -1
        self._batch: StagedBatch | None = None
        self._large: LargeBlob | None = None
        # The number of a batch that was answered already, while the rest of it comes in.
        self._dropping: int | None = None
        self._dropping_large = False

    def handlers(self) -> dict[int, Callable[[memoryview], None]]:
        return {
            messages.BATCH: self._begin,
            messages.PACK: self._pack,
            messages.LARGE: self._begin_large,
            messages.DATA: self._data,
            messages.END: self._end,
            messages.COMMIT: self._commit,
            messages.ABORT: self._abort,
            messages.ASK_OFFSET: self._ask_offset,
        }

    @property
    def between_batches(self) -> bool:
        return self._batch is None and self._dropping is None

    @property
    def busy(self) -> bool:
        """Whether so much waits for its receipt that no frame may be taken."""
        return self._commits.full

    @property
    def working(self) -> bool:
        """Whether the client waits for receipts."""
        return self._commits.waiting > 0

    def advance(self) -> bool:
        receipts, failed_sync = self._commits.finish_sync()
        for receipt in receipts:
            self._answer(receipt)
        if failed_sync is not None:
            self._fail(failed_sync)
        # Publishing may take long, so it begins when the receipts are sent.
        for receipt in self._commits.start_sync():
            self._answer(receipt)
        return False

    def interrupt(self) -> None:
        """Drops what is not committed, and keeps what can be resumed."""
        if self._large is not None:
            self._large.interrupt()
            self._large = None
        if self._batch is not None:
            self._batch.discard(self._workspace.stage, keep_partials=True)
            self._batch = None
        self._offers.withdraw()

    def close(self) -> None:
        self._sync.stop()

    # --- the frames

    def _begin(self, payload: memoryview) -> None:
        announced = messages.BATCH.read(payload)
        if not self.between_batches:
            raise ProtocolError("a BATCH within a batch")
        if announced.number <= self._last_number:
            raise ProtocolError(f"batch {announced.number} after batch {self._last_number}")
        self._last_number = announced.number
        self._batch = StagedBatch(announced.number, announced.blobs, announced.bytes, self._counter)

    def _pack(self, payload: memoryview) -> None:
        batch = self._open_batch("a PACK")
        codec, raw_length, rest = messages.PACK.read(payload)
        checksum = b""
        if not self._by_blob:
            checksum = bytes(rest[:DIGEST_BYTES])
            rest = rest[DIGEST_BYTES:]
        # Also what is dropped: what comes next may refer to it.
        raw = unpacked(self._codecs, codec, raw_length, rest)
        if batch is None:
            return
        if not self._by_blob and self._new_hasher(raw).digest() != checksum:
            self._fail(OSError(errno.EBADMSG, "a pack does not have its checksum"))
            return
        digests, sizes, begin = messages.read_table(raw)
        first = batch.blobs
        self._add(batch, digests, len(raw) - begin)
        try:
            self._writer.put(batch, first, raw, digests, sizes, begin)
        except OSError as problem:
            self._fail(problem)

    def _begin_large(self, payload: memoryview) -> None:
        announced = messages.LARGE.read(payload)
        batch = self._open_batch("a LARGE")
        if batch is None:
            self._dropping_large = True
            return
        self._add(batch, announced.digest, announced.size)
        partial, sums = self._offers.take(announced)
        room = batch.partials < _MOST_PARTIALS
        if partial is None and announced.size > RESUMABLE and room:
            partial = open_partial(self._workspace.incoming, announced.digest.hex())
        name = batch.lay(batch.blobs - 1)
        try:
            if partial is not None:
                batch.add_partial(partial)
                partial.cut(announced.offset)
                fd = partial.fd
            else:
                fd = os.open(name, CREATE, 0o644, dir_fd=self._workspace.stage)
        except OSError as problem:
            self._dropping_large = True
            self._fail(problem)
        else:
            self._large = LargeBlob(announced, fd, partial, sums)

    def _data(self, payload: memoryview) -> None:
        large = self._large
        if large is None and not self._dropping_large:
            raise ProtocolError("a DATA outside a large blob")
        raw = unpacked(self._codecs, *messages.DATA.read(payload))
        if large is None:
            return
        try:
            large.write(raw)
        except OSError as problem:
            self._fail(problem)

    def _end(self, payload: memoryview) -> None:
        status, checksum = messages.END.read(payload)
        if bool(checksum) != (status == COMPLETE and not self._by_blob):
            raise ProtocolError("an END with a checksum too many or too few")
        if self._dropping_large:
            self._dropping_large = False
            return
        large, batch = self._large, self._batch
        if large is None or batch is None:
            raise ProtocolError("an END outside a large blob")
        if status != COMPLETE:
            self._leave_out(batch, large, WITHDREW)
        elif not large.is_right(large.digest if self._by_blob else checksum):
            self._leave_out(batch, large, MISMATCH)
        else:
            self._large = None
            try:
                large.seal(self._by_file)
            except OSError as problem:
                self._fail(problem)

    def _commit(self, payload: memoryview) -> None:
        if not self._workspace.placed:
            raise gone()
        self._require_end(messages.COMMIT.read(payload))
        self._require_names()
        if self._batch is not None and self._b3sum is not None:
            from ntt_backup.receiver.name_check import check_names

            # While it is still the one being received: a sync that fails meanwhile fails it too.
            try:
                check_names(self._b3sum, self._batch, self._workspace.stage, self._alive)
            except OSError as problem:
                self._fail(problem)
        batch, self._batch, self._dropping = self._batch, None, None
        if batch is not None:
            self._commits.add(batch)

    def _abort(self, payload: memoryview) -> None:
        """Drops the batch; ABORT may come within a large blob, which is kept as at a lost link."""
        number = messages.ABORT.read(payload)
        if self._large is not None:
            self._large.interrupt()
        self._large, self._dropping_large = None, False
        self._require_end(number)
        batch, self._batch, self._dropping = self._batch, None, None
        if batch is not None:
            batch.discard(self._workspace.stage, keep_partials=True)
            self._connection.say(messages.ABORTED.frame(number))

    def _ask_offset(self, payload: memoryview) -> None:
        digest, size = messages.ASK_OFFSET.read(payload)
        self._require_no_large("an ASK_OFFSET")
        if self._dropping is not None:
            size = 0  # A disk that has just failed offers nothing.
        self._connection.say(messages.OFFSET.frame(*self._offers.make(digest, size)))

    def _require_names(self) -> None:
        """Raises Refusal where the marker says another hash of names than the client."""
        if not self._names_fit:
            said = self._workspace.hash_of_names or "blake3"
            if messages.HASHES[said] != self._names:
                raise Refusal("refused", f"the names of blobs on this target are {said}")
            self._names_fit = True

    # --- what they share

    def _fail(self, problem: OSError) -> None:
        """Answers the batch that is being received, if any, and drops the rest of it."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._dropping = batch.number
        if self._large is not None:
            self._dropping_large = True
            self._large.close()
            self._large = None
        self._answer(self._commits.fail_batch(batch, problem))

    def _answer(self, receipt: Receipt) -> None:
        if receipt.outcome == SETTLED and not self._workspace.in_place:
            raise gone()
        self._connection.say(messages.RECEIPT.frame(*receipt))

    def _alive(self) -> None:
        """Answers other batches, and shows the client life, while one frame takes long."""
        self.advance()
        self._connection.show_life()

    def _begin_sums(self, digest: bytes) -> Sums:
        """Begins the hashes of a large blob: that of the session first, then that of its name."""
        if self._by_blob:
            return [self._new_hasher(b"")]
        name = [self._new_name(b"")] if self._new_name else []
        return [self._new_hasher(digest), *name]

    def _open_batch(self, what: str) -> StagedBatch | None:
        """Returns the batch that a frame belongs to; None where the batch is being dropped."""
        self._require_no_large(what)
        if self.between_batches:
            raise ProtocolError(f"{what} outside a batch")
        return self._batch

    def _require_no_large(self, what: str) -> None:
        if self._large is not None or self._dropping_large:
            raise ProtocolError(f"{what} within a large blob")

    def _require_end(self, number: int) -> None:
        self._require_no_large("the end of a batch")
        current = self._batch.number if self._batch is not None else self._dropping
        if number != current:
            raise ProtocolError(f"the end of batch {number} within batch {current}")

    def _add(self, batch: StagedBatch, digests: bytes, size: int) -> None:
        batch.add(digests, size)
        if batch.blobs > batch.most_blobs or batch.bytes > batch.most_bytes:
            raise ProtocolError("more in a batch than it announced")
        self._counter = batch.first + batch.blobs

    def _leave_out(self, batch: StagedBatch, large: LargeBlob, verdict: int) -> None:
        position = batch.blobs - 1
        batch.except_for(position, verdict, "")
        large.close()
        self._large = None
        with contextlib.suppress(OSError):
            batch.drop(position, self._workspace.stage, batch.name(position))
