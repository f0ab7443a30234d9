"""How a batch travels: what the worker asks of a strategy, and which strategies there are.

The worker knows batches, receipts and errors; it does not know tar. A strategy opens a session (one
connection, set up once), takes batches one after the other, and gives back an outcome for each. New
strategies register here and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ntt_backup.errors import Unsupported
from ntt_backup.model import Batch, Receipt
from ntt_backup.upload.strategies.session import Facts, Probe, Rejection, SessionPlan
from ntt_backup.upload.strategies.stream import StreamSession, open_stream
from ntt_backup.upload.strategies.stream_probe import StreamProbe
from ntt_backup.upload.strategies.tar import TarSession
from ntt_backup.upload.strategies.tar_probe import TarProbe

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


class Reached(Protocol):
    """A connection to the remote on which nothing was asked yet."""

    def begin(self) -> Session:
        """Have the remote ready to take batches. Raises as `Session` does."""
        ...

    def abort(self) -> None:
        """End it now. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """open: connect, and return when the remote is ready to take batches. reach: only connect, for
    who does not know yet whether there will be batches; what it gives becomes a Session by `begin`.
    None where there is nothing between the two. probe: see `Probe`.
    """

    open: Callable[[SessionPlan], Session]
    reach: Callable[[SessionPlan], Reached] | None
    probe: Callable[[SessionPlan], Probe]


STRATEGIES: Mapping[str, Strategy] = {
    "stream": Strategy(open_stream, StreamSession, StreamProbe),
    "tar": Strategy(TarSession, None, TarProbe),
}


def open_session(name: str, plan: SessionPlan) -> Session:
    """A session of the strategy of that name. Raises as `Session` does."""
    return STRATEGIES[name].open(plan)


def reach(name: str, plan: SessionPlan) -> Reached | None:
    """A connection for a session of the strategy of that name, if it can be had beforehand. Raises
    as `Session` does.
    """
    connect = STRATEGIES[name].reach
    return None if connect is None else connect(plan)


def open_probe(name: str, plan: SessionPlan, *, will_try_out: bool) -> tuple[str, Probe, Facts]:
    """The strategy that will be used, a probe of the remote, and what it says about itself.

    name may be `auto`: `stream` where the remote can run it, else `tar`.
    """
    if name == "auto":
        try:
            return open_probe("stream", plan, will_try_out=will_try_out)
        except Unsupported:
            return open_probe("tar", plan, will_try_out=will_try_out)
    probe = STRATEGIES[name].probe(plan)
    try:
        return name, probe, probe.facts(will_try_out=will_try_out)
    except BaseException:
        probe.close()
        raise
