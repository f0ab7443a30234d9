"""The waits before another attempt, the limits of an outage and of restarts, and their events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ntt_backup.config import RunSettings
from ntt_backup.errors import BackupError

if TYPE_CHECKING:
    from ntt_backup import events

# The restarts in a row of a process that must not die.
RESTARTS: Final = 5
# After a life of this length the restarts before it do not count.
SOUND_SECONDS: Final = 600.0
_REPORTED_AS: Final = {"suspect": "source"}
_SIDES: Final = ("remote", "catalog", "source", "suspect", "preflight")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter: uniform in (0, min(cap, base * 2**(n-1))].

    All workers lose the same link at the same moment, and must not retry at the same moment. A wait
    is at least a tenth of its ceiling.

    Attributes:
        base: The ceiling of the first wait in seconds.
        cap: The ceiling of all waits in seconds.
    """

    base: float
    cap: float

    @staticmethod
    def of(run: RunSettings) -> Backoff:
        """Returns the backoff of the settings."""
        return Backoff(run.backoff_base, run.backoff_cap)

    def wait(self, attempt: int, random: Callable[[], float]) -> float:
        """Returns the seconds to wait. attempt: counted from 1; random: uniform in [0, 1)."""
        ceiling = min(self.cap, self.base * 2.0 ** min(attempt - 1, 60))
        return ceiling * (0.1 + 0.9 * random())


class OutageClock:
    """The waits while a side is unreachable.

    After `limit` seconds since the first failure `next_wait` returns None. random: see
    `Backoff.wait`.
    """

    def __init__(self, backoff: Backoff, limit: float | None, random: Callable[[], float]) -> None:
        self._backoff = backoff
        self._limit = limit
        self._random = random
        self._since: float | None = None
        self.attempt = 0

    @staticmethod
    def of(run: RunSettings) -> OutageClock:
        """Returns the clock of a command, with the limit of the settings."""
        return OutageClock(Backoff.of(run), run.outage_timeout, random.random)

    def next_wait(self, now: float) -> float | None:
        """Counts a failure. Returns the seconds to wait, or None after the limit."""
        if self._since is None:
            self._since = now
        if self._limit is not None and now - self._since >= self._limit:
            return None
        self.attempt += 1
        return self._backoff.wait(self.attempt, self._random)

    def lasted(self, now: float) -> float:
        """Returns the seconds since the outage began; 0 if there is none."""
        return 0.0 if self._since is None else now - self._since

    def over(self) -> None:
        """Ends the outage: the next failure begins another one."""
        self.answered()
        self.attempt = 0

    def answered(self) -> None:
        """Restarts the limit: the side answered, but no work was done, so the waits still grow."""
        self._since = None


class Restarts:
    """Says when a process that failed is started again: each failure in a row doubles the wait.

    most: the number of restarts in a row. jitter: see `Backoff.wait`.
    """

    def __init__(
        self, backoff: Backoff, most: int | None = None, jitter: Callable[[], float] = random.random
    ) -> None:
        self.count = 0
        self._backoff = backoff
        self._most = most
        self._jitter = jitter

    def next_wait(self, lived_s: float = 0.0) -> float | None:
        """Counts a failure after a life of some seconds.

        Returns the seconds until the next start; None where there were too many restarts.
        """
        if lived_s > SOUND_SECONDS:
            self.count = 0
        if self.count == self._most:
            return None
        self.count += 1
        return self._backoff.wait(self.count, self._jitter)


class Outages:
    """Counts the outages of each side of a process, and emits their events.

    The sides are those of `events.Outage`, and `suspect`: a store that is mounted in part. Its
    event says `source`, but a batch that can be begun does not end it. limit: the seconds after
    which an outage is waited out no longer; None: it is waited out for ever.
    """

    def __init__(
        self, emit: Callable[[events.Event], None], backoff: Backoff, limit: float | None
    ) -> None:
        self._emit = emit
        self._clocks = {side: OutageClock(backoff, limit, random.random) for side in _SIDES}

    def away(self, side: str, error: BackupError) -> float:
        """Counts an outage and emits its event; returns the seconds to wait.

        Raises the error when the outage has lasted too long.
        """
        clock = self._clocks[side]
        wait_s = clock.next_wait(time.monotonic())
        if wait_s is None:
            raise error
        from ntt_backup import events  # Commands that only wait for a session have none.

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
            from ntt_backup import events

            lasted = clock.lasted(time.monotonic())
            self._emit(events.OutageEnd(what=_REPORTED_AS.get(side, side), duration_s=lasted))
        clock.over()
        return ends

    def lasts(self, side: str) -> bool:
        """Returns whether the side was away when it was last tried."""
        return self._clocks[side].attempt > 0
