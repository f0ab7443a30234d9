"""The `stream` strategy: verified blobs back to back over one connection, durable when answered.

tar needs every blob's length before it starts, a process a batch, and trusts what arrives. Here a
receiver of ours runs on the remote (its source travels with the connection), so the link carries
content and little else, the far side checks what it writes, gives names only to what is on disk,
and answers with a verdict for every blob. What is read is checked against its name in the very
memory it is sent from; a source blob that no longer matches never leaves under that name.

Batches follow each other without waiting for answers, within the worker's window; while one is
made durable there, the next is already on its way. Large blobs go in pieces, in constant memory;
one of over 64 MiB goes on where its last durable byte was, if the link dropped under it.

The protocol is docs/protocol.md, the far side `ntt_backup.receiver`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ntt_backup.client import handshake
from ntt_backup.client.bootstrap import bundle
from ntt_backup.client.error_text import explain_batch, explain_gone
from ntt_backup.errors import BackupError, BatchRejected, SourceError
from ntt_backup.model import Batch, Blob, Failure, Reason, Receipt
from ntt_backup.source.inspection import Store
from ntt_backup.source.reader import Reader, TooLarge
from ntt_backup.upload.strategies import compression
from ntt_backup.upload.strategies.in_flight import Flight, PipelinedSession
from ntt_backup.upload.strategies.large_blob_hashes import Content
from ntt_backup.upload.strategies.packs import Packer
from ntt_backup.upload.strategies.session import Rejection, SessionPlan
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import Inbox

_CHUNK: Final = framing.MAX_CHUNK
_NAMELESS: Final = "the remote said no more about it"


@dataclass(slots=True)
class _Flight(Flight):
    """sent: the blobs in the order they went out, by which the receipt counts. failed: those that
    were not sent, or withdrawn. answered: there was a receipt while it was still being sent.
    """

    sent: list[Blob] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    wire_bytes: int = 0
    begun: bool = False
    answered: bool = False


def open_stream(plan: SessionPlan) -> StreamSession:
    """A session that is ready to take batches. Raises as `strategies.Session` does."""
    return StreamSession(plan).begin()


class StreamSession(PipelinedSession[_Flight]):
    """See `strategies.Session`. Made, it is connected and the far side has greeted;
    batches go after `begin`, or, for a look that places nothing, after `hello`.
    """

    LAST_WORD = framing.frame(framing.LEFT)

    def __init__(self, plan: SessionPlan) -> None:
        command, program = bundle()
        super().__init__(plan, command)
        self._inbox = Inbox(write_messages.TO_CLIENT)
        self._ready: dict[str, write_messages.Field] | None = None
        self._offset: tuple[int, bytes] | None = None
        self._chunk = memoryview(bytearray(_CHUNK))
        try:
            self.banner = handshake.greet(self._channel, program, plan.transport.connect_timeout)
            self._codec = compression.choose(plan.run.codec, self.banner.codecs)
            self._sums = self.banner.hash == "sha256"
            self._packer = Packer(self._codec, checksum=self._sums)
        except BaseException:
            self.abort()
            raise

    def begin(self) -> StreamSession:
        """Have the far side open its root, where by-hash must be."""
        try:
            if not self.hello().get("placed"):
                raise explain_gone(f"{self._plan.root}/by-hash: no such directory")
        except BaseException:
            self.abort()
            raise
        return self

    def put(self, batch: Batch) -> None:
        flight = self._fly(batch)
        try:
            self._put_blobs(flight, self._plan.store)
        except SourceError:
            self._call_back(flight)
            raise
        if not flight.begun and self._packer.empty:
            self._flights.remove(flight)
            self._settle(flight)
            return
        self._flush(flight)
        if flight.answered:
            self._call_back(flight)
        else:
            self._send(write_messages.numbered(framing.COMMIT, flight.number))
            flight.handed_over = time.monotonic()

    def close(self) -> None:
        if self._usable and self._ready is not None:
            try:
                self._send(framing.frame(framing.BYE))
            except BackupError:
                return
        super().close()

    def try_out(self, store: Store, batches: Sequence[Batch], alive: Callable[[], None]) -> None:
        """Send batches from a store, and call them back; returns when the far side has dropped
        them. alive is called while that is waited for, and may raise.
        """
        for batch in batches:
            flight = self._fly(batch)
            self._put_blobs(flight, store)
            self._flush(flight)
            self._call_back(flight)
        while self._flights:
            alive()
            self._hear(1.0)
        for outcome in self._outcomes:
            if isinstance(outcome, Rejection):
                raise outcome.error

    def hello(self) -> dict[str, write_messages.Field]:
        """Have the far side open its root, with or without by-hash; what it says about itself."""
        plan = self._plan
        return self._await_ready(handshake.hello(plan, self.banner, sync=plan.sync))

    def place(self) -> None:
        """Have it make by-hash."""
        self._await_ready(framing.frame(framing.PLACE))

    # --- what goes out ----------------------------------------------------------------------------

    def _fly(self, batch: Batch) -> _Flight:
        self._number += 1
        flight = _Flight(self._number, batch, time.monotonic())
        self._flights.append(flight)
        return flight

    def _put_blobs(self, flight: _Flight, store: Store) -> None:
        with Reader(store) as reader:
            for blob in flight.batch.blobs:
                self._put_blob(reader, flight, blob)
                if flight.answered:
                    break
            reader.require_life(flight.failed, nothing_sent=not flight.sent)

    def _put_blob(self, reader: Reader, flight: _Flight, blob: Blob) -> None:
        outcome = reader.read(blob, self._packer.space)
        if isinstance(outcome, Failure):
            flight.failed.append(outcome)
        elif isinstance(outcome, TooLarge):
            self._put_large(reader, flight, outcome.blob)
        else:
            self._packer.add(blob.blobid, outcome)
            flight.sent.append(blob if blob.size == outcome else Blob(blob.blobid, outcome))
            if self._packer.full:
                self._flush(flight)

    def _flush(self, flight: _Flight) -> None:
        self._begin(flight)
        if not self._packer.empty:
            content = self._packer.used
            self._write(flight, *self._packer.take(), content=content)

    def _begin(self, flight: _Flight) -> None:
        if not flight.begun:
            flight.begun = True
            blobs = flight.batch.blobs
            known = all(blob.size is not None for blob in blobs)
            most = flight.batch.size if known else framing.MAX_BLOB
            self._write(flight, write_messages.batch(flight.number, len(blobs), most))

    def _write(self, flight: _Flight, *parts: bytes | memoryview, content: int = 0) -> None:
        self._carry(flight, content, sum(map(len, parts)))
        for part in parts:
            if flight.answered:
                return  # It failed there: the rest of it need not travel.
            self._send(part)
            flight.wire_bytes += len(part)

    def _put_large(self, reader: Reader, flight: _Flight, blob: Blob) -> None:
        """A blob in pieces, hashed as it goes; withdrawn at its end if it is not what it should
        be.
        """
        self._flush(flight)
        size = blob.size or 0
        digest = bytes.fromhex(blob.blobid)
        content = Content(blob.blobid, summed=self._sums)
        try:
            with reader.opened(blob) as fd:
                offset = self._resume(flight, fd, blob, content)
                self._write(flight, write_messages.large(digest, size, offset), content=offset)
                flight.sent.append(blob)
                left = size - offset
                while left and not flight.answered:
                    count = os.readv(fd, (self._chunk[: min(left, _CHUNK)],))
                    if not count:
                        break
                    left -= count
                    piece = self._chunk[:count]
                    content.add(piece)
                    number, parts = self._codec.encode([piece])
                    prefix = write_messages.part_prefix(number, count)
                    length = len(prefix) + sum(map(len, parts))
                    head = framing.head(framing.DATA, length) + prefix
                    self._write(flight, head, *parts, content=count)
        except OSError as error:
            self._withdraw(flight, blob, reader.failure(blob, error))
            return
        if flight.answered:
            return
        if (problem := content.problem(left)) is not None:
            self._withdraw(flight, blob, Failure(blob.blobid, Reason.CORRUPT_SOURCE, problem))
        else:
            self._write(flight, write_messages.end(write_messages.COMPLETE, content.checksum))

    def _withdraw(self, flight: _Flight, blob: Blob, failure: Failure) -> None:
        flight.failed.append(failure)
        if flight.sent and flight.sent[-1] is blob:
            flight.withdrawn.add(blob.blobid)
            self._write(flight, write_messages.end(write_messages.WITHDRAWN))

    def _resume(self, flight: _Flight, fd: int, blob: Blob, content: Content) -> int:
        """Where to go on with a blob that may have been sent in part before: content has taken in
        all before it. 0 for the beginning.
        """
        size = blob.size or 0
        if size <= write_messages.RESUMABLE:
            return 0
        self._begin(flight)
        self._offset = None
        self._write(flight, write_messages.ask_offset(bytes.fromhex(blob.blobid), size))
        limit = self._plan.run.receipt_timeout
        self._await(lambda: self._offset is not None or flight.answered, limit)
        if self._offset is None and not flight.answered:
            raise self._overdue(flight)
        offset, theirs = self._offset or (0, b"")
        if not 0 < offset <= size:
            return 0
        left = offset
        while left and (count := os.readv(fd, (self._chunk[: min(left, _CHUNK)],))):
            content.add(self._chunk[:count])
            left -= count
        if not left and content.so_far() == theirs:
            return offset
        content.restart()
        os.lseek(fd, 0, os.SEEK_SET)
        return 0

    def _call_back(self, flight: _Flight) -> None:
        """Nothing of this batch shall be stored; it is not in flight any more. The far side is told
        also where it has failed: it drops what comes until then.
        """
        self._packer.clear()
        self._reckon(flight, 0)
        if flight.begun:
            flight.aborted = not flight.answered
            self._send(write_messages.numbered(framing.ABORT, flight.number))
        else:
            self._flights.remove(flight)

    # --- what comes back --------------------------------------------------------------------------

    def _await_ready(self, frame: bytes) -> dict[str, write_messages.Field]:
        self._ready = None
        self._send(frame)
        # What a dead session has left there may take a while to remove.
        self._await(lambda: self._ready is not None, self._plan.transport.connect_timeout)
        if self._ready is None:
            raise self._nonsense("no READY")
        return self._ready

    def _take(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                space = self._inbox.space()
                count = min(len(space), len(rest))
                space[:count] = rest[:count]
                self._inbox.filled(count)
                rest = rest[count:]
                while (frame := self._inbox.next()) is not None:
                    self._answer(*frame)
        except framing.ProtocolError as error:
            raise self._nonsense(str(error)) from error

    def _answer(self, kind: int, payload: memoryview) -> None:
        if kind == framing.RECEIPT:
            self._receipt(write_messages.read_receipt(payload))
        elif kind == framing.ABORTED:
            number = write_messages.read_number(payload)
            flight = self._flight(number)
            if not flight.aborted:
                raise self._nonsense(f"ABORTED {number}")
            self._flights.remove(flight)
        elif kind == framing.OFFSET:
            self._offset = write_messages.read_offset(payload)
        elif kind == framing.READY and self._ready is None:
            self._ready = write_messages.read_fields(payload)
        elif kind == framing.ERROR:
            raise self._broken(handshake.refusal(*write_messages.read_error(payload)))
        elif kind not in (framing.PONG, framing.BUSY):
            raise self._nonsense(f"a frame of type {kind} out of order")

    def _flight(self, number: int) -> _Flight:
        for flight in self._flights:
            if flight.number == number:
                return flight
        raise self._nonsense(f"an answer for batch {number}")

    def _receipt(self, said: write_messages.Receipt) -> None:
        flight = self._flight(said.number)
        settled = said.outcome == write_messages.SETTLED
        if settled and not flight.aborted and not self._fits(flight, said):
            raise self._nonsense(f"a receipt that does not fit batch {said.number}")
        self._flights.remove(flight)
        flight.answered = True
        if flight.aborted:
            return
        if settled:
            self._settle(flight, said)
        else:
            text = said.exceptions[0].text if said.exceptions else ""
            self._conclude(flight, Rejection(flight.batch, explain_batch(text or _NAMELESS)))

    def _fits(self, flight: _Flight, said: write_messages.Receipt) -> bool:
        """Whether this may be the receipt of that batch: in turn, of the agreed hash, for as many
        blobs as were sent.
        """
        positions = {exception.position for exception in said.exceptions}
        return (
            flight is self._flights[0]
            and flight.handed_over > 0
            and said.hash == write_messages.HASHES[self.banner.hash]
            and len(positions) == len(said.exceptions)
            and said.stored + len(positions) == len(flight.sent)
            and all(position < len(flight.sent) for position in positions)
        )

    def _settle(self, flight: _Flight, said: write_messages.Receipt | None = None) -> None:
        """What a receipt means for each blob; without one nothing was sent."""
        not_stored = set(flight.withdrawn)
        for position, verdict, text in said.exceptions if said is not None else ():
            blob = flight.sent[position]
            if verdict == write_messages.MISMATCH:
                error = BatchRejected(
                    "a blob was altered on its way",
                    detail=f"{blob.blobid}: {text}",
                    hint="if this happens again: bad memory at one end",
                )
                self._conclude(flight, Rejection(flight.batch, error))
                return
            if verdict == write_messages.REFUSED:
                flight.failed.append(
                    Failure(blob.blobid, Reason.REMOTE_REJECTED, text or _NAMELESS)
                )
                not_stored.add(blob.blobid)
            elif verdict == write_messages.WITHDREW and blob.blobid not in flight.withdrawn:
                raise self._nonsense(f"{blob.blobid} was not withdrawn")
        stored = tuple(blob for blob in flight.sent if blob.blobid not in not_stored)
        duration = time.monotonic() - flight.started
        failed = tuple(flight.failed)
        self._conclude(flight, Receipt(flight.batch, stored, failed, flight.wire_bytes, duration))
