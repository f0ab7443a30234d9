"""These rules say how long to wait before another attempt, and when to give up. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ntt_backup.config import RunSettings


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with full jitter, in seconds: uniform in (0, min(cap, base * 2**(n-1))].

    All workers lose the same link at the same moment and must not come back at the same moment. A
    tenth of the ceiling is kept as a floor, so that no wait is zero.
    """

    base: float
    cap: float

    @staticmethod
    def of(run: RunSettings) -> Backoff:
        """Returns that of the settings."""
        return Backoff(run.backoff_base, run.backoff_cap)

    def wait(self, attempt: int, random: Callable[[], float]) -> float:
        """Returns the seconds to wait. attempt counts from 1; random() is uniform in [0, 1)."""
        ceiling = min(self.cap, self.base * 2.0 ** min(attempt - 1, 60))
        return ceiling * (0.1 + 0.9 * random())


class OutageClock:
    """Says how long to wait while a side is unavailable, and when to stop waiting.

    limit: seconds since the first failure after which `next_wait` returns None; None: never.
    """

    def __init__(self, backoff: Backoff, limit: float | None, random: Callable[[], float]) -> None:
        self._backoff = backoff
        self._limit = limit
        self._random = random
        self._since: float | None = None
        self.attempt = 0

    @staticmethod
    def of(run: RunSettings) -> OutageClock:
        """Returns that of a command, which waits no longer than the settings say."""
        return OutageClock(Backoff.of(run), run.outage_timeout, random.random)

    def next_wait(self, now: float) -> float | None:
        """Counts a failure; returns the seconds to wait, or None when the limit has passed."""
        if self._since is None:
            self._since = now
        if self._limit is not None and now - self._since >= self._limit:
            return None
        self.attempt += 1
        return self._backoff.wait(self.attempt, self._random)

    def lasted(self, now: float) -> float:
        """Returns the seconds since the outage began; 0 where there is none."""
        return 0.0 if self._since is None else now - self._since

    def over(self) -> None:
        """Ends the outage: the next failure begins a new one."""
        self.answered()
        self.attempt = 0

    def answered(self) -> None:
        """Counts the limit anew: the side answered, but no work was done, so waits keep growing."""
        self._since = None
