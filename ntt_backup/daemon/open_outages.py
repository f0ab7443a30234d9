"""The outages of a run are kept while they last: for the control socket, metrics and notices.

Each worker reports an outage of its own, so a side is away while one of them misses it. The end of
a worker or of the run ends its outages, too: nobody waits any more.
"""

from __future__ import annotations

from typing import NamedTuple

from ntt_backup import events
from ntt_backup.daemon.events import TargetRestart


class OpenOutage(NamedTuple):
    """An outage that lasts. since: by the clock of who keeps it. event: its last one."""

    since: float
    event: events.Outage


class OpenOutages:
    """Keeps the outages of one run."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int | None], OpenOutage] = {}

    def take(self, event: events.Event, now: float) -> None:
        """Takes in what happened. now: seconds, by whatever clock."""
        match event:
            case events.Outage():
                key = event.what, event.worker
                since = self._open[key].since if key in self._open else now
                self._open[key] = OpenOutage(since, event)
            case events.OutageEnd():
                self._open.pop((event.what, event.worker), None)
            case events.WorkerStart() | events.WorkerStop() | events.WorkerRestart():
                for key in [key for key in self._open if key[1] == event.worker]:
                    del self._open[key]
            case events.RunStart() | events.RunStop() | TargetRestart():
                self._open.clear()

    @property
    def all(self) -> list[OpenOutage]:
        return list(self._open.values())

    @property
    def sides(self) -> set[str]:
        """Returns the sides that are away."""
        return {what for what, _ in self._open}
