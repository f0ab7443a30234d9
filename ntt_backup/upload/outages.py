"""The outages of a process: each side that may be away has a clock, and its outages are events.

The sides are those of `events.Outage`, and `suspect`. That is a store that is mounted in part: its
event says `source`, but a batch that can be begun does not end it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff, OutageClock
from ntt_backup.errors import BackupError

_REPORTED_AS: Final = {"suspect": "source"}
_SIDES: Final = ("remote", "catalog", "source", "suspect", "preflight")


class Outages:
    """Counts outages and emits their events. limit: seconds after which an outage is waited out no
    longer; None: it is waited out for ever.
    """

    def __init__(
        self, emit: Callable[[events.Event], None], backoff: Backoff, limit: float | None
    ) -> None:
        self._emit = emit
        self._clocks = {side: OutageClock(backoff, limit, random.random) for side in _SIDES}

    def away(self, side: str, error: BackupError) -> float:
        """Counts an outage and emits its event; returns the seconds to wait. Raises the error when
        the outage has lasted too long.
        """
        clock = self._clocks[side]
        wait_s = clock.next_wait(time.monotonic())
        if wait_s is None:
            raise error
        self._emit(
            events.Outage(
                what=_REPORTED_AS.get(side, side),
                reason=error.message,
                detail=error.detail,
                attempt=clock.attempt,
                wait_s=wait_s,
            )
        )
        return wait_s

    def back(self, side: str) -> bool:
        """Ends the outage of a side that has answered; returns whether there was one."""
        clock = self._clocks[side]
        ends = self.lasts(side)
        if ends:
            lasted = clock.lasted(time.monotonic())
            self._emit(events.OutageEnd(what=_REPORTED_AS.get(side, side), duration_s=lasted))
        clock.over()
        return ends

    def lasts(self, side: str) -> bool:
        """Returns whether the side was away when it was last tried."""
        return self._clocks[side].attempt > 0
