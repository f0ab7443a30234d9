"""One worker process as the coordinator sees it: start, hear, stop, kill, start again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from ntt_backup import events
from ntt_backup.client.backoff import Backoff
from ntt_backup.client.bootstrap import bundle
from ntt_backup.daemon.child import EventChild
from ntt_backup.errors import WorkerFailed
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import Fatal, Message, Tick, WorkerDied
from ntt_backup.process.pipeline import Child
from ntt_backup.upload.event_pipe import NOW
from ntt_backup.upload.worker_main import GO, STOP, WorkerSpec, work

RESTARTS: Final = 5
SOUND_SECONDS: Final = 600.0


def fork_worker(spec: WorkerSpec) -> Child:
    """Returns a worker process that waits for GO. Raises OSError where that cannot be."""
    if spec.settings.remote.kind != "s3":
        bundle()  # Made once, and not by each of the copies.
    return Fork(partial(work, spec), f"ntt-worker {spec.worker}")


class SupervisedWorker:
    """A worker process with a bounded number of restarts.

    It is the leader of its own session and process group, so `kill` ends its tar and ssh with it.
    stalled: it has said nothing for longer than it may, see `mind_silence`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        backoff: Backoff,
        fork: Callable[[WorkerSpec], Child] = fork_worker,
    ) -> None:
        self._fork = fork
        self.spec = spec
        self.restarts = 0
        self._started = 0.0
        self.due: float | None = 0.0
        self._backoff = backoff
        self._child: EventChild | None = None
        self._given: WorkerSpec | None = None
        self._said_goodbye = False
        self._warned = False
        self._spoke = False
        self._expected = 0.0
        self._quiet = 0.0
        self.stalled = False

    @property
    def worker(self) -> int:
        """Returns the worker's number."""
        return self.spec.worker

    @property
    def running(self) -> bool:
        return self._child is not None

    @property
    def fds(self) -> list[int]:
        """Returns the descriptors that become readable when the process says something or ends."""
        return [] if self._child is None else self._child.fds

    def start(self, now: float) -> None:
        """Lets it work, in a process that is started if there is none. now: monotonic seconds.
        Raises OSError where none can be started.
        """
        self.due = None
        self._started = self._expected = now
        self.stalled = False
        self.prepare()
        if self._child is not None:
            self._child.tell(GO)

    def prepare(self) -> None:
        """Starts the process early: it connects to the remote, and waits for `start`. Raises
        OSError where none can be started.
        """
        if self._child is not None and self._given != self.spec:
            self.abandon()
        if self._child is None:
            self._child = EventChild(self._fork(self.spec))
            self._given = self.spec
            self._said_goodbye = False
            self._warned = False

    def ask(self, word: bytes, now: float) -> None:
        """Asks a process that probes the remote for one step; `hear` gives the answer."""
        self._started = self._expected = now
        if self._child is not None:
            self._child.tell(word)

    def found(self, strategy: str) -> None:
        """Sets the strategy. A process that probes the remote found it, and goes on with it."""
        probes, self.spec = self.spec.probes, replace(self.spec, strategy=strategy, probes=False)
        if probes:
            self._given = self.spec

    def abandon(self) -> None:
        """Ends a process that has not begun to work. It cleans up first; another may be started."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            self._child.reap()
            self._child = None

    def hear(self) -> Iterator[Message]:
        """Yields the messages that have arrived, as many as one read gives: a worker that sends
        faster than it is heard must not keep signals and the others waiting. Afterwards `running`
        is False if the process has ended, and then all has been heard.
        """
        child = self._child
        if child is None:
            return
        for message in child.hear():
            if isinstance(message, bytes):
                yield from self._warn_once(message, child.pid)
                continue
            self._said_goodbye |= isinstance(message, events.WorkerStop | Fatal)
            self._spoke = True
            self._quiet = message.quiet if isinstance(message, Tick) else 0.0
            if isinstance(message, events.WorkerEvent):
                message = replace(message, worker=self.worker)
            yield message
        if child.ended:
            status = child.reap()
            self._child = None
            if not self._said_goodbye:
                yield WorkerDied(pid=child.pid, status=status, detail=child.detail)

    def mind_silence(self, now: float) -> Iterator[Message]:
        """Yields a `worker_stall` event, once, when the worker has said nothing for more than
        `run.stall_timeout` beyond the seconds for which it had announced to be quiet;
        `worker_stall_end` when it speaks again. Messages that wait are no silence: `hear` first.
        """
        child = self._child
        if child is None:
            return
        silent = now - self._expected
        if self._spoke:
            self._spoke = False
            self._expected = now + self._quiet
            if self.stalled:
                self.stalled = False
                yield events.WorkerStallEnd(pid=child.pid, worker=self.worker, duration_s=silent)
        elif silent > self.spec.settings.run.stall_timeout and not self.stalled:
            self.stalled = True
            hint = (
                f"`ps -o stat,wchan,args -p {child.pid}` says what it waits for: T is"
                f" stopped, `kill -CONT {child.pid}` lets it go on; D is a disk that does not"
                f" answer; `kill -KILL {child.pid}` has another one do its work, and loses nothing"
            )
            yield events.WorkerStall(pid=child.pid, worker=self.worker, silent_s=silent, hint=hint)

    def _warn_once(self, line: bytes, pid: int) -> Iterator[Message]:
        """Yields a warning for the first line that is no message: a library may print something,
        and that ends no backup.
        """
        if not self._warned:
            self._warned = True
            shown = line[:200].decode("utf-8", "backslashreplace")
            reason = f"worker {self.worker} prints what is no event: {shown!r}"
            yield events.Warning(pid=pid, worker=self.worker, reason=reason)

    def hurry(self) -> None:
        """Has it look for work at once, and start at once where it waits for that."""
        if self.due is not None:
            self.due = 0.0
        elif self._child is not None:
            self._child.tell(NOW)

    def stop(self) -> None:
        """Asks it to finish what is in flight and end. It is not started again."""
        self.due = None
        if self._child is not None:
            self._child.tell(STOP)

    def kill(self) -> None:
        """Ends it and all that it started, now."""
        self.due = None
        if self._child is not None:
            self._child.kill()

    def plan_restart(self, death: WorkerDied, now: float, random: float) -> events.WorkerRestart:
        """Counts a restart, sets when it is due, and returns its event. Raises WorkerFailed at the
        limit. The count begins anew when the worker had lived for SOUND_SECONDS.
        """
        if now - self._started > SOUND_SECONDS:
            self.restarts = 0
        if self.restarts == RESTARTS:
            raise WorkerFailed(
                f"worker {self.worker} died {RESTARTS + 1} times",
                hint="the reason is in the log, in the worker_restart events before this",
            )
        self.restarts += 1
        wait = self._backoff.wait(self.restarts, lambda: random)
        self.due = now + wait
        return events.WorkerRestart(
            worker=self.worker,
            pid=death.pid,
            status=death.status,
            detail=death.detail,
            attempt=self.restarts,
            wait_s=wait,
        )
