"""What sessions over a channel have in common: batches under way, and their answers in time.

A batch that was put stays in flight until its answer comes. Answers come while the next batch is
sent, or when they are asked for; one that is late, or a channel that ends or talks nonsense, ends
the session, and what was in flight is sent again over another one. Here is all of that but the
language: what a batch looks like on the wire and what its answer says is the strategy's.

The base of `tar.TarSession` and `stream.StreamSession`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ntt_backup.errors import BackupError, RemoteUnreachable
from ntt_backup.model import Batch, Receipt
from ntt_backup.upload.strategies.session import Rejection, SessionPlan


@dataclass(slots=True)
class Flight:
    """A batch that was put. Times are monotonic seconds; handed_over is 0 while it is being sent.

    aborted: it was called back; the far side still answers, and nobody waits for it. content: bytes
    of blobs that went out for it.
    """

    number: int
    batch: Batch
    started: float
    handed_over: float = 0.0
    aborted: bool = False
    content: int = 0


@dataclass(slots=True)
class _Cargo:
    """So many bytes to come on the wire, and how much content of a batch they carry."""

    flight: Flight
    wire: int
    content: int


F = TypeVar("F", bound=Flight)


class PipelinedSession(ABC, Generic[F]):
    """See `strategies.Session`; `put` is the strategy's.

    LAST_WORD: what the far side says when it has ended in good order.
    """

    LAST_WORD: bytes

    def __init__(self, plan: SessionPlan, command: str) -> None:
        self._plan = plan
        self._flights: deque[F] = deque()
        self._outcomes: list[Receipt | Rejection] = []
        self._number = 0
        self._settled = 0.0
        self._usable = True
        self._cargo: _Cargo | None = None
        self._channel = plan.channel(command, self._went)

    @abstractmethod
    def _take(self, data: bytes) -> None:
        """Understand what has come from the far side."""

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def lingers(self) -> bool:
        """See `Channel.lingers`."""
        return self._channel.lingers

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        return tuple(flight.batch for flight in self._flights if not flight.aborted)

    def collect(self, timeout: float) -> list[Receipt | Rejection]:
        deadline = time.monotonic() + timeout
        while self._usable and not self._outcomes and self._flights:
            now = time.monotonic()
            # First: an answer may be there, and be unread because we were held up elsewhere.
            self._hear(max(0.0, deadline - now))
            if self._flights and not self._outcomes:
                self._check_overdue(time.monotonic())
            if now >= deadline:
                break
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            self._settled = time.monotonic()
        return outcomes

    def close(self) -> None:
        self._usable = False
        self._channel.close(self.LAST_WORD)

    def abort(self) -> None:
        self._usable = False
        self._channel.abort()
        for flight in self._flights:
            self._reckon(flight, 0)

    # --- what is told of content ------------------------------------------------------------------

    def _carry(self, flight: Flight, content: int, wire: int) -> None:
        """The next so many bytes on the wire carry so much content of this batch."""
        self._cargo = _Cargo(flight, wire, content)

    def _went(self, count: int) -> None:
        cargo = self._cargo
        if cargo is not None and cargo.wire:
            count_of_it = min(count, cargo.wire)
            content = cargo.content * count_of_it // cargo.wire
            cargo.wire -= count_of_it
            cargo.content -= content
            cargo.flight.content += content
            self._plan.on_content(content)
        self._plan.on_bytes(count)

    def _reckon(self, flight: Flight, stored: int) -> None:
        """Of what went out for this batch, so much came to something."""
        self._plan.on_content(stored - flight.content)
        flight.content = stored
        if self._cargo is not None and self._cargo.flight is flight:
            self._cargo = None

    def _conclude(self, flight: Flight, outcome: Receipt | Rejection) -> None:
        """The batch has come to this."""
        self._reckon(flight, outcome.stored_bytes if isinstance(outcome, Receipt) else 0)
        self._outcomes.append(outcome)

    # --- sending and hearing ----------------------------------------------------------------------

    def _send(self, data: bytes | bytearray | memoryview, beside: Iterable[int] = ()) -> None:
        """Hand all of data over; answers, and life on one of beside, are heard meanwhile."""
        try:
            self._channel.send(memoryview(data), self._take, patience=self._patience, beside=beside)
        except BackupError:
            self.abort()
            raise

    def _hear(self, timeout: float, beside: Iterable[int] = ()) -> None:
        """Take the answers that have arrived, or arrive within timeout seconds."""
        try:
            self._channel.hear(self._take, timeout, beside=beside)
        except BackupError:
            self.abort()
            raise

    def _await(self, there: Callable[[], bool], limit: float) -> None:
        """Hear until it is there, or the channel is silent for limit seconds."""
        asked = time.monotonic()
        while not there() and not self._channel.is_silent(asked, limit, time.monotonic()):
            self._hear(1.0)

    @property
    def _patience(self) -> float:
        """Seconds for which nothing may move. A remote with earlier batches to settle may be busy
        syncing them; that the link lives meanwhile is what ssh's ServerAlive tells.
        """
        run = self._plan.run
        return run.receipt_timeout if len(self._flights) > 1 else run.stall_timeout

    def _check_overdue(self, now: float) -> None:
        oldest, limit = self._flights[0], self._plan.run.receipt_timeout
        if self._channel.is_silent(max(oldest.handed_over, self._settled), limit, now):
            raise self._overdue(oldest)

    def _overdue(self, flight: F) -> BackupError:
        return self._broken(
            RemoteUnreachable(
                "the remote does not answer for a batch",
                detail=f"batch {flight.batch.name}, {self._plan.run.receipt_timeout:.0f} s",
                hint="its disk may be very slow: see run.receipt_timeout",
            )
        )

    def _nonsense(self, said: str) -> BackupError:
        return self._broken(RemoteUnreachable("the remote answers nonsense", detail=said[:200]))

    def _broken(self, error: BackupError) -> BackupError:
        self.abort()
        return error
