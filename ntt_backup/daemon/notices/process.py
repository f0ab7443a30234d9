"""A process of its own sends notices to an operator: by their program, a webhook, a ping.

Each way has its time, and gets each notice once; what cannot be told is a warning in the log. A
notice names no secret, and no warning shows a URL: whoever knows it could ping for us.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from ntt_backup import __version__
from ntt_backup.config import CatalogConfig, identity
from ntt_backup.daemon.child import tell_parent
from ntt_backup.daemon.listener_process import Heard, ListenerProcess
from ntt_backup.daemon.notices.troubles import Notice, Notices
from ntt_backup.daemon.run_state import RunState
from ntt_backup.daemon.signals import time_limit
from ntt_backup.errors import BackupError, CatalogError, RemoteUnreachable, SourceError
from ntt_backup.events import Warning
from ntt_backup.format import duration, utc
from ntt_backup.process.pipeline import start, write

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
