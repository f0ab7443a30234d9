"""What a run has done so far, as told by its workers' events; what the log and the screen show of
it.

Pure: fed with events and the time, asked for figures. The number of pending blobs is not known at
the start, because counting 42 million rows takes longer than most runs; the coordinator counts
range by range beside the work, over and over (`count_range`), since other programs insert rows
meanwhile. Until the first count is complete, `pending` and the ETA are None. A daemon that waited
for hours is no slower for it: the ETA goes by the pace since there was work again.

Called by `coordinator`, which feeds a `View`; the views are in `console`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ntt_backup.planner import RANGES, RateWindow, eta_seconds


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker at a moment. state: starting, sending, waiting, idle, outage, stopped."""

    index: int
    state: str
    batch: str
    copied: int
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at a moment. Bytes and seconds; mb_per_s is 10^6 bytes a second over the last
    minute.
    """

    elapsed_s: float
    copied: int
    failed: int
    pending: int | None
    bytes: int
    mb_per_s: float
    blobs_per_s: float
    eta_s: float | None
    workers: tuple[WorkerLine, ...]

    @property
    def active_workers(self) -> int:
        return sum(1 for worker in self.workers if worker.state in ("sending", "waiting"))


class View(Protocol):
    """Shows a run. `event` takes what goes into the log, `refresh` the figures of the moment."""

    def event(self, event: Mapping[str, Any]) -> None: ...
    def refresh(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Worker:
    state: str = "starting"
    batch: str = ""
    copied: int = 0
    rate: RateWindow = field(default_factory=lambda: RateWindow(10.0))


class Progress:
    """Adds up a run. Times are monotonic seconds.

    out_of_date: work has begun or ended since the last count was begun, so another should be.
    """

    def __init__(self, started: float, workers: int) -> None:
        self._started = started
        self._workers = [_Worker() for _ in range(workers)]
        self._bytes_rate = RateWindow()
        self._blobs_rate = RateWindow()
        self._counted = 0
        self._sum = 0
        self._pending_then: int | None = None
        self._settled_then = 0
        self._work_since = (started, 0)
        self.out_of_date = False
        self.copied = 0
        self.failed = 0
        self.bytes = 0

    def event(self, index: int, event: Mapping[str, Any], now: float) -> None:
        """Take in one event of the worker with this index."""
        worker = self._workers[index]
        match event["event"]:
            case "tick":
                self._turn(worker, event["state"], now)
                worker.rate.add(now, event["sent"])
                self._bytes_rate.add(now, event["sent"])
            case "batch_complete":
                worker.batch = event["batch"]
                worker.copied += event["copied"]
                self.copied += event["copied"]
                self.failed += event["failed"]
                self.bytes += event["bytes"]
                self._blobs_rate.add(now, event["copied"] + event["failed"])
            case "worker_start":
                worker.state = "starting"
            case "worker_stop":
                worker.state = "stopped"

    def _turn(self, worker: _Worker, state: str, now: float) -> None:
        """Note what the worker does now, and whether with it work begins or ends for all."""
        idle = self._all_idle
        worker.state = state
        if self._all_idle is idle:
            return
        self.out_of_date = True
        if idle:
            self._work_since = (now, self._settled)

    @property
    def _all_idle(self) -> bool:
        return all(worker.state == "idle" for worker in self._workers)

    @property
    def next_range(self) -> int:
        """The index of the range to count next."""
        return self._counted

    def count_range(self, pending: int) -> bool:
        """Take in the number of pending blobs of that range; whether that completes a count.

        What is settled while a count goes on may be in it or not: the figure is that much too high
        until the next count.
        """
        if self._counted == 0:
            self.out_of_date = False
        self._counted += 1
        self._sum += pending
        if self._counted < RANGES:
            return False
        self._pending_then, self._settled_then = self._sum, self._settled
        self._counted = self._sum = 0
        return True

    @property
    def _settled(self) -> int:
        return self.copied + self.failed

    @property
    def pending(self) -> int | None:
        """Blobs still to send; None until the first count is complete."""
        if self._pending_then is None:
            return None
        return max(0, self._pending_then - (self._settled - self._settled_then))

    def snapshot(self, now: float) -> Snapshot:
        """The figures of this moment."""
        since, settled_before = self._work_since
        return Snapshot(
            elapsed_s=now - self._started,
            copied=self.copied,
            failed=self.failed,
            pending=self.pending,
            bytes=self.bytes,
            mb_per_s=self._bytes_rate.rate(now) / 1e6,
            blobs_per_s=self._blobs_rate.rate(now),
            eta_s=eta_seconds(self.pending, self._settled - settled_before, now - since),
            workers=tuple(
                WorkerLine(index, one.state, one.batch, one.copied, one.rate.rate(now) / 1e6)
                for index, one in enumerate(self._workers)
            ),
        )
