"""The strategy `packs` sends batches as packs to a file store, each blob checked on its way.

A batch is one pack; its large blobs are files of their own. Each blob is hashed while it is read,
and nothing becomes visible before all of its file is right: one bad blob, and the file is dropped
and made anew without it. The receipt is the target's checksum of the whole file, compared with
ours.

A name follows from the blobs alone. So a batch that is sent again finds what was stored of it,
whether its answer was lost or its sender died. Where packs are sealed, a pack has another name
each time, and a large blob is a pack, too: the name of a file must not reveal a blobid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, cast

from ntt_backup.blobdir.layout import is_blobid
from ntt_backup.client.remote_errors import other_names
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config.sealing import require_sealing, seal_writer
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    BatchRejected,
    NameTaken,
    RemoteUnreachable,
    SourceError,
)
from ntt_backup.filestore.contract import CommittedFile, PackTarget, Progress, StoredFile
from ntt_backup.filestore.open import open_pack_target
from ntt_backup.model import Batch, Blob, Failure, Reason, Receipt, StoredPack, total_size
from ntt_backup.pack.format import ID_BYTES, pack_id, unsigned
from ntt_backup.pack.names import LARGE_BLOB, PackKey, blob_key
from ntt_backup.pack.writer import PackWriter
from ntt_backup.packstore import marker
from ntt_backup.process.memory import give_back_large_blocks, memory_needed, new_buffer
from ntt_backup.source.reader import BadSourceBlob, Reader, TooLarge
from ntt_backup.source.store import Store
from ntt_backup.upload.strategies.probe import Ahead
from ntt_backup.upload.strategies.session import Outcome, Rejection
from ntt_backup.wire.framing import FORMAT

# What fits a processor's cache is copied and hashed there.
_PIECE: Final = 1024**2
_TURN_SECONDS: Final = 0.2
# To read a small blob takes as long as to read so many bytes of a large one, from a slow disk.
_A_BLOB: Final = 1 << 16


@memory_needed()
def open_packs(spec: SessionSpec, store: Store, ahead: Ahead | None = None) -> PacksSession:
    """Opens a session. ahead: the store of a probe of packs by a connection."""
    give_back_large_blocks()  # Of the lists and tables that a pack takes.
    require_sealing(spec.recipients)
    target = open_pack_target(spec) if ahead is None else cast("PackTarget", ahead)
    try:
        # What a probe has just found there is not asked for once more.
        identity = spec.identity if ahead is not None else ""
        identity = identity or _identity(spec, store, target)
    except BaseException:
        target.close()
        raise
    return PacksSession(spec, store, target, bytes.fromhex(identity))


def _identity(spec: SessionSpec, store: Store, target: PackTarget) -> str:
    """Returns the identity that the marker of a target says, and requires the expected one."""
    if (found := marker.find(target)) is None:
        raise marker.gone(f"{spec.bucket.url if spec.bucket else spec.root}/{FORMAT}")
    if spec.identity and found.identity != spec.identity:
        raise AnotherTarget(spec.identity, found.identity)
    if found.hash != store.hash:
        raise other_names(store.hash, found.hash)
    return found.identity


@dataclass(slots=True)
class _Put:
    """A file on its way, and the blobs in it. pack: None for a large blob."""

    file: CommittedFile
    blobs: list[Blob]
    pack: PackKey | None = None

    @property
    def stored(self) -> StoredFile | None:
        """The file as it is in the store; None where another content has its name."""
        try:
            return self.file.result()
        except NameTaken:
            return None

    @property
    def name(self) -> str:
        return self.pack.key if self.pack is not None else blob_key(self.blobs[0].blobid)


@dataclass(slots=True)
class _Flight:
    """A batch that was put.

    Attributes:
        look: Whether something of the batch may be in the store already.
        files: The files that are complete.
        put: The bytes of content that were handed over.
        whole: When there were no more files to come, in monotonic seconds; 0 before.
    """

    batch: Batch
    started: float
    look: bool
    failed: list[Failure] = field(default_factory=list)
    files: list[_Put] = field(default_factory=list)
    put: int = 0
    whole: float = 0.0

    @property
    def answered(self) -> bool:
        """Returns whether each of its files has an outcome."""
        return self.whole > 0 and all(one.file.settled for one in self.files)


class ContentReport:
    """Reports content of batches when it is sent, and not when it was put into a buffer.

    Two parts of an upload wait in buffers, of 32 MiB each: over a slow link they take minutes.
    on_content gets what is to be added to all that was reported before.
    """

    def __init__(self, on_content: Callable[[int], None]) -> None:
        self._on_content = on_content
        self._put_ever = 0
        # Of the batches in flight: all content, and how much of it was not reported yet.
        self._in_flight = 0
        self._waits = 0

    def put(self, count: int) -> None:
        """Counts content that was added. count: below 0 where it was taken back."""
        self._put_ever += count
        self._in_flight += count
        self._waits += count

    def hear(self, progress: Progress) -> None:
        """Reports content that has been sent."""
        # What is compressed has fewer bytes than content.
        waits = self._put_ever * progress.unsent // max(1, progress.added)
        self._report_but(min(self._waits, waits))

    def settle(self, put: int, stored: int) -> None:
        """Reports what was stored of a batch, in place of what was put for it."""
        self._in_flight -= put
        self._on_content(stored - put)
        self._report_but(self._waits)

    def _report_but(self, waits: int) -> None:
        waits = max(0, min(waits, self._in_flight))
        if count := self._waits - waits:
            self._waits = waits
            self._on_content(count)


class PacksSession:
    """See `session.Session`."""

    lingers = False

    def __init__(
        self, spec: SessionSpec, store: Store, target: PackTarget, store_id: bytes
    ) -> None:
        self._spec = spec
        self._store = store
        self._store_id = store_id
        self._target = target
        target.on_wait = self._hear
        self._content = ContentReport(spec.on_content)
        self._flights: list[_Flight] = []
        self._outcomes: list[Outcome] = []
        self._usable = True
        # Names under which the target has something else.
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
                reader.require_life(flight.failed, nothing_sent=not flight.files)
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
            self._wait(min(left, _TURN_SECONDS))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        if self._usable and not self._flights:
            self._usable = False
            self._target.close()
        self.abort()

    def abort(self) -> None:
        if not self._usable:
            return
        self._take_answers()
        self._usable = False
        self._target.abort()
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
        """Sends a large blob as a file of its own, or notes that the blob is bad.

        A blob that is sealed, or whose name something else has, becomes a pack.
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
        """Sends a pack of the blobs, or returns those that do not belong into the pack.

        Such blobs are bad, or were found to be large.
        """
        low, high = _digest(blobs[0]), _digest(blobs[-1])
        name = PackKey.of(low, high, pack_id(self._store_id, map(_digest, blobs)))
        while name.key in self._taken:
            other = pack_id(self._store_id, [bytes.fromhex(name.pack_id)])
            name = PackKey.of(low, high, other)

        sealed = bool(self._spec.recipients)
        if sealed:
            name = PackKey.of_sealed(low, high, os.urandom(ID_BYTES))
        # What is sealed takes a little more.
        size = total_size(blobs) * 1001 // 1000
        file = self._target.write(name.key, size, look=flight.look and not sealed)
        sent: list[Blob] = []
        bad: list[Failure | Blob] = []
        with self._discarded_unless_committed(file):
            compress, within = self._spec.run.codec != "none", bytes.fromhex(name.pack_id)
            seal = seal_writer(file.add, self._spec.recipients) if sealed else None
            write, sign = (file.add, unsigned) if seal is None else (seal.write, self._spec.sign)
            names = self._store.hash
            writer = PackWriter(
                write, self._store_id, within, compress=compress, sign=sign, names=names
            )
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
                file.commit()
                flight.files.append(_Put(file, sent, name))
        if bad:
            done = [blob for one in flight.files for blob in one.blobs]
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
        """Sends a blob as a file of its own; one that is bad is returned, and not sent."""
        size = blob.size or 0
        file = self._target.write(blob_key(blob.blobid), size, look=flight.look)
        carried = 0
        with self._discarded_unless_committed(file):
            try:
                for piece in reader.pieces(blob, lambda: self._buffer[:_PIECE]):
                    file.add(piece)
                    self._carry(flight, len(piece))
                    carried += len(piece)
            except BadSourceBlob as error:
                self._carry(flight, -carried)
                return error.failure
            file.commit()
            flight.files.append(_Put(file, [blob]))
        return None

    @contextmanager
    def _discarded_unless_committed(self, file: CommittedFile) -> Iterator[None]:
        try:
            yield
        finally:
            if self._usable:
                file.discard()

    # --- what comes back --------------------------------------------------------------------------

    def _take_answers(self) -> None:
        for flight in [one for one in self._flights if one.answered]:
            self._flights.remove(flight)
            self._outcomes.append(self._outcome(flight))

    def _outcome(self, flight: _Flight) -> Outcome:
        packs: list[StoredPack] = []
        stored: list[Blob] = []
        size = 0
        for one in flight.files:
            file = one.stored
            if file is None:
                self._taken.add(one.name)
                continue
            stored += one.blobs
            size += file.size
            if one.pack is not None:
                ends, count = (one.blobs[0].blobid, one.blobs[-1].blobid), len(one.blobs)
                pack_id, key = one.pack.pack_id, one.pack.key
                packs.append(StoredPack(pack_id, key, *ends, count, file.size, file.checksum))
        if taken := [one.name for one in flight.files if one.name in self._taken]:
            self._settle_content(flight, 0)
            return Rejection(
                flight.batch,
                BatchRejected(
                    "the target has something else under the same name",
                    detail=taken[0],
                    hint="it is sent under another name; `verify --download` looks at that one",
                ),
            )
        now = time.monotonic()
        receipt = Receipt(
            flight.batch,
            tuple(stored),
            tuple(flight.failed),
            size,
            now - flight.started,
            tuple(packs),
            now - flight.whole,
        )
        self._settle_content(flight, receipt.stored_bytes)
        return receipt

    def _wait(self, timeout: float) -> None:
        try:
            self._target.wait(timeout)
        except BaseException:
            self.abort()
            raise
        self._hear()

    def _hear(self) -> None:
        """Reports how much was sent; ends the session where the target is silent."""
        try:
            self._require_life()
        except BackupError:
            self.abort()
            raise

    def _require_life(self) -> None:
        progress = self._target.progress
        self._content.hear(progress)
        self._spec.on_bytes(progress.sent - self._reported)
        self._reported = progress.sent
        now, heard = time.monotonic(), (progress.sent, progress.answers)
        run = self._spec.run
        limit = run.receipt_timeout if progress.all_sent else run.stall_timeout
        if heard != self._heard or not progress.awaited:
            self._heard, self._heard_at = heard, now
        elif now - max(self._heard_at, progress.throttled) > limit:
            raise RemoteUnreachable("the target does not answer", detail=f"for {limit:.0f} s")

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
