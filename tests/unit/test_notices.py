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
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.dump.events import DumpFailed, DumpRecovered, DumpSkipped
from ntt_backup.errors import CatalogRefused, RemoteUnreachable
from ntt_backup.events import Event
from ntt_backup.report import notices
from ntt_backup.report.facts import FactsReader, TargetFacts
from ntt_backup.report.notices import Notice, Notices
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotsRecovered
from tests.helpers.waiting import PATIENCE

HOST = "127.0.0.1"
ERROR: dict[str, Any] = {"exit_code": 5, "message": "m", "detail": "why", "hint": "do"}
STATE = RunProgress(0.0, 2).state(1.0)
DUMP_FAILED = DumpFailed(**ERROR)
DUMP_FINE = DumpSkipped(name="copyjob-2026-11-22T02-10-00Z.dump")
STALL = events.WorkerStall(worker=1, silent_s=60.0, hint="look")
STALL_END = events.WorkerStallEnd(worker=1, duration_s=70.0)
DIED = events.WorkerRestart(worker=0, status=-9, detail="", attempt=1, wait_s=1.0)
OUTCOMES = {"done": 0, "error": 5, "some_failed": 7, "stopped": 143}


def start(*, watch: bool = False) -> Event:
    return events.RunStart(
        version="1", target="far", strategy="auto", workers=2, watch=watch, source="/s", remote="r"
    )


def stop(outcome: str) -> Event:
    return events.RunStop(
        outcome=outcome, exit_code=OUTCOMES[outcome], copied=9, failed=0, bytes=90, duration_s=1.0
    )


def away(worker: int = 0) -> Event:
    return events.Outage(
        worker=worker, what="remote", reason="gone", detail="", attempt=1, wait_s=1.0
    )


def back(worker: int = 0) -> Event:
    return events.OutageEnd(worker=worker, what="remote", duration_s=1.0)


def failed(reason: str) -> Event:
    return events.BlobFailed(worker=0, blobid="a" * 64, reason=reason, detail="d")


At = tuple[float, Event | RunState]


def facts(reason: str = "", **known: Any) -> TargetFacts:
    """A target that is well. reason: why its last run failed."""
    end = RunEnd(datetime.now(UTC), 5, None, reason) if reason else None
    return TargetFacts(CatalogConfig(), end=end, **known)


def told(*heard: At, failed_before: bool = False) -> list[str]:
    """The kinds of the notices, after what a run told at these seconds."""
    known = facts("exit code 5" if failed_before else "")
    notices = Notices("far", 900.0, lambda daemon: replace(known, daemon=daemon))
    found = [one.kind for now, what in heard for one in notices.take(what, now)]
    return [kind for kind in found if kind != "alive"]


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "failed_before", "kinds"),
    [
        ("done", False, ["success"]),
        ("done", True, ["success", "recovery"]),
        ("error", False, ["failure", "first_failure"]),
        ("error", True, ["failure"]),
        ("some_failed", False, ["failure", "first_failure"]),
        ("stopped", False, []),
    ],
)
def test_the_end_of_a_run_is_told_beside_the_end_of_the_last_one(
    outcome: str, failed_before: bool, kinds: list[str]
) -> None:
    heard = ((0, start()), (1, stop(outcome)))
    assert told(*heard, failed_before=failed_before) == ["start", *kinds]


@pytest.mark.parametrize(("pending", "copied"), [(0, 0), (9, 1)])
def test_a_daemon_that_copies_or_has_nothing_left_recovers_from_the_failure_of_the_last_run(
    pending: int, copied: int
) -> None:
    """It has no end that could say so, and pings only while it is well."""
    idle = replace(STATE, pending=9, copied=0, elapsed_s=100.0)
    works = replace(idle, pending=pending, copied=copied)
    heard: list[At] = [(0, start(watch=True)), (1, idle), (2, works), (3, works), (4, DUMP_FAILED)]
    kinds = ["start", "recovery", "failure", "first_failure"]
    assert told(*heard, failed_before=True) == kinds
    assert told(heard[0], (0, stop("error")), *heard) == [
        *("start", "failure", "first_failure"),
        *kinds,
    ]


def test_what_is_away_when_a_daemon_starts_is_told_though_no_worker_works_yet() -> None:
    """There are no figures of a run then, only its attempts."""
    error: dict[str, Any] = {"reason": "refused", "detail": "", "attempt": 1, "wait_s": 60.0}
    missed = events.Outage(worker=None, what="preflight", **error)
    back_again = events.OutageEnd(worker=None, what="preflight", duration_s=960.0)
    early = [(0.0, start(watch=True)), (1.0, missed), (840.0, missed)]
    assert told(*early) == ["start"]
    heard = [*early, (960.0, missed), (1020.0, missed), (1030.0, back_again)]
    assert told(*heard) == ["start", "outage", "first_failure", "recovery"]


FULL = events.Error(exit_code=6, message="the remote is full", detail="no space", hint="free some")
FULL_AGAIN = TargetRestart(status=6, detail="", attempt=1, wait_s=1.0)


def test_a_target_that_stays_full_is_told_of_once_however_often_it_is_started_again() -> None:
    """It may copy a few small blobs each time: that is no recovery."""
    begun = replace(STATE, pending=9, copied=1, elapsed_s=5.0)
    heard: list[At] = []
    for nth in range(7):
        each: list[Event | RunState] = [start(watch=True), begun, FULL, stop("error"), FULL_AGAIN]
        heard += [(7.0 * nth + at, what) for at, what in enumerate(each)]
    kinds = [kind for kind in told(*heard) if kind != "start"]
    assert kinds == ["failure", "first_failure"]
    heard += [(60.0, start(watch=True)), (130.0, replace(begun, elapsed_s=70.0))]
    assert [kind for kind in told(*heard) if kind != "start"] == [*kinds, "recovery"]


@pytest.mark.parametrize(
    ("before", "kinds"),
    [("the remote is full: no space", []), ("no route to host", ["failure"])],
)
def test_a_daemon_that_a_service_manager_starts_again_tells_no_trouble_twice(
    before: str, kinds: list[str]
) -> None:
    """The catalog knows why the last run ended."""
    notices = Notices("far", 900.0, lambda _: facts(before))
    heard = (start(watch=True), FULL, stop("error"))
    found = [one.kind for what in heard for one in notices.take(what, 0.0)]
    assert found == ["start", *kinds]


def test_another_trouble_is_told_beside_one_that_is_known() -> None:
    other = DumpFailed(**{**ERROR, "message": "another"})
    heard: list[At] = [(0, start(watch=True)), (1, DUMP_FAILED), (2, DUMP_FAILED), (3, other)]
    assert told(*heard) == ["start", "failure", "first_failure", "failure"]


def test_a_failure_says_what_the_error_said() -> None:
    notices = Notices("far", 900.0, lambda _: facts())
    for event in (start(), events.Error(**ERROR)):
        notices.take(event, 0.0)
    text = notices.take(stop("error"), 1.0)[0].text
    assert text == "error: m: why; do"


def test_only_the_first_trouble_and_the_end_of_the_last_one_are_told_apart() -> None:
    heard = [start(watch=True), DUMP_FAILED, STALL, DUMP_FAILED, DUMP_FINE, STALL_END, DUMP_FINE]
    assert told(*((0, event) for event in heard)) == [
        "start",
        *("failure", "first_failure"),  # the dump
        "stall",
        "recovery",  # The stall has ended, too.
    ]


def test_the_stall_of_a_run_that_was_killed_is_over_when_its_workers_start_anew() -> None:
    """As that of all workers is, which has their coordinator killed."""
    anew = events.WorkerStart(worker=1, strategy="stream")
    heard = [start(watch=True), STALL, start(watch=True), anew]
    assert told(*((0, event) for event in heard)) == [
        *("start", "stall", "first_failure"),
        *("start", "recovery"),
    ]


def test_a_coordinator_that_dies_is_a_run_that_failed() -> None:
    """It has no end that could say so; that it misses nothing any more is no recovery."""
    died = TargetRestart(status=-9, detail="", attempt=1, wait_s=1.0)
    long: list[At] = [(0.0, start(watch=True)), (1.0, away()), (901.0, STATE)]
    again: list[At] = [(902.0, died), (903.0, start(watch=True)), (904.0, died)]
    assert told(*long, *again) == ["start", "outage", "first_failure", "failure", "start"]
    well = (905.0, replace(STATE, pending=0))
    assert told((0.0, start(watch=True)), *again, well) == [
        *("start", "failure", "first_failure", "start"),
        "recovery",
    ]


def test_a_run_that_ended_by_an_error_fails_once_though_it_is_started_again() -> None:
    again = TargetRestart(status=4, detail="", attempt=1, wait_s=1.0)
    heard = [start(watch=True), stop("error"), again]
    assert told(*((0, event) for event in heard)) == ["start", "failure", "first_failure"]


@pytest.mark.parametrize(
    ("failures", "well", "again"),
    [
        (
            [SnapshotFailed(set=name, **ERROR) for name in ("etc", "")],
            SnapshotsRecovered(),
            ["failure"],
        ),
        ([DumpFailed(**ERROR), DumpFailed(**ERROR)], DumpRecovered(), []),
    ],
    ids=["snapshots", "dumps"],
)
def test_side_jobs_that_fail_no_more_are_no_trouble_though_none_was_done(
    failures: list[Event], well: Event, again: list[str]
) -> None:
    heard = [start(watch=True), *failures, well, well]
    assert told(*((0, event) for event in heard)) == [
        *("start", "failure", "first_failure", *again),
        "recovery",
    ]


def test_an_outage_is_told_when_it_has_lasted() -> None:
    short: list[At] = [(0.0, start(watch=True)), (1.0, away()), (899.0, STATE), (900.0, back())]
    assert told(*short, (2000.0, STATE)) == ["start"]
    long: list[At] = [(0.0, start(watch=True)), (1.0, away()), (500.0, away(1)), (901.0, STATE)]
    assert told(*long, (902.0, STATE), (903.0, back(1)), (904.0, back())) == [
        *("start", "outage", "first_failure"),
        "recovery",
    ]


def test_the_death_of_a_worker_ends_its_outage() -> None:
    heard: list[At] = [(0.0, start(watch=True)), (1.0, away()), (2.0, DIED), (5000.0, STATE)]
    assert told(*heard) == ["start"]


@pytest.mark.parametrize(
    ("event", "kinds"),
    [
        (DIED, ["recovery"]),
        (events.WorkerStop(worker=0), ["recovery"]),
        (events.WorkerStallEnd(worker=0, duration_s=1.0), []),
    ],
)
def test_the_end_of_a_worker_ends_its_outage_that_was_told(event: Event, kinds: list[str]) -> None:
    heard: list[At] = [(0.0, start(watch=True)), (1.0, away()), (901.0, STATE), (902.0, event)]
    assert told(*heard, (903.0, STATE)) == ["start", "outage", "first_failure", *kinds]


def test_rot_is_told_once_a_run_and_other_failed_blobs_of_a_daemon_once_a_day() -> None:
    rot, lost = failed("corrupt-source"), failed("missing")
    assert told((0, start()), (1, rot), (2, rot), (3, lost)) == ["start", "source_rot"]
    heard = ((0, start(watch=True)), (1, lost), (2, lost), (86402, lost))
    assert told(*heard) == ["start", "failure", "failure"]


DAMAGED = CheckRun("verify", datetime.now(UTC), datetime.now(UTC), 7, 100, 1000, 2, "")
REFUSED = CatalogRefused("no right")


def test_a_daemon_is_judged_as_status_judges_it() -> None:
    """By what no event tells of: it does not ping as well, and that is told once until it is so."""
    known = [facts(), facts(checks=[DAMAGED]), facts(checks=[replace(DAMAGED, wrong=3)]), facts()]
    known[2:2] = [facts(trouble=REFUSED)]  # Nobody knows then.
    notices, said = Notices("far", 900.0, lambda _: known.pop(0)), []
    notices.take(start(watch=True), 0.0)
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
    heard = [("far", start()), ("near", stop("done")), ("far", stop("error"))]
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
    notices._tell_of_runs({"far": wanted}, iter([("far", start()), ("far", stop("error"))]))
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
    heard = [("far off", start()), ("far off", stop("done")), ("far off", stop("error"))]
    notices._tell_of_runs({"far": wanted}, iter(heard))
    page = "/key/backup-far%20off"
    assert server.paths == [f"{page}{end}?create=1" for end in ("/start", "", "/fail")]
    assert server.bodies[1].decode() == stop("done").line
    assert said == []


def test_a_daemon_pings_while_it_is_well(server: Server, said: list[Event]) -> None:
    clock = iter([0.0, 299.0, 300.0, 301.0, 302.0, 900.0, 901.0])
    heard: list[Event | RunState] = [start(watch=True), STATE, STATE, STATE]
    heard += [DUMP_FAILED, STATE, DUMP_FINE]
    wanted = settings(ping_url=f"{server.url}/p")
    notices._tell_of_runs({"far": wanted}, iter([("far", what) for what in heard]), clock.__next__)
    assert server.paths == ["/p", "/p/fail", "/p"]


def test_a_webhook_gets_the_notice_and_its_refusal_shows_no_url(
    server: Server, said: list[Event]
) -> None:
    wanted = settings(webhook_url=f"{server.url}/secret/{{target}}", on=["success"])
    server.status = 403
    notices._tell_of_runs({"far": wanted}, iter([("far", start()), ("far", stop("done"))]))
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


def test_nobody_to_tell_is_no_process() -> None:
    assert not settings().notify.wanted
