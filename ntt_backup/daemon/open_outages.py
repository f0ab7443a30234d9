"""One judge says when an outage of a run begins and ends, for the coordinator and all who hear it.

An outage of a side begins with the first failure that any worker or side job reports, and ends with
the first success of any of them. The end of the run ends all of its outages. An outage that was
reported by workers alone that have ended is dropped: nobody waits any more.
"""

from __future__ import annotations

from typing import NamedTuple

from ntt_backup import events
from ntt_backup.daemon.events import TargetRestart


class OpenOutage(NamedTuple):
    """An outage that lasts, as one worker misses the side. since: the time of the first failure
    that this worker reported, by the clock of who keeps it. event: its last one.
    """

    since: float
    event: events.Outage


class OpenOutages:
    """Keeps the outages of one run."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int | None], OpenOutage] = {}
        # By side: the time of the first failure, and of a new connection after the last failure.
        self._began: dict[str, float] = {}
        self._connected: dict[str, float] = {}

    def take(self, event: events.Event, now: float) -> None:
        """Takes in what happened. now: seconds, by whatever clock."""
        match event:
            case events.Outage():
                key = event.what, event.worker
                since = self._open[key].since if key in self._open else now
                self._open[key] = OpenOutage(since, event)
                self._began.setdefault(event.what, now)
                self._connected.pop(event.what, None)
            case events.OutageEnd():
                self._drop([key for key in self._open if key[0] == event.what])
            case events.WorkerStart() | events.WorkerStop() | events.WorkerRestart():
                self._drop([key for key in self._open if key[1] == event.worker])
            case events.RunStart() | events.RunStop() | TargetRestart():
                self._drop([*self._open])

    def connect(self, what: str, now: float) -> bool:
        """Notes that a side accepted a connection, which is not yet work that was done: the outage
        ends with that, and is over since now. Returns whether this is the first connection since
        the last failure.
        """
        if what not in self._began or what in self._connected:
            return False
        self._connected[what] = now
        return True

    def lasted(self, what: str, now: float) -> float | None:
        """Returns for how many seconds a side was unreachable, up to now or to the connection that
        has answered; None where the side has no outage.
        """
        began = self._began.get(what)
        return None if began is None else self._connected.get(what, now) - began

    def waiting(self, what: str) -> set[int | None]:
        """Returns the workers that wait for a side; None stands for a side job."""
        return {worker for side, worker in self._open if side == what}

    @property
    def all(self) -> list[OpenOutage]:
        """Returns the outages that last, without a side that accepts connections again."""
        return [one for (side, _), one in self._open.items() if side not in self._connected]

    @property
    def sides(self) -> set[str]:
        """Returns the sides that are unreachable."""
        return set(self._began)

    def _drop(self, keys: list[tuple[str, int | None]]) -> None:
        for key in keys:
            del self._open[key]
        left = {side for side, _ in self._open}
        for side in self._began.keys() - left:
            del self._began[side]
            self._connected.pop(side, None)
