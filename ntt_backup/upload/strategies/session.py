"""What every strategy is given, and what it gives that is not a receipt.

Kept apart from the registry, so that the strategies and the registry can both import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ntt_backup.client.channel import Channel
from ntt_backup.client.throttle import Pace
from ntt_backup.client.transport import Transport
from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError
from ntt_backup.model import Batch
from ntt_backup.source.inspection import Store


@dataclass(frozen=True, slots=True)
class Rejection:
    """The remote answered for this batch, and the answer is no. The session goes on."""

    batch: Batch
    error: BackupError


@dataclass(frozen=True, slots=True)
class Facts:
    """What a remote says about itself. Bytes and seconds; None where it does not say.

    program: what will receive there, with its version. placed: by-hash is there.
    """

    system: str
    program: str
    free_bytes: int | None
    skew_s: float
    placed: bool


class Probe(Protocol):
    """A look at the remote before a run, by the way that the run will take.

    Methods are called in this order, `try_out` and `make_place` only where wanted. They raise as
    `Session` does.
    """

    @property
    def lingers(self) -> bool:
        """Whether a connection was held open by something there after its end; once closed."""
        ...

    def facts(self, *, will_try_out: bool) -> Facts:
        """Reach the remote, and ask."""
        ...

    def try_out(self) -> str:
        """Send trial blobs, and leave nothing of them there; a few words on what was seen."""
        ...

    def make_place(self) -> None:
        """Make by-hash."""
        ...

    def close(self) -> None:
        """Let go of the remote. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session is opened with.

    root: the remote's path, which holds `by-hash/`. owner names this host and target, run_id the
    run and slot the worker: together they name the session's scratch space on the remote, so that
    the next one can remove what a dead one left. pace limits what is sent, None for no limit.
    on_bytes is told, as they go, how many bytes were handed to the transport, and right before it
    on_content how much content of blobs they carry; with less than zero for what comes to nothing,
    so that its sum is what was stored and what is under way. For `stream` only: sync is how the
    far side makes a batch durable (`syncfs`, or `fsync` a file). on_bytes is told of none, too, as
    a sign of life while nothing can go.
    """

    transport: Transport
    store: Store
    root: str
    owner: str
    run_id: str
    slot: str
    run: RunSettings
    pace: Pace | None
    on_bytes: Callable[[int], None]
    on_content: Callable[[int], None] = lambda _: None
    sync: str = "syncfs"

    def channel(self, command: str, on_bytes: Callable[[int], None]) -> Channel:
        """The remote command, started, under this plan's limit; on_bytes is told what goes."""
        return Channel(self.transport, command, pace=self.pace, on_bytes=on_bytes)
