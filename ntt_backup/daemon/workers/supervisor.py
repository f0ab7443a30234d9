"""One worker process as the coordinator sees it: start, hear, stop, kill, start again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ntt_backup import events
from ntt_backup.client.backoff import Backoff
from ntt_backup.client.bootstrap import bundle
from ntt_backup.daemon.child import RESTARTS, ChildProcess, Restarts
from ntt_backup.errors import WorkerFailed
from ntt_backup.process.fork import Fork
from ntt_backup.process.messages import Fatal, Message, ProcessEnded, Tick
from ntt_backup.process.pipeline import Child
from ntt_backup.upload.event_pipe import NOW
from ntt_backup.upload.worker_main import GO, STOP, WorkerSpec, work


def fork_worker(spec: WorkerSpec) -> Child:
    """Returns a worker process that waits for GO. Raises OSError where that cannot be."""
    if spec.settings.remote.kind != "s3":
        bundle()  # Made once, and not by each of the copies.
    return Fork(partial(work, spec), f"ntt-worker {spec.worker}")


class SupervisedWorker(ChildProcess):
    """A worker process with a bounded number of restarts.

    due: when the worker is started, in monotonic seconds; None: it runs, or is not to be started.
    stalled: it has said nothing for longer than it may, see `mind_silence`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        backoff: Backoff,
        fork: Callable[[WorkerSpec], Child] = fork_worker,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.due: float | None = 0.0
        self.restarts = Restarts(backoff, RESTARTS)
        self.stalled = False
        self._fork = fork
        self._given: WorkerSpec | None = None
        self._started = self._expected = self._quiet = 0.0
        self._said_goodbye = self._warned = self._spoke = False

    @property
    def worker(self) -> int:
        """Returns the worker's number."""
        return self.spec.worker

    def start(self, now: float) -> None:
        """Lets it work, in a process that is started if there is none. now: monotonic seconds."""
        self.due = None
        self._started = self._expected = now
        self.stalled = False
        self.prepare()
        self.tell(GO)

    def prepare(self) -> None:
        """Starts the process early: it connects to the remote, and waits for `start`."""
        if self.running and self._given != self.spec:
            self.abandon()
        if not self.running:
            self.begin(partial(self._fork, self.spec))
            self._given = self.spec
            self._said_goodbye = self._warned = False

    def ask(self, word: bytes, now: float) -> None:
        """Asks a process that probes the remote for one step; `hear` gives the answer."""
        self._started = self._expected = now
        self.tell(word)

    def found(self, strategy: str) -> None:
        """Sets the strategy. A process that probes the remote found it, and goes on with it."""
        probes, self.spec = self.spec.probes, replace(self.spec, strategy=strategy, probes=False)
        if probes:
            self._given = self.spec

    def abandon(self) -> None:
        """Ends a process that has not begun to work. It cleans up first; another may be started."""
        self.discard(signal.SIGTERM)

    def hear(self) -> Iterator[Message]:
        """Yields the messages that `read_messages` yields, with the worker's number. The end of a
        worker that said goodbye is none.
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
        """Yields a `worker_stall` event, once, when the worker has said nothing for more than
        `run.stall_timeout` beyond the seconds for which it had announced to be quiet;
        `worker_stall_end` when it speaks again. Messages that wait are no silence: `hear` first.
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
        """Yields a warning for the first line that is no message: a library may print something,
        and that ends no backup.
        """
        if not self._warned:
            self._warned = True
            shown = line[:200].decode("utf-8", "backslashreplace")
            reason = f"worker {self.worker} prints what is no event: {shown!r}"
            yield events.Warning(pid=self.pid, worker=self.worker, reason=reason)

    def hurry(self) -> None:
        """Has it look for work at once, and start at once where it waits for that."""
        if self.due is not None:
            self.due = 0.0
        else:
            self.tell(NOW)

    def stop(self) -> None:
        """Asks it to finish what is in flight and end. It is not started again."""
        self.due = None
        self.tell(STOP)

    def kill(self) -> None:
        """Kills the worker and its child processes immediately. It is not started again."""
        self.due = None
        super().kill()

    def plan_restart(self, death: ProcessEnded, now: float) -> events.WorkerRestart:
        """Counts a restart, sets when it is due, and returns its event. Raises WorkerFailed at the
        limit.
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
