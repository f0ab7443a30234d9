"""The pool of a run's workers: how many start, by which strategy, and which wait in reserve."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ntt_backup.client.backoff import Backoff
from ntt_backup.client.effort import Effort
from ntt_backup.client.throttle import Limit
from ntt_backup.config import RunSettings, Settings, identity
from ntt_backup.daemon.workers.supervisor import SupervisedWorker
from ntt_backup.model import PendingEstimate
from ntt_backup.process.shared import SharedNumber
from ntt_backup.upload.worker_main import WorkerSpec

# One more worker pays for a batch, or for so many bytes; in a bucket it makes one more pack that is
# not full.
_SHARE: Final = 4 * 1024 * 1024
_PACK_SHARE: Final = 64 * 1024 * 1024
# A worker costs a quarter of a second of CPU, more than it saves of a short run: on two cores one
# alone is the quickest for 600 MB, or for 40,000 small blobs. So one more follows after this time,
# and the rest after twice as long; at once where those before it need this time by any link. To a
# bucket it costs a tenth of that, for it has neither ssh nor receiver, and has a pack to make.
_HEAD_START: Final = 2.0
# What one worker does in a second where no link slows it down.
_BLOBS_A_SECOND: Final = 30_000
_BYTES_A_SECOND: Final = 400_000_000
# Dumps and snapshots are sent beside the workers, and under the same limit.
_BESIDE: Final = 2


def workers_needed(pending: PendingEstimate, run: RunSettings) -> int:
    """Returns the number of workers that a run should start with. Where little is pending, one more
    Python at both ends and one more ssh between them cost more than they save.
    """
    if not pending.exact or pending.unsized:
        return run.workers
    size = min(run.batch_bytes, _PACK_SHARE if run.strategy == "objects" else _SHARE)
    shares = max(pending.blobs / run.batch_size, pending.bytes / size)
    return max(1, min(run.workers, math.ceil(shares)))


def workers_at_once(pending: PendingEstimate) -> int:
    """Returns the number of workers that have work for longer than a head start."""
    alone_s = pending.blobs / _BLOBS_A_SECOND + pending.bytes / _BYTES_A_SECOND
    return 1 + int(alone_s / _HEAD_START)


class WorkerPool:
    """Holds all workers of a run, not yet started. They share the limit of the bandwidth and
    the effort of compressing. limit: has two more senders behind the workers, for side jobs.

    reserve: the workers that are not started while little is pending. first: the worker that probes
    the remote for the preflight.
    """

    def __init__(self, settings: Settings, run_id: str, backoff: Backoff, *, watch: bool) -> None:
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
            application=identity.application(),
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
        """Returns whether any worker runs, or will be started."""
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
        """Loads what a bucket needs, where the first worker does not remain alone: the others are
        copies of this process, and need not load it again.
        """
        if self._remote.kind == "s3" and self._needed(pending) > 1:
            from ntt_backup.objects import s3

            s3.load(self._remote)
            gc.freeze()  # A collection would write to each page that the copies share with us.

    def set_strategy(
        self, strategy: str, pending: PendingEstimate | None, now: float, *, connect: bool
    ) -> None:
        """Sets the strategy of all workers, and puts those that are not needed into the reserve.
        The next one follows the first after a head start, and the rest after two; where the run
        watches, and to a bucket, all start at once. connect: those that start at once connect to
        the remote already. now: monotonic seconds.
        """
        at_once = len(self._workers) if self._watch or strategy == "objects" else 1
        if pending is not None:
            at_once = max(at_once, workers_at_once(pending))
        self.reserve = self._workers[self._needed(pending) :]
        for worker in self:
            worker.found(strategy)
            head_starts = min(2, max(0, worker.worker + 1 - at_once))
            worker.due = now + head_starts * _HEAD_START if head_starts else 0.0
            if worker in self.reserve:
                worker.due = None
            elif connect and not head_starts:
                worker.prepare()

    def start_reserve(self, pending: int | None, now: float) -> None:
        """Starts the reserve when more is pending than the others were started for."""
        at_work = len(self._workers) - len(self.reserve)
        if pending is not None and pending > at_work * self._run.batch_size:
            if self.reserve:
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
        """Returns how many workers the run starts with."""
        if pending is None or self._watch:
            return len(self._workers)
        return workers_needed(pending, self._run)

    def hurry(self) -> None:
        """Has all workers look for work at once, whatever they wait for."""
        for worker in self:
            worker.hurry()

    def stop(self) -> None:
        """Asks all workers to finish what is in flight and end; none is started again."""
        self.reserve = []
        for worker in self:
            worker.stop()

    def kill(self) -> None:
        """Ends all workers now, with every process that they started."""
        for worker in self:
            worker.kill()
