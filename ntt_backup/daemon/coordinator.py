"""The coordinator holds the lock, keeps the workers alive, writes the log, answers signals.

It moves no data. The workers are processes of their own, each in its own session, so that a Ctrl-C
on the terminal reaches only the coordinator, and so that everything a worker has started can be
ended with one signal. It is one thread around poll(2): the workers' events, signals and the clock.

Signals: the first SIGINT or SIGTERM lets the workers finish what is in flight and then ends; a
second one ends them now. SIGHUP reads the settings again, and reopens the log. A worker that dies
is started again, with backoff, a bounded number of times. A non-retryable error ends
the run with its exit code, again after what is in flight.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from ntt_backup import __version__, events
from ntt_backup.client.backoff import Backoff, Outages, Restarts
from ntt_backup.config import Settings
from ntt_backup.daemon.event_log import BatchLines, EventLog, FailedBlobs
from ntt_backup.daemon.events import CheckComplete
from ntt_backup.daemon.listeners import Listener, Listeners
from ntt_backup.daemon.medium import identity_at
from ntt_backup.daemon.progress import OpenOutages, RunProgress, RunState
from ntt_backup.daemon.run_control import RunControl, read_again
from ntt_backup.daemon.side_jobs import jobs_of
from ntt_backup.daemon.signals import SignalInbox
from ntt_backup.daemon.systemd import WATCHDOG_SECONDS, Systemd
from ntt_backup.daemon.workers import SupervisedWorker, WorkerPool
from ntt_backup.dump.events import DumpSkipped, DumpStart
from ntt_backup.errors import AnotherTarget, BackupError, SourceError, Stopped
from ntt_backup.process.child import ChildProcess
from ntt_backup.process.memory import collect_often
from ntt_backup.process.messages import (
    Answered,
    Done,
    Drained,
    Fatal,
    Message,
    ProcessEnded,
    RemoteProbed,
    Tick,
)
from ntt_backup.process.pid_lock import pid_lock
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotStart

if TYPE_CHECKING:
    from ntt_backup.daemon.preflight import Preflight

# Events of side jobs that have reached what they need.
_OF_WORK: Final = (CheckComplete, DumpStart, DumpSkipped, SnapshotStart, SnapshotComplete)
_REFRESH_SECONDS: Final = 0.25
# How often a run that has nothing to do says so.
_IDLE_SECONDS: Final = 3600.0


def run(
    settings: Settings,
    *,
    watch: bool,
    listeners: Sequence[Listener],
    reread: Callable[[], Settings],
    systemd: Systemd | None = None,
    names: Callable[[], Collection[str]] | None = None,
    targets: Sequence[str] = (),
) -> int:
    """Sends what is pending; returns the exit code of the contract.

    watch: go on for ever, until a signal. The log is written first, then the listeners hear what it
    says. systemd: is told what systemd should know. reread, names: as for `read_again`; at SIGHUP.
    targets: those of the daemon, if there are several.
    Raises BackupError only for what is wrong before the run has a log to say it in (lock, log
    file); everything later is logged, shown, and returned as the code.
    """
    if watch:
        collect_often()
    run_id = str(uuid.uuid4())
    with SignalInbox().installed() as inbox, pid_lock(settings.lock.file):
        log = EventLog(settings.log, run_id, settings.target)
        reload = partial(
            read_again, load=reread, try_out=lambda new: log.reopen(new.log), names=names
        )
        heard_by = [log, *listeners]
        one = _Coordinator(
            settings, reload, watch, heard_by, run_id, inbox, systemd or Systemd(), targets
        )
        try:
            return one.go()
        finally:
            one.close()


class _WorkerLost(Exception):
    """The first worker died, or could not be started, before it answered the preflight."""


class _Coordinator:
    def __init__(
        self,
        settings: Settings,
        reload: Callable[[Settings], tuple[Settings, list[events.Event]]],
        watch: bool,
        listeners: Iterable[Listener],
        run_id: str,
        inbox: SignalInbox,
        systemd: Systemd,
        targets: Sequence[str],
    ) -> None:
        self._reload = reload
        self._settings = settings
        self._watch = watch
        self._inbox = inbox
        self._systemd = systemd
        self._started = time.monotonic()
        self._backoff = Backoff.of(settings.run)
        self._progress = RunProgress(self._started, settings.run.workers)
        self._workers = WorkerPool(settings, run_id, self._backoff, watch=watch)
        self._workers.begin_probe()
        # What speaks to the catalog takes as long to load as the remote to answer.
        from ntt_backup.daemon.run_history import RunHistory

        self._history = RunHistory(settings, run_id)
        self._jobs = jobs_of(settings, watch=watch, limit=self._workers.limit, targets=targets)
        self._control = RunControl(
            settings, run_id, self._workers, self._jobs, self._progress, inbox, self._emit
        )
        self._listeners = Listeners([self._control, *listeners])
        self._outages = OpenOutages()
        self._error: BackupError | None = None
        self._asked_to_stop = False
        # Whether another medium of the target is in its place.
        self._displaced = False
        self._killed = False
        self._failed_blobs = FailedBlobs()
        self._batches = BatchLines()
        self._next_progress = self._started + settings.log.progress_interval
        # The state that was told last, and when a state that says nothing new is told.
        self._told: RunState | None = None
        self._next_idle = 0.0

    def go(self) -> int:
        settings = self._settings
        self._emit(
            events.RunStart(
                version=__version__,
                target=settings.target,
                strategy=settings.run.strategy,
                workers=settings.run.workers,
                watch=self._watch,
                source=str(settings.source.root),
                remote=settings.remote.where,
                prefixes=str(settings.part),
            )
        )
        # Whoever asks before the first wait is answered then.
        self._control.listen()
        try:
            if (preflight := self._preflight()) is not None:
                self._history.start(preflight.strategy or "")
                self._history.note_pending(self._progress, preflight.estimate, time.monotonic())
                self._systemd.ready()
                self._refresh()
                self._jobs["dump"].start_if_due(time.monotonic())
                if not settings.dump.beside:
                    self._finish_job("dump", "dumping the catalog")
                if "files" in self._jobs and not self._watch:
                    self._jobs["files"].start_if_due(time.monotonic())
                    self._finish_job("files", "registering files")
                pending = self._watch or preflight.pending or self._history.any_pending()
                if pending and not self._inbox.stops:
                    self._work_in_turns()
                else:
                    self._dismiss()
                if not self._watch:  # What ends the work on blobs is no reason to lose the dump.
                    self._finish_job("dump", "dumping the catalog")
                if not self._watch and self._error is None and not self._inbox.stops:
                    if self._jobs["dump"].again and self._progress.copied:
                        self._jobs["dump"].hurry()
                        self._jobs["dump"].start_if_due(time.monotonic())
                        self._finish_job("dump", "dumping the catalog")
                    self._jobs["snapshot"].start_if_due(time.monotonic())
                    self._finish_job("snapshot", "taking snapshots")
        except BackupError as error:
            self._error = error
        finally:
            for job in self._jobs.values():
                job.discard()  # The remote discards the incomplete uploads.
            self._workers.kill()
        return self._finish()

    def close(self) -> None:
        self._listeners.close()

    def _preflight(self) -> Preflight | None:
        """Returns a preflight that has passed, or None when the run is told to stop.

        With watch, the method waits until outages end. A store that cannot be used counts as an
        outage, as it does once the workers run: its disk may be mounted later than this process is
        started.
        """
        outages = Outages(self._emit, self._backoff, None)
        turns = Restarts(self._backoff)
        while not self._inbox.stops:
            try:
                with self._inbox.raising():
                    preflight, warnings = self._take_steps()
                outages.back("preflight")
                self._emit(*(events.Warning(reason=warning) for warning in warnings))
                return preflight
            except _WorkerLost:
                if self._error is not None:
                    raise self._error from None
                self._sit_out((self._workers.first.due or 0.0) - time.monotonic())
            except BackupError as error:
                if self._watch and (found := self._other_medium(error)):
                    outages.back("preflight")
                    self._systemd.ready()
                    self._systemd.status(f"waiting for its turn: {error.message}")
                    self._await_turn(found, turns.next_wait() or 0.0)
                    continue
                turns.count = 0
                may_pass = error.retryable or isinstance(error, SourceError)
                if not (self._watch and may_pass):
                    raise
                wait_s = outages.away("preflight", error)
                # Waiting for what is unreachable at boot is a daemon's work, not a failed start.
                self._systemd.ready()
                self._systemd.status(f"waiting: {error.message}")
                self._sit_out(wait_s)
        return None

    def _other_medium(self, error: BackupError) -> str:
        """Returns the identity of another medium of the target that has its turn; "" for none.

        That is no outage.
        """
        if isinstance(error, AnotherTarget) and error.whose in self._settings.media:
            return error.found
        return ""

    def _await_turn(self, found: str, wait_s: float) -> None:
        """Waits until another medium is no longer in the place; the place is probed then.

        Args:
            found: The identity of the other medium.
            wait_s: The least seconds to wait where only a probe can tell that.
        """
        remote = self._settings.remote
        while not self._inbox.stops:
            self._sit_out(self._settings.run.poll_interval)
            seen = identity_at(remote.path) if remote.kind == "file" else None
            if seen is None:
                self._sit_out(wait_s - self._settings.run.poll_interval)
            if seen != found:
                return

    def _take_steps(self) -> tuple[Preflight, list[str]]:
        """Returns a preflight that has passed, and its warnings. Raises the error of a failed step.

        The first worker connects to the remote meanwhile, and probes the remote.
        """
        from ntt_backup.daemon.preflight import Preflight

        def ask(word: bytes) -> RemoteProbed | Done:
            self._workers.first.ask(word, time.monotonic())
            if preflight.strategy is None and (preflight.pending or self._watch):
                self._workers.load_ahead(preflight.estimate)
            return self._answer_of_first()

        warnings = []
        self._workers.begin_probe()
        preflight = Preflight(self._settings, watch=self._watch)
        try:
            for step in preflight.steps(ask):
                if step.error is not None:
                    raise step.error
                if step.warning:
                    warnings.append(f"{step.name}: {step.warning}")
                self._serve_watchdog()
                if preflight.strategy is not None and step.name == "remote":
                    self._workers.set_strategy(preflight.strategy, preflight.estimate)
                    for worker in self._workers.reserve:
                        idle = Tick(state="idle")
                        self._progress.take(worker.worker, idle, time.monotonic())
        except BaseException:
            self._workers.first.discard(signal.SIGTERM)  # It cleans up.
            raise
        finally:
            preflight.close()
        return preflight, warnings

    def _answer_of_first(self) -> RemoteProbed | Done:
        """Waits for the first worker's answer to a word. Raises its error, or _WorkerLost."""
        while True:
            for message in self._hear_first():
                match message:
                    case RemoteProbed() | Done():
                        return message
                    case Fatal():
                        raise message.error
                    case ProcessEnded():
                        self._died(self._workers.first, message, time.monotonic())
                        raise _WorkerLost
                    case events.Event():
                        self._emit(message)

    def _hear_first(self) -> Iterator[Message]:
        """Waits a while for the first worker, and yields its messages, or a stall."""
        worker = self._workers.first
        if worker.fds:  # Else it could not be started.
            self._wait(worker.fds, WATCHDOG_SECONDS)
        yield from worker.hear()
        yield from worker.mind_silence(time.monotonic())

    def _dismiss(self) -> None:
        """Ends the worker that probed the remote, in good order."""
        worker = self._workers.first
        worker.stop()
        while worker.running and not self._inbox.stops:
            heard = list(self._hear_first())
            self._emit(*(message for message in heard if isinstance(message, events.Warning)))

    def _sit_out(self, wait_s: float) -> None:
        """Waits for some seconds, or until a stop or a request to look for work now."""
        for left in self._control.time_left(wait_s):
            self._wait([], min(left, WATCHDOG_SECONDS))

    def _wait(self, fds: Iterable[int], seconds: float) -> None:
        """Waits for a descriptor or a signal, notifies the watchdog, and obeys a SIGHUP."""
        self._serve_watchdog()
        self._control.wait([self._inbox.fd, *fds], seconds)
        self._mind_hangup()

    def _serve_watchdog(self) -> bool:
        """Notifies the watchdog, unless the run hangs. Returns whether a new status is due."""
        now = time.monotonic()
        alive = self._control.paused or not self._workers.hang(now)
        return self._systemd.watchdog(alive=alive)

    def _finish_job(self, name: str, status: str) -> None:
        """Waits for a side job while no worker works. A stop ends it; a failure only is told."""
        job = self._jobs[name]
        self._hear_jobs()
        if job.running:
            self._systemd.status(status)
        while job.running and not self._inbox.stops:
            self._wait(job.fds, _REFRESH_SECONDS)
            self._hear_jobs()
            self._refresh()

    # --- the loop ---------------------------------------------------------------------------------

    def _work_in_turns(self) -> None:
        """Works, and waits until its medium is back whenever another one has taken the place."""
        self._work()
        while self._displaced and not self._asked_to_stop and self._preflight() is not None:
            self._displaced = False
            self._work()

    def _leave(self) -> None:
        """Ends the work until the medium is back. The place answers, so its outage is over."""
        self._displaced = True
        self._answered("remote", None)
        for job in self._jobs.values():
            job.displaced = False
            if job.running:
                job.discard()
                job.hurry()
        self._workers.stop()

    def _work(self) -> None:
        while self._workers.busy:
            now = time.monotonic()
            for worker in self._workers:
                if worker.due is not None and worker.due <= now:
                    worker.start(now)
            idle = self._asked_to_stop or self._displaced or self._control.paused
            if self._watch and not idle:
                # A side job alone retries by itself.
                by_workers = [one for one in self._outages.all if one.event.worker is not None]
                for job in self._jobs.values():
                    job.start_if_due(now, {one.event.what for one in by_workers})
            children: list[ChildProcess] = [*self._workers, *self._jobs.values()]
            fds = [self._inbox.fd, *(fd for child in children for fd in child.fds)]
            ready = self._control.wait(fds, _REFRESH_SECONDS)
            self._hear_jobs()
            for worker in self._workers:
                if not (worker.fds and ready.isdisjoint(worker.fds)):
                    self._receive(worker, worker.hear())
                self._receive(worker, worker.mind_silence(time.monotonic()))
            self._mind_signals()
            self._keep_time(time.monotonic())

    def _receive(self, worker: SupervisedWorker, messages: Iterable[Message]) -> None:
        for message in messages:
            now = time.monotonic()
            self._progress.take(worker.worker, message, now)
            match message:
                case Fatal():
                    if isinstance(message.error, AnotherTarget) and self._settings.media:
                        self._leave()
                    else:
                        self._fail(message.error)
                case ProcessEnded():
                    self._died(worker, message, now)
                case Drained() if not self._watch:
                    # The others need not find that out. All say goodbye to the remote at once.
                    self._workers.stop()
                case events.BlobFailed() if not self._failed_blobs.has_a_line(message):
                    continue
                case events.OutageEnd():
                    self._answered(message.what, worker.worker)
                    continue
                case Answered(settled=False):
                    self._connected(message.what)
                case Answered():
                    self._answered(message.what, worker.worker)
                case events.BatchComplete() | events.MarksLost():
                    self._answered("catalog", worker.worker)
                    if self._watch:
                        self._emit(*self._batches.take(message, now))
                        continue
            if isinstance(message, events.Event):
                self._emit(message)

    def _hear_jobs(self) -> None:
        """Emits the events of the side jobs. Work that has begun shows that its sides answer."""
        for job in self._jobs.values():
            for event in job.hear(time.monotonic()):
                # A scan asks nothing of the remote.
                scanned = isinstance(event, CheckComplete) and event.command == "scan"
                if isinstance(event, _OF_WORK):
                    for side in {"catalog"} if scanned else job.needs:
                        self._answered(side, None)
                self._emit(event)
        if any(job.displaced for job in self._jobs.values()):
            self._leave()

    # --- outages ----------------------------------------------------------------------------------

    def _connected(self, side: str) -> None:
        """Notes that a side accepts connections again, and wakes all that wait for the side."""
        now = time.monotonic()
        self._control.connect(side)
        if self._outages.connect(side, now):
            self._wake(self._outages.waiting(side), side)

    def _answered(self, side: str, worker: int | None) -> None:
        """Ends the outage of a side, if there is one, and wakes all that wait for the side."""
        lasted = self._outages.lasted(side, time.monotonic())
        if lasted is not None:
            waiting = self._outages.waiting(side)
            self._emit(events.OutageEnd(worker=worker, what=side, duration_s=lasted))
            self._wake(waiting, side)

    def _wake(self, waiting: Collection[int | None], side: str) -> None:
        for worker in self._workers:
            if worker.worker in waiting and worker.running:
                worker.hurry()
        for job in self._jobs.values():
            job.answer(side)

    def _died(self, worker: SupervisedWorker, death: ProcessEnded, now: float) -> None:
        if self._asked_to_stop or self._displaced:
            return
        try:
            self._emit(worker.plan_restart(death, now))
        except BackupError as error:
            self._fail(error)

    def _fail(self, error: BackupError) -> None:
        """Keeps the first error, and lets the workers finish the batches in flight."""
        if self._error is None:
            self._error = error
        self._stop_workers()

    def _stop_workers(self) -> None:
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self._systemd.stopping()
            self._workers.stop()

    def _mind_hangup(self) -> None:
        self._inbox.drain()
        if self._inbox.take_hangup():
            with self._systemd.reloading():
                settings, told = self._reload(self._settings)
                self._emit(*told)
                if settings.log != self._settings.log:
                    self._next_progress = time.monotonic() + settings.log.progress_interval
                self._settings = settings
                for job in self._jobs.values():
                    job.adopt(settings)
                self._control.adopt(settings)

    def _mind_signals(self) -> None:
        self._mind_hangup()
        if self._inbox.stops and not self._asked_to_stop:
            self._emit(self._progress.stopping(self._inbox.first_stop, time.monotonic()))
            self._stop_workers()
        # What is paused would never be finished.
        if self._inbox.stops > (not self._control.paused) and not self._killed:
            self._killed = True
            self._workers.kill()

    def _refresh(self) -> RunState:
        """Counts the pending blobs, if that is due, and tells the listeners the present state."""
        self._history.count_pending(self._progress, time.monotonic())
        state = self._progress.state(time.monotonic())
        self._history.refresh(state)
        self._listeners.refresh(state)
        return state

    def _keep_time(self, now: float) -> None:
        state = self._refresh()
        self._emit(*self._batches.due(now))
        self._workers.start_reserve(state.pending, now)
        if self._serve_watchdog():
            self._systemd.status(state.event().line or "")
        if now >= self._next_progress:
            self._next_progress = now + self._settings.log.progress_interval
            self._history.update(state)
            self._emit(*self._failed_blobs.rest())
            if state.says_more_than(self._told) or now >= self._next_idle:
                self._told, self._next_idle = state, now + _IDLE_SECONDS
                self._emit(state.event())

    # --- the end ----------------------------------------------------------------------------------

    def _finish(self) -> int:
        if self._error is None and self._inbox.stops:
            self._error = Stopped(self._inbox.first_stop)
        state = self._progress.state(time.monotonic())
        failed = [name for name, job in self._jobs.items() if job.failed]
        outcome, code = state.outcome(self._error, failed)
        if self._error is not None and outcome == "error":
            self._emit(events.Error(**self._error.fields))
        if still_failed := self._history.still_failed():
            self._emit(events.StillFailed(blobs=still_failed))
        # Who was stopped has not looked at all files.
        young = self._history.young_files() if self._error is None else 0
        self._history.end(state, outcome, code, str(self._error or ""))
        self._emit(*self._batches.rest(), *self._failed_blobs.rest())
        self._emit(state.end(outcome, code, young))
        return code

    def _emit(self, *told: events.Event) -> None:
        for event in told:
            self._outages.take(event, time.monotonic())
            self._listeners.event(event)
