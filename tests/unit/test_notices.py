"""What an operator is told of a run, when, and by which way."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ntt_backup import events
from ntt_backup.catalog.history import CheckRun, RunEnd
from ntt_backup.config import CatalogConfig
from ntt_backup.config.sections import NotifySettings
from ntt_backup.daemon.events import CheckComplete, CheckFailed, ChecksRecovered
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.dump.events import DumpFailed, DumpRecovered, DumpSkipped
from ntt_backup.errors import CatalogRefused, RemoteUnreachable
from ntt_backup.events import Event
from ntt_backup.report import notices
from ntt_backup.report.notices import Notice, Notices
from ntt_backup.report.target_facts import FactsReader, TargetFacts
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotsRecovered
from tests.helpers.waiting import PATIENCE
from tests.unit.sample_events import (
    BLOB_FAILED,
    DIED,
    OUTAGE,
    OUTAGE_END,
    RUN_START,
    RUN_STOP,
    STALL,
    STALL_END,
    TARGET_DIED,
)

HOST = "127.0.0.1"
WHY: dict[str, Any] = {"exit_code": 5, "message": "m", "detail": "why", "hint": "do"}
START = replace(RUN_START, watch=False)
WATCH = replace(RUN_START, watch=True)
STATE = RunProgress(0.0, 2).state(1.0)
COPIES = replace(STATE, pending=9, copied=1, elapsed_s=100.0)
IDLE = replace(COPIES, copied=0)
DUMP_FAILED = DumpFailed(**WHY)
DRILL_FAILED = CheckFailed(command="drill", **WHY)
SCANNED = CheckComplete(
    command="scan",
    blobs=1,
    bytes=0,
    wrong=0,
    changed=0,
    complete=True,
    exit_code=0,
    duration_s=1.0,
)
DUMP_FINE = DumpSkipped(name="copyjob-2026-11-22T02-10-00Z.dump")
AWAY = replace(OUTAGE, worker=0)
CANNOT_BEGIN = replace(OUTAGE, what="preflight")
CAN_BEGIN = replace(OUTAGE_END, what="preflight")
WORKER_STOP = events.WorkerStop(worker=0)
ROT = replace(BLOB_FAILED, worker=0, reason="corrupt-source")
FULL = events.Error(exit_code=6, message="the remote is full", detail="no space", hint="free some")


def stop(outcome: str) -> Event:
    codes = {"done": 0, "error": 5, "some_failed": 7, "stopped": 143}
    return replace(RUN_STOP, outcome=outcome, exit_code=codes[outcome])


def facts(reason: str = "", **known: Any) -> TargetFacts:
    """A target that is well. reason: why its last run failed."""
    end = RunEnd(datetime.now(UTC), 5, None, reason) if reason else None
    return TargetFacts(CatalogConfig(), end=end, **known)


Heard = Event | RunState | float | str


def told(*heard: Heard) -> list[Notice]:
    """The notices, after what a run told at the seconds that stand before it; no ping of a daemon
    that is well. A text is why the run before it has failed.
    """
    known, now, found = facts(), 0.0, []
    notices = Notices("far", 900.0, lambda daemon: replace(known, daemon=daemon))
    for what in heard:
        match what:
            case str():
                known = facts(what)
            case float() | int():
                now = what
            case _:
                found += notices.take(what, now)
    return [one for one in found if one.kind != "alive"]


# --- when -----------------------------------------------------------------------------------------

FIRST = "failure first_failure"
GONE = "outage first_failure"
MISSES = [WATCH, 1, AWAY, 901, STATE]
OTHER = replace(AWAY, worker=1)
NEW_WORKER = events.WorkerStart(worker=1, strategy="stream")
BEGUN, NOTHING_LEFT = replace(COPIES, elapsed_s=5.0), replace(STATE, pending=0)
SNAPSHOTS_FAIL = [SnapshotFailed(set=name, **WHY) for name in ("etc", "")]
FULL_AGAIN = [WATCH, BEGUN, FULL, stop("error"), TARGET_DIED]
STORIES: dict[str, tuple[list[Any], str]] = {
    "done": ([START, stop("done")], "start success"),
    "done after a failure": (["code 5", START, stop("done")], "start success recovery"),
    "an error": ([START, stop("error")], f"start {FIRST}"),
    "an error after another one": (["code 5", START, stop("error")], "start failure"),
    "some failed": ([START, stop("some_failed")], f"start {FIRST}"),
    "stopped": ([START, stop("stopped")], "start"),
    # A daemon has no end that could say so.
    "copies again": (["x", WATCH, IDLE, COPIES, COPIES, DUMP_FAILED], f"start recovery {FIRST}"),
    "nothing left": (["x", WATCH, IDLE, NOTHING_LEFT, DUMP_FAILED], f"start recovery {FIRST}"),
    "its own error": ([WATCH, stop("error"), WATCH, COPIES], f"start {FIRST} start recovery"),
    # Before the workers start there are no states, only attempts.
    "no start for a while": ([WATCH, 1, CANNOT_BEGIN, 840, CANNOT_BEGIN], "start"),
    "no start for long": (
        [WATCH, 1, CANNOT_BEGIN, 960, CANNOT_BEGIN, 1020, CANNOT_BEGIN, CAN_BEGIN],
        f"start {GONE} recovery",
    ),
    # It may copy a few small blobs with each new start: that is no recovery.
    "stays full": ([*FULL_AGAIN * 7, WATCH, COPIES], f"start {FIRST} {'start ' * 7} recovery"),
    "full after a restart": (["the remote is full: no space", *FULL_AGAIN[:4]], "start"),
    "full after another failure": (["no route to host", *FULL_AGAIN[:4]], "start failure"),
    "another trouble beside a known one": (
        [WATCH, DUMP_FAILED, DUMP_FAILED, replace(DUMP_FAILED, message="another")],
        f"start {FIRST} failure",
    ),
    "the end of the last of two troubles": (
        [WATCH, DUMP_FAILED, STALL, DUMP_FAILED, DUMP_FINE, STALL_END, DUMP_FINE],
        f"start {FIRST} stall recovery",
    ),
    # As that of all workers is, which has their coordinator killed.
    "a stall of a run that was killed": (
        [WATCH, STALL, WATCH, NEW_WORKER],
        "start stall first_failure start recovery",
    ),
    # That a dead coordinator misses nothing any more is no recovery.
    "dies in an outage": (
        [*MISSES, TARGET_DIED, WATCH, TARGET_DIED],
        f"start {GONE} failure start",
    ),
    "dies twice, and is well": (
        [WATCH, TARGET_DIED, WATCH, TARGET_DIED, NOTHING_LEFT],
        f"start {FIRST} start recovery",
    ),
    "an error, and a new start": ([WATCH, stop("error"), TARGET_DIED], f"start {FIRST}"),
    "snapshots that fail no more": (
        [WATCH, *SNAPSHOTS_FAIL, SnapshotsRecovered(), SnapshotsRecovered()],
        f"start {FIRST} failure recovery",
    ),
    "dumps that fail no more": (
        [WATCH, DUMP_FAILED, DUMP_FAILED, DumpRecovered(), DumpRecovered()],
        f"start {FIRST} recovery",
    ),
    "a drill that fails for days beside checks that do not": (
        [WATCH, *[DRILL_FAILED, SCANNED] * 3, ChecksRecovered(), SCANNED],
        f"start {FIRST} recovery",
    ),
    "a short outage": ([WATCH, 1, AWAY, 899, STATE, OUTAGE_END, 2000, STATE], "start"),
    "a long outage of two workers": (
        [WATCH, 1, AWAY, 500, OTHER, 901, STATE, 902, STATE, OUTAGE_END, OUTAGE_END],
        f"start {GONE} recovery",
    ),
    "who misses a side dies": ([*MISSES, DIED, STATE], f"start {GONE} recovery"),
    "who misses a side ends": ([*MISSES, WORKER_STOP, STATE], f"start {GONE} recovery"),
    "who misses a side speaks": ([*MISSES, replace(STALL_END, worker=0)], f"start {GONE}"),
    "rot, once a run": ([START, ROT, ROT, BLOB_FAILED], "start source_rot"),
    "failed blobs of a daemon, once a day": (
        [WATCH, 1, BLOB_FAILED, 2, BLOB_FAILED, 86402, BLOB_FAILED],
        "start failure failure",
    ),
}


@pytest.mark.parametrize(("heard", "kinds"), STORIES.values(), ids=STORIES)
def test_what_matters_is_told_once(heard: list[Heard], kinds: str) -> None:
    assert [one.kind for one in told(*heard)] == kinds.split()


def test_a_failure_says_what_the_error_said() -> None:
    *_, failure, _ = told(START, events.Error(**WHY), stop("error"))
    assert failure.text == "error: m: why; do"


DAMAGED = CheckRun("verify", datetime.now(UTC), datetime.now(UTC), 7, 100, 1000, 2, "")
REFUSED = CatalogRefused("no right")


def test_a_daemon_is_judged_as_status_judges_it() -> None:
    """By what no event tells of: it does not ping as well, and that is told once until it is so."""
    known = [facts(), facts(checks=[DAMAGED]), facts(checks=[replace(DAMAGED, wrong=3)]), facts()]
    known[2:2] = [facts(trouble=REFUSED)]  # Nobody knows then.
    notices, said = Notices("far", 900.0, lambda _: known.pop(0)), []
    notices.take(WATCH, 0.0)
    for now in range(0, 1300, 50):
        said += [(now, one.kind, one.text) for one in notices.take(STATE, float(now))]
    assert [one[:2] for one in said] == [
        *((300, "action_required"), (300, "first_failure")),
        *((1200, "recovery"), (1200, "alive")),
    ]
    assert said[0][2].endswith(
        "found 2 blobs missing or wrong; `ntt-backup-remote verify` says more"
    )
    assert said[0][2].startswith("Action required: The last verify, ")


# --- by which way ---------------------------------------------------------------------------------


@dataclass
class Server:
    """Notes what was posted to it, and answers with a status."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.paths.append(self.path)
            found.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(found.status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            found.paths.append(f"GET {self.path}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    http = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    found.url = f"http://{HOST}:{http.server_port}"
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What is logged; and no catalog is asked."""
    logged: list[Event] = []
    monkeypatch.setattr(notices, "tell_parent", logged.append)
    monkeypatch.setattr(FactsReader, "read", lambda *_: facts())
    return logged


def settings(**notify: Any) -> CatalogConfig:
    return CatalogConfig(notify=NotifySettings(**notify))


def program(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return (str(path), "an argument; not a command")


def test_a_program_gets_the_notices_that_are_wanted(tmp_path: Path, said: list[Event]) -> None:
    command = program(tmp_path, f'cat >> {tmp_path}/got; echo "|$1" >> {tmp_path}/got')
    heard = [("far", START), ("near", stop("done")), ("far", stop("error"))]
    notices._tell_of_runs({"far": settings(command=command)}, iter(heard))
    body, _, argument = (tmp_path / "got").read_text().partition("|")
    assert argument == "an argument; not a command\n"
    notice = json.loads(body)
    assert notice.pop("host")
    assert notice.pop("timestamp").endswith("Z")
    assert notice.pop("details")["exit_code"] == 5
    assert notice == {"notice": "first_failure", "target": "far", "text": stop("error").line}
    assert said == []


@pytest.mark.parametrize(
    ("script", "timeout", "why"),
    [
        ("echo no way >&2; exit 3", PATIENCE, "it ended with status 3: no way"),
        ("exec sleep 600", 1, "it took longer than notify.timeout (1.0 s), and was killed"),
        ("exec <&-; exit 4", PATIENCE, "it ended with status 4"),
    ],
)
def test_a_program_that_fails_or_hangs_is_a_warning(
    tmp_path: Path, said: list[Event], script: str, timeout: float, why: str
) -> None:
    wanted = settings(command=program(tmp_path, script), timeout=timeout)
    notices._tell_of_runs({"far": wanted}, iter([("far", START), ("far", stop("error"))]))
    assert [str(event.line) for event in said] == [
        f"warning: the notice 'first_failure' did not go out by notify.command: {why}"
    ]


def test_what_a_program_leaves_behind_is_not_waited_for(tmp_path: Path, said: list[Event]) -> None:
    # The sleeper has the program's stdout.
    wanted = settings(command=program(tmp_path, "sleep 600 & echo $! >$0.pid"), timeout=PATIENCE)
    begun = time.monotonic()
    try:
        notices._tell_of_runs({"far": wanted}, iter([("far", stop("error"))]))
    finally:
        os.kill(int((tmp_path / "program.pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - begun < PATIENCE
    assert said == []


def test_what_a_program_prints_takes_no_memory(tmp_path: Path, said: list[Event]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wanted = settings(command=program(tmp_path, "head -c 200M /dev/zero"))
    notices._tell_of_runs({"far": wanted}, iter([("far", stop("error"))]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    assert said == []


def test_a_program_that_is_missing_is_told_by_check_and_at_the_notice(
    tmp_path: Path, said: list[Event]
) -> None:
    wanted = settings(command=[f"{tmp_path}/none"])
    assert notices.check(wanted) == (
        "by command",
        f"notify.command cannot be run: {tmp_path}/none",
    )
    notices._tell_of_runs({"far": wanted}, iter([("far", stop("error"))]))
    assert "is not installed" in str(said[0].line)


def test_a_check_is_pinged_at_the_start_the_end_and_a_failure(
    server: Server, said: list[Event]
) -> None:
    wanted = settings(ping_url=f"{server.url}/key/backup-{{target}}?create=1")
    heard = [("far off", START), ("far off", stop("done")), ("far off", stop("error"))]
    notices._tell_of_runs({"far": wanted}, iter(heard))
    page = "/key/backup-far%20off"
    assert server.paths == [f"{page}{end}?create=1" for end in ("/start", "", "/fail")]
    assert server.bodies[1].decode() == stop("done").line
    assert said == []


def test_a_daemon_pings_while_it_is_well(server: Server, said: list[Event]) -> None:
    clock = iter([0.0, 299.0, 300.0, 301.0, 302.0, 900.0, 901.0])
    heard: list[Event | RunState] = [WATCH, STATE, STATE, STATE]
    heard += [DUMP_FAILED, STATE, DUMP_FINE]
    wanted = settings(ping_url=f"{server.url}/p")
    notices._tell_of_runs({"far": wanted}, iter([("far", what) for what in heard]), clock.__next__)
    assert server.paths == ["/p", "/p/fail", "/p"]


def test_a_webhook_gets_the_notice_and_its_refusal_shows_no_url(
    server: Server, said: list[Event]
) -> None:
    wanted = settings(webhook_url=f"{server.url}/secret/{{target}}", on=["success"])
    server.status = 403
    notices._tell_of_runs({"far": wanted}, iter([("far", START), ("far", stop("done"))]))
    assert json.loads(server.bodies[0])["notice"] == "success"
    assert server.paths == ["/secret/far"]
    (warning,) = said
    assert str(warning.line).endswith("by notify.webhook_url: the server answered 403 Forbidden")


def test_a_server_that_is_away_is_a_warning_and_shows_no_url() -> None:
    wanted = settings(ping_url="http://127.0.0.1:1/secret")
    (problem,) = notices.send(wanted, Notice("test", "far", "t", {}))
    assert problem.startswith("the notice 'test' did not go out by notify.ping_url: no answer")
    assert "secret" not in problem


def test_a_redirect_is_not_followed(server: Server, said: list[Event]) -> None:
    """The notice would not arrive: it becomes a GET without a body, to whom the answer names."""
    server.status, server.headers = 302, {"Location": f"{server.url}/elsewhere"}
    wanted = settings(webhook_url=f"{server.url}/secret", on=["success"])
    (problem,) = notices.send(wanted, Notice("success", "far", "t", {}))
    assert problem.endswith("the server answered 302 Found: the URL leads elsewhere now")
    assert server.paths == ["/secret"]


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@127.0.0.1/",
        "http://127.0.0.1:secret/",
        "http://127.0.0.1/sec ret",
        "ftp://127.0.0.1/secret",
        "file:///secret",
    ],
)
def test_a_url_that_would_not_be_sent_as_it_is_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        settings(ping_url=url)


def test_an_unusable_url_is_not_shown() -> None:
    with pytest.raises(RemoteUnreachable) as caught:
        notices._request("http://127.0.0.1/sec ret", b"", "text/plain", 1)
    assert str(caught.value) == "no answer: the URL is not valid"
