"""Notices tell an operator what matters of a run: not every event, and nothing twice.

Pure: it takes in events, states and the time, and returns notices. A target is in trouble from the
first event that says so until the last trouble is over; `first_failure` and `recovery` are told at
these two moments alone. Troubles are a run that failed, a dump or snapshot that failed, a side that
is away for longer than `notify.outage_after`, and a worker that stalls.

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from ntt_backup import __version__, events
from ntt_backup.config import CatalogConfig, identity
from ntt_backup.daemon.child import tell_parent
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.listeners import Heard, ListenerProcess
from ntt_backup.daemon.open_outages import OpenOutages
from ntt_backup.daemon.progress import RunState
from ntt_backup.daemon.signals import time_limit
from ntt_backup.dump.events import DumpComplete, DumpFailed, DumpRecovered, DumpSkipped
from ntt_backup.errors import BackupError, CatalogError, RemoteUnreachable, SourceError
from ntt_backup.events import Event, Warning
from ntt_backup.format import duration, utc
from ntt_backup.model import Reason
from ntt_backup.process.pipeline import start, write
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed, SnapshotsRecovered

# After this time a daemon that copies has recovered from the failure of the last run: one whose
# target is full may copy a few small blobs with each new start.
_SOUND_SECONDS: Final = 60.0
# A daemon that fails blobs says so once a day, not with each of them.
_FAILED_BLOBS_SECONDS: Final = 86400.0
_RUN: Final = "run"
_DUMP: Final = "dump"
_SNAPSHOT: Final = "snapshot "
# A daemon that is well says so as often.
_PING_SECONDS: Final = 300.0
# For what the limit of a single read does not bound.
_SLACK_SECONDS: Final = 5.0
# What a ping says: what its URL ends with.
_PINGS: Final = {
    "start": "/start",
    "success": "",
    "recovery": "",
    "failure": "/fail",
    "outage": "/fail",
    "stall": "/fail",
    "findings": "/fail",
    "alive": "",
    "test": "",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to be told. kind: one of `config.sections.NoticeKind`, or `start` and `alive`,
    which only a ping is made of. fields: of the event behind it, or what a check found.
    """

    kind: str
    target: str
    text: str
    fields: Mapping[str, Any]
    watch: bool = False


@dataclass(slots=True)
class _Target:
    watch: bool = False
    # What is wrong, by what it is about.
    troubles: dict[str, str] = field(default_factory=dict)
    outages: OpenOutages = field(default_factory=OpenOutages)
    error: str = ""
    reason: str = ""
    rotten: bool = False
    failed_blobs_at: float | None = None


class Notices:
    """Finds what is to be told of the runs of several targets.

    outage_after: seconds. last_failure: returns why the last run of a target failed;
    "" where the last run did not fail.
    """

    def __init__(self, outage_after: float, last_failure: Callable[[str], str]) -> None:
        self._outage_after = outage_after
        self._last_failure = last_failure
        self._targets: dict[str, _Target] = {}

    def well(self, target: str) -> bool:
        """Returns whether nothing is known to be wrong with the target."""
        return not self._targets.setdefault(target, _Target()).troubles

    def take(self, target: str, what: Event | RunState, now: float) -> Iterator[Notice]:
        """Takes in what a run does, and yields what is to be told. now: monotonic seconds."""
        one = self._targets.setdefault(target, _Target())
        if isinstance(what, RunState):
            yield from self._long_outages(target, one, now)
            # A daemon has no good end.
            copies = what.copied and what.elapsed_s >= _SOUND_SECONDS
            if one.watch and (copies or what.pending == 0):
                yield from _over(_RUN, target, one, what.event())
            return
        one.outages.take(what, now)
        # Before its outages end with it. One that ended by an error has told so.
        if isinstance(what, TargetRestart) and _RUN not in one.troubles:
            yield from _failure(_RUN, target, one, what, text=one.error)
        for side in events.SIDES:
            if side not in one.outages.sides:
                yield from _over(f"outage {side}", target, one, what)
        match what:
            case events.RunStart():
                one.watch, one.rotten, one.error, one.reason = what.watch, False, "", ""
                if not one.troubles and (why := self._last_failure(target)):
                    one.troubles[_RUN] = why
                yield _notice("start", target, one, what)
            case events.RunStop():
                yield from self._end(target, one, what)
            case events.Outage():  # Before the workers start there are no states.
                yield from self._long_outages(target, one, now)
            case events.Error():
                one.error = what.line or ""
                one.reason = events.with_detail(what.message, what.detail)
            case DumpFailed():
                yield from _failure(_DUMP, target, one, what)
            case DumpComplete() | DumpSkipped() | DumpRecovered():
                yield from _over(_DUMP, target, one, what)
            case SnapshotFailed():
                yield from _failure(f"{_SNAPSHOT}{what.set}", target, one, what)
            case SnapshotComplete():
                yield from _over(f"{_SNAPSHOT}{what.set}", target, one, what)
            case SnapshotsRecovered():
                for about in [key for key in one.troubles if key.startswith(_SNAPSHOT)]:
                    yield from _over(about, target, one, what)
            case events.WorkerStall():
                if f"stall {what.worker}" not in one.troubles:
                    yield _notice("stall", target, one, what)
                yield from _failure(f"stall {what.worker}", target, one, what, told=True)
            case (
                events.WorkerStallEnd()
                | events.WorkerRestart()
                | events.WorkerStop()
                | events.WorkerStart()  # Of a coordinator in the place of one that was killed.
            ):
                yield from _over(f"stall {what.worker}", target, one, what)
            case events.BlobFailed():
                yield from self._failed_blob(target, one, what, now)

    def _long_outages(self, target: str, one: _Target, now: float) -> Iterator[Notice]:
        for since, outage in one.outages.all:
            key = f"outage {outage.what}"
            if now - since >= self._outage_after and key not in one.troubles:
                yield _notice("outage", target, one, outage)
                yield from _failure(key, target, one, outage, told=True)

    def _failed_blob(
        self, target: str, one: _Target, event: events.BlobFailed, now: float
    ) -> Iterator[Notice]:
        """Yields a notice of rot once a run; of any other failed blob only while a daemon runs,
        since the end of a single run tells of them.
        """
        if event.reason == Reason.CORRUPT_SOURCE:
            if not one.rotten:
                one.rotten = True
                yield _notice("source_rot", target, one, event)
        elif one.watch:
            last = one.failed_blobs_at
            if last is None or now - last >= _FAILED_BLOBS_SECONDS:
                one.failed_blobs_at = now
                yield _notice("failure", target, one, event)

    def _end(self, target: str, one: _Target, event: events.RunStop) -> Iterator[Notice]:
        if event.outcome == "stopped":
            return
        if event.exit_code:
            text = one.error or event.line or ""
            yield from _failure(_RUN, target, one, event, text=text, reason=one.reason)
            return
        yield _notice("success", target, one, event)
        if one.troubles:
            one.troubles.clear()
            yield _notice("recovery", target, one, event)


def _failure(
    about: str,
    target: str,
    one: _Target,
    event: Event,
    *,
    text: str = "",
    reason: str = "",
    told: bool = False,
) -> Iterator[Notice]:
    """Notes a trouble, and yields its notices: none where the same trouble was told before for the
    same reason. reason: without what changes from one time to the next; the text where it is empty.
    told: another kind of notice tells of it.
    """
    first, reason = not one.troubles, reason or text or event.line or ""
    known, one.troubles[about] = one.troubles.get(about), reason
    if not told and known != reason:
        yield _notice("failure", target, one, event, text)
    if first:
        yield _notice("first_failure", target, one, event, text)


def _over(about: str, target: str, one: _Target, event: Event) -> Iterator[Notice]:
    """Ends a trouble, and yields a notice where it was the last one."""
    if one.troubles.pop(about, None) is not None and not one.troubles:
        yield _notice("recovery", target, one, event)


def _notice(kind: str, target: str, one: _Target, event: Event, text: str = "") -> Notice:
    fields = {"event": event.kind, **event.fields}
    return Notice(kind, target, text or event.line or "", fields, one.watch)


def notice_process(settings: CatalogConfig) -> ListenerProcess:
    """Returns the process that tells of all runs that it hears of."""
    # The last notice is the one that matters most.
    patience = len(told(settings)) * settings.notify.timeout + _SLACK_SECONDS
    return ListenerProcess("notices", partial(_tell_of_runs, settings), patience=patience)


def told(settings: CatalogConfig, kind: str = "") -> list[str]:
    """Returns the names of the ways that are set; kind: of those that tell of such a notice."""
    notify, wanted = settings.notify, not kind or kind in settings.notify.on
    ways = {
        "command": notify.command and wanted,
        "webhook_url": notify.webhook_url and wanted,
        "ping_url": notify.ping_url and (not kind or kind in _PINGS),
    }
    return [name for name, used in ways.items() if used]


def send(settings: CatalogConfig, notice: Notice) -> list[str]:
    """Tells a notice by each way that is wanted for it; returns what went wrong, a line each."""
    problems = []
    ways = {"command": _run_program, "webhook_url": _post, "ping_url": _ping}
    seconds = settings.notify.timeout
    too_long = RemoteUnreachable(f"it took longer than notify.timeout ({duration(seconds)})")
    for name in told(settings, notice.kind):
        try:
            with time_limit(seconds + _SLACK_SECONDS, too_long):
                ways[name](settings, notice)
        except BackupError as error:
            problems.append(f"the notice {notice.kind!r} did not go out by notify.{name}: {error}")
    return problems


def check(settings: CatalogConfig) -> tuple[str, str]:
    """Says who is told, and warns of a program that cannot be run; no notice is sent."""
    warning = ""
    if (command := settings.notify.command) and not os.access(command[0], os.X_OK):
        warning = f"notify.command cannot be run: {command[0]}"
    return "by " + ", ".join(told(settings)), warning


def _tell_of_runs(
    settings: CatalogConfig, heard: Iterator[Heard], clock: Callable[[], float] = time.monotonic
) -> None:
    notices = Notices(settings.notify.outage_after, partial(_last_failure, settings))
    pinged: dict[str, float] = {}
    watched: set[str] = set()
    for target, what in heard:
        now = clock()
        for notice in notices.take(target, what, now):
            if notice.kind == "start" and notice.watch:
                watched.add(target)
            pinged[target] = now
            _send(settings, notice)
        regular = isinstance(what, RunState) and target in watched and notices.well(target)
        if regular and now >= pinged.get(target, 0.0) + _PING_SECONDS:
            pinged[target] = now
            _send(settings, Notice("alive", target, "the daemon is well", {}))


def _send(settings: CatalogConfig, notice: Notice) -> None:
    for problem in send(settings, notice):
        tell_parent(Warning(reason=problem))


def _last_failure(settings: CatalogConfig, target: str) -> str:
    """Returns why the target's last run failed; "" where it did not, or the catalog does not say
    it.
    """
    from ntt_backup.catalog import connection, history

    try:
        with connection.connect(settings.catalog.url, identity.application("notices")) as conn:
            end = history.last_end(conn, target)
    except CatalogError:
        return ""
    if end is None or end.exit_code in (0, 130, 143):
        return ""
    return end.reason or f"exit code {end.exit_code}"


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
    """Posts a body. Raises RemoteUnreachable, which does not show the URL. A redirect is not
    followed: the body would not arrive, and whoever answers would say whom we ask next.
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
