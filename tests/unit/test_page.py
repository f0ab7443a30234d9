"""The status page without a catalog: its verdicts, its drawings, its HTML, and how it is served."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ntt_backup.catalog.failures import FailedBlob
from ntt_backup.catalog.history import CheckRun, DumpRun, Hour
from ntt_backup.catalog.identities import Place
from ntt_backup.catalog.listed_files import Files
from ntt_backup.catalog.proofs import Contact, Kind, ProofCount, Unproved
from ntt_backup.catalog.stats import Proved
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control_socket import Away, DaemonReport, RunReport
from ntt_backup.daemon.progress import WorkerStatus
from ntt_backup.errors import CatalogRefused, CatalogUnavailable, ConfigError, WaitsToStart
from ntt_backup.report import page as drawing
from ntt_backup.report.health import Health, judge, lives
from ntt_backup.report.page import Target, policy, render
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.report.web_server import PageServer, Shown
from ntt_backup.rollback_detection import Newest
from ntt_backup.snapshot.last_take import Last
from tests.helpers.waiting import PATIENCE
from tests.unit.sample_records import TOTALS, a_run

NOW = datetime.now(UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
ALL_COPIED = replace(
    TOTALS, pending=0, failed=0, failed_by_reason={}, pending_by_reason={}, unsized=0
)
RUN = a_run(started_at=NOW - 2 * HOUR, updated_at=NOW - HOUR, ended_at=NOW - HOUR, read_at=NOW)
DUMP = DumpRun(NOW - HOUR, NOW - HOUR, "a.dump", 1000, "", "")
AWAY = CatalogUnavailable("it is away")
HOSTILE = "<script>alert(1)</script>\n\x1b[31m\u202e</title><img src=x onerror=y>'\"`&"


MISSED = Newest("remote", "", "version", "etc", "x", NOW, missed="x", missed_at=NOW)


def settings(**tables: Any) -> CatalogConfig:
    return CatalogConfig.model_validate(
        {"remote": {"url": "ssh://vault/srv"}, "snapshots": {"etc": {"paths": ["/etc"]}}, **tables}
    )


def facts(**changes: Any) -> TargetFacts:
    """A target that is well: all is copied, and the last run was an hour ago."""
    well = TargetFacts(settings(), read_at=NOW, totals=ALL_COPIED, runs=[RUN], dumps=[DUMP])
    return replace(well, **changes)


def daemon(**changes: Any) -> DaemonReport:
    made = RunReport(str(RUN.run_id), 1).report("remote", paused=False, bwlimit=12_000_000, jobs={})
    state = replace(
        made.state,
        pending=77,
        eta_s=90.0,
        mb_per_s=11.5,
        blobs_per_s=3.0,
        share=0.25,
        workers=(WorkerStatus(0, "sending", "b-1", 10, 3.0),),
    )
    return replace(made, watch=True, state=state, **changes)


NOTHING_LEFT = replace(daemon(), state=replace(daemon().state, pending=0))


def away(since: timedelta) -> list[Away]:
    return [Away("remote", 0, (NOW - since).isoformat())]


def uncounted(state: str) -> TargetFacts:
    """A daemon that does not know what is pending."""
    made = daemon()
    workers = (replace(made.state.workers[0], state=state),)
    known = replace(made.state, pending=None, copied=10, workers=workers)
    return facts(daemon=replace(made, state=known))


HEALTHY, WAITING, ACTION = Health
KNOWN = replace(ALL_COPIED, failed=3, failed_by_reason={"missing": 3})
PENDING = replace(ALL_COPIED, pending=5)
UNREAD = Files(listed=3, unread=1, failed=0, gone=0, registered_at=None)
REFUSED, STARTS_AGAIN = CatalogRefused("no right"), WaitsToStart("it starts again at 17:40:03")
ERROR = replace(RUN, outcome="error", exit_code=5)
FULL = replace(ERROR, exit_code=6, reason="the remote is full")
UNDER_WAY = replace(RUN, ended_at=None, updated_at=NOW, host="elsewhere")
SILENT = replace(UNDER_WAY, outcome=None, updated_at=RUN.updated_at)
OURS = replace(UNDER_WAY, host=socket.gethostname(), pid=os.getpid())
DEAD = replace(OURS, pid=2**22 + 1)  # More than Linux gives to any process.
WRONG = CheckRun("verify", NOW, NOW, 7, 100, 1000, 2, "")
UNHEALED = replace(WRONG, command="heal")
RECONCILED = CheckRun("reconcile", NOW, NOW, 0, 100, 0, 0, "")
DRILLED = CheckRun("drill", NOW - DAY, NOW - DAY, 0, 100, 1000, 0, "")
WRONG_BEFORE = replace(WRONG, started_at=NOW - DAY, ended_at=NOW - DAY)
DAILY = {"snapshots": {"etc": {"paths": ["/etc"], "every": "1d"}}}
LATE = Last("2026-01-01T00:00:00Z", taken_at=NOW - 3 * DAY)
NO_SPACE = Last(failed_at=NOW, error="no space")
PROMISED = settings(policy={"copies": 2})
FOREIGN, NEW = Contact(NOW - DAY, 5000), Contact(NOW - HOUR, 0)
KEPT = ProofCount(("remote", "usb"), 90 * 86400.0, NOW - HOUR, (Kind(90, (3, 3), "00"),))
UNCOPIED = replace(KEPT, kinds=(*KEPT.kinds, Kind(7, (3, 0), "01")))
STALE = replace(UNCOPIED, kinds=(*UNCOPIED.kinds, Kind(3, (3, 2), "02")))
OLD_COUNT = replace(KEPT, counted_at=NOW - 2 * DAY)


@pytest.mark.parametrize(
    ("level", "words", "found"),
    [
        (HEALTHY, "All blobs are copied; the last run ended 1 h 0 min ago", facts()),
        (ACTION, "5,000 rows are marked by another program", facts(contact=FOREIGN)),
        (HEALTHY, "All blobs are copied", facts(contact=FOREIGN, checks=[RECONCILED])),
        (HEALTHY, "All blobs are copied", facts(settings=PROMISED, count=KEPT)),
        (HEALTHY, "All blobs are copied", facts(count=STALE)),
        (WAITING, "7 blobs have fewer than 2 proved", facts(settings=PROMISED, count=UNCOPIED)),
        (ACTION, "10 blobs have fewer than 2 proved", facts(settings=PROMISED, count=STALE)),
        (
            WAITING,
            "10 blobs",
            facts(settings=PROMISED, count=STALE, contact=NEW),
        ),
        (WAITING, "Proved copies were last counted", facts(settings=PROMISED, count=OLD_COUNT)),
        (HEALTHY, "Sending: 77 blobs left, about 1 min 30 s", facts(daemon=daemon())),
        (
            HEALTHY,
            "5 blobs are pending; it waits for its",
            facts(totals=PENDING, daemon=NOTHING_LEFT),
        ),
        (HEALTHY, "A run is starting", uncounted("starting")),
        (HEALTHY, "It waits for new blobs", uncounted("idle")),
        (HEALTHY, "Sending: 10 blobs copied so far", uncounted("sending")),
        (HEALTHY, "A run is under way on elsewhere", facts(runs=[UNDER_WAY])),
        (WAITING, "Somebody paused it", facts(daemon=daemon(paused=True))),
        (WAITING, "The remote has been", facts(daemon=daemon(outages=away(HOUR / 2)))),
        (
            ACTION,
            "Something that the start needs has been unreachable",
            facts(daemon=daemon(outages=[replace(away(2 * HOUR)[0], what="preflight")])),
        ),
        (ACTION, "for 2 h 0 min", facts(daemon=daemon(outages=away(2 * HOUR)))),
        (ACTION, "The target lacks the version etc@x, the newest", facts(missed=[MISSED])),
        (WAITING, "are older", facts(trouble=AWAY)),
        (ACTION, "are older", facts(trouble=AWAY, read_at=NOW - 2 * HOUR)),
        (ACTION, "It is away", facts(trouble=AWAY, read_at=None)),
        (ACTION, "No right", facts(trouble=REFUSED)),
        (ACTION, "No right", facts(lacks=[REFUSED])),
        (ACTION, "3 blobs could not be copied", facts(totals=TOTALS, unknown=3)),
        (HEALTHY, "3 blobs could not be copied, which somebody said", facts(totals=KNOWN)),
        (WAITING, "A check found 5 blobs missing or wrong", facts(totals=TOTALS)),
        (WAITING, "5 blobs are waiting", facts(totals=PENDING)),
        (ACTION, "5 blobs are not copied yet, and there never", facts(totals=PENDING, runs=[])),
        (WAITING, "1 file is not read yet, and so not", facts(totals=ALL_COPIED, files=UNREAD)),
        (ACTION, "1 file is not copied yet, and", facts(totals=ALL_COPIED, files=UNREAD, runs=[])),
        (
            HEALTHY,
            "All blobs are copied, but 1 file is not read yet",
            facts(totals=ALL_COPIED, files=UNREAD, daemon=NOTHING_LEFT),
        ),
        (ACTION, "ended early, 1 h 0 min ago, with exit code 5", facts(runs=[ERROR])),
        (
            ACTION,
            "1 h 0 min ago: the remote is full; it starts again at 17:40:03",
            facts(runs=[FULL], silence=STARTS_AGAIN),
        ),
        (ACTION, "The last run, on elsewhere, recorded no end: last", facts(runs=[SILENT])),
        (ACTION, "recorded no end", facts(runs=[DEAD])),
        (WAITING, "This user may", facts(runs=[OURS], silence=ConfigError("this user may not"))),
        (ACTION, "disk full", facts(dumps=[replace(DUMP, error="disk full")])),
        (ACTION, "There is no dump of the catalog", facts(dumps=[])),
        (ACTION, "dump of the ca", facts(dumps=[replace(DUMP, ended_at=NOW - 20 * DAY)])),
        (ACTION, "The last snapshot of etc failed: no space", facts(snapshots={"etc": NO_SPACE})),
        (ACTION, "etc is late", facts(settings=settings(**DAILY), snapshots={"etc": LATE})),
        (
            HEALTHY,
            "All blobs are copied",
            facts(settings=settings(media=["a", "b"], **DAILY), snapshots={"etc": LATE}),
        ),
        (ACTION, "heal, 0.0 s ago, found 2 blobs", facts(checks=[UNHEALED])),
        (ACTION, "heal", facts(checks=[replace(UNHEALED, wrong=4)], totals=KNOWN)),
        (HEALTHY, "somebody said is known", facts(checks=[UNHEALED], totals=KNOWN)),
        (ACTION, "verify, 0.0 s ago, found 2 blobs missing or wrong", facts(checks=[WRONG])),
        (
            HEALTHY,
            "All blobs are copied",
            facts(checks=[replace(WRONG, exit_code=0, wrong=0), WRONG_BEFORE]),
        ),
    ],
)
def test_the_verdict_says_at_once_how_it_stands(
    level: Health, words: str, found: TargetFacts
) -> None:
    verdict = judge(found, NOW)
    assert verdict.level is level
    assert words in "\n".join(point.what for point in verdict.points)
    assert list(verdict.points) == sorted(verdict.points, key=lambda one: -one.level)


def test_the_minutes_of_the_last_hour_are_drawn_by_what_was_sent() -> None:
    minute = int(NOW.timestamp()) // 60 * 60
    chart = drawing.last_hour([[minute - 60, 30_000_000], [minute, 60_000_000], [0, 5]], NOW)
    assert chart is not None
    assert [round(bar.height) for bar in chart.bars if bar.height] == [50, 100]
    assert chart.says == "90.0 MB in the last hour, at most 1.0 MB/s"
    assert drawing.last_hour([[minute - 7200, 5]], NOW) is None


def test_the_days_of_the_month_are_drawn_and_outages_marked() -> None:
    today = NOW.astimezone().replace(hour=12)
    hours = [
        Hour(today - 2 * DAY, 1, 0, 1000, 0.0),
        Hour(today - 2 * DAY + HOUR, 1, 0, 1000, 7200.0),
        Hour(today, 3, 1, 8000, 0.0),
    ]
    chart = drawing.last_days(hours, NOW)
    assert chart is not None
    amounts = [bar for bar in chart.bars if bar.kind == "amount" and bar.height]
    assert [round(bar.height) for bar in amounts] == [25, 100]
    (mark,) = [bar for bar in chart.bars if bar.kind == "away"]
    assert mark.x == amounts[0].x
    assert "2 blobs, 2.0 kB, 0 failures, unreachable for 2 h 0 min" in mark.says
    assert chart.says.startswith("10.0 kB copied in 7 days")
    longer = drawing.last_days([Hour(today - 20 * DAY, 1, 0, 1000, 0.0), *hours], NOW)
    assert longer is not None
    assert longer.says.startswith("11.0 kB copied in 21 days")
    assert drawing.last_days([], NOW) is None


def test_the_shares_of_what_was_proved_fill_the_bar() -> None:
    shares = {words: share for words, share, _ in drawing.ages(Proved(200, 100, 150, 150, 190))}
    assert list(shares.values()) == [0.5, 0.25, 0.0, 0.2, 0.05]


class Seen(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_from_outside_becomes_markup() -> None:
    """Names, reasons, details, lines of the log, errors: each is shown, as one line of text."""
    checked = CheckRun(HOSTILE, NOW, NOW, 7, 100, 1000, 2, HOSTILE)
    failed = FailedBlob(HOSTILE, HOSTILE, HOSTILE, 1, NOW, NOW)
    hostile = facts(
        settings=settings(target="remote"),
        daemon=daemon(recent=[[NOW.isoformat(), "warning", HOSTILE]], outages=away(HOUR)),
        snapshots={HOSTILE: Last(failed_at=NOW, error=HOSTILE)},
        trouble=CatalogUnavailable(HOSTILE, hint=HOSTILE),
        lacks=[CatalogRefused(HOSTILE, hint=HOSTILE)],
        totals=replace(TOTALS, failed_by_reason={HOSTILE: 3}),
        unknown=3,
        runs=[replace(RUN, host=HOSTILE, outcome=HOSTILE)],
        dumps=[replace(DUMP, name=HOSTILE), replace(DUMP, error=HOSTILE)],
        checks=[checked],
        examples=[failed],
    )
    page = render(
        [Target.of(hostile, judge(hostile, NOW)), Target.of(facts(), judge(facts(), NOW))], NOW
    )
    plain = Seen(render([Target.of(facts(), judge(facts(), NOW))], NOW))
    seen = Seen(page)
    assert seen.text.count("alert(1)") > 10
    for tag in ("script", "style", "title", "meta", "link", "img"):
        assert [name for name, _ in seen.tags].count(tag) == [n for n, _ in plain.tags].count(tag)
    assert not [name for _, found in seen.tags for name in found if name.startswith("on")]
    assert not re.search("[\x1b\u202e]", page)


def test_the_page_says_the_figures_and_asks_for_nothing_else() -> None:
    known = facts(daemon=daemon(), totals=TOTALS, unknown=3, place=Place("5" * 32, NOW))
    page = render([Target.of(known, judge(known, NOW))], NOW)
    assert f"Identity of the target: {'5' * 32}, last seen" in page
    figures = dict(re.findall(r"<dt>(\w+)</dt><dd><b>([^<]*)</b>", page))
    assert figures == {"copied": "3,400,000", "pending": "77", "failed": "3", "speed": "11.5 MB/s"}
    assert "<title>Action required: backup of " in page
    tags = Seen(page).tags
    assert not [found for _, found in tags if {"src", "action", "formaction", "style"} & set(found)]
    assert not {"form", "button", "input"} & {tag for tag, _ in tags}
    assert [found["href"][:5] for tag, found in tags if tag == "link"] == ["data:"]  # type: ignore[index]


def test_runs_of_several_hosts_are_told_apart() -> None:
    """Beside the one of this host, whose daemon answers, live those that were heard of lately."""
    ours, at_work = socket.gethostname(), replace(RUN, ended_at=None, updated_at=NOW)
    runs = [
        replace(at_work, host=ours),
        replace(at_work, host="elsewhere", run_id=UUID(int=8)),
        replace(at_work, host=ours, run_id=UUID(int=9)),
        replace(RUN, run_id=UUID(int=10)),
    ]
    known = facts(runs=runs, daemon=daemon())
    assert [run for run in runs if lives(known, run)] == runs[:2]
    page = render([Target.of(known, judge(known, NOW))], NOW)
    assert (page.count(">at work<"), page.count(">no end recorded<")) == (2, 1)


# --- over HTTP ------------------------------------------------------------------------------------


def healthy() -> Shown:
    return Shown("<p>page", policy(), "remote: Healthy\n", True)


@contextmanager
def served(
    draw: Callable[[], Shown] = healthy, listen: str = "127.0.0.1:0", **options: Any
) -> Iterator[PageServer]:
    server = PageServer(listen, draw, **options)
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        serving.join(PATIENCE)


def ask(
    server: PageServer, method: str = "GET", path: str = "/", host: str | None = None
) -> tuple[http.client.HTTPResponse, str]:
    client = http.client.HTTPConnection(*server.server_address[:2], timeout=PATIENCE)  # type: ignore[arg-type]
    try:
        client.request(method, path, headers={} if host is None else {"Host": host})
        answer = client.getresponse()
        return answer, answer.read().decode()
    finally:
        client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with served() as found:
        yield found


def test_a_get_shows_the_page_with_safe_headers(server: PageServer) -> None:
    answer, text = ask(server)
    assert (answer.status, text) == (200, "<p>page")
    assert answer.headers["Content-Security-Policy"] == policy()
    for words in ("default-src 'none'", "frame-ancestors 'none'", "form-action 'none'", "sha256-"):
        assert words in policy()
    assert "unsafe" not in policy()
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Python" not in answer.headers["Server"]
    head, nothing = ask(server, "HEAD")
    assert (head.status, nothing) == (200, "")
    assert head.headers["Content-Length"] == answer.headers["Content-Length"]


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"]
)
def test_no_other_method_is_allowed(server: PageServer, method: str) -> None:
    answer, text = ask(server, method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert text == "405 Method Not Allowed\n"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:80", 200),
        ("[::1]:9188", 200),
        ("LOCALHOST", 200),
        ("evil.example", 421),
        ("localhost.evil.example:9188", 421),
        ("10.0.0.1", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_request_for_another_name_is_refused(server: PageServer, host: str, status: int) -> None:
    assert ask(server, host=host)[0].status == status
    assert ask(server, path="/healthz", host=host)[0].status == status


def test_other_hosts_and_the_name_of_a_proxy_see_it_only_where_that_was_asked_for() -> None:
    with served(names=("Backup.Example.org",)) as server:
        assert ask(server, host="backup.example.org")[0].status == 200
    with pytest.raises(ConfigError, match="no loopback address") as caught:
        PageServer("0.0.0.0:0", healthy)
    assert "--expose" in caught.value.hint
    with served(listen="0.0.0.0:0", exposed=True) as server:
        assert ask(server, host="10.0.0.1")[0].status == 200
        assert ask(server, host="evil.example")[0].status == 421
    with served() as server, pytest.raises(ConfigError, match="cannot listen"):
        PageServer(server.url[7:-1], healthy)


@pytest.mark.parametrize("listen", ["localhost:80", "9188", "127.0.0.1", "", "127.0.0.1:99999"])
def test_what_is_no_address_and_port_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="no address to listen on"):
        PageServer(listen, healthy, exposed=True)


def test_health_is_told_in_plain_text(server: PageServer) -> None:
    answer, text = ask(server, path="/healthz?full")
    assert (answer.status, text) == (200, "remote: Healthy\n")
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert ask(server, path="/other")[0].status == 404
    with served(lambda: Shown("", "", "remote: Action required\n", False)) as ill:
        assert ask(ill, path="/healthz")[0].status == 503
        assert ask(ill)[0].status == 200


def test_many_viewers_cost_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a page that was asked for long ago is made anew."""
    made: list[None] = []

    def make() -> Shown:
        made.append(None)
        return Shown(f"page {len(made)}", policy(), "", True)

    monkeypatch.setattr("ntt_backup.report.web_server._FRESH_SECONDS", 600.0)
    with served(make) as server:
        assert {ask(server)[1] for _ in range(20)} == {"page 1"}
        monkeypatch.setattr("ntt_backup.report.web_server._FRESH_SECONDS", 0.0)
        assert ask(server)[1] == "page 2"


def test_a_signal_that_another_thread_gets_ends_the_wait_for_viewers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that comes just before the main thread waits: neither interrupts the wait."""
    hung: list[bool] = []

    def stop(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    def send() -> None:
        # Until then Python sees the signal by itself.
        while (
            len(seen := {waiting.read_text() for _ in range(100)}) > 1
            or "sleeping" not in seen.pop()
        ):
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        hung.append(not ended.wait(PATIENCE))
        server.server_close()

    monkeypatch.setattr("ntt_backup.report.web_server._SIGNAL_SECONDS", 0.2)
    waiting = Path(f"/proc/self/task/{threading.get_native_id()}/status")
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, stop)
    sender = threading.Thread(target=send)
    server = PageServer("127.0.0.1:0", healthy)
    try:
        sender.start()
        with pytest.raises(SystemExit):
            server.serve()
    finally:
        ended.set()
        sender.join()
        server.shutdown()
        server.server_close()
        signal.signal(signal.SIGTERM, before)
    assert hung == [False]


def test_the_lines_of_a_daemon_show_no_pause_that_has_ended_and_no_trouble_twice() -> None:
    recent = [
        ["1", "warning", "paused by user 0; `ntt-backup-remote resume` ends the pause"],
        ["2", "info", "resumed by user 0 after 3.0 s"],
        ["3", "warning", "remote is unreachable, again in 0.7 s: refused"],
        ["4", "warning", "remote is unreachable, again in 1 min 30 s: refused"],
        ["5", "error", "no snapshot of etc: no space"],
        ["6", "warning", "no free memory for 3 workers"],
        ["7", "warning", "no free memory for 4 workers"],
        ["8", "warning", "failed, missing: 3f0a17"],
        ["9", "error", "the catalog is not dumped: no pg_dump"],
        ["10", "warning", "paused by user 1; `ntt-backup-remote resume` ends the pause"],
    ]
    assert [one[0] for one in drawing.worth_a_look(recent)] == ["5", "7", "10"]
    assert [one[0] for one in drawing.worth_a_look(recent[:7])] == ["5", "7"]


def test_what_a_check_found_and_is_sent_again_is_told_once() -> None:
    again = replace(ALL_COPIED, pending=2, pending_by_reason={"remote-missing": 2})
    (point,) = judge(facts(totals=again, checks=[WRONG]), NOW).points
    assert point.what == "The last verify, 0.0 s ago, found 2 blobs missing or wrong"
    assert "`ntt-backup-remote verify` says more; they will be sent again" in point.do
    (found,) = judge(facts(totals=again), NOW).points
    assert found.what.startswith("A check found 2 blobs missing or wrong")


def test_an_outage_says_why() -> None:
    (since,) = away(HOUR / 2)
    said = judge(facts(daemon=daemon(outages=[replace(since, reason="no route")])), NOW).headline
    assert said == (
        "Waiting: The remote has been unreachable for 30 min 0 s: no route;"
        " it is tried again and again"
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", replace(facts(), totals=None)),
        (
            "{all} of {all} blobs on remote, no verify yet; no dump of the catalog; no drill",
            facts(runs=[], dumps=[]),
        ),
        (
            "{all} of {all} blobs on remote, 9 of them never checked, verified 0.0 s ago;"
            " dump of 1 h 0 min ago; drill 1 d 0 h ago",
            facts(unproved=Unproved(9, False, 0, NOW), checks=[WRONG, DRILLED]),
        ),
        (
            "90 of 100 blobs proved on 2, 10 on 1 of 2 targets within 90 d 0 h"
            " (counted 1 h 0 min ago); dump of 2 h 0 min ago, 1 h 0 min before the last copies;"
            " no drill",
            facts(count=STALE, dumps=[replace(DUMP, started_at=NOW - 2 * HOUR)]),
        ),
    ],
)
def test_one_sentence_says_how_safe_the_blobs_are(said: str, found: TargetFacts) -> None:
    assert judge(found, NOW).safety == said.format(all=f"{ALL_COPIED.copied:,}")
