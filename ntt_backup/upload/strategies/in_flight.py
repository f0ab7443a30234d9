"""All strategies share this part of a session: batches in flight, and their answers in time.

A batch that was put stays in flight until its answer comes. Answers come while the next batch is
sent, or when they are asked for. One that is late, or a channel that ends or violates the protocol,
ends the session; what was in flight is sent again over another one. How a batch and its answer look
on the wire is the strategy's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ntt_backup.client.channel import Channel
from ntt_backup.client.receiver_connection import SLOW
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.errors import BackupError, RemoteUnreachable
from ntt_backup.model import Batch, Blob, Failure, Receipt
from ntt_backup.upload.strategies.session import Outcome, Rejection


@dataclass(slots=True)
class Flight:
    """A batch that was put. Times are monotonic seconds; handed_over is 0 while it is being sent.

    sent: its blobs in the order of sending, by which the remote counts. failed: those that were not
    sent, or withdrawn. content: bytes of blobs that were sent for it. begun: a first frame was
    sent. aborted: it was called back; the remote still answers, and nobody waits for that.
    answered: the answer came during the sending.
    """

    number: int
    batch: Batch
    started: float
    handed_over: float = 0.0
    sent: list[Blob] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    wire_bytes: int = 0
    content: int = 0
    begun: bool = False
    aborted: bool = False
    answered: bool = False

    def cut(self) -> None:
        """Ends the batch with the blobs that were sent or have failed; the others stay pending."""
        done = {blob.blobid for blob in self.sent} | {one.blobid for one in self.failed}
        blobs = tuple(blob for blob in self.batch.blobs if blob.blobid in done)
        self.batch = replace(self.batch, blobs=blobs)


@dataclass(slots=True)
class _Sending:
    """The bytes that are being sent, and how much content of a batch they carry."""

    flight: Flight
    wire: int
    content: int


class PipelinedSession(ABC):
    """See `session.Session`; `put` and `close` are the strategy's."""

    def __init__(self, spec: SessionSpec, channel: Channel) -> None:
        self._spec = spec
        self._flights: deque[Flight] = deque()
        self._outcomes: list[Outcome] = []
        self._answered_at = 0.0
        self._usable = True
        self._sending: _Sending | None = None
        self.channel = channel
        channel.on_bytes = self._on_bytes

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Takes in what has come from the remote."""

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def lingers(self) -> bool:
        """See `Channel.lingers`."""
        return self.channel.lingers

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        return tuple(flight.batch for flight in self._flights if not flight.aborted)

    def collect(self, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        while self._usable and not self._outcomes and self._flights:
            now = time.monotonic()
            # First: an answer may be there, unread because this process was held up elsewhere.
            self._hear(max(0.0, deadline - now))
            if self._flights and not self._outcomes:
                self._check_overdue(time.monotonic())
            if now >= deadline:
                break
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            self._answered_at = time.monotonic()
        return outcomes

    def abort(self) -> None:
        self._usable = False
        self.channel.abort()
        for flight in self._flights:
            self._correct_content(flight, 0)

    # --- what is reported of content --------------------------------------------------------------

    def _announce_content(self, flight: Flight, content: int, wire: int) -> None:
        """Notes that the next bytes on the wire carry so much content of this batch."""
        self._sending = _Sending(flight, wire, content)

    def _on_bytes(self, count: int) -> None:
        sending = self._sending
        if sending is not None and sending.wire:
            wire = min(count, sending.wire)
            content = sending.content * wire // sending.wire
            sending.wire -= wire
            sending.content -= content
            sending.flight.content += content
            self._spec.on_content(content)
        self._spec.on_bytes(count)

    def _correct_content(self, flight: Flight, stored: int) -> None:
        """Reports that so many bytes were stored of what was sent for this batch."""
        self._spec.on_content(stored - flight.content)
        flight.content = stored
        if self._sending is not None and self._sending.flight is flight:
            self._sending = None

    def _reject(self, flight: Flight, error: BackupError) -> None:
        """Keeps a rejection for `collect`."""
        self._correct_content(flight, 0)
        self._outcomes.append(Rejection(flight.batch, error))

    def _confirm(self, flight: Flight, stored: Iterable[Blob]) -> None:
        """Keeps a receipt for `collect`."""
        now = time.monotonic()
        receipt = Receipt(
            flight.batch,
            tuple(stored),
            tuple(flight.failed),
            flight.wire_bytes,
            now - flight.started,
            answer_s=now - (flight.handed_over or now),
        )
        self._correct_content(flight, receipt.stored_bytes)
        self._outcomes.append(receipt)

    # --- sending and hearing ----------------------------------------------------------------------

    def _send(self, data: bytes | bytearray | memoryview, beside: Iterable[int] = ()) -> None:
        """Sends all of data; answers are taken in meanwhile. beside: see `Channel.send`."""
        try:
            self.channel.send(memoryview(data), self._take, patience=self._patience, beside=beside)
        except BackupError:
            self.abort()
            raise

    def _hear(self, timeout: float, beside: Iterable[int] = ()) -> None:
        """Takes in the answers that have arrived, or arrive within timeout seconds."""
        try:
            self.channel.hear(self._take, timeout, beside=beside)
        except BackupError:
            self.abort()
            raise

    def _await(self, arrived: Callable[[], bool], flight: Flight, size: int = 0) -> None:
        """Waits for an answer that flight needs; raises where the remote is silent for too long.

        size: The bytes that the remote may have to hash first.
        """
        asked, limit = time.monotonic(), self._spec.run.receipt_timeout
        while not arrived():
            if self.channel.is_silent(asked, limit, time.monotonic(), size / SLOW):
                raise self._overdue(flight)
            self._hear(1.0)

    @property
    def _patience(self) -> float:
        """Returns the seconds within which something must be sent.

        A remote with earlier batches may be busy syncing them; ssh's ServerAlive finds out whether
        the link lives meanwhile.
        """
        run = self._spec.run
        return run.receipt_timeout if len(self._flights) > 1 else run.stall_timeout

    def _check_overdue(self, now: float) -> None:
        oldest, limit = self._flights[0], self._spec.run.receipt_timeout
        since = max(oldest.handed_over, self._answered_at)
        # The program b3sum hashes what was sent only now.
        if self.channel.is_silent(since, limit, now, oldest.content / SLOW):
            raise self._overdue(oldest)

    def _overdue(self, flight: Flight) -> BackupError:
        self.abort()
        return RemoteUnreachable(
            "the remote does not answer for a batch",
            detail=f"batch {flight.batch.name}, {self._spec.run.receipt_timeout:.0f} s",
            hint="its disk may be very slow: see run.receipt_timeout",
        )
