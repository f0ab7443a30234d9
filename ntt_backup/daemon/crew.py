"""The workers of a run: how many go to work, by which strategy, and who is kept back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ntt_backup.catalog.stats import PendingEstimate
from ntt_backup.client.backoff import Backoff
from ntt_backup.client.throttle import Limit
from ntt_backup.config import RunSettings, Settings, identity
from ntt_backup.daemon.supervisor import SupervisedWorker
from ntt_backup.upload.worker_main import WorkerSpec

# A worker is worth starting for so many bytes.
_SHARE: Final = 4 * 1024 * 1024


def workers_needed(pending: PendingEstimate, run: RunSettings) -> int:
    """Returns how many workers a run should start with. Where little is pending, another Python at
    both ends, and another ssh between them, cost more than they gain.
    """
    if not pending.exact or pending.unsized:
        return run.workers
    shares = max(pending.blobs / run.batch_size, pending.bytes / min(run.batch_bytes, _SHARE))
    return max(1, min(run.workers, math.ceil(shares)))


class Crew:
    """Holds all workers of a run, none of them started; they share the limit on what is sent.

    reserve: those that are kept back while little is pending. first looks round on the remote.
    """

    def __init__(self, settings: Settings, run_id: str, backoff: Backoff, *, watch: bool) -> None:
        self._run = run = settings.run
        self._watch = watch
        self.reserve: list[SupervisedWorker] = []
        limit = None if run.bwlimit is None else Limit(run.bwlimit, run.workers)
        spec = WorkerSpec(
            settings=settings,
            worker=0,
            run_id=run_id,
            owner=identity.owner(settings),
            application=identity.application(),
            strategy=run.strategy,
            watch=watch,
            limit=limit,
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
        """Whether any of them runs, or is to be started."""
        return any(worker.running or worker.due is not None for worker in self)

    def begin_look(self) -> None:
        """Has the first one look round when it is prepared."""
        self.first.spec = replace(self.first.spec, strategy=self._run.strategy, looks=True)

    def set_strategy(
        self, strategy: str, pending: PendingEstimate | None, *, connect: bool
    ) -> None:
        """Lets all send by this strategy, and keeps back those who are not needed. connect: the
        others connect to the remote already.
        """
        needed = len(self._workers)
        if pending is not None and not self._watch:
            needed = workers_needed(pending, self._run)
        self.reserve = self._workers[needed:]
        for worker in self:
            worker.found(strategy)
            worker.due = None if worker in self.reserve else 0.0
            if connect and worker.due is not None:
                with suppress(OSError):  # Then it is started in its turn.
                    worker.prepare()

    def call_up(self, pending: int | None, now: float) -> None:
        """Starts the reserve where more is pending now than the others were started for."""
        at_work = len(self._workers) - len(self.reserve)
        if pending is not None and pending > at_work * self._run.batch_size:
            for worker in self.reserve:
                worker.due = now
            self.reserve = []

    def stop(self) -> None:
        """Asks all to finish what is in flight and end; none is started again."""
        self.reserve = []
        for worker in self:
            worker.stop()

    def kill(self) -> None:
        """Ends all, and what they started, now."""
        for worker in self:
            worker.kill()
