"""How a batch travels: what the worker asks of a strategy, and which strategies there are.

The worker knows batches, receipts and errors; it does not know tar. A strategy opens a session (one
connection, set up once), takes batches one after the other, and gives back an outcome for each. New
strategies register here and nothing else changes.

Called by `worker` and `preflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ntt_backup.model import Batch, Receipt
from ntt_backup.strategy import tar
from ntt_backup.strategy.session import Rejection, SessionPlan

Outcome = Receipt | Rejection


class Session(Protocol):
    """One connection to the remote that carries batches in order.

    Any method may raise RemoteUnreachable (retryable: open another session, send what is in flight
    again), RemoteDenied or RemoteCannotStore (permanent), or SourceError.
    """

    @property
    def usable(self) -> bool:
        """Whether another batch may be put; False once the session is broken or closed."""
        ...

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """The batches that were put and have no outcome yet, oldest first; also once the session
        is broken, closed or aborted.
        """
        ...

    def put(self, batch: Batch) -> None:
        """Check and send a batch; returns when its last byte is handed over, before its outcome.

        Raises BatchRejected when this batch could not be sent as a whole; it is not in flight then.
        """
        ...

    def collect(self, timeout: float) -> list[Outcome]:
        """Outcomes that have arrived; waits up to timeout seconds for the first where there is
        none.

        A session that is not usable any more gives those that arrived before; it does not wait or
        raise.
        """
        ...

    def close(self) -> None:
        """End the session in good order, after its batches are settled; bounded in time."""
        ...

    def abort(self) -> None:
        """End the session now. Never raises."""
        ...


OpenSession = Callable[[SessionPlan], Session]

STRATEGIES: Mapping[str, OpenSession] = {"tar": tar.TarSession}


def resolve(name: str) -> str:
    """The strategy that `auto` stands for; any other name stands for itself."""
    return "tar" if name == "auto" else name


def open_session(name: str, plan: SessionPlan) -> Session:
    """Connect, and return when the remote is ready to take batches. Raises as `Session` does."""
    return STRATEGIES[resolve(name)](plan)
