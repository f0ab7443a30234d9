"""How fast work goes, and how long the rest of it will take. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections import deque


class RateWindow:
    """Amounts over the last `span` seconds, in constant memory: one bucket a second."""

    def __init__(self, span: float = 60.0) -> None:
        self._span = span
        self._buckets: deque[tuple[float, float]] = deque()
        self._total = 0.0
        self._start: float | None = None

    def add(self, now: float, amount: float) -> None:
        if self._start is None:
            self._start = now
        self._expire(now)
        self._total += amount
        if self._buckets and now - self._buckets[-1][0] < 1.0:
            start, before = self._buckets[-1]
            self._buckets[-1] = (start, before + amount)
        else:
            self._buckets.append((now, amount))

    def rate(self, now: float) -> float:
        """Returns the amount a second over the span, or since the first amount."""
        if self._start is None:
            return 0.0
        self._expire(now)
        return self._total / max(1.0, min(self._span, now - self._start))

    def _expire(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] > self._span:
            self._total -= self._buckets.popleft()[1]


def eta_seconds(left: float, done: float, elapsed_s: float) -> float | None:
    """Returns the seconds until what is left (bytes, or blobs) is done at the pace so far; None in
    the first quarter of a second, and while nothing is done.

    Blobids are hashes, so the blobs that are done are a fair sample of those to come.
    """
    if elapsed_s < 0.25:
        return None
    if left == 0:
        return 0.0
    if done == 0:
        return None
    return left * elapsed_s / done
