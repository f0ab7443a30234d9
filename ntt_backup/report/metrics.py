"""Metrics tell a monitoring system of runs: by a page for Prometheus, by a file for node-exporter.

A process of its own serves them, and hears the runs. The page needs nothing but figures in memory;
a file system or a catalog that hangs holds up a thread of its own each. The figures come from what
runs tell, and from the catalog.

Counters begin at 0 with the process that serves them, and are there from the start of a run, so
that the first failure is an increase.

`METRICS` is the one place that names a metric. The table of docs/monitoring.md is made from it
(`python -m tests.helpers.documents`). Names follow the conventions of Prometheus: base units,
counters end in `_total`. No label holds free text: each has few values, known beforehand.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    MetricsHandler,
    disable_created_metrics,
    generate_latest,
)

from ntt_backup import __version__, events
from ntt_backup.config import Settings
from ntt_backup.config.values import address_of
from ntt_backup.daemon.control_socket import DaemonReport, RunReport
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.listeners import Heard, ListenerProcess
from ntt_backup.daemon.progress import STATES, OpenOutages, RunState
from ntt_backup.dump.events import DumpComplete, DumpFailed
from ntt_backup.model import OF_CHECKS, Reason
from ntt_backup.process.child import tell_parent
from ntt_backup.report.health import judge
from ntt_backup.report.target_facts import FactsReader, TargetFacts
from ntt_backup.report.web_server import BriefRequest, WebServer
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed

PREFIX: Final = "ntt_backup_"
# The clock of the catalog's server may differ by as much.
_AHEAD_SECONDS: Final = 3600.0
_SECONDS: Final = (0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_EVERY_SECONDS: Final = 60.0
_WRITE_SECONDS: Final = 15.0
# A short run's file shall have what the catalog knows, too.
_FIRST_ANSWER_SECONDS: Final = 2.0
# How long the end waits for the last file: its file system may not answer.
_LAST_WRITE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. text: for its HELP and the documentation. more: its labels beside the target."""

    text: str
    more: str = ""
    of_target: bool = True

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels."""
        return (*["target"] * self.of_target, *self.more.split())


METRICS: Final[Mapping[str, Metric]] = {
    "build_info": Metric("Always 1; the version stands in the label.", "version", of_target=False),
    "up": Metric("1 while a run works or waits for the target, 0 at its end."),
    "last_heard_timestamp_seconds": Metric(
        "When the run last said anything: every second while its workers live."
    ),
    "run_start_timestamp_seconds": Metric("When the run began."),
    "blobs_copied_total": Metric(
        "Blobs on the remote's stable storage, recorded in the ledger.", "worker"
    ),
    "copied_bytes_total": Metric("Content of the copied blobs.", "worker"),
    "wire_bytes_total": Metric(
        "Bytes handed to the transport for batches that are settled.", "worker"
    ),
    "blobs_failed_total": Metric("Blobs that were marked as failed.", "worker"),
    "failures_total": Metric("The same by reason; see Failed blobs in first-aid.md.", "reason"),
    "blobs_still_failed": Metric(
        "Blobs that are failed now, by whatever run, without those that somebody says to know of."
    ),
    "files": Metric("Files that go by their paths: listed, unread, failed and gone.", "state"),
    "blobs_pending": Metric("Blobs still to send; may be an estimate; missing until it is known."),
    "eta_seconds": Metric("Until nothing is pending; missing while that is not known."),
    "link_bytes_per_second": Metric(
        "Bytes handed to the transport, a second, over the last minute."
    ),
    "batch_duration_seconds": Metric("From a batch's start to its receipt.", "worker"),
    "receipt_duration_seconds": Metric(
        "From a batch's last byte to its receipt: the way, what is still queued, and the remote's"
        " disk.",
        "worker",
    ),
    "batch_retries_total": Metric(
        "Batches that are sent again: their answer was lost (link), was none (protocol), or said"
        " no (rejected).",
        "worker reason",
    ),
    "batch_splits_total": Metric(
        "Batches that kept failing, and are sent again in halves.", "worker"
    ),
    "workers": Metric("Workers by what they do.", "state"),
    "paused": Metric("1 while somebody has told the run to pause."),
    "worker_restarts_total": Metric("Worker processes that died and are started again.", "worker"),
    "run_restarts_total": Metric(
        "With several targets: runs that died, failed or hung, started again."
    ),
    "worker_stalls_total": Metric(
        "How often a worker said nothing for run.stall_timeout.", "worker"
    ),
    "outage": Metric(
        "1 while somebody misses the remote, the catalog, the store (source), or what the start"
        " needs (preflight).",
        "what",
    ),
    "outage_seconds_total": Metric("How long outages lasted so far.", "what"),
    "dump_failures_total": Metric("Dumps of the catalog that failed."),
    "snapshot_failures_total": Metric("Snapshots that failed.", "set"),
    "last_success_timestamp_seconds": Metric(
        "When a run last ended with 0; with --watch also when it last had nothing left to send."
    ),
    "last_run_end_timestamp_seconds": Metric("When a run last ended."),
    "last_run_exit_code": Metric(
        "The exit code of that run; 1 where it was killed, or its end could not be noted."
    ),
    "last_dump_timestamp_seconds": Metric("When the catalog was last dumped to the remote."),
    "last_snapshot_timestamp_seconds": Metric("When the last version of the set was taken.", "set"),
    "last_check_timestamp_seconds": Metric(
        "When verify, reconcile, drill or restore last found all right.", "command"
    ),
    "last_check_wrong_blobs": Metric(
        "Blobs that its last call found lost or not right.", "command"
    ),
    "target_info": Metric("Always 1; the identity of the target stands in the label.", "id"),
    "health": Metric("How `status` judges the target: 0 healthy, 1 waiting, 2 action required."),
    "locks_end_timestamp_seconds": Metric(
        "When the first object lock of the target ends, as `protect` or `check` has noted."
    ),
    "policy_short_blobs": Metric(
        "Blobs with fewer proved copies than policy.copies, on all targets, by the last count."
    ),
    "policy_counted_timestamp_seconds": Metric("When proved copies were last counted."),
    "missed_on_target": Metric(
        "The newest dump and versions of this host that the target lacks: it may have been rolled"
        " back."
    ),
}


class Figures:
    """Holds the figures of all targets, from what their runs tell.

    Several threads may use the figures, one of which calls `take`. sets: The snapshot sets that
    runs take, by target.
    """

    def __init__(self, sets: Mapping[str, Iterable[str]]) -> None:
        self._sets = sets
        # What each run tells of itself, by its target; None of a run that has ended.
        self._reports: dict[str, RunReport | None] = {}
        self._lock = Lock()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._metrics = {name: _made(name, one, self.registry) for name, one in METRICS.items()}
        self._watching: set[str] = set()
        self._ids: dict[str, str] = {}
        self._latest: dict[tuple[str, ...], float] = {}
        # By target; and up to when they are counted.
        self._outages: defaultdict[str, OpenOutages] = defaultdict(OpenOutages)
        self._counted = 0.0
        # By target and counter: what will be copied again, and was counted already.
        self._lost: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.set("build_info", 1, version=__version__)

    def take(self, target: str, what: events.Event | RunState, now: float) -> None:
        """Handles an event or a state. now: seconds since the epoch."""
        self.pass_time(now)
        self.set("last_heard_timestamp_seconds", now, target=target)
        if isinstance(what, events.Event):
            outages = self._outages[target]
            outages.take(what, now)
            for side in events.SIDES:
                self.set("outage", side in outages.sides, target=target, what=side)
        self._take_report(target, what)
        match what:
            case RunState():
                self._take_state(target, what, now)
            case events.RunStart():
                self._begin(target, what, now)
            case events.RunStop():
                self._end(target, what, now)
            case events.BatchComplete(worker=worker):
                self._add_once("blobs_copied_total", what.copied, target, worker)
                self._add_once("copied_bytes_total", what.bytes, target, worker)
                self._add("wire_bytes_total", what.wire_bytes, target, worker)
                self._add("blobs_failed_total", what.failed, target, worker)
                for _ in range(what.batches if what.wire_bytes else 0):
                    mean = what.duration_s / what.batches
                    self._observe("batch_duration_seconds", mean, target, worker)
                    self._observe("receipt_duration_seconds", what.answer_s, target, worker)
            case events.MarksLost():
                self._lost[target, "blobs_copied_total"] += what.blobs
                self._lost[target, "copied_bytes_total"] += what.bytes
            case events.BatchRetry(worker=worker):
                self._add("batch_retries_total", 1, target, worker, what.cause)
            case events.BatchSplit(worker=worker):
                self._add("batch_splits_total", 1, target, worker)
            case events.BlobFailed():
                self._add("failures_total", 1, target, what.reason)
            case events.BlobsFailed():
                for reason, count in what.reasons.items():
                    self._add("failures_total", count, target, reason)
            case events.StillFailed():
                self.set("blobs_still_failed", what.blobs, target=target)
            case events.WorkerRestart(worker=worker):
                self._add("worker_restarts_total", 1, target, worker)
            case TargetRestart():
                self._add("run_restarts_total", 1, target)
                self._down(target)
            case events.WorkerStall(worker=worker):
                self._add("worker_stalls_total", 1, target, worker)
            case DumpComplete():
                self.note("last_dump_timestamp_seconds", now, target)
            case DumpFailed():
                self._add("dump_failures_total", 1, target)
            case SnapshotComplete():
                self.note("last_snapshot_timestamp_seconds", now, target, what.set)
            case SnapshotFailed():
                self._add("snapshot_failures_total", 1, target, what.set)

    def _take_report(self, target: str, what: events.Event | RunState) -> None:
        with self._lock:
            if isinstance(what, events.RunStart):
                self._reports[target] = RunReport("", what.workers)
            elif isinstance(what, events.RunStop | TargetRestart):
                self._reports[target] = None
            if (report := self._reports.get(target)) is not None:
                report.take(what)

    def reports(self) -> dict[str, DaemonReport | None]:
        """Returns what the runs tell of themselves now, by target; None for one that has ended."""
        with self._lock:
            return {
                name: None if one is None else one.report(name)
                for name, one in sorted(self._reports.items())
            }

    def pass_time(self, now: float) -> None:
        """Counts the seconds of outages that last. now: seconds of the epoch."""
        passed, self._counted = now - self._counted, now
        for target, outages in list(self._outages.items()):
            for what in outages.sides if passed > 0 else ():
                self._add("outage_seconds_total", passed, target, what)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        gauge = self._metrics[name]
        assert isinstance(gauge, Gauge)
        gauge.labels(**labels).set(value)

    def note(self, name: str, when: float, *labels: str) -> bool:
        """Sets a time, unless a later time is known, and returns whether the time was set.

        A time ahead of now comes from a wrong clock, and would hide all later times until then.
        """
        known, most = self._latest.get((name, *labels), 0.0), self._counted + _AHEAD_SECONDS
        if later := when <= most and not when <= known <= most:
            self._latest[name, *labels] = when
            self.set(name, when, **dict(zip(METRICS[name].labels, labels, strict=True)))
        return later

    def note_end(self, target: str, when: float, exit_code: int) -> None:
        """Notes that a run ended, unless a later end is known."""
        if self.note("last_run_end_timestamp_seconds", when, target):
            self.set("last_run_exit_code", exit_code, target=target)

    def note_facts(self, facts: TargetFacts) -> None:
        """Sets the figures that host and catalog know of a target.

        While the catalog cannot be read, its last figures stay.
        """
        target = facts.target
        self.set("missed_on_target", len(facts.missed), target=target)
        if facts.lock is not None:
            self.set("locks_end_timestamp_seconds", facts.lock.until.timestamp(), target=target)
        for name, known in facts.snapshots.items():
            if known.taken_at is not None:
                when = known.taken_at.timestamp()
                self.note("last_snapshot_timestamp_seconds", when, target, name)
        if facts.trouble is not None:
            return
        self.set("health", judge(facts, datetime.now(UTC)).level, target=target)
        if facts.place is not None:
            if (before := self._ids.get(target)) not in (None, facts.place.id):
                self.forget("target_info", target=target, id=str(before))
            self._ids[target] = facts.place.id
            self.set("target_info", 1, target=target, id=facts.place.id)
        copies = facts.settings.policy.copies
        if copies is not None and (count := facts.count) is not None:
            short = sum(one.blobs for one in count.short(copies))
            self.set("policy_short_blobs", short, target=target)
            self.note("policy_counted_timestamp_seconds", count.counted_at.timestamp(), target)
        if facts.end is not None:
            self.note_end(target, facts.end.ended_at.timestamp(), facts.end.exit_code)
            if facts.end.succeeded_at is not None:
                when = facts.end.succeeded_at.timestamp()
                self.note("last_success_timestamp_seconds", when, target)
        for dump in facts.dumps:
            if dump.name:
                when = dump.ended_at.timestamp()
                self.note("last_dump_timestamp_seconds", when, target)
        for one in sorted(facts.checks, key=lambda one: one.ended_at):
            self.set("last_check_wrong_blobs", one.wrong, target=target, command=one.command)
            if one.exit_code == 0:
                when = one.ended_at.timestamp()
                self.note("last_check_timestamp_seconds", when, target, one.command)
        self.set("blobs_still_failed", facts.unknown, target=target)
        for state in ("listed", "unread", "failed", "gone") if facts.files is not None else ():
            self.set("files", getattr(facts.files, state), target=target, state=state)

    def forget(self, name: str, **labels: str) -> None:
        """Removes a figure that is not known any more."""
        metric = self._metrics[name]
        with suppress(KeyError):
            metric.remove(*(labels[one] for one in METRICS[name].labels))

    def _begin(self, target: str, start: events.RunStart, now: float) -> None:
        self._watching.discard(target)
        if start.watch:
            self._watching.add(target)
        self.set("up", 1, target=target)
        self.set("run_start_timestamp_seconds", now, target=target)
        for worker in range(start.workers):
            for name, metric in METRICS.items():
                if metric.labels == ("target", "worker"):
                    self._metrics[name].labels(target, worker)
            for cause in events.RETRY_CAUSES.values():
                self._metrics["batch_retries_total"].labels(target, worker, cause)
        for reason in (one for one in Reason if one not in OF_CHECKS):
            self._metrics["failures_total"].labels(target, reason.value)
        for what in events.SIDES:
            self._metrics["outage_seconds_total"].labels(target, what)
        for name in ("dump_failures_total", "run_restarts_total"):
            self._metrics[name].labels(target)
        for name in self._sets.get(target, ()):
            self._metrics["snapshot_failures_total"].labels(target, name)

    def _end(self, target: str, stop: events.RunStop, now: float) -> None:
        self._down(target)
        self.note_end(target, now, stop.exit_code)
        if not stop.exit_code:
            self.note("last_success_timestamp_seconds", now, target)

    def _down(self, target: str) -> None:
        self.set("up", 0, target=target)
        self.set("link_bytes_per_second", 0, target=target)
        for state in STATES:
            self.set("workers", 0, target=target, state=state)

    def _take_state(self, target: str, state: RunState, now: float) -> None:
        states = [one.state for one in state.workers]
        for name in STATES:
            self.set("workers", states.count(name), target=target, state=name)
        self.set("link_bytes_per_second", state.mb_per_s * 1e6, target=target)
        self.set("paused", state.paused, target=target)
        for name, value in (("blobs_pending", state.pending), ("eta_seconds", state.eta_s)):
            if value is None:
                self.forget(name, target=target)
            else:
                self.set(name, value, target=target)
        if state.pending == 0 and target in self._watching:
            self.note("last_success_timestamp_seconds", now, target)

    def _add(self, name: str, amount: float, *labels: object) -> None:
        counter = self._metrics[name]
        assert isinstance(counter, Counter)
        counter.labels(*labels).inc(amount)

    def _add_once(self, name: str, amount: int, target: str, worker: object) -> None:
        """Counts copies, without the repeated copies of blobs whose marks were lost."""
        again = min(amount, self._lost[target, name])
        self._lost[target, name] -= again
        self._add(name, amount - again, target, worker)

    def _observe(self, name: str, value: float, *labels: object) -> None:
        histogram = self._metrics[name]
        assert isinstance(histogram, Histogram)
        histogram.labels(*labels).observe(value)


def class_of(name: str) -> type[Counter | Gauge | Histogram]:
    """Returns the class of a metric, as the conventions of Prometheus tell it from the name."""
    if name.endswith("_total"):
        return Counter
    return Histogram if name.endswith("_duration_seconds") else Gauge


def _made(name: str, metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    """Returns the object that counts."""
    about, kind = (PREFIX + name, metric.text, metric.labels), class_of(name)
    if kind is Histogram:
        return Histogram(*about, registry=registry, buckets=_SECONDS)
    return kind(*about, registry=registry)


def metrics_process(each: Mapping[str, Settings]) -> ListenerProcess:
    """Returns the process that serves the metrics of all runs. The first settings say where."""
    return ListenerProcess("metrics", partial(_serve, each))


def check(settings: Settings) -> tuple[str, str]:
    """Returns the place of the metrics, and a warning; neither stops a run."""
    listen, textfile = settings.metrics.listen, settings.metrics.textfile
    warnings = []
    if listen is not None:
        try:
            WebServer(*address_of(listen), BriefRequest).server_close()
        except OSError as error:
            warnings.append(_trouble(listen, error))
    if textfile is not None and not os.access(textfile.parent, os.W_OK | os.X_OK):
        why = "may not be written to" if textfile.parent.is_dir() else "is missing"
        warnings.append(f"no metrics in {textfile}: its directory {why}")
    if textfile is not None and textfile.suffix != ".prom":
        warnings.append(f"node-exporter reads *.prom, and not {textfile}")
    return f"in {textfile}" if listen is None else f"http://{listen}", "; ".join(warnings)


def _trouble(place: object, error: OSError) -> str:
    return f"no metrics at {place}: {error.strerror or error}"


def _serve(each: Mapping[str, Settings], heard: Iterator[Heard]) -> None:
    figures = Figures({name: one.scheduled for name, one in each.items()})
    wanted, answered, over = Event(), Event(), Event()
    asking = (each, figures, wanted, answered)
    Thread(target=_ask_again_and_again, args=asking, daemon=True).start()
    writing = (next(iter(each.values())), figures, answered, over)
    clock = Thread(target=_keep_time, args=writing, daemon=True)
    clock.start()
    for target, what in heard:
        figures.take(target, what, time.time())
        if isinstance(what, events.RunStart):
            wanted.set()
    over.set()
    clock.join(_LAST_WRITE_SECONDS)


def _ask_again_and_again(
    each: Mapping[str, Settings], figures: Figures, wanted: Event, answered: Event
) -> None:
    """Reads what catalog and host know of the targets, when that is wanted and then each minute."""
    reader = FactsReader(each, "metrics", page=False, patience=None)
    wanted.wait()
    while True:
        wanted.clear()
        for target, report in figures.reports().items():
            figures.note_facts(reader.read(target, report))
        answered.set()
        wanted.wait(_EVERY_SECONDS)


def _keep_time(settings: Settings, figures: Figures, answered: Event, over: Event) -> None:
    """Serves the page and writes the file. A failure is told once, and retried."""
    listen, textfile = settings.metrics.listen, settings.metrics.textfile

    class Handler(BriefRequest, MetricsHandler):
        registry = figures.registry

    complained: set[object] = set()
    served = False

    def attempt(place: object, work: Callable[[], object]) -> bool:
        try:
            work()
        except OSError as error:
            if place not in complained:
                complained.add(place)
                tell_parent(events.Warning(reason=_trouble(place, error)))
            return False
        complained.discard(place)
        return True

    def open_page(listen: str) -> None:
        server = WebServer(*address_of(listen), Handler)
        Thread(target=server.serve_forever, daemon=True).start()

    while True:
        if listen is not None and not served:
            served = attempt(listen, partial(open_page, listen))
        answered.wait(_FIRST_ANSWER_SECONDS)
        ended = over.is_set()
        figures.pass_time(time.time())
        if textfile is not None:
            attempt(textfile, lambda: _write(textfile, generate_latest(figures.registry)))
        if ended:
            return
        over.wait(_WRITE_SECONDS)


def _write(path: Path, text: bytes) -> None:
    """Writes the file in one step: node-exporter reads whole ones, and only *.prom."""
    new = path.with_name(f"{path.name}.new")
    # Others may write to the directory: what one of them put there is not written through.
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)  # node-exporter is another user, whatever our umask.
        file.write(text)
    new.replace(path)
