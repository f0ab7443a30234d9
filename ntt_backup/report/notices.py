"""Notices tell an operator what matters of a run: not every event, and nothing twice.

Pure: it takes in events, states and the time, and returns notices. A target is in trouble from the
first event that says so until the last trouble is over; `first_failure` and `recovery` are told at
these two moments alone. Troubles are a run that failed, a dump or snapshot that failed, a side that
is unreachable for longer than `notify.outage_after`, and a worker that stalls. A daemon without one
of these is judged every few minutes as `status` judges it: what no event tells of, such as an old
dump, or damage that a check found, is a trouble, too, and such a daemon does not ping as well.

A process of its own sends the notices: by the operator's program, a webhook, a ping. Each way has
its time, and gets each notice once; what cannot be told is a warning in the log. A notice names no
secret, and no warning shows a URL: whoever knows it could ping for us.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from ntt_backup import __version__, events
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control_socket import DaemonReport, RunReport
from ntt_backup.daemon.events import CheckComplete, CheckFailed, ChecksRecovered, TargetRestart
from ntt_backup.daemon.listeners import Heard, ListenerProcess
from ntt_backup.daemon.progress import OpenOutages, RunState
from ntt_backup.daemon.signals import time_limit
from ntt_backup.dump.events import DumpComplete, DumpFailed, DumpRecovered, DumpSkipped
from ntt_backup.errors import BackupError, RemoteUnreachable, SourceError
from ntt_backup.events import Event, Warning
from ntt_backup.formatting import duration, utc, without_numbers
from ntt_backup.model import Reason
from ntt_backup.process.child import tell_parent
from ntt_backup.process.spawn import start, write
from ntt_backup.report.health import Health, judge
from ntt_backup.report.target_facts import FactsReader, TargetFacts
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed, SnapshotsRecovered

# After this time a daemon that copies has recovered from the failure of the last run: one whose
# target is full may copy a few small blobs with each new start.
_SOUND_SECONDS: Final = 60.0
# A daemon that fails blobs says so once a day, not with each of them.
_FAILED_BLOBS_SECONDS: Final = 86400.0
_RUN: Final = "run"
_DUMP: Final = "dump"
_CHECK: Final = "check "
_SNAPSHOT: Final = "snapshot "
_HEALTH: Final = "health"
# A daemon is judged as often, and says so where it is well.
_PING_SECONDS: Final = 300.0
# For what the limit of a single read does not bound.
_SLACK_SECONDS: Final = 5.0
# What a ping says: what its URL ends with.
_PINGS: Final = {
    "start": "/start",
    **dict.fromkeys(("success", "recovery", "alive", "test"), ""),
    **dict.fromkeys(("failure", "outage", "stall", "action_required", "findings"), "/fail"),
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One notice to send. fields: Of the event behind the notice, or the findings of a check.

    kind: One of `config.sections.NoticeKind`, or `start` or `alive`, which only pings have.
    """

    kind: str
    target: str
    text: str
    fields: Mapping[str, Any]
    watch: bool = False


class Notices:
    """Decides which notices follow from the events and states of a target's runs.

    Args:
        target: Its name.
        outage_after: Seconds after which an outage is told.
        read: Reads the facts of the target, beside what its run tells.
    """

    def __init__(
        self, target: str, outage_after: float, read: Callable[[DaemonReport], TargetFacts]
    ) -> None:
        self._target = target
        self._outage_after = outage_after
        self._read = read
        self._report = RunReport("", 1)
        self._watch = self._rotten = False
        # What is wrong, by what it is about.
        self._troubles: dict[str, str] = {}
        self._outages = OpenOutages()
        self._error = self._reason = ""
        self._failed_blobs_at: float | None = None
        self._told_at = self._judged_at = 0.0
        self._found: list[Notice] = []

    def take(self, what: Event | RunState, now: float) -> list[Notice]:
        """Handles an event or a state, and returns the notices. now: monotonic seconds."""
        self._found = []
        self._report.take(what)
        if isinstance(what, RunState):
            self._take_state(what, now)
        else:
            self._take_event(what, now)
        if self._found:
            self._told_at = now
        return self._found

    def _take_state(self, state: RunState, now: float) -> None:
        self._find_long_outages(now)
        # A daemon has no good end.
        copies = state.copied and state.elapsed_s >= _SOUND_SECONDS
        if self._watch and (copies or state.pending == 0):
            self._end_trouble(_RUN, state.event())
        well = self._watch and not (self._found or self._troubles.keys() - {_HEALTH})
        if well and now >= max(self._told_at, self._judged_at) + _PING_SECONDS:
            self._judged_at = now
            self._look_at_health(state.event())

    def _look_at_health(self, event: Event) -> None:
        """Judges a daemon that has no other trouble. What cannot be read now changes nothing."""
        facts = self._read(self._report.report(self._target))
        verdict = judge(facts, datetime.now(UTC))
        if facts.trouble is None and verdict.level is Health.ACTION_REQUIRED:
            text = "; ".join(filter(None, (verdict.headline, verdict.points[0].do)))
            reason = without_numbers(text)
            self._begin_trouble(_HEALTH, event, kind="action_required", text=text, reason=reason)
        elif facts.trouble is None:
            self._end_trouble(_HEALTH, event)
        if not self._troubles:
            self._found.append(Notice("alive", self._target, "the daemon is well", {}))

    def _take_event(self, event: Event, now: float) -> None:
        self._outages.take(event, now)
        # Before its outages end with it. One that ended by an error has told so.
        if isinstance(event, TargetRestart) and _RUN not in self._troubles:
            self._begin_trouble(_RUN, event, text=self._error)
        for side in events.SIDES:
            if side not in self._outages.sides:
                self._end_trouble(f"outage {side}", event)
        match event:
            case events.RunStart():
                self._watch, self._rotten, self._error, self._reason = event.watch, False, "", ""
                self._report = RunReport("", event.workers)
                end = (
                    self._read(self._report.report(self._target)).end
                    if not self._troubles
                    else None
                )
                if end is not None and end.exit_code not in (0, 130, 143):
                    self._troubles[_RUN] = end.reason or f"exit code {end.exit_code}"
                self._tell("start", event)
            case events.RunStop():
                self._end_run(event)
            case events.Outage():  # Before the workers start there are no states.
                self._find_long_outages(now)
            case events.Error():
                self._error = event.line or ""
                self._reason = events.with_detail(event.message, event.detail)
            case DumpFailed():
                self._begin_trouble(_DUMP, event)
            case DumpComplete() | DumpSkipped() | DumpRecovered():
                self._end_trouble(_DUMP, event)
            case SnapshotFailed():
                self._begin_trouble(f"{_SNAPSHOT}{event.set}", event)
            case SnapshotComplete():
                self._end_trouble(f"{_SNAPSHOT}{event.set}", event)
            case SnapshotsRecovered():
                for about in [key for key in self._troubles if key.startswith(_SNAPSHOT)]:
                    self._end_trouble(about, event)
            case CheckFailed():
                self._begin_trouble(f"{_CHECK}{event.command}", event)
            case CheckComplete():
                self._end_trouble(f"{_CHECK}{event.command}", event)
                if event.exit_code:
                    self._tell("findings", event)
            case ChecksRecovered():
                for about in [key for key in self._troubles if key.startswith(_CHECK)]:
                    self._end_trouble(about, event)
            case events.WorkerStall():
                self._begin_trouble(f"stall {event.worker}", event, kind="stall")
            case (
                events.WorkerStallEnd()
                | events.WorkerRestart()
                | events.WorkerStop()
                | events.WorkerStart()  # Of a coordinator in the place of one that was killed.
            ):
                self._end_trouble(f"stall {event.worker}", event)
            case events.BlobFailed():
                self._take_failed_blob(event, now)

    def _find_long_outages(self, now: float) -> None:
        for since, outage in self._outages.all:
            if now - since >= self._outage_after:
                self._begin_trouble(f"outage {outage.what}", outage, kind="outage")

    def _take_failed_blob(self, event: events.BlobFailed, now: float) -> None:
        """Sends a notice of a failed blob.

        A corrupt source is reported once a run. Any other failed blob is reported only while a
        daemon runs, since the end of a single run reports the failed blobs.
        """
        if event.reason == Reason.CORRUPT_SOURCE:
            if not self._rotten:
                self._rotten = True
                self._tell("source_rot", event)
        elif self._watch:
            last = self._failed_blobs_at
            if last is None or now - last >= _FAILED_BLOBS_SECONDS:
                self._failed_blobs_at = now
                self._tell("failure", event)

    def _end_run(self, event: events.RunStop) -> None:
        if event.outcome == "stopped":
            return
        if event.exit_code:
            text = self._error or event.line or ""
            self._begin_trouble(_RUN, event, text=text, reason=self._reason)
            return
        self._tell("success", event)
        if self._troubles:
            self._troubles.clear()
            self._tell("recovery", event)

    def _begin_trouble(
        self, about: str, event: Event, *, kind: str = "failure", text: str = "", reason: str = ""
    ) -> None:
        """Notes a trouble, and makes its notices.

        A failure, or what requires action, is told again where its reason is another one.

        Args:
            about: What is wrong.
            event: The event that says so.
            kind: The kind of the notice.
            text: The text of the notice; "": the line of the event.
            reason: The text without what changes from one time to the next; "": the text.
        """
        first, reason = not self._troubles, reason or text or event.line or ""
        known, self._troubles[about] = self._troubles.get(about), reason
        if known is None or (kind in ("failure", "action_required") and known != reason):
            self._tell(kind, event, text)
        if first:
            self._tell("first_failure", event, text)

    def _end_trouble(self, about: str, event: Event) -> None:
        """Ends a trouble, and makes a notice if it was the last one."""
        if self._troubles.pop(about, None) is not None and not self._troubles:
            self._tell("recovery", event)

    def _tell(self, kind: str, event: Event, text: str = "") -> None:
        fields = {"event": event.kind, **event.fields}
        text = text or event.line or ""
        self._found.append(Notice(kind, self._target, text, fields, self._watch))


def notice_process(each: Mapping[str, CatalogConfig]) -> ListenerProcess:
    """Returns the process that sends the notices of all runs. The first settings say how."""
    settings = next(iter(each.values()))
    # The last notice is the one that matters most.
    patience = len(told(settings)) * settings.notify.timeout + _SLACK_SECONDS
    return ListenerProcess("notices", partial(_tell_of_runs, each), patience=patience)


def told(settings: CatalogConfig, kind: str = "") -> list[str]:
    """Returns the names of the ways that are configured. kind: for notices of this kind only."""
    notify, wanted = settings.notify, not kind or kind in settings.notify.on
    ways = {
        "command": notify.command and wanted,
        "webhook_url": notify.webhook_url and wanted,
        "ping_url": notify.ping_url and (not kind or kind in _PINGS),
    }
    return [name for name, used in ways.items() if used]


def send(settings: CatalogConfig, notice: Notice) -> list[str]:
    """Sends a notice by each way that is configured for its kind. Returns the problems."""
    problems = []
    ways = {"command": _run_program, "webhook_url": _post, "ping_url": _ping}
    seconds = settings.notify.timeout
    too_long = f"it took longer than notify.timeout ({duration(seconds)})"
    for name in told(settings, notice.kind):
        try:
            with time_limit(seconds + _SLACK_SECONDS, RemoteUnreachable(too_long)):
                ways[name](settings, notice)
        except BackupError as error:
            problems.append(f"the notice {notice.kind!r} did not go out by notify.{name}: {error}")
    return problems


def check(settings: CatalogConfig) -> tuple[str, str]:
    """Returns the ways, and a warning about a program that cannot be run. Sends no notice."""
    warning = ""
    if (command := settings.notify.command) and not os.access(command[0], os.X_OK):
        warning = f"notify.command cannot be run: {command[0]}"
    return "by " + ", ".join(told(settings)), warning


def _tell_of_runs(
    each: Mapping[str, CatalogConfig],
    heard: Iterator[Heard],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    settings = next(iter(each.values()))
    reader = FactsReader(each, "notices", page=False)
    notices: dict[str, Notices] = {}
    for target, what in heard:
        if target not in notices:
            read = partial(reader.read, target)
            notices[target] = Notices(target, settings.notify.outage_after, read)
        for notice in notices[target].take(what, clock()):
            for problem in send(settings, notice):
                tell_parent(Warning(reason=problem))


def _body(notice: Notice) -> bytes:
    return json.dumps(
        {
            "notice": notice.kind,
            "timestamp": utc(datetime.now(UTC)),
            "target": notice.target,
            "host": socket.gethostname(),
            "text": notice.text,
            "details": dict(notice.fields),
        }
    ).encode()


def _run_program(settings: CatalogConfig, notice: Notice) -> None:
    """Runs the operator's program. Raises SourceError where it fails."""
    child = start(settings.notify.command)
    try:
        with suppress(BrokenPipeError):  # A program need not read it.
            write(child.stdin_fd, _body(notice))
        child.close_stdin()
        # What it prints is not kept, and what it leaves behind is not waited for.
        status = child.wait(settings.notify.timeout)
    finally:
        child.kill()
    if status is None:
        limit = duration(settings.notify.timeout)
        raise SourceError(f"it took longer than notify.timeout ({limit}), and was killed")
    if status:
        last = child.stderr.text.strip().splitlines()[-1:]
        raise SourceError(f"it ended with status {status}", detail="".join(last))


def _post(settings: CatalogConfig, notice: Notice) -> None:
    url = _of_target(settings.notify.webhook_url, notice)
    _request(url, _body(notice), "application/json", settings.notify.timeout)


def _ping(settings: CatalogConfig, notice: Notice) -> None:
    """Asks for the URL of a check, as healthchecks has it: start, success, failure."""
    if notice.kind == "start" and notice.watch:
        return
    parts = urlsplit(_of_target(settings.notify.ping_url, notice))
    path = parts.path.rstrip("/") + _PINGS[notice.kind]
    ping = urlunsplit(parts._replace(path=path))
    _request(ping, notice.text.encode(), "text/plain; charset=utf-8", settings.notify.timeout)


def _of_target(url: str | None, notice: Notice) -> str:
    assert url is not None  # Only ways that are set are asked.
    return url.replace("{target}", quote(notice.target))


def _request(url: str, body: bytes, kind: str, timeout: float) -> None:
    """Sends a body by an HTTP POST.

    A redirect is not followed: the body would not arrive, and whoever answers would choose the next
    host that is asked.

    Raises:
        RemoteUnreachable: The request failed. The error does not show the URL.
    """
    # A run that tells nobody loads none of these.
    import http.client
    import urllib.error
    import urllib.request as web

    headers = {"Content-Type": kind, "User-Agent": f"ntt-backup/{__version__}"}
    request = web.Request(url, body, headers, method="POST")  # noqa: S310  http(s) only
    opener = web.OpenerDirector()
    for part in (
        web.ProxyHandler(),
        web.HTTPHandler(),
        web.HTTPSHandler(),
        web.HTTPErrorProcessor(),
        web.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(part)
    try:
        with opener.open(request, timeout=timeout):
            pass
    except urllib.error.HTTPError as error:
        said = f"{error.code} {http.client.responses.get(error.code, '')}".strip()
        moved = ": the URL leads elsewhere now" if 300 <= error.code < 400 else ""
        raise RemoteUnreachable(f"the server answered {said}{moved}") from None
    except http.client.InvalidURL:  # It says which part of it.
        raise RemoteUnreachable("no answer: the URL is not valid") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise RemoteUnreachable(
            f"no answer: {getattr(reason, 'strerror', None) or reason}"
        ) from None
