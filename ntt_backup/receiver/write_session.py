"""Taking in one batch after the other: frames become files in the session's stage.

Small blobs come many in a frame and are written by `stow`, a large one comes in pieces. Content
that does not fit its checksum never gets as far as a name.

When storing fails, the batch is answered at once, and what still comes of it is dropped: a client
on a slow link hears of a full disk before it has sent the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ntt_backup.receiver.large_blob import LargeBlob, Offers, Sums
from ntt_backup.receiver.name_check import Naming
from ntt_backup.receiver.partial import open_partial
from ntt_backup.receiver.staged_batch import StagedBatch
from ntt_backup.receiver.staging import CREATE, Stowage
from ntt_backup.receiver.workspace import Ground
from ntt_backup.wire import write_messages
from ntt_backup.wire.framing import DIGEST_BYTES, MAX_CHUNK, MAX_RAW, ProtocolError
from ntt_backup.wire.write_messages import (
    BLAKE3,
    COMPLETE,
    MISMATCH,
    RAW,
    RESUMABLE,
    SHA256,
    WITHDREW,
)

if TYPE_CHECKING:
    from ntt_backup.receiver.codec import Decompress
    from ntt_backup.receiver.hashing import NewHasher

# Each holds two descriptors until its batch is settled, and there may be eight such batches.
_MOST_PARTIALS = 32


class Intake:
    """The batch that is being received, and the large blob within it.

    hash: of the session. Names are checked by BLAKE3 whatever that is: with a hasher of it as
    content comes, or else by naming once the batch is whole. naming is None where that is not
    needed, or cannot be. alive is called now and then while something takes long. on_failure takes
    the batch that storing failed for.
    """

    def __init__(
        self,
        ground: Ground,
        hash: int,
        hashes: dict[int, NewHasher],
        naming: Naming | None,
        codecs: dict[int, Decompress],
        by_file: bool,
        alive: Callable[[], None],
        on_failure: Callable[[StagedBatch, OSError], None],
    ) -> None:
        self._ground = ground
        self._by_blob = hash != SHA256
        self._new_hasher = hashes[hash]
        self._new_name = hashes.get(BLAKE3)
        self._naming = naming
        self._codecs = codecs
        self._by_file = by_file
        self._stowage = Stowage(ground, self._new_name, by_file)
        self._offers = Offers(ground, self._begin_sums, alive)
        self._on_failure = on_failure
        self._counter = 0
        self._last_number = -1
        self._batch: StagedBatch | None = None
        self._large: LargeBlob | None = None
        # The number of a batch that was answered already, while the rest of it comes in.
        self._dropping: int | None = None
        self._dropping_large = False

    @property
    def between_batches(self) -> bool:
        return self._batch is None and self._dropping is None

    def begin(self, payload: memoryview) -> None:
        """BATCH."""
        announced = write_messages.read_batch(payload)
        if not self.between_batches:
            raise ProtocolError("a BATCH within a batch")
        if announced.number <= self._last_number:
            raise ProtocolError(f"batch {announced.number} after batch {self._last_number}")
        self._last_number = announced.number
        self._batch = StagedBatch(announced.number, announced.blobs, announced.bytes, self._counter)

    def pack(self, payload: memoryview) -> None:
        """PACK: small blobs, many at once."""
        batch = self._open_batch("a PACK")
        if batch is None:
            return
        codec, raw_length, rest = write_messages.read_part(payload, MAX_RAW)
        checksum = b""
        if not self._by_blob:
            checksum = bytes(rest[:DIGEST_BYTES])
            rest = rest[DIGEST_BYTES:]
        raw = self._raw(codec, raw_length, rest)
        if not self._by_blob and self._new_hasher(raw).digest() != checksum:
            self.fail(OSError(errno.EBADMSG, "a pack does not have its checksum"))
            return
        digests, sizes, begin = write_messages.read_table(raw)
        self._check_room(batch, len(sizes), len(raw) - begin)
        first = batch.blobs
        batch.add(digests, len(raw) - begin)
        self._counter = batch.first + batch.blobs
        try:
            self._stowage.put(batch, first, raw, digests, sizes, begin)
        except OSError as problem:
            self.fail(problem)

    def large(self, payload: memoryview) -> None:
        """LARGE: one blob follows in pieces."""
        announced = write_messages.read_large(payload)
        batch = self._open_batch("a LARGE")
        if batch is None:
            self._dropping_large = True
            return
        self._check_room(batch, 1, announced.size)
        partial, sums = self._offers.take(announced)
        room = batch.partials < _MOST_PARTIALS
        if partial is None and announced.size > RESUMABLE and room:
            partial = open_partial(self._ground, announced.digest)
        batch.add(announced.digest, announced.size)
        self._counter = batch.first + batch.blobs
        name = batch.lay(batch.blobs - 1)
        try:
            if partial is not None:
                batch.add_partial(partial)
                partial.cut(announced.offset)
                fd = partial.fd
            else:
                fd = os.open(name, CREATE, 0o644, dir_fd=self._ground.stage)
        except OSError as problem:
            self._dropping_large = True
            self.fail(problem)
        else:
            self._large = LargeBlob(announced, fd, partial, sums)

    def data(self, payload: memoryview) -> None:
        """DATA: the next piece."""
        if self._dropping_large:
            return
        large = self._large
        if large is None:
            raise ProtocolError("a DATA outside a large blob")
        raw = self._raw(*write_messages.read_part(payload, MAX_CHUNK))
        try:
            large.write(raw)
        except OSError as problem:
            self.fail(problem)

    def end(self, payload: memoryview) -> None:
        """END: the large blob is there, or was withdrawn."""
        status, checksum = write_messages.read_end(payload)
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
                self.fail(problem)

    def commit(self, payload: memoryview) -> StagedBatch | None:
        """COMMIT: the batch as it is now staged; None where it was answered already."""
        number = write_messages.read_number(payload)
        self._require_end(number)
        if self._batch is not None and self._naming is not None:
            # While it is still the one being received: a sync that fails meanwhile fails it too.
            try:
                self._naming.check(self._batch)
            except OSError as problem:
                self.fail(problem)
        return self._finish()

    def abort(self, payload: memoryview) -> int | None:
        """ABORT: its number, when it is still to be answered. It may come within a large blob."""
        number = write_messages.read_number(payload)
        if self._large is not None:
            self._large.interrupt()
        self._large, self._dropping_large = None, False
        self._require_end(number)
        batch = self._finish()
        if batch is None:
            return None
        batch.discard(self._ground.stage, keep_partials=True)
        return number

    def offer(self, payload: memoryview) -> tuple[int, bytes]:
        """ASK_OFFSET: from where a large blob can go on, and the hash of what is there."""
        digest, size = write_messages.read_ask_offset(payload)
        if self._large is not None or self._dropping_large:
            raise ProtocolError("an ASK_OFFSET within a large blob")
        if self._dropping is not None:
            size = 0  # A disk that has just failed offers nothing.
        return self._offers.make(digest, size)

    def fail(self, problem: OSError) -> None:
        """The batch that is being received, if any, is answered now; the rest of it is dropped."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._dropping = batch.number
        if self._large is not None:
            self._dropping_large = True
            self._large.close()
            self._large = None
        self._on_failure(batch, problem)

    def close(self) -> None:
        """The connection has ended: drop what is not committed, keep what can be resumed."""
        if self._large is not None:
            self._large.interrupt()
            self._large = None
        if self._batch is not None:
            self._batch.discard(self._ground.stage, keep_partials=True)
            self._batch = None
        self._offers.withdraw()

    def _begin_sums(self, digest: bytes) -> Sums:
        """The hashes of a large blob. BLAKE3 gives its name; SHA-256 covers the name as well."""
        if self._by_blob:
            return Sums(self._new_hasher(b""), None)
        return Sums(self._new_hasher(digest), self._new_name and self._new_name(b""))

    def _open_batch(self, what: str) -> StagedBatch | None:
        if self._large is not None or self._dropping_large:
            raise ProtocolError(f"{what} within a large blob")
        if self.between_batches:
            raise ProtocolError(f"{what} outside a batch")
        return self._batch

    def _require_end(self, number: int) -> None:
        if self._large is not None or self._dropping_large:
            raise ProtocolError("the end of a batch within a large blob")
        current = self._batch.number if self._batch is not None else self._dropping
        if number != current:
            raise ProtocolError(f"the end of batch {number} within batch {current}")

    def _finish(self) -> StagedBatch | None:
        self._dropping = None
        batch, self._batch = self._batch, None
        return batch

    def _check_room(self, batch: StagedBatch, blobs: int, size: int) -> None:
        if batch.blobs + blobs > batch.most_blobs or batch.bytes + size > batch.most_bytes:
            raise ProtocolError("more in a batch than it announced")

    def _raw(self, codec: int, raw_length: int, part: memoryview) -> memoryview:
        if codec == RAW:
            if len(part) != raw_length:
                raise ProtocolError(f"{len(part)} bytes where {raw_length} were announced")
            return part
        decompress = self._codecs.get(codec)
        if decompress is None:
            raise ProtocolError(f"codec {codec} was not offered")
        return memoryview(decompress(part, raw_length))

    def _leave_out(self, batch: StagedBatch, large: LargeBlob, verdict: int) -> None:
        position = batch.blobs - 1
        batch.except_for(position, verdict, "")
        large.close()
        self._large = None
        with contextlib.suppress(OSError):
            batch.drop(position, self._ground.stage, batch.name(position))
