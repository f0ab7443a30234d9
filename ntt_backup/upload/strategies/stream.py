"""The `stream` strategy sends verified blobs over one connection, durable when answered.

A receiver of ours runs on the remote (`ntt_backup.receiver`; its source travels with the
connection). It checks what it writes, gives names only to what is on disk, and answers with a
verdict for every blob; docs/protocol.md has the messages. A local blob is checked against its name
in the very memory it is sent from; one that no longer matches is never sent under that name.

Batches follow each other without waiting for answers, within the worker's window; while one is made
durable, the next is already on its way. Large blobs go in pieces, in constant memory; one of over
64 MiB is resumed after its last durable byte, if the link dropped under it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, islice
from typing import Final

from ntt_backup.client.receiver_connection import ReceiverConnection
from ntt_backup.client.remote_errors import explain_batch
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BatchRejected, SourceError
from ntt_backup.model import Batch, Blob, Failure, Reason
from ntt_backup.name_hash import NEW_HASHER
from ntt_backup.source.reader import BadSourceBlob, PieceHashes, Reader
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.codec import MOST_PACK_BYTES, Codec, choose_codec
from ntt_backup.upload.strategies.in_flight import Flight, PipelinedSession
from ntt_backup.upload.strategies.probe import Ahead, require_time
from ntt_backup.upload.strategies.session import Rejection
from ntt_backup.wire import framing, messages
from ntt_backup.wire.framing import PACK_BYTES, ProtocolError
from ntt_backup.wire.messages import PACK

# Only a link within this machine, or to a neighbour, brings an answer back within this time.
_NEAR_SECONDS: Final = 0.002
# How many blobs are read without a sign of life: each takes seconds where the disk is very slow.
_SIGN_BLOBS: Final = 16
_NO_WORDS: Final = "the remote said no more about it"
# Of empty blobs. Keeps the table small beside MAX_BLOBS.
_MOST_BLOBS: Final = 8192


def connect(spec: SessionSpec) -> ReceiverConnection:
    """Returns a connection to a receiver that takes batches.

    Raises Unsupported where the remote lacks the codec that is set.
    """
    connection = ReceiverConnection(spec, messages.to_client(messages.WRITING))
    with connection.checked():
        choose_codec(spec.run.codec, connection.banner.codecs)
    return connection


def open_stream(spec: SessionSpec, store: Store, ahead: Ahead | None = None) -> StreamSession:
    """Opens a session. ahead: a connection of `connect`."""
    connection = ahead if isinstance(ahead, ReceiverConnection) else connect(spec)
    connection.open()
    session = StreamSession(connection, store)
    session.detect_near_remote()
    return session


class Packer:
    """A pack that is being filled: small blobs share one frame, compressed where that pays.

    A frame, a write and a checksum for every blob of a few hundred bytes would cost more than the
    blob. So contents are read one behind the other into one buffer that is never reallocated;
    before them, on the wire, goes a table of digests and sizes. See docs/protocol.md, PACK.

    Args:
        codec: Compresses the pack.
        checksum: Whether packs carry a SHA-256, for a remote that cannot check the names.

    Attributes:
        used: The bytes of content in the pack.
    """

    def __init__(self, codec: Codec, *, checksum: bool) -> None:
        self._codec = codec
        self._checksum = checksum
        # A blob that fits a pack fits behind a pack that is all but full, with a byte to spare that
        # shows that it has ended.
        self._buffer = memoryview(bytearray(MOST_PACK_BYTES + PACK_BYTES + 1))
        self._blobids: list[str] = []
        self._sizes: list[int] = []
        self._full = 0
        self.used = 0

    @property
    def space(self) -> memoryview:
        """Returns the space for the next blob; a blob that fills it is too large for a pack."""
        return self._buffer[self.used : self.used + PACK_BYTES + 1]

    @property
    def empty(self) -> bool:
        return not self._sizes

    def add(self, blobid: str, size: int) -> bool:
        """Adds the blob that was just read into `space`. Returns whether the pack is full."""
        if not self._sizes:
            self._full = self._codec.pack_bytes  # Asked for each blob, it would take longer.
        self._blobids.append(blobid)
        self._sizes.append(size)
        self.used += size
        return self.used >= self._full or len(self._sizes) >= _MOST_BLOBS

    def pop_frame(self) -> list[bytes | memoryview]:
        """Empties the pack; returns its frame in pieces that hold until the next blob is read."""
        digests = bytes.fromhex("".join(self._blobids))
        table = memoryview(messages.table([digests], self._sizes))
        content = self._buffer[: self.used]
        checksum = b""
        if self._checksum:
            summed = sha256(table)
            summed.update(content)
            checksum = summed.digest()
        raw_length = len(table) + len(content)
        number, parts = self._codec.encode([table, content])
        prefix = messages.part_prefix(number, raw_length, checksum)
        length = len(prefix) + sum(map(len, parts))
        self.clear()
        return [framing.head(PACK, length) + prefix, *parts]

    def clear(self) -> None:
        self._blobids.clear()
        self._sizes.clear()
        self.used = 0


class StreamSession(PipelinedSession):
    """See `session.Session`. The connection is one of `connect`, and has said hello."""

    def __init__(self, connection: ReceiverConnection, store: Store) -> None:
        spec, banner = connection.spec, connection.banner
        super().__init__(spec, connection.channel)
        self._connection = connection
        self._store = store
        # Of a blob that is named by SHA-256 the name suffices.
        self._sums = connection.hash == "sha256" and store.hash != "sha256"
        self._codec = choose_codec(spec.run.codec, banner.codecs, spec.effort)
        self._packer = Packer(self._codec, checksum=self._sums)
        self._offset: tuple[int, bytes] | None = None
        self._chunk = memoryview(bytearray(framing.MAX_CHUNK))

    def detect_near_remote(self) -> None:
        """Sends a PING, and tells the codec if the remote answers it at once.

        Does nothing where the codec is fixed, or `run.bwlimit` makes the link slow.
        """
        effort = self._codec.effort
        if effort is not None and self._spec.run.bwlimit is None:
            self._hear(0.0)  # What has come before is no answer.
            heard = self.channel.heard
            self._send(messages.PING.frame(bytes(8)))
            self._hear(_NEAR_SECONDS)
            if self.channel.heard > heard:
                effort.set_near()

    def put(self, batch: Batch) -> None:
        flight = self._begin_flight(batch)
        try:
            self._put_blobs(flight)
        except SourceError:
            self._call_back(flight)
            raise
        if not flight.begun and self._packer.empty:
            self._flights.remove(flight)
            self._confirm(flight, ())
            return
        self._flush(flight)
        if flight.answered:
            self._call_back(flight)
        else:
            self._send(messages.COMMIT.frame(flight.number))
            flight.handed_over = time.monotonic()

    def close(self) -> None:
        if self._usable:
            self._usable = False
            self._connection.close()

    def begin_trial(self, batches: Sequence[Batch]) -> None:
        """Sends batches, and calls them back."""
        for batch in batches:
            flight = self._begin_flight(batch)
            self._put_blobs(flight)
            self._flush(flight)
            self._call_back(flight)

    def end_trial(self) -> None:
        """Returns when the remote has dropped the trial's batches. Raises as `Session` does."""
        began = time.monotonic()
        while self._flights:
            require_time(began)
            self._hear(1.0)
        for outcome in self._outcomes:
            if isinstance(outcome, Rejection):
                raise outcome.error

    # --- what is sent -----------------------------------------------------------------------------

    def _begin_flight(self, batch: Batch) -> Flight:
        flight = Flight(next(self._connection.numbers), batch, time.monotonic())
        self._flights.append(flight)
        return flight

    def _put_blobs(self, flight: Flight) -> None:
        with Reader(self._store) as reader:
            packer, sent = self._packer, flight.sent
            for blob in flight.batch.blobs:
                outcome = reader.read(blob, packer.space)
                looks = True
                if isinstance(outcome, int):
                    sent.append(blob if blob.size == outcome else Blob(blob.blobid, outcome))
                    if looks := packer.add(blob.blobid, outcome):
                        self._flush(flight)
                    if not len(sent) % _SIGN_BLOBS:
                        self._spec.on_bytes(0)
                elif isinstance(outcome, Failure):
                    flight.failed.append(outcome)
                    self._spec.on_bytes(0)
                else:
                    self._put_large(reader, flight, outcome.blob)
                if flight.answered:
                    break
                # Asked for each small blob, it would take longer.
                if looks and self._spec.stopping():
                    flight.cut()
                    break
            reader.require_life(flight.failed, nothing_sent=not sent)

    def _flush(self, flight: Flight) -> None:
        self._begin_batch(flight)
        # What was compressed must be sent: what comes next may refer to it.
        if not self._packer.empty and not flight.answered:
            content = self._packer.used
            self._write_coded(flight, *self._packer.pop_frame(), content=content)

    def _begin_batch(self, flight: Flight) -> None:
        if not flight.begun:
            flight.begun = True
            blobs = flight.batch.blobs
            known = all(blob.size is not None for blob in blobs)
            most = flight.batch.size if known else framing.MAX_BLOB
            self._write(flight, messages.BATCH.frame(flight.number, len(blobs), most))

    def _write(self, flight: Flight, *parts: bytes | memoryview, content: int = 0) -> None:
        """Sends a frame, and all of it, whatever is heard of the batch meanwhile."""
        if flight.answered:
            return  # It failed on the remote: the rest of it need not travel.
        self._announce_content(flight, content, sum(map(len, parts)))
        for part in parts:
            self._send(part)
            flight.wire_bytes += len(part)

    def _write_coded(self, flight: Flight, *parts: bytes | memoryview, content: int) -> None:
        """Sends a frame of the codec, and tells the codec how long that took."""
        began = time.monotonic()
        self._write(flight, *parts, content=content)
        self._codec.sent(time.monotonic() - began)

    def _put_large(self, reader: Reader, flight: Flight, blob: Blob) -> None:
        """Sends a blob in pieces, hashed meanwhile; withdraws one that does not match its name."""
        self._flush(flight)
        digest = bytes.fromhex(blob.blobid)
        hashes = PieceHashes(blob.blobid, NEW_HASHER[self._store.hash], summed=self._sums)
        try:
            offset = self._resume(reader, flight, blob, hashes)
            pieces = reader.pieces(blob, lambda: self._chunk, hashes, begin=offset)
            # A blob that cannot be opened is not begun.
            first = list(islice(pieces, 1))
            head = messages.LARGE.frame(digest, blob.size or 0, offset)
            self._write(flight, head, content=offset)
            flight.sent.append(blob)
            if flight.answered:
                return
            for piece in chain(first, pieces):
                number, parts = self._codec.encode([piece])
                prefix = messages.part_prefix(number, len(piece))
                length = len(prefix) + sum(map(len, parts))
                head = framing.head(messages.DATA, length) + prefix
                self._write_coded(flight, head, *parts, content=len(piece))
                if flight.answered:
                    return
        except BadSourceBlob as error:
            self._withdraw(flight, blob, error.failure)
        else:
            self._write(flight, messages.END.frame(messages.COMPLETE, hashes.checksum))

    def _withdraw(self, flight: Flight, blob: Blob, failure: Failure) -> None:
        flight.failed.append(failure)
        if flight.sent and flight.sent[-1] is blob:
            flight.withdrawn.add(blob.blobid)
            self._write(flight, messages.END.frame(messages.WITHDRAWN))

    def _resume(self, reader: Reader, flight: Flight, blob: Blob, hashes: PieceHashes) -> int:
        """Returns the offset from which to send a blob that may have been sent in part before.

        Adds all before the offset to the hashes. Raises BadSourceBlob.
        """
        size = blob.size or 0
        if size <= messages.RESUMABLE:
            return 0
        self._begin_batch(flight)
        self._offset = None
        self._write(flight, messages.ASK_OFFSET.frame(bytes.fromhex(blob.blobid), size))
        self._await(lambda: self._offset is not None or flight.answered, flight, size)
        offset, remote_hash = self._offset or (0, b"")
        if not 0 < offset <= size:
            return 0
        for _ in reader.pieces(blob, lambda: self._chunk, hashes, end=offset):
            self._spec.on_bytes(0)
            # A disk may read for longer than the remote waits for a client that says nothing.
            if self.channel.quiet:
                self._send(messages.PING.frame(bytes(8)))
        if hashes.so_far() == remote_hash:
            return offset
        hashes.restart()
        return 0

    def _call_back(self, flight: Flight) -> None:
        """Withdraws a batch: nothing of it is stored, and it is not in flight any more.

        The remote needs that word even where the batch has failed: it drops everything before it.
        """
        self._packer.clear()
        self._correct_content(flight, 0)
        if flight.begun:
            flight.aborted = not flight.answered
            self._send(messages.ABORT.frame(flight.number))
            flight.handed_over = time.monotonic()
        else:
            self._flights.remove(flight)

    # --- what comes back --------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        with self._connection.checked():
            for kind, payload in self._connection.frames(data):
                self._answer(kind, payload)

    def _answer(self, kind: int, payload: memoryview) -> None:
        if kind == messages.RECEIPT:
            self._receipt(messages.RECEIPT.read(payload))
        elif kind == messages.ABORTED:
            flight = self._flight(messages.ABORTED.read(payload))
            if not flight.aborted:
                raise ProtocolError(f"ABORTED {flight.number}")
            self._flights.remove(flight)
        elif kind == messages.OFFSET:
            self._offset = messages.OFFSET.read(payload)
        else:
            raise ProtocolError(f"a frame of type {kind} out of order")

    def _flight(self, number: int) -> Flight:
        for flight in self._flights:
            if flight.number == number:
                return flight
        raise ProtocolError(f"an answer for batch {number}")

    def _receipt(self, said: messages.Receipt) -> None:
        flight = self._flight(said.number)
        settled = said.outcome == messages.SETTLED
        if settled and not flight.aborted and not self._fits(flight, said):
            raise ProtocolError(f"a receipt that does not fit batch {said.number}")
        self._flights.remove(flight)
        flight.answered = True
        if not settled or any(one.verdict == messages.MISMATCH for one in said.exceptions):
            self._codec.restart()  # What follows may refer to what was altered on its way.
        if flight.aborted:
            return
        if settled:
            self._settle(flight, said.exceptions)
        else:
            text = said.exceptions[0].text if said.exceptions else ""
            self._reject(flight, explain_batch(text or _NO_WORDS))

    def _fits(self, flight: Flight, said: messages.Receipt) -> bool:
        """Returns whether this may be the receipt of that batch.

        Such a receipt is in turn, of the agreed hash, and for as many blobs as were sent.
        """
        positions = {exception.position for exception in said.exceptions}
        return (
            flight is self._flights[0]
            and flight.handed_over > 0
            and said.hash == messages.HASHES[self._connection.hash]
            and len(positions) == len(said.exceptions)
            and said.stored + len(positions) == len(flight.sent)
            and all(position < len(flight.sent) for position in positions)
        )

    def _settle(self, flight: Flight, exceptions: Sequence[messages.Exceptional]) -> None:
        """Makes the receipt of a batch whose blobs are stored, with exceptions."""
        not_stored = set(flight.withdrawn)
        for position, verdict, text in exceptions:
            blob = flight.sent[position]
            if verdict == messages.MISMATCH:
                error = BatchRejected(
                    "a blob was altered on its way",
                    detail=f"{blob.blobid}: {text}",
                    hint="if this happens again: bad memory at one end",
                )
                self._reject(flight, error)
                return
            if verdict == messages.REFUSED:
                why = text or _NO_WORDS
                flight.failed.append(Failure(blob.blobid, Reason.REMOTE_REJECTED, why))
                not_stored.add(blob.blobid)
            elif verdict == messages.WITHDREW and blob.blobid not in flight.withdrawn:
                raise ProtocolError(f"{blob.blobid} was not withdrawn")
        stored = flight.sent
        if not_stored:
            stored = [blob for blob in stored if blob.blobid not in not_stored]
        self._confirm(flight, stored)
