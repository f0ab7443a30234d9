"""The `objects` strategy sends batches as packs into a bucket, each blob checked on its way.

A batch is one pack; its large blobs are objects of their own. Each blob is hashed while it is read,
and nothing becomes visible before all of its object is right: one bad blob, and the upload is
dropped and made anew without it. The receipt is the bucket's checksum of the whole object, compared
with ours.

A key follows from the blobs alone. So a batch that is sent again finds what was stored of it,
whether its answer was lost or its sender died. A sealed pack has another key each time; there large
blobs are packs, too, since no key may tell a blobid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.client.connection import SessionSpec
from ntt_backup.config.sealing import require_sealing, seal_writer
from ntt_backup.errors import BatchRejected, RemoteUnreachable, SourceError
from ntt_backup.model import Batch, Blob, Failure, Reason, Receipt, StoredPack, total_size
from ntt_backup.objects import store_format
from ntt_backup.objects.bucket import Bucket, Buffer
from ntt_backup.objects.keys import LARGE_BLOB, PackKey, blob_key
from ntt_backup.objects.outbox import Meter, Outbox, Outgoing
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.pack.format import ID_BYTES, pack_id, unsigned
from ntt_backup.pack.writer import PackWriter
from ntt_backup.process.memory import give_back_large_blocks, memory_needed, new_buffer
from ntt_backup.source.reader import BadSourceBlob, Reader, TooLarge
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.content_report import ContentReport
from ntt_backup.upload.strategies.session import Outcome, Rejection

# What fits a processor's cache is copied and hashed there.
_PIECE: Final = 1024**2
_TURN_SECONDS: Final = 0.2
# To read a small blob takes as long as to read so many bytes of a large one, from a slow disk.
_A_BLOB: Final = 1 << 16


@memory_needed()
def open_objects(spec: SessionSpec, store: Store) -> ObjectsSession:
    """Opens a session."""
    assert spec.bucket is not None
    give_back_large_blocks()  # Of the lists and tables that a pack takes.
    meter = Meter(spec.pace)
    require_sealing(spec.recipients)
    bucket = open_bucket(spec.bucket, meter)
    if (store_id := store_format.read(bucket)) is None:
        raise store_format.gone(spec.bucket.url)
    part_size = spec.bucket.part_size
    return ObjectsSession(spec, store, bucket, meter, store_id=store_id, part_size=part_size)


@dataclass(slots=True)
class _Flight:
    """A batch that was put. look: something of it may be in the bucket already. packed and large:
    the objects on their way, and which blobs are in them; whole: when there were no more to come,
    0 before. put: bytes of content that were handed over.
    """

    batch: Batch
    started: float
    look: bool
    failed: list[Failure] = field(default_factory=list)
    packed: list[tuple[Outgoing, PackKey, list[Blob]]] = field(default_factory=list)
    large: list[tuple[Outgoing, Blob]] = field(default_factory=list)
    put: int = 0
    whole: float = 0.0

    @property
    def objects(self) -> list[Outgoing]:
        return [*(one[0] for one in self.packed), *(one[0] for one in self.large)]

    @property
    def answered(self) -> bool:
        """Returns whether each of its objects has an outcome."""
        return self.whole > 0 and all(out.settled for out in self.objects)


class ObjectsSession:
    """See `session.Session`. The meter counts what the bucket is sent."""

    lingers = False

    def __init__(
        self,
        spec: SessionSpec,
        store: Store,
        bucket: Bucket,
        meter: Meter,
        *,
        store_id: bytes,
        part_size: int,
    ) -> None:
        self._spec = spec
        self._store = store
        self._store_id = store_id
        self._meter = meter
        self._outbox = Outbox(bucket, part_size, self._hear)
        self._content = ContentReport(self._outbox, spec.on_content)
        self._flights: list[_Flight] = []
        self._outcomes: list[Outcome] = []
        self._usable = True
        # Keys under which the bucket has something else.
        self._taken: set[str] = set()
        # A run before this one may have died after its last requests, and before their record.
        self._looks = spec.run.window
        self._buffer = memoryview(new_buffer(_PIECE + 1))
        self._reported = 0
        self._unheard = 0
        self._heard = (0, 0)
        self._heard_at = time.monotonic()

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        return tuple(flight.batch for flight in self._flights)

    @memory_needed()
    def put(self, batch: Batch) -> None:
        look = batch.attempt > 1 or self._looks > 0
        self._looks -= 1
        flight = _Flight(batch, time.monotonic(), look)
        self._flights.append(flight)
        try:
            with Reader(self._store) as reader:
                self._put_blobs(flight, reader)
                reader.require_life(flight.failed, nothing_sent=not flight.objects)
        except SourceError:
            # What was finished of it stays, and is found when it is sent again.
            self._flights.remove(flight)
            self._settle_content(flight, 0)
            raise
        except BaseException:
            self.abort()
            raise
        flight.whole = time.monotonic()

    def collect(self, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        while self._usable and self._flights:
            self._take_answers()
            left = deadline - time.monotonic()
            if self._outcomes or left <= 0:
                break
            self._outbox.wait(min(left, _TURN_SECONDS))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._usable:
            return
        self._take_answers()
        self._usable = False
        self._outbox.abort()
        for flight in self._flights:
            self._settle_content(flight, 0)

    # --- what is sent -----------------------------------------------------------------------------

    def _put_blobs(self, flight: _Flight, reader: Reader) -> None:
        small: dict[str, Blob] = {}
        for blob in flight.batch.blobs:
            if blob.expected < LARGE_BLOB:
                small[blob.blobid] = blob
            else:
                self._put_apart(flight, reader, blob)
        for odd in [one for one in small if not is_blobid(one)]:
            flight.failed.append(Failure(odd, Reason.BAD_BLOBID, "not 64 lowercase hex digits"))
            del small[odd]
        blobs = sorted(small.values(), key=lambda blob: blob.blobid)
        small.clear()  # Thousands of names, while a pack is made.
        while blobs and (apart := self._put_pack(flight, reader, blobs)):
            for one in apart:
                self._put_apart(flight, reader, one)
            gone = {one.blobid for one in apart}
            blobs = [blob for blob in blobs if blob.blobid not in gone]

    def _put_apart(self, flight: _Flight, reader: Reader, one: Blob | Failure) -> None:
        """Sends a large blob as an object of its own, or as a pack where it is sealed, or where
        something else has its key; notes one that is bad.
        """
        examined = one if isinstance(one, Failure) else reader.examine(one, verify=False)
        if isinstance(examined, Failure):
            flight.failed.append(examined)
        elif self._spec.recipients or blob_key(one.blobid) in self._taken:
            for again in self._put_pack(flight, reader, [examined[0]]):
                self._put_apart(flight, reader, again)
        elif (failure := self._put_large(flight, reader, examined[0])) is not None:
            flight.failed.append(failure)

    def _put_pack(
        self, flight: _Flight, reader: Reader, blobs: Sequence[Blob]
    ) -> list[Failure | Blob]:
        """Sends a pack of the blobs; where some of them do not belong into it, because they are bad
        or found to be large, it sends nothing and returns these.
        """
        low, high = _digest(blobs[0]), _digest(blobs[-1])
        name = PackKey.of(low, high, pack_id(self._store_id, map(_digest, blobs)))
        while name.key in self._taken:
            other = pack_id(self._store_id, [bytes.fromhex(name.pack_id)])
            name = PackKey.of(low, high, other)

        def write(data: Buffer) -> None:
            self._outbox.write(out, data)

        sealed = bool(self._spec.recipients)
        if sealed:
            name = PackKey.of_sealed(low, high, os.urandom(ID_BYTES))
        # What is sealed takes a little more.
        size = total_size(blobs) * 1001 // 1000
        out = self._outbox.begin(name.key, size, look=flight.look and not sealed)
        sent: list[Blob] = []
        bad: list[Failure | Blob] = []
        with self._dropped_unless_finished(out):
            compress, within = self._spec.run.codec != "none", bytes.fromhex(name.pack_id)
            seal = seal_writer(write, self._spec.recipients) if sealed else None
            last, sign = (write, unsigned) if seal is None else (seal.write, self._spec.sign)
            writer = PackWriter(last, self._store_id, within, compress=compress, sign=sign)
            for blob in blobs:
                found = reader.read(blob, self._buffer)
                if isinstance(found, int):
                    if not bad:
                        writer.add(_digest(blob), self._buffer[:found])
                    self._carry(flight, 0 if bad else found)
                elif isinstance(found, TooLarge):
                    if blob.expected < LARGE_BLOB <= found.blob.expected:
                        bad.append(found.blob)
                        continue
                    found = self._pass_on(flight, reader, found.blob, None if bad else writer)
                if isinstance(found, Failure):
                    # The rest is only read, to know all that are bad.
                    bad.append(found)
                    self._carry(flight, 0)
                else:
                    sent.append(blob if blob.size == found else Blob(blob.blobid, found))
            if not bad:
                writer.close()
                if seal is not None:
                    seal.close()
                self._outbox.finish(out)
                flight.packed.append((out, name, sent))
        if bad:
            done = [blob for _, blob in flight.large]
            done += [blob for _, _, some in flight.packed for blob in some]
            self._carry(flight, total_size(done) - flight.put)
        return bad

    def _pass_on(
        self, flight: _Flight, reader: Reader, blob: Blob, writer: PackWriter | None
    ) -> int | Failure:
        """Reads a blob in pieces, into the pack where there is one; returns its size."""
        size = blob.size or 0
        if writer is not None:
            writer.begin(_digest(blob), size)
        try:
            for piece in reader.pieces(blob, lambda: self._buffer[:_PIECE]):
                if writer is not None:
                    writer.more(piece)
                self._carry(flight, 0 if writer is None else len(piece))
                self._hear()
        except BadSourceBlob as error:
            return error.failure
        return size

    def _put_large(self, flight: _Flight, reader: Reader, blob: Blob) -> Failure | None:
        """Sends a blob as an object of its own; one that is bad is returned, and not sent."""
        out = self._outbox.begin(blob_key(blob.blobid), blob.size or 0, look=flight.look)
        carried = 0
        with self._dropped_unless_finished(out):
            try:
                for piece in reader.pieces(blob, lambda: self._outbox.space(out)[:_PIECE]):
                    self._outbox.filled(out, len(piece))
                    self._carry(flight, len(piece))
                    carried += len(piece)
            except BadSourceBlob as error:
                self._carry(flight, -carried)
                return error.failure
            self._outbox.finish(out)
            flight.large.append((out, blob))
        return None

    @contextmanager
    def _dropped_unless_finished(self, out: Outgoing) -> Iterator[None]:
        try:
            yield
        finally:
            if out.done is None and self._usable:
                self._outbox.drop(out)

    # --- what comes back --------------------------------------------------------------------------

    def _take_answers(self) -> None:
        for flight in [one for one in self._flights if one.answered]:
            self._flights.remove(flight)
            self._outcomes.append(self._outcome(flight))

    def _outcome(self, flight: _Flight) -> Outcome:
        packs: list[StoredPack] = []
        if taken := [out.key for out in flight.objects if out.info is None]:
            self._taken.update(taken)
            self._settle_content(flight, 0)
            return Rejection(
                flight.batch,
                BatchRejected(
                    "the bucket has something else under the same name",
                    detail=taken[0],
                    hint="it is sent under another name; `verify --download` looks at that one",
                ),
            )
        stored = [blob for _, blob in flight.large]
        for out, name, blobs in flight.packed:
            info = out.info
            assert info is not None
            stored += blobs
            low, high = blobs[0].blobid, blobs[-1].blobid
            count, size = len(blobs), info.size
            packs.append(StoredPack(name.pack_id, out.key, low, high, count, size, info.checksum))
        now = time.monotonic()
        receipt = Receipt(
            flight.batch,
            tuple(stored),
            tuple(flight.failed),
            sum(out.size for out in flight.objects),
            now - flight.started,
            tuple(packs),
            now - flight.whole,
        )
        self._settle_content(flight, receipt.stored_bytes)
        return receipt

    def _hear(self) -> None:
        """Tells how much was sent; ends the session where the bucket is in trouble or silent."""
        sent = self._meter.sent
        self._content.hear(sent)
        self._spec.on_bytes(sent - self._reported)
        self._reported = sent
        if (trouble := self._outbox.trouble) is not None:
            self.abort()
            raise trouble
        now, heard = time.monotonic(), (sent, self._outbox.answers)
        run, all_sent = self._spec.run, sent >= self._outbox.handed_over
        limit = run.receipt_timeout if all_sent else run.stall_timeout
        if heard != self._heard or not self._outbox.waiting:
            self._heard, self._heard_at = heard, now
        elif now - max(self._heard_at, self._meter.throttled) > limit:
            self.abort()
            raise RemoteUnreachable("the object store does not answer", detail=f"for {limit:.0f} s")

    # --- what is reported of content --------------------------------------------------------------

    def _carry(self, flight: _Flight, count: int) -> None:
        """Counts content that was handed over for a batch."""
        flight.put += count
        self._content.put(count)
        self._unheard += count + _A_BLOB
        if self._unheard >= _PIECE:
            self._unheard = 0
            self._hear()

    def _settle_content(self, flight: _Flight, stored: int) -> None:
        """Reports that so many bytes were stored of what was handed over for this batch."""
        self._content.settle(flight.put, stored)
        flight.put = 0


def _digest(blob: Blob) -> bytes:
    return bytes.fromhex(blob.blobid)
