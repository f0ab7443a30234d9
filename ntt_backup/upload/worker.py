"""A worker claims, sends, collects, records, emits. One process a worker, one thread, one loop.

The order within one batch is what the invariants rest on: the receipt comes from the remote after
its sync, then the ledger is committed, then the event is emitted. When the remote is away, batches
without a receipt are sent again; when the catalog is away, receipts are kept until they are
recorded, and claims, which vanished with the connection, are made anew. Neither marks a blob
failed.

The loop knows no strategy and no SQL: it is given a way to open a `Session` and one to open a
`CatalogSession`, and opens either again when it was lost. What becomes of a batch is decided by
`Outcomes`, what waits to be sent is in the `SendQueue`. The coordinator is at the other end of the
event pipe.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff, Outages
from ntt_backup.config import RunSettings
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    BatchRejected,
    CatalogError,
    CatalogUnavailable,
    RemoteUnreachable,
    SessionExpired,
    SourceError,
    StoreSuspect,
)
from ntt_backup.model import Batch, Blob, Receipt
from ntt_backup.process.memory import SharedNumber
from ntt_backup.process.messages import Answered, BatchStart, Drained
from ntt_backup.source.read_ahead import ReadAhead
from ntt_backup.source.store import Store
from ntt_backup.upload.batch_outcomes import Outcomes
from ntt_backup.upload.event_pipe import EventPipe, pause
from ntt_backup.upload.queue import STEP, SendQueue
from ntt_backup.upload.strategies.session import Outcome, Session

if TYPE_CHECKING:
    from ntt_backup.upload.catalog_session import CatalogSession
    from ntt_backup.upload.first_reads import FirstReads, Looked

_COLLECT_SECONDS: Final = 0.5
# From one look to the next whether a batch was read ahead.
_READING_SECONDS: Final = 0.05
_IDLE_SESSION_SECONDS: Final = 60.0
_FIRST_WAIT_SECONDS: Final = 0.05
_LAST_WAIT_SECONDS: Final = 2.0
# For longer a server keeps no commit in memory alone: three times wal_writer_delay, which is 0.2 s.
_VOLATILE_SECONDS: Final = 1.0


class Worker:
    """Runs until nothing is pending; with watch until it is told to stop. name: unique in a run.
    interval: seconds from one look for new blobs to the next; its value may change. first_reads:
    reads the files that go by their paths; None where names are hashes.
    takes_turns: whether another target may be in the place of this one, which then ends the work.
    """

    def __init__(
        self,
        name: str,
        run: RunSettings,
        store: Store,
        ahead: ReadAhead,
        connect_remote: Callable[[], Session],
        connect_catalog: Callable[[], CatalogSession],
        pipe: EventPipe,
        *,
        watch: bool,
        interval: SharedNumber | None = None,
        first_reads: FirstReads | None = None,
        takes_turns: bool = False,
    ) -> None:
        self._run = run
        self._first_reads = first_reads
        self._interval = interval or SharedNumber(run.poll_interval)
        self._watch = watch
        self._takes_turns = takes_turns
        self._store = store
        self._ahead = ahead
        self._connect_remote = connect_remote
        self._connect_catalog = connect_catalog
        self._pipe = pipe
        backoff = Backoff.of(run)
        self._outages = Outages(pipe.emit, backoff, None if watch else run.outage_timeout)
        self._session: Session | None = None
        self._catalog: CatalogSession | None = None
        self._queue = SendQueue(
            name, run.batch_size, run.first_bytes, run.most_blobs, run.batch_bytes
        )
        self._arrived: list[Outcome] = []
        self._outcomes = Outcomes(
            run, backoff, store, self._queue, self._outages, pipe, watch=watch
        )
        # Whether the last search found nothing free.
        self._dry = False
        # Until blobs that others hold may be free.
        self._wait_s = _FIRST_WAIT_SECONDS
        # What is claimed once more, since its range was reopened.
        self._again: set[str] = set()
        self._idle_since: float | None = None
        self._catalog_due: float | None = None
        self._away_s = 0.0
        self._done = False
        # The last receipts that were recorded, each with the time of that.
        self._recorded: deque[tuple[float, Receipt]] = deque()
        pipe.on_tick = self._keep_claims

    def run(self) -> None:
        """Works until done or told to stop. Raises what waiting cannot mend; nothing is lost."""
        try:
            while not self._done:
                try:
                    self._step()
                except CatalogUnavailable as error:
                    self._catalog_away(error)
                except RemoteUnreachable as error:
                    if self._takes_turns and isinstance(error, AnotherTarget):
                        raise
                    self._remote_away(error)
                except SourceError as error:
                    self._source_away(error)
        except BaseException as error:
            self._give_up_session()
            if isinstance(error, BackupError) and not isinstance(error, CatalogError):
                self._record_the_rest()
            raise
        if self._session is not None:
            self._session.close()
        self._leave_catalog()

    def _step(self) -> None:
        if self._session is not None and not self._session.usable:
            lost = self._give_up_session()
            self._outcomes.resend(lost, 0.0, RemoteUnreachable("the session was given up"))
        if self._pipe.take_hurry():
            self._queue.hurry()
            self._catalog_due = self._catalog_due and 0.0
        self._accept()
        busy = bool(self._in_flight())
        if self._catalog_due is not None and (busy or not self._pipe.stopping):
            self._await_catalog(self._catalog_due, busy)
            return
        self._record()
        if self._pipe.stopping:
            self._queue.forget()
            if busy:
                self._collect()
            self._done = not busy
        elif self._away_s:
            wait_s, self._away_s = self._away_s, 0.0
            pause(self._pipe, wait_s, "outage")
        elif len(self._in_flight()) >= self._run.window:
            self._collect()
        elif (batch := self._next_batch()) is not None:
            self._send(batch)
        elif busy:
            self._collect()
        elif self._ahead.reading:
            pause(self._pipe, _READING_SECONDS, "waiting")
        elif (due := self._queue.next_due) is not None:
            self._await_due(due)
        else:
            self._idle()

    # --- what to send -----------------------------------------------------------------------------

    def _next_batch(self) -> Batch | None:
        if (batch := self._queue.pop_due(time.monotonic())) is not None:
            return batch
        # Whether anything is left at all is one look for `_idle`: a search before it is one more.
        if self._is_read() and (not self._dry or self._in_flight()):
            self._claim()
        return self._queue.pop_new() if self._is_read() else None

    def _is_read(self) -> bool:
        """Returns whether the next blobs need not be read ahead, or were."""
        return not self._ahead.reading or self._ahead.has_read(self._queue.front())

    def _claim(self) -> None:
        """Claims blobs for one batch, as far as there are any."""
        while missing := self._queue.missing:
            wanted = missing + (self._ahead.batches - 1) * min(self._run.batch_size, STEP)
            claims = self._open_catalog().claims
            taken = claims.take(wanted)
            self._dry = not taken and not claims.searching
            self._outages.back("catalog")
            if self._first_reads is not None and taken:
                assert self._store.paths is not None
                self._store.paths.know(self._open_catalog().paths_of(taken))
            arranged = self._ahead.arranged(self._without_again(taken))
            sized = self._store.measure([blob for blob, _ in arranged])
            self._queue.add(zip(sized, (index for _, index in arranged), strict=True))
            if len(taken) < wanted:
                break

    def _without_again(self, taken: list[tuple[Blob, int]]) -> list[tuple[Blob, int]]:
        """Returns what was claimed, without what is claimed again since its range was reopened."""
        if not self._again:
            return taken
        new = [one for one in taken if one[0].blobid not in self._again]
        self._again.difference_update(blob.blobid for blob, _ in taken)
        return new

    def _send(self, batch: Batch) -> None:
        self._idle_since = None
        self._wait_s = _FIRST_WAIT_SECONDS
        if self._session is None:
            self._pipe.state("waiting")
            try:
                self._session = self._connect_remote()
            except BackupError:
                self._queue.delay([batch])
                raise
            self._pipe.emit(Answered(what="remote", settled=False))
        self._pipe.state("sending")
        self._pipe.emit(BatchStart(batch=batch.name, blobs=len(batch.blobs), bytes=batch.size))
        try:
            with self._ahead.at_hand(batch.blobs):
                self._session.put(batch)
        except BatchRejected as error:
            self._outcomes.rejected(batch, error)
        except SourceError:
            if batch not in self._session.in_flight:
                self._queue.delay([batch])
            raise
        self._outages.back("source")
        self._arrived += self._session.collect(0.0)

    # --- what became of it ------------------------------------------------------------------------

    def _collect(self) -> None:
        if self._session is not None:
            self._pipe.state("waiting")
            self._arrived += self._session.collect(_COLLECT_SECONDS)

    def _accept(self) -> None:
        """Takes in every outcome that has arrived. Raises what `Outcomes.accept` raises."""
        arrived, self._arrived = self._arrived, []
        for one in arrived:
            if isinstance(one, Receipt):
                # The time of reading ahead is not in the receipt, so then no batch grows.
                quick = self._ahead.batches == 1
                stored, size = (len(one.stored), one.stored_bytes) if quick else (0, 0)
                self._queue.fit(stored, size, one.duration_s)
        self._outcomes.accept(arrived, connected=self._session is not None)

    def _record(self) -> None:
        """Commits the receipts, oldest first, emits their events, and frees their ranges."""
        while self._outcomes.receipts:
            receipt = self._outcomes.receipts[0]
            self._open_catalog().ledger.record(receipt.stored, receipt.failed, receipt.packs)
            self._outages.back("catalog")
            self._outcomes.receipts.popleft()
            self._note_recorded(receipt)
            if self._store.paths is not None:
                self._store.paths.forget(blob.blobid for blob in receipt.batch.blobs)
            for failure in receipt.failed:
                self._pipe.emit(events.BlobFailed.of(failure))
            self._pipe.emit(events.BatchComplete.of(receipt))
        if self._catalog is not None and (spent := self._catalog.claims.exhausted()):
            kept = self._queue.ranges(time.monotonic())
            busy = kept.union(*(batch.ranges for batch in self._in_flight()))
            self._catalog.claims.release(spent - busy)

    def _note_recorded(self, receipt: Receipt) -> None:
        """Keeps the receipts of the last moment: a crash of the server may lose their marks."""
        now = time.monotonic()
        while self._recorded and now - self._recorded[0][0] > _VOLATILE_SECONDS:
            self._recorded.popleft()
        self._recorded.append((now, receipt))

    def _tell_lost_marks(self, catalog: CatalogSession) -> None:
        """Tells which blobs were counted as copied and will be sent again."""
        sizes = {
            blob.blobid: blob.size or 0 for _, receipt in self._recorded for blob in receipt.stored
        }
        lost = catalog.ledger.unrecorded(set(sizes)) if sizes else set()
        self._recorded.clear()
        if lost:
            size = sum(sizes[blobid] for blobid in lost)
            self._pipe.emit(events.MarksLost(blobs=len(lost), bytes=size))

    def _record_the_rest(self) -> None:
        """Records what has been answered, as far as possible. The error that ends the work is the
        one to be seen, not what comes of this.
        """
        with suppress(BackupError):
            self._accept()
        with suppress(BackupError):
            self._record()

    def _in_flight(self) -> tuple[Batch, ...]:
        return self._session.in_flight if self._session is not None else ()

    # --- nothing to do ----------------------------------------------------------------------------

    def _idle(self) -> None:
        """Ends or waits, since nothing is free: all is done, or others hold the rest."""
        claims = self._open_catalog().claims
        if claims.searching:
            return
        self._dry = False
        while (pending := claims.any_pending()) is None:
            if self._pipe.stopping:
                return
        looked: Looked = "none"
        if not pending and self._first_reads is not None:
            looked = self._first_reads.read_some(self._open_catalog().unread)
            self._outages.back("source")
            pending = looked == "others"
        if looked == "some":
            self._wait_s = _FIRST_WAIT_SECONDS
            return
        if not pending:
            self._pipe.emit(Drained())
            self._done = not self._watch
        if self._done:
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if self._session is not None and now - self._idle_since > _IDLE_SESSION_SECONDS:
            self._session.close()
            self._session = None
            gc.collect()  # Its buffers are not needed for a while, and some parts form loops.
        if pending:
            self._wait_s = min(self._wait_s * 2, _LAST_WAIT_SECONDS)
            pause(self._pipe, self._wait_s, "idle")
        else:
            heard, fd = claims.drain_notifications, claims.fileno()
            pause(self._pipe, self._interval.value, "idle", fd, heard=heard)

    def _await_due(self, due: float) -> None:
        """Waits for what is to be tried again later.

        A run that watches looks for new blobs meanwhile, as it does when it is idle: also in the
        ranges of what waits, which nobody else can claim.
        """
        wait_s = due - time.monotonic()
        if not self._watch or any(map(self._outages.lasts, ("remote", "source", "suspect"))):
            pause(self._pipe, wait_s, "outage" if self._outages.lasts("suspect") else "waiting")
            return
        claims = self._open_catalog().claims
        heard, fd = claims.drain_notifications, claims.fileno()
        pause(self._pipe, min(wait_s, self._interval.value), "waiting", fd, heard=heard)
        # Nothing else is under way: all that comes once more is in the delayed batches.
        delayed = self._queue.delayed
        claims.reopen(frozenset().union(*(batch.ranges for batch in delayed)))
        self._again.update(blob.blobid for batch in delayed for blob in batch.blobs)
        self._dry = False

    # --- when a side is away ----------------------------------------------------------------------

    def _remote_away(self, error: RemoteUnreachable) -> None:
        lost = self._give_up_session()
        if any(isinstance(outcome, Receipt) for outcome in self._arrived):
            self._outages.back("remote")  # It answered before it went away.
        self._away_s = 0.0 if self._pipe.stopping else self._outages.away("remote", error)
        self._outcomes.resend(lost, self._away_s, error)

    def _source_away(self, error: SourceError) -> None:
        """Waits for the store, which worked when the run began: a disk that was unmounted may be
        mounted again. Where it is incomplete, a person must find the reason.
        """
        if isinstance(error, StoreSuspect):
            raise error
        self._away_s = 0.0 if self._pipe.stopping else self._outages.away("source", error)

    def _give_up_session(self) -> tuple[Batch, ...]:
        """Ends the session now, and returns its batches without an answer. Answers are kept."""
        session, self._session = self._session, None
        if session is None:
            return ()
        session.abort()
        self._arrived += session.collect(0.0)
        return session.in_flight

    def _catalog_away(self, error: CatalogUnavailable) -> None:
        """Keeps the receipts and comes back later. Told to stop: once more, when what is in flight
        has its answers. A session that has expired is no outage: only its claims are lost.
        """
        self._leave_catalog()
        if self._pipe.stopping:
            self._done = self._catalog_due is not None and not self._in_flight()
            self._catalog_due = time.monotonic()
        elif isinstance(error, SessionExpired):
            self._catalog_due = time.monotonic()
        else:
            self._catalog_due = time.monotonic() + self._outages.away("catalog", error)

    def _await_catalog(self, due: float, busy: bool) -> None:
        """Settles what is in flight before anything is claimed anew, so that nothing goes twice.
        Then all that was claimed is forgotten: the claims vanished with the connection.
        """
        if busy:
            self._collect()
        elif (left := due - time.monotonic()) > 0:
            pause(self._pipe, left, "outage")
        else:
            self._outcomes.forget()
            self._catalog_due = None

    # --- the catalog ------------------------------------------------------------------------------

    def _open_catalog(self) -> CatalogSession:
        if self._catalog is None:
            self._catalog = self._connect_catalog()
            if moved := self._catalog.moved:
                self._pipe.emit(
                    events.CatalogMoved(
                        server=self._catalog.host,
                        timeline=self._catalog.server.timeline,
                        before=moved.timeline,
                        same_cluster=moved.same_cluster,
                    )
                )
            self._tell_lost_marks(self._catalog)
        self._catalog.require_latest()
        return self._catalog

    def _keep_claims(self) -> None:
        if self._catalog is not None:
            self._catalog.keep()

    def _leave_catalog(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = None
        self._again.clear()
        self._dry = False  # What it held is free again.
