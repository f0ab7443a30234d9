"""A run's listeners are told of its events, and of its state at a moment.

What a run does is heard by listeners: the log, the screen, and whatever else an operator has
switched on. Each hears every event once, in order, and the state a few times a second. The run
waits for none of them, so a listener that has much to do does it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Final, Protocol, Self, runtime_checkable

from ntt_backup import events
from ntt_backup.errors import SOME_FAILED, BackupError, Stopped
from ntt_backup.process.messages import Message

STATES: Final = (
    "starting",
    "sending",
    "paused",
    "waiting",
    "idle",
    "outage",
    "stalled",
    "stopped",
)
_sums = attrgetter("copied", "failed", "pending", "active_workers")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker at a moment. state: starting, sending, paused, waiting, idle, outage, stalled,
    stopped.
    """

    worker: int
    state: str
    batch: str
    copied: int
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class RunState:
    """A run at a moment. mb_per_s: on the link, over the last minute. estimated: pending, share and
    eta_s are. sent: content, answered or not. Of this burst of work: done are the settled blobs,
    share is the part of the content that was sent, below 1 while blobs are pending; None where
    nothing is pending or done, or pending is not known. paused: somebody holds all back.
    """

    elapsed_s: float
    copied: int
    failed: int
    pending: int | None
    estimated: bool
    bytes: int
    sent: int
    done: int
    share: float | None
    mb_per_s: float
    blobs_per_s: float
    eta_s: float | None
    workers: tuple[WorkerStatus, ...]
    paused: bool = False

    def says_more_than(self, other: RunState | None) -> bool:
        """Returns whether there is work, or anything but a speed, which only fades, has changed."""
        states = {worker.state for worker in self.workers}
        return other is None or bool(states - {"idle"}) or _sums(self) != _sums(other)

    @property
    def active_workers(self) -> int:
        return sum(1 for worker in self.workers if worker.state in ("sending", "waiting"))

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the state as it stands in JSON."""
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Returns the state whose `fields` these are."""
        workers = tuple(WorkerStatus(**one) for one in fields["workers"])
        return cls(**{**fields, "workers": workers})

    def event(self) -> events.Progress:
        """Returns the event that says the same."""
        return events.Progress(
            copied=self.copied,
            failed=self.failed,
            pending=self.pending,
            estimated=self.estimated,
            bytes=self.bytes,
            mb_per_s=self.mb_per_s,
            blobs_per_s=self.blobs_per_s,
            eta_s=None if self.eta_s is None else round(self.eta_s, 1),
            active_workers=self.active_workers,
            paused=self.paused,
        )

    def outcome(self, error: BackupError | None, jobs_failed: Sequence[str]) -> tuple[str, int]:
        """Returns how a run ends that is so, and its exit code. error: what ends it, if it is one;
        jobs_failed: the side jobs that failed.
        """
        if error is not None:
            return "stopped" if isinstance(error, Stopped) else "error", error.exit_code
        if self.failed:
            return "some_failed", SOME_FAILED
        return (f"{jobs_failed[0]}_failed", SOME_FAILED) if jobs_failed else ("done", 0)

    def end(self, outcome: str, exit_code: int) -> events.RunStop:
        """Returns the event of a run that ends so."""
        return events.RunStop(
            outcome=outcome,
            exit_code=exit_code,
            copied=self.copied,
            failed=self.failed,
            bytes=self.bytes,
            duration_s=self.elapsed_s,
        )


class StateMessage(Message):
    """A run's state, on its way to another process. state: `RunState.fields`."""

    state: dict[str, Any]


class Listener(Protocol):
    """Is told of one run."""

    def event(self, event: events.Event) -> None:
        """Takes in what has happened."""

    def refresh(self, state: RunState) -> None:
        """Takes in how the run is now."""

    def close(self) -> None:
        """Ends: nothing more will come."""


@runtime_checkable
class Speaks(Protocol):
    """A listener that may have something to say."""

    def hear(self) -> Iterable[events.Event]:
        """Returns what it has to say since it was asked last: all listeners are told."""


class Listeners:
    """Tells several listeners, in their order."""

    def __init__(self, all_of_them: Sequence[Listener]) -> None:
        self._all = all_of_them

    def event(self, event: events.Event) -> None:
        for one in self._all:
            one.event(event)

    def refresh(self, state: RunState) -> None:
        for one in self._all:
            one.refresh(state)
        for said in self._said():
            self.event(said)

    def close(self) -> None:
        """Ends all; what those that speak say at their end is told to the others."""
        others = [one for one in self._all if not isinstance(one, Speaks)]
        for one in self._all:
            if one not in others:
                one.close()
        for said in self._said():
            for one in others:
                one.event(said)
        for one in others:
            one.close()

    def _said(self) -> list[events.Event]:
        return [said for one in self._all if isinstance(one, Speaks) for said in one.hear()]
