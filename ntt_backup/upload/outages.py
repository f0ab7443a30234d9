"""The outages of one worker: each side that may be away has a clock, and its outages are events.

The sides are `remote`, `catalog`, `source` and `suspect`. The last is a store that is
mounted in part: its event says `source`, but a batch that could be begun is no end of it.
"""

from __future__ import annotations

import random
import time
from typing import Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff, OutageClock
from ntt_backup.errors import BackupError
from ntt_backup.upload.event_pipe import EventPipe

_REPORTED_AS: Final = {"suspect": "source"}
_SIDES: Final = ("remote", "catalog", "source", "suspect")


class Outages:
    """Counts outages and emits their events. limit: seconds after which an outage is waited out no
    longer; None: it is waited out for ever.
    """

    def __init__(self, pipe: EventPipe, backoff: Backoff, limit: float | None) -> None:
        self._pipe = pipe
        self._clocks = {side: OutageClock(backoff, limit, random.random) for side in _SIDES}

    def away(self, side: str, error: BackupError) -> float:
        """Counts an outage and emits its event; returns the seconds to wait. Raises the error when
        the outage has lasted too long.
        """
        clock = self._clocks[side]
        wait_s = clock.next_wait(time.monotonic())
        if wait_s is None:
            raise error
        self._pipe.emit(
            events.Outage(
                what=_REPORTED_AS.get(side, side),
                reason=error.message,
                detail=error.detail,
                attempt=clock.attempt,
                wait_s=wait_s,
            )
        )
        return wait_s

    def back(self, side: str) -> None:
        """Ends the outage of a side that has answered, if there was one."""
        clock = self._clocks[side]
        if clock.attempt:
            lasted = clock.lasted(time.monotonic())
            self._pipe.emit(events.OutageEnd(what=_REPORTED_AS.get(side, side), duration_s=lasted))
        clock.over()

    def lasts(self, side: str) -> bool:
        """Returns whether the side was away when it was last tried."""
        return self._clocks[side].attempt > 0
