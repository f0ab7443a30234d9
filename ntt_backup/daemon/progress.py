"""The progress and the outages of a run are known from its messages, for all who hear of the run.

Pure: it takes in messages and the time, and returns snapshots. The number of pending blobs comes
from the catalog, at the start and again during the work, since other programs insert rows: counted,
or estimated where a count takes too long (`found`). Until then `pending` and the ETA are None. Once
a worker has seen the catalog without a pending blob it is 0, whatever was found before.

Share and ETA go by content, and count content that was sent but is not answered yet: a batch may be
in flight for half a minute. Both begin anew with each burst of work, so that a daemon that waited
for hours is no slower for it. The sums (`copied`, `failed`, `bytes`) are of answered batches alone.

An outage of a side begins with the first failure that any worker or side job reports, and ends with
the first success of any of them. The end of the run ends all of its outages. An outage that was
reported by workers alone that have ended is dropped: nobody waits any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

from ntt_backup import events
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.errors import SOME_FAILED, BackupError, Stopped
from ntt_backup.model import PendingEstimate
from ntt_backup.process.messages import BatchStart, Drained, Fatal, Message, ProcessEnded, Tick

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
_TOLD: Final = tuple(one.name for one in fields(events.Progress) if one.name != "pid")
_NOT_AT_WORK = ("starting", "idle", "stopped")
_NOT_ALL = 0.999  # What is sent is not done before the answer.
_FIRST_SECONDS = 0.25  # They say nothing of the pace.


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of one worker at one moment. state: one of `STATES`."""

    worker: int
    state: str
    batch: str
    copied: int
    mb_per_s: float


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run at one moment.

    Attributes:
        estimated: Whether pending, share and eta_s are estimates.
        sent: The bytes of content that were sent, answered or not.
        done: The settled blobs of the present burst of work.
        share: The part of the content of this burst that was sent, from 0 to 1, and below 1 while
            blobs are pending. None if nothing is pending or done, or if pending is not known.
        mb_per_s: The speed on the link over the last minute, in 10^6 bytes a second.
        paused: Whether a user has paused the run.
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
        return asdict(self)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        workers = tuple(WorkerStatus(**one) for one in fields["workers"])
        return cls(**{**fields, "workers": workers})

    def event(self) -> events.Progress:
        """Returns the event that says the same."""
        said = {name: getattr(self, name) for name in _TOLD}
        return events.Progress(**said | {"eta_s": self.eta_s and round(self.eta_s, 1)})

    def outcome(self, error: BackupError | None, jobs_failed: Sequence[str]) -> tuple[str, int]:
        """Returns the outcome and the exit code of a run that ends in this state.

        error: the error that ends the run, or None; jobs_failed: the names of the failed side jobs.
        """
        if error is not None:
            return "stopped" if isinstance(error, Stopped) else "error", error.exit_code
        if self.failed:
            return "some_failed", SOME_FAILED
        return (f"{jobs_failed[0]}_failed", SOME_FAILED) if jobs_failed else ("done", 0)

    def end(self, outcome: str, exit_code: int, young: int) -> events.RunStop:
        return events.RunStop(
            outcome=outcome,
            exit_code=exit_code,
            copied=self.copied,
            failed=self.failed,
            bytes=self.bytes,
            duration_s=self.elapsed_s,
            young=young,
        )


class RateWindow:
    """Amounts over the last `span` seconds, in constant memory: one bucket a second."""

    def __init__(self, span: float = 60.0) -> None:
        self._span = span
        self._buckets: deque[tuple[float, float]] = deque(maxlen=int(span) + 2)
        self._start: float | None = None

    def add(self, now: float, amount: float) -> None:
        if self._start is None:
            self._start = now
        if self._buckets and now - self._buckets[-1][0] < 1.0:
            now, before = self._buckets.pop()
            amount += before
        self._buckets.append((now, amount))

    def rate(self, now: float) -> float:
        """Returns the amount a second over the span, or since the first amount."""
        if self._start is None:
            return 0.0
        total = sum(amount for at, amount in self._buckets if now - at <= self._span)
        return total / max(1.0, min(self._span, now - self._start))


@dataclass(slots=True)
class _Worker:
    """The state of a worker, according to its messages.

    Attributes:
        in_flight: The bytes of content that were sent and are in no sum yet. The number is below
            zero for a moment if the answer arrives before the message about the last bytes.
    """

    state: str = "starting"
    batch: str = ""
    copied: int = 0
    in_flight: int = 0
    stalled: bool = False
    rate: RateWindow = field(default_factory=lambda: RateWindow(10.0))

    def restart(self, state: str) -> None:
        self.state, self.in_flight, self.stalled = state, 0, False

    def status(self, worker: int, now: float, *, paused: bool) -> WorkerStatus:
        state = "stalled" if self.stalled else self.state
        state = "paused" if paused and state == "sending" else state
        return WorkerStatus(worker, state, self.batch, self.copied, self.rate.rate(now) / 1e6)


class _Settled(NamedTuple):
    """Holds what was settled up to a moment; bytes are of what was copied."""

    copied: int = 0
    failed: int = 0
    bytes: int = 0

    @property
    def blobs(self) -> int:
        return self.copied + self.failed


class RunProgress:
    """Adds up the progress of a run. Times are monotonic seconds.

    Attributes:
        at_work: Whether some worker has something to do.
        out_of_date: Whether the last number of pending blobs is no longer reliable.
    """

    def __init__(self, started: float, workers: int) -> None:
        self._started = started
        self._workers = [_Worker() for _ in range(workers)]
        self._bytes_rate = RateWindow()
        self._blobs_rate = RateWindow()
        self._found: PendingEstimate | None = None
        self._settled_then = _Settled()
        self.at_work = False
        self._work_since = started
        self._before = _Settled()
        self._begun_blobs = 0
        self._begun_bytes = 0
        self.out_of_date = False
        self._held_since: float | None = None
        self.copied = 0
        self.failed = 0
        self.bytes = 0

    def take(self, worker: int, message: Message, now: float) -> None:
        one = self._workers[worker]
        match message:
            case Tick():
                self._change_state(one, message.state, now)
                one.rate.add(now, message.sent)
                one.in_flight += message.content
                self._bytes_rate.add(now, message.sent)
            case BatchStart():
                one.batch = message.batch
                self._begun_blobs += message.blobs
                self._begun_bytes += message.bytes
                if not self.pending:
                    self.out_of_date = True
            case events.BatchComplete():
                one.copied += message.copied
                one.in_flight -= message.bytes
                self.copied += message.copied
                self.failed += message.failed
                self.bytes += message.bytes
                self._blobs_rate.add(now, message.copied + message.failed)
            case events.FileFailed():
                self.failed += 1
            case events.MarksLost():
                one.copied -= message.blobs
                self.copied -= message.blobs
                self.bytes -= message.bytes
            case Drained():
                self.found(PendingEstimate(0, 0, 0, exact=True))
            case events.WorkerStart():
                one.restart("starting")
            case events.WorkerStop() | ProcessEnded() | Fatal():
                one.restart("stopped")
            case events.WorkerStall():
                one.stalled = True
            case events.WorkerStallEnd():
                one.stalled = False

    def hold(self, now: float) -> None:
        """Notes that all is held back from now on."""
        self._held_since = now

    def go_on(self, now: float) -> float:
        """Ends a pause, which counts for no pace of the work. Returns its length in seconds."""
        since = now if self._held_since is None else self._held_since
        self._held_since = None
        self._work_since += now - max(since, self._work_since)  # Work may have begun meanwhile.
        return now - since

    @property
    def paused(self) -> bool:
        return self._held_since is not None

    def _change_state(self, one: _Worker, state: str, now: float) -> None:
        """Sets the state of a worker; notes when the first worker begins or the last one ends."""
        one.state = state
        if state == "idle":
            one.batch = ""
        if not self.at_work and state not in _NOT_AT_WORK:
            self.at_work = True
            self._work_since, self._before = now, self._settled
            if not self.pending:
                self._found = None
                self.out_of_date = True
        elif self.at_work and all(worker.state == "idle" for worker in self._workers):
            self.at_work = False
            self.out_of_date = self.pending != 0

    def found(self, estimate: PendingEstimate) -> None:
        """Records an estimate of the blobs that are pending at this moment.

        An estimate that was not counted does not replace a number that still holds: two estimates
        may differ by more than the blobs that arrived meanwhile.
        """
        if estimate.exact or self.out_of_date or self.pending is None:
            self._found, self._settled_then = estimate, self._settled
        self.out_of_date = False

    @property
    def _settled(self) -> _Settled:
        return _Settled(self.copied, self.failed, self.bytes)

    @property
    def pending(self) -> int | None:
        """The number of blobs still to send; None while that is not known."""
        found = self._found
        if found is None:
            return None
        left = found.blobs + self._settled_then.blobs - self._settled.blobs
        if left <= 0 and not found.exact:
            return None  # The estimate was too low, nobody knows by how much.
        return max(0, left)

    @property
    def _in_flight(self) -> int:
        return sum(worker.in_flight for worker in self._workers)

    @property
    def _done(self) -> int:
        return self._settled.blobs - self._before.blobs

    @property
    def _mean_size(self) -> float:
        """The mean size in bytes of the blobs that were begun; since blobids are hashes, of all."""
        return self._begun_bytes / self._begun_blobs if self._begun_blobs else 0.0

    def _content_since(self, then: _Settled) -> float:
        """Returns the content that was settled since then; failed blobs have no known size."""
        return self.bytes - then.bytes + (self.failed - then.failed) * self._mean_size

    def _share_and_eta(self, now: float) -> tuple[float | None, float | None]:
        """Returns share and ETA by bytes, or by blobs where all are empty."""
        pending, found = self.pending, self._found
        if found is None or pending is None:
            return None, None
        if not pending:
            return (1.0 if self._done else None), 0.0
        done = max(0.0, self._content_since(self._before) + self._in_flight)
        known = found.bytes + found.unsized * self._mean_size
        left = max(0.0, known - self._content_since(self._settled_then) - self._in_flight)
        if not done and not left:
            done, left = float(self._done), float(pending)
        share = min(done / (done + left), _NOT_ALL)
        elapsed = now - self._work_since
        if not self.at_work or not done or elapsed < _FIRST_SECONDS:
            return share, None
        return share, left * elapsed / done

    def stopping(self, signum: int, now: float) -> events.Stopping:
        """Returns the event of a stop, which says what the run still waits for."""
        left, rate = max(0, self._in_flight), self._bytes_rate.rate(now)
        return events.Stopping(
            signal=signum,
            within_s=left / rate if rate else None,
            workers=sum(one.state not in _NOT_AT_WORK for one in self._workers),
            bytes=left,
        )

    def state(self, now: float) -> RunState:
        """Returns the run at this moment; without an ETA where nothing has moved for a minute."""
        share, eta_s = self._share_and_eta(now)
        mb_per_s, blobs_per_s = self._bytes_rate.rate(now) / 1e6, self._blobs_rate.rate(now)
        pending, found = self.pending, self._found
        moves = (mb_per_s or blobs_per_s) and not self.paused
        return RunState(
            elapsed_s=now - self._started,
            copied=self.copied,
            failed=self.failed,
            pending=pending,
            estimated=pending is not None and found is not None and not found.exact,
            bytes=self.bytes,
            sent=self.bytes + self._in_flight,
            done=self._done,
            share=share,
            mb_per_s=mb_per_s,
            blobs_per_s=blobs_per_s,
            eta_s=eta_s if not pending or moves else None,
            workers=tuple(
                one.status(number, now, paused=self.paused)
                for number, one in enumerate(self._workers)
            ),
            paused=self.paused,
        )


class OpenOutage(NamedTuple):
    """An outage that has not ended, as one worker reports it.

    since: the time of the first failure, by the clock of the object that keeps the outage; event:
    the last outage event of the worker.
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
        """Records that a side has accepted a connection. Returns whether it is the first one.

        A connection is not yet work that was done: only such work ends the outage, but the outage
        then counts as over since the connection.
        """
        if what not in self._began or what in self._connected:
            return False
        self._connected[what] = now
        return True

    def lasted(self, what: str, now: float) -> float | None:
        """Returns the seconds for which a side was unreachable, up to its answer or to now.

        None if the side has no outage.
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
        return set(self._began)

    def _drop(self, keys: list[tuple[str, int | None]]) -> None:
        for key in keys:
            del self._open[key]
        left = {side for side, _ in self._open}
        for side in self._began.keys() - left:
            del self._began[side]
            self._connected.pop(side, None)
