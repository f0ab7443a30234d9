"""A side job (a dump, snapshots, checks) is a process that is started when due, heard, and killed.

The coordinator may wait for nothing: it answers signals and the watchdog while gigabytes are sent,
and no failure of such work stops the blobs. The process is a copy of it, since mostly nothing is
due, and loading a program only to find that out would cost more than all else.

The dump is made while blobs are copied (`dump.beside`), or else before the first of them, and by a
run that watches every `dump.interval`. A dump in which no blob is copied does not tell what a
restore must bring back, so after the first blobs of a target's life another one is made: at the end
of the run, or, where it watches, after an hour.

Where this machine or key can make no dumps at all (no pg_dump, a forced command that takes none),
that is a warning as long as nobody relies on dumps: none was ever made for this target, and
`dump.bin` is not set. From the first dump on it is a failure.

The sets that have `every` are taken after the blobs, or while the run watches. What does either is
loaded by the process that does it: no blob waits for that.

A run that watches waits for a remote or a catalog that is unreachable with this work as with blobs:
the outage is told, and no failure.

A check that hangs would keep all later checks from being done, so it is killed. No dump is: it says
nothing while its bytes travel, and may be slow because a limit says so.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from ntt_backup.client.backoff import Backoff, Restarts
from ntt_backup.client.throttle import Limit, Pace, set_process_pace
from ntt_backup.config import Settings
from ntt_backup.daemon.events import (
    CheckFailed,
    ChecksRecovered,
    CheckStart,
    FilesFailed,
    FilesRecovered,
    FilesRegistered,
)
from ntt_backup.dump.events import DumpFailed, DumpRecovered
from ntt_backup.errors import BackupError, CatalogUnavailable, DumpImpossible, FileListUnavailable
from ntt_backup.events import Event, Outage, Warning
from ntt_backup.formatting import duration
from ntt_backup.process.child import ChildProcess, tell_parent
from ntt_backup.process.messages import JobOver, ProcessEnded, Tick
from ntt_backup.snapshot.events import (
    SnapshotFailed,
    SnapshotProgress,
    SnapshotsRecovered,
    SnapshotStart,
)

RETRY_SECONDS: Final = 60.0
MOST_RETRY_SECONDS: Final = 3600.0
# So often in a row work that had begun may be broken by an outage before that is a failure.
MOST_BROKEN: Final = 5
# A check has hung that takes so much longer than twice its max_time, or is silent for a day.
_LATE_SECONDS: Final = 600.0
_QUIET_SECONDS: Final = 86400.0


class SideJob(ChildProcess):
    """One kind of work.

    A failure is followed by the next start after a minute; each failure that follows doubles that,
    to an hour at most. away: the side for which the work waits, or "". pace: of what it sends.

    Attributes:
        name: Of the process.
        needs: The sides without which the work cannot be done.
        displaced: Whether another medium was found in the place of the target.
        looks: Whether the work knows when it is due, and so is begun when settings are read again.
        failure: The event of work that has failed.
        recovered: The event of work that has not failed, or is switched off, after an error.
        process: The process, in words.

    Args:
        settings: Of the run.
        backoff: How long an outage of a side is waited for; None: an outage is a failure.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    looks: ClassVar[bool] = False
    failure: ClassVar[type[Any]]
    recovered: ClassVar[type[Event]]
    process: ClassVar[str]

    def __init__(self, settings: Settings, backoff: Backoff | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.failed = False
        self.displaced = False
        self.away = ""
        self.pace: Pace | None = None
        self._failures = Restarts(Backoff(RETRY_SECONDS, MOST_RETRY_SECONDS), jitter=lambda: 1.0)
        # Tries in a row that met an outage, and how many of them had begun to work.
        self._waits = Restarts(backoff) if backoff is not None else None
        self._broken = 0
        self._unreached = False
        self._over: JobOver | None = None
        self._last: Event | None = None
        # Whether an error was told since all was well.
        self._wrong = False
        self._killed = False
        # The settings of its process.
        self._used = settings
        # When a message was heard last, and when the last event of work.
        self._heard = self._told = 0.0
        # When it starts next, and when it was to start next as its process began.
        self._every = math.inf
        self._next = self._planned = math.inf
        self.adopt(settings)

    def interval(self) -> float | None:
        """Returns the seconds from one start to the next, where the work does not say when.

        None where the work is switched off.
        """
        raise NotImplementedError

    def work(self, patient: bool) -> JobOver:
        """Does the work, in the process, and says what happens by `tell_parent`.

        patient: whether an outage is waited for, and is no failure.
        """
        raise NotImplementedError

    def died(self, ended: ProcessEnded, last: Event | None) -> Event:
        """Returns the event of a process that ended without a report. last: but for warnings."""
        message = f"the {self.process} died"
        about = {"detail": ended.detail, "hint": "", **self.subject(last)}
        event: Event = self.failure(pid=ended.pid, exit_code=1, message=message, **about)
        return event

    def subject(self, last: Event | None) -> dict[str, str]:
        """Returns the fields of a failure that name what was done. last: as for `died`."""
        return {}

    def hung(self, now: float) -> Event | None:
        """Returns the event of a process that is killed because it hangs; None for any other."""
        return None

    def adopt(self, settings: Settings) -> None:
        """Goes on with settings that were read again, from the next start on."""
        self.settings = settings
        every = self.interval() or math.inf
        if self.looks or every != self._every:
            self._next = 0.0 if every < math.inf else math.inf
        self._every = every

    @property
    def watches(self) -> bool:
        """Whether the run watches, and so waits for the end of outages."""
        return self._waits is not None

    @property
    def again(self) -> bool:
        """Returns whether its last process asked to be started again."""
        return self._over is not None and self._over.again_s is not None

    def start_if_due(self, now: float, away: Collection[str] = ()) -> None:
        """Starts a due process, unless a side that the work needs is unreachable."""
        if now < self._next or self.running or not self.needs.isdisjoint(away):
            return
        self._next = self._planned = now + self._every
        self._heard = self._told = now
        self._over = self._last = None
        self._killed, self._used = False, self.settings
        patient = self._waits is not None and self._broken < MOST_BROKEN
        self.begin(partial(_work, partial(self.work, patient), self.pace), self.name)

    def hear(self, now: float) -> Iterator[Event]:
        """Yields the events of the process, and of its end; then `running` is False."""
        for event in self._events(now):
            self._wrong |= event.level == "error"
            yield event
        if self._every == math.inf and not self.running:
            self.failed = False  # It was switched off.
        if self._wrong and not (self.running or self.failed):
            self._wrong = False
            yield self.recovered()

    def _events(self, now: float) -> Iterator[Event]:
        for message in self.read_messages():
            self._heard = now
            match message:
                case JobOver():
                    self._over = message
                case Event():
                    if not isinstance(message, Warning):
                        self._last, self._told = message, now
                    yield message
                case ProcessEnded():
                    yield from self._end(message, self._over, now)
        if self.running and not self._killed and (event := self.hung(now)) is not None:
            # A process that waits for a broken disk ends once that answers, or never.
            self._killed = self.failed = True
            self.kill()
            yield event

    def _end(self, ended: ProcessEnded, over: JobOver | None, now: float) -> Iterator[Event]:
        """Takes in that the process has ended, and sets when the next one starts."""
        if over is not None and over.displaced and self.settings.media and self._waits is not None:
            self.displaced = True
            self.hurry()  # Once its own medium is there.
            return
        if over is not None and over.away and self._waits is not None:
            self.away = over.away
            # What nobody has reached meanwhile is the same outage.
            self._broken += self._last is not None and not self._unreached
            self._unreached = True
            wait = self._start_again(self._waits, now)
            attempt = self._waits.count
            reason, detail = over.reason, over.detail
            yield Outage(what=over.away, reason=reason, detail=detail, attempt=attempt, wait_s=wait)
            return
        self.away = ""
        if self._waits is not None:
            self._waits.count = 0
        self.failed = over is None or over.failed
        if over is None:
            if not self._killed:
                yield self.died(ended, self._last)
        elif over.again_s is not None and self._next == self._planned:
            # Else it was set meanwhile, for what the process did not know.
            self._next = now + over.again_s
        if self.failed:
            self._start_again(self._failures, now)
        else:
            self._failures.count = self._broken = 0
            self._unreached = False

    def answer(self, what: str) -> None:
        """Schedules the work immediately where the work waits for this side, which answers now."""
        if self.away == what:
            self._unreached = False
            self.hurry()

    def hurry(self) -> None:
        """Schedules the work immediately, unless the work is switched off."""
        if self._every < math.inf:
            self._next = 0.0

    def _start_again(self, restarts: Restarts, now: float) -> float:
        """Counts a try, and returns the seconds within which the next one follows."""
        wait = restarts.next_wait()
        assert wait is not None  # They are not limited.
        if self._every < math.inf:  # Else it was switched off meanwhile.
            self._next = min(self._next, now + wait)
        return wait


def _work(body: Callable[[], JobOver], pace: Pace | None) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if pace is not None:
        set_process_pace(pace)
    over = body()
    tell_parent(over)
    return int(over.failed)


class DumpJob(SideJob):
    """Dumps the catalog, where a dump is due.

    Args:
        settings: Of the run; backoff: as for `SideJob`.
        shared: The targets of the daemon, which share one dump.
    """

    name = "ntt-dump"
    needs = frozenset({"remote", "catalog"})
    failure = DumpFailed
    recovered = DumpRecovered
    process = "process that dumps the catalog"

    def __init__(
        self, settings: Settings, backoff: Backoff | None = None, shared: Sequence[str] = ()
    ) -> None:
        super().__init__(settings, backoff)
        self._targets = shared if len(shared) > 1 else ()

    def interval(self) -> float | None:
        wanted = self.settings.dump
        off = self.settings.run.skip_pgdump
        return None if off else min(wanted.interval, wanted.max_age or math.inf)

    def work(self, patient: bool) -> JobOver:
        from ntt_backup.dump.job import dump, relied_on

        wanted = self.settings.dump
        shared = self._targets if wanted.beside else ()
        try:
            made = dump(
                self.settings,
                tell_parent,
                patient=patient,
                beside=wanted.beside,
                shared=shared,
                every=(self.interval() or 0.0) if patient else 0.0,
            )
        except DumpImpossible as error:
            if not relied_on(self.settings):
                text = f"no dump of the catalog is made: {error}; {error.hint}"
                tell_parent(Warning(reason=f"{text}; or set run.skip_pgdump"))
                return JobOver(failed=False)
            tell_parent(DumpFailed(**error.fields))
        except BackupError as error:
            if patient and error.retryable:
                return JobOver.of_outage(error)
            tell_parent(DumpFailed(**error.fields))
        else:
            if not made.tells:
                return JobOver(failed=False, again_s=min(MOST_RETRY_SECONDS, wanted.interval))
            # Targets and hosts that share a dump need the next one at the same time.
            shares = patient and made.age_s > 0
            wait = max(1.0, wanted.interval - made.age_s) if shares else None
            return JobOver(failed=False, again_s=wait)
        return JobOver(failed=True)


class SnapshotJob(SideJob):
    """Takes versions of the snapshot sets that are due."""

    name = "ntt-snapshot"
    needs = frozenset({"remote"})
    looks = True
    failure = SnapshotFailed
    recovered = SnapshotsRecovered
    process = "process that takes snapshots"

    def interval(self) -> float | None:
        return min(self.settings.scheduled.values(), default=None)

    def work(self, patient: bool) -> JobOver:
        from ntt_backup.snapshot.job import take_due

        return take_due(self.settings, tell_parent, patient=patient)

    def died(self, ended: ProcessEnded, last: Event | None) -> Event:
        from ntt_backup.snapshot.last_take import note_failure

        note_failure(self.settings, self.subject(last)["set"], f"the {self.process} died")
        return super().died(ended, last)

    def subject(self, last: Event | None) -> dict[str, str]:
        return {"set": last.set if isinstance(last, SnapshotStart | SnapshotProgress) else ""}


class CheckJob(SideJob):
    """Does the checks that are due."""

    name = "ntt-check"
    needs = frozenset({"remote", "catalog"})
    looks = True
    failure = CheckFailed
    recovered = ChecksRecovered
    process = "process of the checks"

    def interval(self) -> float | None:
        return min(self.settings.due_checks.values(), default=None)

    def work(self, patient: bool) -> JobOver:
        from ntt_backup.daemon.checks import check_due

        alive = partial(tell_parent, Tick(state="checking"))
        return check_due(self.settings, tell_parent, patient=patient, alive=alive)

    def subject(self, last: Event | None) -> dict[str, str]:
        return {"command": last.command if isinstance(last, CheckStart) else ""}

    def hung(self, now: float) -> Event | None:
        name = self.subject(self._last)["command"]
        limits = getattr(self._used.checks, name or "policy", None)
        max_time = limits.max_time if limits is not None else None
        took, silent = now - self._told, now - self._heard
        if max_time is not None and took > 2 * max_time + _LATE_SECONDS:
            why = f"it took {duration(took)}"
            hint = f"it may hang, or checks.{name}.max_time is too short for one large blob"
        elif silent > _QUIET_SECONDS:
            why = f"it did nothing for {duration(silent)}"
            hint = "the lines of the log before this, and `ntt-backup-remote check`, may say more"
        else:
            return None
        message = f"a check was killed: {why}"
        return CheckFailed(
            command=name, pid=self.pid, exit_code=1, message=message, detail="", hint=hint
        )


class FilesJob(SideJob):
    """Registers the files of a store that go by their paths."""

    name = "ntt-files"
    needs = frozenset({"catalog"})
    failure = FilesFailed
    recovered = FilesRecovered
    process = "process that registers files"

    def interval(self) -> float | None:
        return min(self.settings.origins.values(), default=None)

    def work(self, patient: bool) -> JobOver:
        from ntt_backup.audit.register import register_due
        from ntt_backup.catalog.origin_passes import Registration

        new, failed = Registration(), False

        def tell_error(error: BackupError) -> None:
            nonlocal failed
            failed = True
            tell_parent(FilesFailed(**error.fields))

        def tell(done: Registration) -> None:
            nonlocal new
            new += done
            if new.registered or new.changed or new.gone:
                told = ("rows", "registered", "changed", "gone", "duration_s")
                tell_parent(FilesRegistered(**{name: getattr(new, name) for name in told}))
                new = Registration()

        try:
            wait_s = register_due(self.settings, tell, stays=self.watches, on_error=tell_error)
        except BackupError as error:
            # No blob waits for the database of an application.
            ours = isinstance(error, CatalogUnavailable)
            if patient and ours and not isinstance(error, FileListUnavailable):
                return JobOver.of_outage(error)
            tell_error(error)
            return JobOver(failed=True)
        return JobOver(failed=failed, again_s=wait_s)


def jobs_of(
    settings: Settings, *, watch: bool, limit: Limit, targets: Sequence[str] = ()
) -> dict[str, SideJob]:
    """Returns the side jobs of a run by the names of what they make, the last senders of the limit.

    watch: whether the run waits for outages. targets: those of the daemon, if there are several.
    """
    backoff = Backoff.of(settings.run) if watch else None
    jobs: dict[str, SideJob] = {
        "dump": DumpJob(settings, backoff, targets),
        "snapshot": SnapshotJob(settings, backoff),
    }
    if settings.by_path:
        jobs["files"] = FilesJob(settings, backoff)
    if watch:
        jobs["check"] = CheckJob(settings, backoff)
    for index, job in enumerate(jobs.values(), limit.senders - len(jobs)):
        job.pace = limit.sender(index)
    return jobs
