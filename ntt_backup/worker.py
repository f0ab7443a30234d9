"""The send loop: claim, send, settle, record, tell. One process a worker, one thread, one loop.

The order within one batch is what the invariants rest on: the receipt comes from the remote after
its sync, then the ledger is committed, then the event is told. When the remote is away, batches
without a receipt are sent again; when the catalog is away, receipts are kept until they are
recorded, and claims, which vanished with the connection, are made anew. Neither marks a blob
failed.

The loop knows no strategy and no SQL: it asks `strategy.open_session`, `Claims` and `Ledger`.
Decisions are `planner`'s. What the loop needs from the coordinator it has as a `Line`: events out,
`stop` in.

Run by `worker_process`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ntt_backup.catalog import db
from ntt_backup.catalog.claim import Claims
from ntt_backup.catalog.ledger import Ledger
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError, BatchRejected, CatalogUnavailable, RemoteUnreachable
from ntt_backup.model import Batch, Blob, Receipt
from ntt_backup.planner import (
    Backoff,
    GiveUp,
    OutageClock,
    Retry,
    after_link_loss,
    after_rejection,
    cut,
)
from ntt_backup.process import wait_for
from ntt_backup.store import Store
from ntt_backup.strategy import Outcome, Session
from ntt_backup.strategy.session import Rejection

_COLLECT_SECONDS: Final = 0.5
_IDLE_SESSION_SECONDS: Final = 60.0
_FIRST_POLL_SECONDS: Final = 0.05
_LAST_POLL_SECONDS: Final = 2.0


class Line(Protocol):
    """The way to the coordinator."""

    @property
    def stopping(self) -> bool:
        """Whether the coordinator has asked for the end."""
        ...

    @property
    def fd(self) -> int:
        """Readable when there is a word from the coordinator; -1 once there will be none."""
        ...

    def emit(self, event: str, **fields: Any) -> None:
        """Tell the coordinator something."""
        ...

    def state(self, state: str) -> None:
        """Tell what the worker is doing, where that changed: sending, waiting, idle, outage."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker is to do. order: in which order it tries the ranges. watch: go on for
    ever.
    """

    name: str
    url: str
    application: str
    target: str
    order: tuple[int, ...]
    watch: bool
    run: RunSettings


@dataclass(slots=True)
class _Delayed:
    batch: Batch
    due: float


class Worker:
    """Runs until nothing is pending (or, watching, until it is told to stop)."""

    def __init__(
        self, assignment: Assignment, store: Store, connect: Callable[[], Session], line: Line
    ) -> None:
        self._job = assignment
        self._store = store
        self._connect = connect
        self._line = line
        run = assignment.run
        self._backoff = Backoff(run.backoff_base, run.backoff_cap)
        limit = None if assignment.watch else run.outage_timeout
        self._outages = {
            kind: OutageClock(self._backoff, limit, random.random) for kind in ("remote", "catalog")
        }
        self._session: Session | None = None
        self._catalog: tuple[db.Connection, Claims, Ledger] | None = None
        self._claimed: deque[tuple[Blob, int]] = deque()
        self._delayed: list[_Delayed] = []
        self._receipts: deque[Receipt] = deque()
        self._batches = 0
        self._poll = _FIRST_POLL_SECONDS
        self._idle_since: float | None = None
        self._catalog_due: float | None = None
        self._done = False

    def run(self) -> None:
        """Work until done or told to stop. Raises what cannot be waited out; nothing is lost
        then.
        """
        try:
            while not self._done:
                try:
                    self._step()
                except CatalogUnavailable as error:
                    self._catalog_away(error)
                except RemoteUnreachable as error:
                    self._remote_away(error)
        except BaseException:
            if self._session is not None:
                self._session.abort()
            raise
        if self._session is not None:
            self._session.close()
        self._leave_catalog()

    def _step(self) -> None:
        self._drop_broken_session()
        busy = bool(self._in_flight())
        if self._catalog_due is not None and not self._line.stopping:
            self._await_catalog(self._catalog_due, busy)
            return
        self._record()
        if self._line.stopping:
            self._claimed.clear()
            self._delayed.clear()
            if busy:
                self._collect()
            else:
                self._done = True
        elif len(self._in_flight()) >= self._job.run.window:
            self._collect()
        elif (batch := self._next_batch()) is not None:
            self._send(batch)
        elif busy:
            self._collect()
        elif self._delayed:
            self._pause(min(one.due for one in self._delayed) - time.monotonic(), "waiting")
        else:
            self._idle()

    # --- what to send -----------------------------------------------------------------------------

    def _next_batch(self) -> Batch | None:
        now = time.monotonic()
        for index, one in enumerate(self._delayed):
            if one.due <= now:
                return self._delayed.pop(index).batch
        run = self._job.run
        if len(self._claimed) < run.batch_size:
            taken = self._open_catalog()[1].take(run.batch_size - len(self._claimed))
            self._outages["catalog"].over()
            sized = self._store.measure([blob for blob, _ in taken])
            self._claimed.extend(zip(sized, (index for _, index in taken), strict=True))
        count = cut([blob for blob, _ in self._claimed], run.batch_size, run.batch_bytes)
        if count == 0:
            return None
        front = [self._claimed.popleft() for _ in range(count)]
        self._batches += 1
        return Batch(
            f"{self._job.name}.{self._batches}",
            tuple(blob for blob, _ in front),
            frozenset(index for _, index in front),
        )

    def _send(self, batch: Batch) -> None:
        self._idle_since = None
        self._poll = _FIRST_POLL_SECONDS
        if self._session is None:
            self._line.state("waiting")
            try:
                self._session = self._connect()
            except BackupError:
                self._delayed.insert(0, _Delayed(batch, 0.0))
                raise
        self._line.state("sending")
        session = self._session
        try:
            session.put(batch)
        except BatchRejected as error:
            self._rejected(batch, error)
        self._accept(session.collect(0.0))

    # --- what became of it ------------------------------------------------------------------------

    def _collect(self) -> None:
        if self._session is not None:
            self._line.state("waiting")
            self._accept(self._session.collect(_COLLECT_SECONDS))

    def _accept(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._outages["remote"].over()
            if isinstance(outcome, Receipt):
                self._receipts.append(outcome)
            else:
                self._refused(outcome)

    def _refused(self, rejection: Rejection) -> None:
        """The remote said no: its own trouble (all stop, or all wait), or this batch's."""
        if isinstance(rejection.error, BatchRejected):
            self._rejected(rejection.batch, rejection.error)
            return
        if rejection.error.retryable:
            self._later(
                after_link_loss(rejection.batch, self._job.run.attempts), 0.0, rejection.error
            )
        raise rejection.error

    def _rejected(self, batch: Batch, error: BatchRejected) -> None:
        """The batch failed for itself: again, in halves, or the bad blob alone is failed."""
        decision = after_rejection(
            batch, str(error), self._job.run.attempts, self._backoff, random.random
        )
        if isinstance(decision, Retry):
            self._later((decision.batch,), decision.wait_s, error)
        elif isinstance(decision, GiveUp):
            self._receipts.append(Receipt(batch, (), (decision.failure,), 0, 0.0))
        else:
            self._line.emit(
                "batch_split", batch=batch.name, blobs=len(batch.blobs), reason=str(error)
            )
            self._delayed.extend(_Delayed(part, 0.0) for part in decision.parts)

    def _later(self, batches: Iterable[Batch], wait_s: float, error: BackupError) -> None:
        for batch in batches:
            self._delayed.append(_Delayed(batch, time.monotonic() + wait_s))
            self._line.emit(
                "batch_retry",
                batch=batch.name,
                blobs=len(batch.blobs),
                attempt=batch.attempt,
                reason=str(error),
                wait_s=round(wait_s, 3),
            )

    def _record(self) -> None:
        """Commit the receipts, oldest first, then tell of them, then free the ranges they
        settle.
        """
        while self._receipts:
            receipt = self._receipts[0]
            self._open_catalog()[2].record(receipt.stored, receipt.failed)
            self._outages["catalog"].over()
            self._receipts.popleft()
            self._tell(receipt)
        self._release_settled()

    def _tell(self, receipt: Receipt) -> None:
        for failure in receipt.failed:
            self._line.emit(
                "blob_failed",
                blobid=failure.blobid,
                reason=failure.reason.value,
                detail=failure.detail,
            )
        duration = max(receipt.duration_s, 1e-6)
        self._line.emit(
            "batch_complete",
            batch=receipt.batch.name,
            blobs=len(receipt.batch.blobs),
            copied=len(receipt.stored),
            failed=len(receipt.failed),
            bytes=receipt.stored_bytes,
            wire_bytes=receipt.wire_bytes,
            duration_s=round(receipt.duration_s, 3),
            mb_per_s=round(receipt.stored_bytes / duration / 1e6, 3),
            attempt=receipt.batch.attempt,
        )

    def _release_settled(self) -> None:
        if self._catalog is None:
            return
        claims = self._catalog[1]
        spent = claims.exhausted()
        if spent:
            busy = {index for _, index in self._claimed}
            waiting = [one.batch for one in self._delayed]
            for batch in (*waiting, *self._in_flight(), *(one.batch for one in self._receipts)):
                busy |= batch.ranges
            claims.release(spent - busy)

    def _in_flight(self) -> tuple[Batch, ...]:
        return self._session.in_flight if self._session is not None else ()

    # --- nothing to do ----------------------------------------------------------------------------

    def _idle(self) -> None:
        """Nothing left that is free: done, or others hold the rest, or there is nothing yet."""
        connection, claims, _ = self._open_catalog()
        pending = claims.any_pending()
        if not pending and not self._job.watch:
            self._done = True
            return
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if self._session is not None and now - self._idle_since > _IDLE_SESSION_SECONDS:
            self._session.close()
            self._session = None
        if pending:
            self._poll = min(self._poll * 2, _LAST_POLL_SECONDS)
            self._pause(self._poll, "idle")
        else:
            self._pause(self._job.run.poll_interval, "idle", connection.fileno())
            claims.drain_notifications()

    def _pause(self, seconds: float, state: str, *fds: int) -> None:
        """Wait, but not past a word from the coordinator or life on one of fds."""
        self._line.state(state)
        watched = [fd for fd in (self._line.fd, *fds) if fd >= 0]
        if not self._line.stopping:
            wait_for(reading=watched, timeout=max(0.0, seconds))

    # --- when a side is away ----------------------------------------------------------------------

    def _drop_broken_session(self) -> None:
        """Take back what was in flight on a session that gave up a batch together with its
        stream.
        """
        if self._session is not None and not self._session.usable:
            lost = self._session.in_flight
            self._session.abort()
            self._session = None
            reason = RemoteUnreachable("the session was given up")
            for batch in lost:
                self._later(after_link_loss(batch, self._job.run.attempts), 0.0, reason)

    def _remote_away(self, error: RemoteUnreachable) -> None:
        wait_s = 0.0 if self._line.stopping else self._outage("remote", error)
        if self._session is not None:
            lost = self._session.in_flight
            self._session.abort()
            self._session = None
            for batch in lost:
                self._later(after_link_loss(batch, self._job.run.attempts), wait_s, error)
        self._pause(wait_s, "outage")

    def _catalog_away(self, error: CatalogUnavailable) -> None:
        """Keep the receipts, forget the claims (they vanished with the connection), come back
        later.
        """
        self._leave_catalog()
        self._claimed.clear()
        self._delayed.clear()
        if self._line.stopping:
            self._done = not self._in_flight()
            return
        self._catalog_due = time.monotonic() + self._outage("catalog", error)

    def _await_catalog(self, due: float, busy: bool) -> None:
        """What is in flight is settled before anything is claimed anew, so that nothing goes
        twice.
        """
        if busy:
            self._collect()
        elif (left := due - time.monotonic()) > 0:
            self._pause(left, "outage")
        else:
            self._catalog_due = None

    def _outage(self, what: str, error: BackupError) -> float:
        """Count and tell an outage; how long to wait. Raises the error when it has lasted too
        long.
        """
        clock = self._outages[what]
        wait_s = clock.next_wait(time.monotonic())
        if wait_s is None:
            raise error
        self._line.emit(
            "outage",
            what=what,
            reason=error.message,
            detail=error.detail,
            attempt=clock.attempt,
            wait_s=round(wait_s, 3),
        )
        return wait_s

    # --- the catalog ------------------------------------------------------------------------------

    def _open_catalog(self) -> tuple[db.Connection, Claims, Ledger]:
        if self._catalog is None:
            connection = db.connect(self._job.url, self._job.application)
            claims = Claims(connection, self._job.target, self._job.order)
            if self._job.watch:
                claims.listen()
            self._catalog = (connection, claims, Ledger(connection, self._job.target))
        return self._catalog

    def _leave_catalog(self) -> None:
        if self._catalog is not None:
            self._catalog[0].close()
        self._catalog = None
