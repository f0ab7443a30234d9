"""What a run has done so far, as told by its workers' events; what the log and the screen show of
it.

Pure: fed with events and the time, asked for figures. What is pending is found by the coordinator
at the start and again beside the work, since other programs insert rows meanwhile: counted, or
estimated where that takes too long (`found`). Before that `pending` and the ETA are None. A worker
that sees the catalog without a pending blob says so, and then it is 0, whatever was found before.

Share and ETA go by content, also by what was sent and is not answered yet: a batch may be under way
for half a minute. Both begin anew with each burst of work, so a daemon that waited for hours is no
slower for it. Sums (`copied`, `failed`, `bytes`) are of receipts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ntt_backup.planner import RateWindow, eta_seconds

_NOT_AT_WORK = ("starting", "idle", "stopped")
_NOT_ALL = 0.999  # What is sent is not done before the answer.


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker at a moment. state: starting, sending, waiting, idle, outage, stalled, stopped."""

    index: int
    state: str
    batch: str
    copied: int
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at a moment. Bytes and seconds; mb_per_s is 10^6 bytes a second over the last
    minute, on the link.

    estimated: pending was not counted; it, and what rests on it, is about right. sent: content that
    was sent, answered or not. Of the work since nothing was pending last: done are the blobs that
    are settled, share is how much of the content was sent, below 1 while blobs are pending; None
    where nothing is known to be pending or done.
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
    workers: tuple[WorkerLine, ...]

    def says_more_than(self, other: Snapshot | None) -> bool:
        """Whether there is work, or anything has changed but speeds, which only fade."""
        states = {worker.state for worker in self.workers}
        return other is None or bool(states - {"idle"}) or self._sums != other._sums

    @property
    def _sums(self) -> tuple[int, int, int | None, int]:
        return self.copied, self.failed, self.pending, self.active_workers

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the event `progress`."""
        return {
            "copied": self.copied,
            "failed": self.failed,
            "pending": self.pending,
            "estimated": self.estimated,
            "bytes": self.bytes,
            "mb_per_s": round(self.mb_per_s, 3),
            "blobs_per_s": round(self.blobs_per_s, 3),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
            "active_workers": self.active_workers,
        }

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
    """under_way: content that was sent and is in no sum yet. It may be below zero for a moment:
    a batch may be told of before the last of its bytes.
    """

    state: str = "starting"
    batch: str = ""
    copied: int = 0
    under_way: int = 0
    stalled: bool = False
    rate: RateWindow = field(default_factory=lambda: RateWindow(10.0))

    def line(self, index: int, now: float) -> WorkerLine:
        """What is shown of it at this moment."""
        state = "stalled" if self.stalled else self.state
        return WorkerLine(index, state, self.batch, self.copied, self.rate.rate(now) / 1e6)


class _Sums(NamedTuple):
    """What was settled up to a moment; bytes are of what was copied."""

    copied: int = 0
    failed: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    """What was pending when so much had been settled."""

    blobs: int
    bytes: int
    unsized: int
    exact: bool
    settled: _Sums


class Progress:
    """Adds up a run. Times are monotonic seconds.

    at_work: some worker has something to do. out_of_date: what was last found to be pending tells
    little now, so it should be looked at anew.
    """

    def __init__(self, started: float, workers: int) -> None:
        self._started = started
        self._workers = [_Worker() for _ in range(workers)]
        self._bytes_rate = RateWindow()
        self._blobs_rate = RateWindow()
        self._found: _Found | None = None
        self.at_work = False
        self._work_since = started
        self._before = _Sums()
        self._begun_blobs = 0
        self._begun_bytes = 0
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
                worker.under_way += event["content"]
                self._bytes_rate.add(now, event["sent"])
            case "batch_start":
                worker.batch = event["batch"]
                self._begun_blobs += event["blobs"]
                self._begun_bytes += event["bytes"]
                if not self.pending:
                    self.out_of_date = True
            case "batch_complete":
                worker.copied += event["copied"]
                worker.under_way -= event["bytes"]
                self.copied += event["copied"]
                self.failed += event["failed"]
                self.bytes += event["bytes"]
                self._blobs_rate.add(now, event["copied"] + event["failed"])
            case "drained":
                self.found(0, 0, 0, exact=True)
            case "worker_start":
                worker.state, worker.under_way, worker.stalled = "starting", 0, False
            case "worker_stop" | "worker_died" | "fatal":
                worker.state, worker.under_way, worker.stalled = "stopped", 0, False
            case "worker_stall":
                worker.stalled = True
            case "worker_stall_end":
                worker.stalled = False

    def _turn(self, worker: _Worker, state: str, now: float) -> None:
        """Note what the worker does now, and whether with it work begins or ends for all."""
        worker.state = state
        if state == "idle":
            worker.batch = ""
        if not self.at_work and state not in _NOT_AT_WORK:
            self.at_work = True
            self._work_since, self._before = now, self._settled
            if not self.pending:
                self._found = None
                self.out_of_date = True
        elif self.at_work and all(one.state == "idle" for one in self._workers):
            self.at_work = False
            self.out_of_date = self.pending != 0

    def found(self, blobs: int, bytes_: int, unsized: int, *, exact: bool) -> None:
        """Take in how much is pending at this moment: blobs, the bytes of those with a known size,
        and how many have none. exact: it was counted. An estimate takes the place of nothing that
        still holds: two of them may differ by more than what came meanwhile.
        """
        if exact or self.out_of_date or self.pending is None:
            self._found = _Found(blobs, bytes_, unsized, exact, self._settled)
        self.out_of_date = False

    @property
    def _settled(self) -> _Sums:
        return _Sums(self.copied, self.failed, self.bytes)

    @property
    def pending(self) -> int | None:
        """Blobs still to send; None while that is not known."""
        found = self._found
        if found is None:
            return None
        left = found.blobs + found.settled.copied + found.settled.failed - self.copied - self.failed
        if left <= 0 and not found.exact:
            return None  # It was too low; how much, is not known.
        return max(0, left)

    @property
    def _under_way(self) -> int:
        return sum(worker.under_way for worker in self._workers)

    @property
    def _mean(self) -> float:
        """The mean size of the blobs that were begun: those to come are like them, since blobids
        are hashes.
        """
        return self._begun_bytes / self._begun_blobs if self._begun_blobs else 0.0

    def _content_since(self, then: _Sums) -> float:
        """How much content was settled since then; of failed blobs the size is not told."""
        return self.bytes - then.bytes + (self.failed - then.failed) * self._mean

    def _amounts(self, found: _Found, pending: int) -> tuple[float, float]:
        """What of this burst of work is done, and what is left: bytes, or blobs without content."""
        done = max(0.0, self._content_since(self._before) + self._under_way)
        known = found.bytes + found.unsized * self._mean
        left = max(0.0, known - self._content_since(found.settled) - self._under_way)
        return (done, left) if done or left else (float(self._done), float(pending))

    @property
    def _done(self) -> int:
        return self.copied + self.failed - self._before.copied - self._before.failed

    def _outlook(self, now: float) -> tuple[float | None, float | None]:
        """The share that is done, and the seconds that are left."""
        pending = self.pending
        if self._found is None or pending is None:
            return None, None
        if not pending:
            return (1.0 if self._done else None), 0.0
        done, left = self._amounts(self._found, pending)
        share = min(done / (done + left), _NOT_ALL)
        if not self.at_work:
            return share, None
        return share, eta_seconds(left, done, now - self._work_since)

    def snapshot(self, now: float) -> Snapshot:
        """The figures of this moment. Where nothing has moved for a minute, nobody knows how long
        the rest will take.
        """
        share, eta_s = self._outlook(now)
        mb_per_s, blobs_per_s = self._bytes_rate.rate(now) / 1e6, self._blobs_rate.rate(now)
        moves = mb_per_s or blobs_per_s or not self.pending
        return Snapshot(
            elapsed_s=now - self._started,
            copied=self.copied,
            failed=self.failed,
            pending=self.pending,
            estimated=self.pending is not None
            and self._found is not None
            and not self._found.exact,
            bytes=self.bytes,
            sent=self.bytes + self._under_way,
            done=self._done,
            share=share,
            mb_per_s=mb_per_s,
            blobs_per_s=blobs_per_s,
            eta_s=eta_s if moves else None,
            workers=tuple(one.line(index, now) for index, one in enumerate(self._workers)),
        )
