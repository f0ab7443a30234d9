"""The contract of a session says what the worker asks of a strategy, and what it is given back.

The worker knows batches, receipts and errors; it does not know how a strategy sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ntt_backup.errors import BackupError
from ntt_backup.model import Batch, Receipt


@dataclass(frozen=True, slots=True)
class Rejection:
    """The remote refused this batch. The session goes on."""

    batch: Batch
    error: BackupError


Outcome = Receipt | Rejection


class Session(Protocol):
    """One connection to the remote that carries batches in order.

    Any method may raise RemoteUnreachable (retryable: open another session, send what is in flight
    again), RemoteDenied or RemoteCannotStore (permanent), or SourceError.
    """

    @property
    def usable(self) -> bool:
        """Returns whether another batch may be put; False once the session is broken or closed."""
        ...

    @property
    def lingers(self) -> bool:
        """Whether, after `close`, another process on the remote held the connection open."""
        ...

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that were put and have no outcome yet, oldest first.

        They are also known once the session is broken, closed or aborted.
        """
        ...

    def put(self, batch: Batch) -> None:
        """Checks and sends a batch; returns when its last byte is handed over, before its outcome.

        Raises BatchRejected when this batch could not be sent as a whole; it is not in flight then.
        """
        ...

    def collect(self, timeout: float) -> list[Outcome]:
        """Returns the outcomes that have arrived; waits up to timeout seconds for a first one.

        A session that is not usable any more gives those that arrived before; it does not wait or
        raise.
        """
        ...

    def close(self) -> None:
        """Ends the session in good order, after its batches have outcomes; bounded in time."""
        ...

    def abort(self) -> None:
        """Ends the session now. Never raises."""
        ...
