"""The workers of a run: how each is started, heard and stopped, and how many of them start."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from ntt_backup import events
from ntt_backup.catalog.latest_server import LATEST
from ntt_backup.client.backoff import RESTARTS, Backoff, Restarts
from ntt_backup.client.bootstrap import bundle
from ntt_backup.client.compression_level import Effort
from ntt_backup.client.throttle import Limit
from ntt_backup.config import RunSettings, Settings, application_name
from ntt_backup.errors import WorkerFailed
from ntt_backup.model import PendingEstimate
from ntt_backup.process.child import ChildProcess
from ntt_backup.process.memory import SharedNumber
from ntt_backup.process.messages import Fatal, Message, ProcessEnded, Tick
from ntt_backup.upload.event_pipe import NOW
from ntt_backup.upload.worker_main import GO, STOP, WorkerSpec, work

# One more worker pays for so many blobs, or bytes: it costs a quarter of a second of CPU, more than
# it saves of a run that one alone does in two seconds. To a bucket it costs a tenth of that, for it
# has neither ssh nor receiver, and makes one more pack that is not full.
_SHARE_BLOBS: Final = 60_000
_SHARE_BYTES: Final = 800 * 1000**2
_PACK_SHARE_BYTES: Final = 64 * 1024 * 1024
# Dumps and snapshots are sent beside the workers, and under the same limit.
_BESIDE: Final = 3


class SupervisedWorker(ChildProcess):
    """A worker process with a bounded number of restarts.

    due: when the worker is started, in monotonic seconds; None: it runs, or is not to be started.
    stalled: it has said nothing for longer than it may, see `mind_silence`.
    """

    def __init__(self, spec: WorkerSpec, backoff: Backoff) -> None:
        super().__init__()
        self.spec = spec
        self.due: float | None = 0.0
        self.restarts = Restarts(backoff, RESTARTS)
        self.stalled = False
        self._started = self._expected = self._quiet = 0.0
        self._said_goodbye = self._warned = self._spoke = False

    @property
    def worker(self) -> int:
        return self.spec.worker

    def start(self, now: float) -> None:
        """Has the worker work, and starts its process if there is none. now: monotonic seconds."""
        self.due = None
        self._started = self._expected = now
        self.stalled = False
        self.prepare()
        self.tell(GO)

    def prepare(self) -> None:
        """Starts the process early. The process connects to the remote, and waits for `start`."""
        if not self.running:
            if self.spec.settings.remote.runs_receiver:
                bundle()  # Made once, and not by each of the copies.
            self.begin(partial(work, self.spec), f"ntt-worker {self.worker}")
            self._said_goodbye = self._warned = False

    def ask(self, word: bytes, now: float) -> None:
        """Asks a process that probes the remote for one step; `hear` gives the answer."""
        self._started = self._expected = now
        self.tell(word)

    def hear(self) -> Iterator[Message]:
        """Yields the messages of `read_messages`, with the worker's number.

        The end of a worker that said goodbye is not yielded.
        """
        for message in self.read_messages():
            if isinstance(message, bytes):
                yield from self._warn_once(message)
                continue
            if isinstance(message, ProcessEnded):
                if not self._said_goodbye:
                    yield message
                continue
            self._said_goodbye |= isinstance(message, events.WorkerStop | Fatal)
            self._spoke = True
            self._quiet = message.quiet if isinstance(message, Tick) else 0.0
            if isinstance(message, events.WorkerEvent):
                message = replace(message, worker=self.worker)
            yield message

    def mind_silence(self, now: float) -> Iterator[Message]:
        """Yields the events for a worker that is silent for too long.

        The event is `worker_stall`, once, when the worker has said nothing for more than
        `run.stall_timeout` beyond the seconds for which it had announced to be quiet; and
        `worker_stall_end` when the worker speaks again. Messages that wait are no silence: call
        `hear` first.
        """
        if self._process is None:
            return
        pid = self.pid
        silent = now - self._expected
        if self._spoke:
            self._spoke = False
            self._expected = now + self._quiet
            if self.stalled:
                self.stalled = False
                yield events.WorkerStallEnd(pid=pid, worker=self.worker, duration_s=silent)
        elif silent > self.spec.settings.run.stall_timeout and not self.stalled:
            self.stalled = True
            hint = (
                f"`ps -o stat,wchan,args -p {pid}` says what it waits for: T is"
                f" stopped, `kill -CONT {pid}` lets it go on; D is a disk that does not"
                f" answer; `kill -KILL {pid}` has another one do its work, and loses nothing"
            )
            yield events.WorkerStall(pid=pid, worker=self.worker, silent_s=silent, hint=hint)

    def _warn_once(self, line: bytes) -> Iterator[Message]:
        """Yields a warning for the first line that is no message.

        A library may print something, and such a line must not end a backup.
        """
        if not self._warned:
            self._warned = True
            shown = line[:200].decode("utf-8", "backslashreplace")
            reason = f"worker {self.worker} prints what is no event: {shown!r}"
            yield events.Warning(pid=self.pid, worker=self.worker, reason=reason)

    def hurry(self) -> None:
        """Has the worker look for work immediately, or starts a worker that waits for a restart."""
        if self.due is not None:
            self.due = 0.0
        else:
            self.tell(NOW)

    def stop(self) -> None:
        """Asks the worker to finish the batches in flight and to end. It is not started again."""
        self.due = None
        self.tell(STOP)

    def kill(self) -> None:
        """Kills the worker and its child processes immediately. It is not started again."""
        self.due = None
        super().kill()

    def plan_restart(self, death: ProcessEnded, now: float) -> events.WorkerRestart:
        """Counts a restart, sets the time at which the restart is due, and returns its event.

        Raises:
            WorkerFailed: The limit of restarts is reached.
        """
        wait = self.restarts.next_wait(now - self._started)
        if wait is None:
            raise WorkerFailed(
                f"worker {self.worker} died {RESTARTS + 1} times",
                hint="the reason is in the log, in the worker_restart events before this",
            )
        self.due = now + wait
        return events.WorkerRestart(
            worker=self.worker,
            pid=death.pid,
            status=death.status,
            detail=death.detail,
            attempt=self.restarts.count,
            wait_s=wait,
        )


def workers_needed(pending: PendingEstimate, run: RunSettings) -> int:
    """Returns the number of workers that a run should start with.

    Where little is pending, one more Python at both ends and one more ssh between them cost more
    than they save.
    """
    if not pending.exact or pending.unsized:
        return run.workers
    blobs, size = _share(run)
    shares = max(pending.blobs / blobs, pending.bytes / size)
    return max(1, min(run.workers, math.ceil(shares)))


def _share(run: RunSettings) -> tuple[int, int]:
    """Returns the blobs, and the bytes, that pay for one more worker."""
    if run.strategy == "packs":
        return run.batch_size, min(run.batch_bytes, _PACK_SHARE_BYTES)
    return _SHARE_BLOBS, _SHARE_BYTES


class WorkerPool:
    """Holds all workers of a run, not yet started.

    Attributes:
        limit: The limit of the bandwidth of all. It has three more senders behind the workers, for
            side jobs.
        reserve: The workers that are not started while little is pending.
        first: The worker that probes the remote for the preflight.
    """

    def __init__(self, settings: Settings, run_id: str, backoff: Backoff, *, watch: bool) -> None:
        LATEST.begin()
        self._run = run = settings.run
        self._watch = watch
        self.reserve: list[SupervisedWorker] = []
        self._remote = settings.remote
        self.limit = Limit(run.bwlimit, run.workers + _BESIDE)
        self._poll = SharedNumber(run.poll_interval)
        spec = WorkerSpec(
            settings=settings,
            worker=0,
            run_id=run_id,
            application=application_name(),
            strategy=run.strategy,
            watch=watch,
            limit=self.limit,
            poll=self._poll,
            effort=Effort(run.workers),
            turn=SharedNumber(0.0),
            started=time.time(),
        )
        self._workers = [
            SupervisedWorker(replace(spec, worker=worker), backoff) for worker in range(run.workers)
        ]

    def __iter__(self) -> Iterator[SupervisedWorker]:
        return iter(self._workers)

    @property
    def first(self) -> SupervisedWorker:
        return self._workers[0]

    @property
    def busy(self) -> bool:
        return any(worker.running or worker.due is not None for worker in self)

    def hang(self, now: float) -> bool:
        """Returns whether all workers that run have stalled, and none waits for a new start."""
        running = [worker for worker in self if worker.running]
        waits = any(worker.due is not None and worker.due > now for worker in self)
        return bool(running) and not waits and all(worker.stalled for worker in running)

    def begin_probe(self) -> None:
        """Lets the first worker connect to the remote, to probe it for the preflight."""
        self.first.spec = replace(self.first.spec, strategy=self._run.strategy, probes=True)
        self.first.prepare()

    def load_ahead(self, pending: PendingEstimate | None) -> None:
        """Loads the modules for a bucket, unless the first worker remains alone.

        The other workers are copies of this process, and need not load the modules again.
        """
        if self._remote.kind == "s3" and self._needed(pending) > 1:
            from ntt_backup.objects import s3

            s3.load()
            gc.freeze()  # A collection would write to each page that the copies share with us.

    def set_strategy(self, strategy: str, pending: PendingEstimate | None) -> None:
        """Sets the strategy of all workers, and puts those that are not needed into the reserve."""
        needed = self._needed(pending)
        self.reserve = self._workers[needed:]
        for worker in self:
            # A process that probed the remote has found the strategy by itself.
            worker.spec = replace(worker.spec, strategy=strategy, probes=False)
            worker.due = None if worker in self.reserve else 0.0

    def start_reserve(self, pending: int | None, now: float) -> None:
        """Starts the reserve when more is pending than the others were started for."""
        at_work = len(self._workers) - len(self.reserve)
        if self.reserve and pending is not None and pending > at_work * _share(self._run)[0]:
            self.load_ahead(None)
            for worker in self.reserve:
                worker.due = now
            self.reserve = []

    def adopt(self, run: RunSettings) -> None:
        """Lets the workers go on with settings that were read again."""
        if run.poll_interval != self._poll.value:
            self._poll.value = run.poll_interval
            self.hurry()

    def _needed(self, pending: PendingEstimate | None) -> int:
        if pending is None or self._watch:
            return len(self._workers)
        return workers_needed(pending, self._run)

    def hurry(self) -> None:
        """Has all workers look for work immediately, whatever they wait for."""
        for worker in self:
            worker.hurry()

    def stop(self) -> None:
        """Asks all workers to finish the batches in flight and to end. None is started again."""
        self.reserve = []
        for worker in self:
            worker.stop()

    def kill(self) -> None:
        for worker in self:
            worker.kill()
