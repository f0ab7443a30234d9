"""What the operator sees of a run, and that nothing said by others can disturb the terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import pytest

from ntt_backup.daemon.progress import Snapshot, View, WorkerLine
from ntt_backup.errors import ConfigError, RemoteUnreachable
from ntt_backup.format import describe, duration, printable, size
from ntt_backup.ui.run_view import (
    FAILURES_SHOWN,
    LiveView,
    PlainView,
    QuietView,
    make_view,
    render_error,
)

BLOBID = "ab" * 32
RUN_START = {
    "event": "run_start",
    "target": "remote",
    "source": "/srv/store",
    "remote": "host:/backup",
    "strategy": "tar",
    "workers": 4,
}
OUTAGE = {
    "event": "outage",
    "what": "remote",
    "reason": "no answer",
    "detail": "timed out",
    "attempt": 2,
    "wait_s": 3.2,
}
OUTAGE_KINDS = ("remote", "catalog", "source", "preflight")
RUN_STOP = {
    "event": "run_stop",
    "outcome": "some_failed",
    "exit_code": 7,
    "copied": 4_998,
    "failed": 2,
    "bytes": 250_000_000,
    "duration_s": 12.5,
}
SNAPSHOT = Snapshot(
    elapsed_s=72.0,
    copied=2_998,
    failed=2,
    pending=1_000,
    estimated=False,
    bytes=123_456_789,
    sent=125_000_000,
    done=3_000,
    share=0.756,
    mb_per_s=12.25,
    blobs_per_s=812.0,
    eta_s=34.0,
    workers=(
        WorkerLine(0, "sending", "w0-7", 1_500, 6.5),
        WorkerLine(1, "outage", "", 0, 0.0),
    ),
)


def failed(detail: str = "no such file") -> dict[str, Any]:
    return {"event": "blob_failed", "blobid": BLOBID, "reason": "missing", "detail": detail}


class Terminal:
    """A pseudo-terminal with a stream to write to, and all that was written, as text."""

    def __init__(self, rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        self.stream: TextIO = os.fdopen(slave, "w", encoding="utf-8")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def raw(self) -> str:
        """What has been written since the last call, as it was written."""
        self.stream.write("\0")
        self.stream.flush()
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self._master, 65_536)
        return data[:-1].decode()

    def text(self) -> str:
        """The same without the terminal's control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self.raw())

    def hang_up(self) -> None:
        """The window is closed: from here on every write fails."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self._master >= 0:
            self.stream.close()
            os.close(self._master)


@contextmanager
def terminal(rows: int = 24, columns: int = 100) -> Iterator[Terminal]:
    term = Terminal(rows, columns)
    try:
        yield term
    finally:
        term.close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def plain(*events: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    view = make_view(stream)
    for event in events:
        view.event(event)
    view.refresh(SNAPSHOT)
    view.close()
    return stream.getvalue().splitlines()


def test_view_is_chosen_by_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_view(io.StringIO()), PlainView)
    with terminal() as term:
        assert isinstance(make_view(term.stream), LiveView)
        assert isinstance(make_view(term.stream, quiet=True), QuietView)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(make_view(term.stream), PlainView)


def test_a_quiet_run_tells_only_what_is_wrong() -> None:
    stream = io.StringIO()
    view = make_view(stream, quiet=True)
    for event in (RUN_START, failed(), OUTAGE, {"event": "warning", "reason": "odd"}):
        view.event(event)
    view.event({**RUN_STOP, "outcome": "done", "exit_code": 0})
    view.event({**RUN_STOP, "outcome": "stopped", "exit_code": 143})
    assert stream.getvalue() == ""
    view.event({"event": "still_failed", "blobs": 8})
    view.event(RUN_STOP)
    view.event({"event": "error", "message": "remote is full", "detail": "", "hint": ""})
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "8 blobs are still failed",
        "some failed",
        "error",
    ]


def test_plain_lines_tell_the_run() -> None:
    progress = {
        "event": "progress",
        "copied": 3_150,
        "failed": 2,
        "pending": 1_848,
        "estimated": False,
        "bytes": 212_300_000,
        "mb_per_s": 48.14,
        "blobs_per_s": 812.0,
        "eta_s": 34.0,
        "active_workers": 4,
    }
    retry = {
        "event": "batch_retry",
        "batch": "w1-7",
        "blobs": 1000,
        "attempt": 2,
        "reason": "tar: exit 2",
        "wait_s": 1.5,
    }
    restart = {
        "event": "worker_restart",
        "worker": 3,
        "status": -9,
        "detail": "killed",
        "attempt": 1,
        "wait_s": 0.7,
    }
    silent = {**restart, "detail": ""}
    lines = plain(RUN_START, progress, retry, OUTAGE, failed(), restart, silent, RUN_STOP)
    assert lines == [
        "4 workers, strategy tar, target remote: /srv/store to host:/backup",
        "3,150 copied, 2 failed, 1,848 pending, 212.3 MB, 48.1 MB/s, 812 files/s, about 34 s left",
        "batch w1-7 again in 1.5 s (attempt 2): tar: exit 2",
        "remote is away, again in 3.2 s: no answer: timed out",
        f"failed, missing: {BLOBID} no such file",
        "worker 3 died (status -9), a new one in 0.7 s: killed",
        "worker 3 died (status -9), a new one in 0.7 s",
        "some failed: 4,998 copied, 2 failed, 250.0 MB in 12 s (20.0 MB/s), exit code 7",
    ]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("remote", "remote is away"),
        ("catalog", "catalog is away"),
        ("source", "store is away"),
        ("preflight", "cannot begin yet"),
    ],
)
def test_an_outage_says_what_is_away(what: str, said: str) -> None:
    assert plain({**OUTAGE, "what": what}) == [f"{said}, again in 3.2 s: no answer: timed out"]


def test_the_end_of_an_outage_says_what_is_back() -> None:
    ends = [{"event": "outage_end", "what": what, "duration_s": 72.4} for what in OUTAGE_KINDS]
    assert plain(*ends) == [
        "remote is back after 1 min 12 s",
        "catalog is back after 1 min 12 s",
        "store is back after 1 min 12 s",
        "can begin after 1 min 12 s",
    ]


def test_a_worker_that_says_nothing_is_named_with_what_to_do() -> None:
    stall = {"event": "worker_stall", "worker": 1, "pid": 77, "silent_s": 61.0, "hint": "look"}
    assert plain(stall, {"event": "worker_stall_end", "worker": 1, "duration_s": 75.0}) == [
        "worker 1 (PID 77) has said nothing for 1 min 1 s: look",
        "worker 1 speaks again after 1 min 15 s",
    ]


def test_one_is_not_many() -> None:
    split = {"event": "batch_split", "batch": "0.1a", "reason": "no"}
    assert plain({**split, "blobs": 1}, {**split, "blobs": 1_000}) == [
        "batch 0.1a split (1 blob): no",
        "batch 0.1a split (1,000 blobs): no",
    ]


def test_what_becomes_of_a_dump_is_told() -> None:
    name = "20260304T120000Z-0badcafe.dump"
    done = {"name": name, "bytes": 3_000_000, "duration_s": 12.0, "kept": 3, "pruned": 1}
    lines = plain(
        *({"event": "dump_start", "reason": why} for why in ("first", "changed", "old", "asked")),
        {"event": "dump_skipped", "name": name},
        {"event": "dump_complete", **done},
        {"event": "dump_failed", "message": "m", "detail": "d", "hint": "do it"},
        {"event": "dump_failed", "message": "m", "detail": "", "hint": ""},
    )
    assert lines == [
        "dumping the catalog (there is none yet)",
        "dumping the catalog (it may have changed since the last time)",
        "dumping the catalog (the last one is old)",
        "dumping the catalog (as asked)",
        f"nobody but us has changed the catalog since {name}",
        f"dumped the catalog: {name}, 3.0 MB in 12 s; 3 kept, 1 removed",
        "the catalog is not dumped: m: d; do it",
        "the catalog is not dumped: m",
    ]


def test_progress_says_what_it_does_not_know_yet() -> None:
    (line,) = plain(
        {
            "event": "progress",
            "copied": 0,
            "failed": 0,
            "pending": None,
            "estimated": False,
            "bytes": 0,
            "mb_per_s": 0.0,
            "blobs_per_s": 0.0,
            "eta_s": None,
            "active_workers": 0,
        }
    )
    assert "pending not counted yet" in line
    assert "left" not in line


def test_plain_lines_leave_the_rest_of_many_failures_to_the_log() -> None:
    lines = plain(*[failed()] * 500)
    assert len(lines) == FAILURES_SHOWN + 1
    assert lines[-1] == "more blobs failed, see the log"


def test_events_without_a_message_for_people_are_not_shown() -> None:
    assert plain({"event": "worker_start", "worker": 1}, {"event": "batch_complete"}) == []


def test_error_event_reads_as_the_error_does() -> None:
    error = {"event": "error", "exit_code": 5, "message": "m", "detail": "d", "hint": "do it"}
    assert plain(error) == ["error: m: d; do it"]


def test_live_picture_shows_the_figures_and_every_worker() -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.event(RUN_START)
        view.event(OUTAGE)
        term.raw()
        view.refresh(SNAPSHOT)
        text = term.text()
    assert "4 workers, strategy tar, target remote: /srv/store to host:/backup" in text
    assert "75%, about 34 s left, 3,000 of 4,000 blobs" in text
    assert "2 failed, 125.0 MB sent in 1 min 12 s, 12.2 MB/s on the link, 812 files/s" in text
    assert re.search(r"worker 0 +sending +6\.5 MB/s +1,500 blobs +w0-7", text)
    assert re.search(r"worker 1 +outage", text)
    assert "remote is away" in text


def test_live_picture_is_there_before_the_first_worker() -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.event(RUN_START)
        view.event(OUTAGE)
        assert "remote is away, again in 3.2 s" in term.text()


def test_live_picture_without_a_count_has_no_percentage() -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.refresh(replace(SNAPSHOT, pending=None, eta_s=None, share=None))
        text = term.text()
    assert "counting what is pending" in text
    assert "%" not in text
    assert "left" not in text


def shown(snapshot: Snapshot, columns: int = 100) -> str:
    with terminal(columns=columns) as term:
        view = make_view(term.stream)
        view.refresh(snapshot)
        return term.text()


def test_an_estimate_is_said_to_be_one() -> None:
    text = shown(replace(SNAPSHOT, estimated=True))
    assert "about 75%, about 34 s left, 3,000 of about 4,000 blobs" in text


def test_when_all_is_done_no_time_is_left() -> None:
    text = shown(replace(SNAPSHOT, pending=0, share=1.0, eta_s=0.0))
    assert "100%, 3,000 of 3,000 blobs" in text
    assert "left" not in text


def test_what_is_nearly_done_is_not_done() -> None:
    assert "99%, about" in shown(replace(SNAPSHOT, share=0.999))


def test_nothing_pending_needs_no_bar() -> None:
    text = shown(replace(SNAPSHOT, pending=0, share=None, eta_s=0.0, done=0))
    assert "nothing is pending" in text
    assert "%" not in text


@pytest.mark.parametrize("columns", [50, 60, 80])
def test_a_narrow_terminal_shows_share_and_time_left_and_no_number_cut_short(columns: int) -> None:
    large = replace(SNAPSHOT, done=12_345_678, pending=30_000_000, eta_s=700_000.0)
    lines = [line.rstrip() for line in shown(large, columns).split("\n")]
    assert any(
        re.search(r"75%, about 8 d 2 h left(, 12,345,678 of 42,345,678 blobs)?$", one)
        for one in lines
    )
    assert any(
        re.match(
            r"2 failed, 125.0 MB sent in 1 min 12 s(, 12.2 MB/s on the link)?(, 812 files/s)?$", one
        )
        for one in lines
    )


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (80, ["worker 0  sending  6.5 MB/s  1,500 blobs  w0-7", "worker 1  outage   0.0 MB/s"]),
        (45, ["worker 0  sending  6.5 MB/s  1,500 blobs", "worker 1  outage   0.0 MB/s"]),
        (40, ["worker 0  sending  6.5 MB/s  1,500 blobs", "worker 1  outage   0.0 MB/s"]),
        (39, ["worker 0  sending  6.5 MB/s", "worker 1  outage   0.0 MB/s"]),
        (20, ["worker 0  sending", "worker 1  outage"]),
        (10, ["worker 0", "worker 1"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_of_workers_and_none_cut_short(
    columns: int, expected: list[str]
) -> None:
    lines = [line.rstrip() for line in shown(SNAPSHOT, columns).split("\n")]
    workers = [line for line in lines if line.startswith("worker")]
    for line, beginning in zip(workers, expected, strict=True):
        assert line.startswith(beginning)
    assert workers[0] == expected[0]


RED, YELLOW, GREEN = "\x1b[31m", "\x1b[33m", "\x1b[32m"


@pytest.mark.parametrize(
    ("event", "colour"),
    [
        (failed(), RED),
        ({"event": "dump_failed", "message": "m", "detail": "", "hint": ""}, RED),
        ({"event": "error", "exit_code": 5, "message": "m", "detail": "", "hint": ""}, RED),
        (OUTAGE, YELLOW),
        ({"event": "warning", "reason": "look"}, YELLOW),
        ({"event": "outage_end", "what": "remote", "duration_s": 3.0}, ""),
        ({"event": "dump_skipped", "name": "n"}, ""),
        ({"event": "dump_start", "reason": "first"}, ""),
        ({"event": "stopping", "signal": 15}, ""),
    ],
)
def test_red_has_failed_and_yellow_wants_a_look(event: dict[str, Any], colour: str) -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.event(event)
        raw = term.raw()
    assert [one for one in (RED, YELLOW, GREEN) if one in raw] == ([colour] if colour else [])


@pytest.mark.parametrize(("outcome", "red"), [("done", False), ("stopped", False), ("error", True)])
def test_the_summary_is_red_where_something_failed(outcome: str, red: bool) -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.event({**RUN_STOP, "outcome": outcome})
        term.raw()
        view.close()
        assert (RED in term.raw()) is red


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (12, 40), (5, 20), (60, 300)])
def test_live_picture_fits_any_terminal(rows: int, columns: int) -> None:
    workers = tuple(WorkerLine(index, "sending", "b" * 80, 10**9, 1e3) for index in range(256))
    with terminal() as term:
        view = make_view(term.stream)
        view.event(RUN_START)
        for _ in range(10):
            view.event(failed("long " * 100))
        view.refresh(SNAPSHOT)
        term.resize(rows, columns)
        term.raw()
        view.refresh(replace(SNAPSHOT, workers=workers))
        lines = term.text().rstrip("\n").split("\n")
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns


def test_terminal_without_a_size_is_taken_as_an_ordinary_one() -> None:
    with terminal(rows=0, columns=0) as term:
        view = make_view(term.stream)
        view.refresh(SNAPSHOT)
        assert "worker 1" in term.text()


def test_many_workers_are_summed_up() -> None:
    workers = tuple(WorkerLine(index, "idle", "", 0, 0.0) for index in range(64))
    with terminal(rows=24) as term:
        view = make_view(term.stream)
        view.refresh(replace(SNAPSHOT, workers=workers))
        text = term.text()
    shown = text.count("idle")
    assert 0 < shown < 24
    assert f"and {64 - shown} workers more" in text


def test_live_picture_ends_in_a_summary() -> None:
    with terminal() as term:
        view = make_view(term.stream)
        view.event(RUN_START)
        view.refresh(SNAPSHOT)
        view.event(failed())
        view.event(RUN_STOP)
        term.raw()
        view.close()
        lines = term.text().split()
    text = " ".join(lines)
    assert "some failed: 4,998 copied, 2 failed" in text
    assert f"failed, missing: {BLOBID}" in text
    assert "worker 0" not in text


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1" if no_color else "")
    with terminal() as term:
        view = make_view(term.stream)
        view.event(OUTAGE)
        view.refresh(SNAPSHOT)
        coloured = re.search(r"\x1b\[[0-9;]*3[0-9]", term.raw()) is not None
    assert coloured is not no_color


class Gone(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def exercise(view: View) -> None:
    view.event(RUN_START)
    view.refresh(SNAPSHOT)
    view.event(RUN_STOP)
    view.close()


def test_reader_that_goes_away_does_not_end_the_run() -> None:
    exercise(make_view(Gone()))


def test_terminal_that_goes_away_does_not_end_the_run() -> None:
    term = Terminal(24, 80)
    view = make_view(term.stream)
    view.refresh(SNAPSHOT)
    term.hang_up()
    exercise(view)


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9bb\r\nc\u202ed\x00[red]"


@pytest.mark.parametrize(
    "event",
    [
        failed(HOSTILE),
        {**failed(), "blobid": HOSTILE},
        {**OUTAGE, "reason": HOSTILE, "detail": HOSTILE},
        {**RUN_START, "remote": HOSTILE},
    ],
)
def test_what_others_said_cannot_reach_the_terminal(event: dict[str, Any]) -> None:
    (line,) = plain(event)
    assert line.isprintable()
    assert "[red]" in line
    with terminal() as term:
        view = make_view(term.stream)
        view.event(event)
        view.refresh(replace(SNAPSHOT, workers=(WorkerLine(0, "sending", HOSTILE, 0, 0.0),)))
        raw = term.raw()
    assert "\x1b]" not in raw
    assert "\x1b[2J" not in raw
    assert not {"\x07", "\x9b", "\x00", "\u202e"} & set(raw)


def test_printable_keeps_words_and_joins_lines() -> None:
    assert printable("tar: Grüße\n\n  tar: Ende \n") == "tar: Grüße;   tar: Ende"
    assert printable("\ud800") == "\\ud800"


def test_error_says_what_why_and_what_to_do() -> None:
    full = ConfigError("cannot read x\x1b[0m", detail="denied\nagain", hint="chmod it\x07")
    assert render_error(full).split("\n") == [
        "error: cannot read x\\x1b[0m: denied; again",
        "hint: chmod it\\x07",
    ]
    assert render_error(RemoteUnreachable("no answer")) == "error: no answer"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (754, "12 min 34 s"),
        (3_600 * 3 + 719, "3 h 11 min"),
        (86_400 * 5 + 3_600, "5 d 1 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 Bytes"), (999, "999 Bytes"), (1_000, "1.0 kB"), (10**12, "1.0 TB")]
)
def test_size_counts_in_thousands(count: int, text: str) -> None:
    assert size(count) == text


def test_nothing_is_said_of_an_unknown_event() -> None:
    assert describe({"event": "tick"}) is None
