"""What the operator sees of a run, on a terminal and in plain lines."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TextIO

import pytest

from ntt_backup import events
from ntt_backup.daemon.listeners import Listener
from ntt_backup.daemon.progress import WorkerStatus
from ntt_backup.dump.events import DumpStart
from ntt_backup.report.live import LiveView
from ntt_backup.report.plain_output import (
    FAILURES_SHOWN,
    JsonResult,
    PlainView,
    QuietView,
    make_views,
)
from ntt_backup.snapshot.events import SnapshotFailed, SnapshotProgress
from tests.unit.sample_events import (
    BLOB_FAILED,
    ERROR,
    HOSTILE,
    OUTAGE,
    PROGRESS,
    RUN_START,
    RUN_STOP,
    STATE,
)

CLEARED = "\x1b[2J\x1b[H"


def make_view(stream: TextIO, *, quiet: bool = False) -> Listener:
    """The view of a run with one target."""
    return make_views(stream, [""], quiet=quiet)[""]


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
        """The same, behind the last clearing, without the terminal's control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self.raw().rpartition(CLEARED)[2])

    def hang_up(self) -> None:
        """The window is closed: from here on every write fails."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self._master >= 0:
            self.stream.close()
            os.close(self._master)


@pytest.fixture
def term() -> Iterator[Terminal]:
    term = Terminal(24, 100)
    try:
        yield term
    finally:
        term.close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


# --- plain lines ----------------------------------------------------------------------------------


def test_view_is_chosen_by_the_stream(monkeypatch: pytest.MonkeyPatch, term: Terminal) -> None:
    assert isinstance(make_view(io.StringIO()), PlainView)
    assert isinstance(make_view(term.stream), LiveView)
    assert isinstance(make_view(term.stream, quiet=True), QuietView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(term.stream), PlainView)


def test_quiet_view_shows_only_what_is_wrong_at_the_end() -> None:
    stream = io.StringIO()
    view = make_view(stream, quiet=True)
    for event in (RUN_START, BLOB_FAILED, OUTAGE, events.Warning(reason="odd")):
        view.event(event)
    view.event(replace(RUN_STOP, outcome="done", exit_code=0))
    view.event(replace(RUN_STOP, outcome="stopped", exit_code=143))
    assert stream.getvalue() == ""
    view.event(events.StillFailed(blobs=8))
    view.event(RUN_STOP)
    view.event(ERROR)
    assert "`ntt-backup-remote failed` says why" in stream.getvalue()
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "8 blobs are still failed",
        "some failed",
        "error",
        "hint",
    ]


@pytest.mark.parametrize("drawn", [False, True])
def test_what_to_do_stands_on_a_line_of_its_own(drawn: bool, term: Terminal) -> None:
    stream = term.stream if drawn else io.StringIO()
    view = make_view(stream)
    view.event(ERROR)
    view.close()
    text = term.text() if drawn else stream.getvalue()  # type: ignore[attr-defined]
    assert "error: m: d\nhint: do it\n" in text


def test_plain_view_prints_a_line_for_each_event_that_has_one() -> None:
    stream = io.StringIO()
    view = make_view(stream)
    for event in (RUN_START, events.WorkerStart(strategy="tar"), PROGRESS, *[BLOB_FAILED] * 500):
        view.event(event)
    view.refresh(STATE)
    view.event(RUN_STOP)
    view.close()
    start, progress, *failures, more, stop = stream.getvalue().splitlines()
    assert (start, progress, stop) == (RUN_START.line, PROGRESS.line, RUN_STOP.line)
    assert failures == [BLOB_FAILED.line] * FAILURES_SHOWN
    assert more == "more blobs failed, see the log"


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_of_several_targets_begin_with_the_name(quiet: bool) -> None:
    stream = io.StringIO()
    views = make_views(stream, ["vault", "usb"], quiet=quiet)
    views["vault"].event(RUN_STOP)
    views["usb"].event(RUN_STOP)
    assert stream.getvalue() == f"vault: {RUN_STOP.line}\nusb: {RUN_STOP.line}\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([RUN_STOP], {"outcome": "some_failed", "exit_code": 7}),
        ([ERROR, RUN_STOP], {"outcome": "some_failed", "exit_code": 7}),
        ([ERROR], {"exit_code": ERROR.exit_code}),
    ],
)
def test_the_result_of_a_run_has_the_error_that_ended_it(
    said: list[events.Event], told: dict[str, Any]
) -> None:
    stream = io.StringIO()
    result = JsonResult(stream, "usb")
    for event in said:
        result.event(event)
    result.close()
    found = json.loads(stream.getvalue())
    assert found.items() >= {"target": "usb", **told}.items()
    error = found.get("error")
    assert (error is not None) == (ERROR in said)
    assert error is None or sorted(error) == ["detail", "exit_code", "hint", "message"]


# --- live picture ---------------------------------------------------------------------------------


def test_live_picture_shows_the_figures_and_every_worker(term: Terminal) -> None:
    view = make_view(term.stream)
    view.event(RUN_START)
    view.event(OUTAGE)
    term.raw()
    view.refresh(STATE)
    text = term.text()
    assert "4 workers, strategy tar, target remote: /srv/store to host:/backup" in text
    assert "75%, about 34 s left, 3,000 of 4,000 confirmed" in text
    assert "2 failed, 125.0 MB sent in 1 min 12 s, 12.2 MB/s on the link, 812 files/s" in text
    assert re.search(r"worker 0 +sending +6\.5 MB/s +1,500 blobs +batch w0-7", text)
    assert re.search(r"worker 1 +outage", text)
    assert "remote is unreachable" in text


def test_live_picture_shows_how_far_a_snapshot_is_until_it_is_done(term: Terminal) -> None:
    far = SnapshotProgress(set="etc", files=1, read=3_000_000, stored=1_000_000, eta_s=61.0)
    failed = SnapshotFailed(set="etc", exit_code=5, message="it is away", detail="", hint="")
    view = make_view(term.stream)
    view.event(far)
    view.refresh(STATE)
    assert "snapshot of etc: 1 file, 3.0 MB read, 1.0 MB stored, about 1 min 1 s" in term.text()
    view.event(failed)
    term.raw()
    view.refresh(STATE)
    text = term.text()
    assert "3.0 MB read" not in text
    assert "no snapshot of etc: it is away" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pending": None, "eta_s": None, "share": None}, "3,000 blobs, counting what is pending"),
        (
            {"estimated": True},
            "about 75%, about 34 s left, 3,000 of about 4,000 confirmed",
        ),
        ({"pending": 0, "share": 1.0, "eta_s": 0.0}, "100%, 3,000 of 3,000 confirmed"),
        ({"share": 0.999}, "99%, about 34 s left, 3,000 of 4,000 confirmed"),
        ({"pending": 0, "share": None, "eta_s": 0.0, "done": 0}, "nothing is pending"),
    ],
)
def test_live_picture_says_how_far_the_work_is(
    change: dict[str, Any], text: str, term: Terminal
) -> None:
    make_view(term.stream).refresh(replace(STATE, **change))
    assert any(line.strip(" \u2501\u2578\u257a") == text for line in term.text().split("\n"))


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (5, 20), (60, 300)])
def test_live_picture_fits_any_terminal(rows: int, columns: int, term: Terminal) -> None:
    workers = tuple(WorkerStatus(index, "sending", "b" * 80, 10**9, 1e3) for index in range(256))
    view = make_view(term.stream)
    view.event(RUN_START)
    for _ in range(10):
        view.event(replace(BLOB_FAILED, detail="long " * 100))
    view.refresh(STATE)
    term.resize(rows, columns)
    term.raw()
    view.refresh(replace(STATE, workers=workers))
    lines = term.text().rstrip("\n").split("\n")
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    shown = sum("sending" in line for line in lines)
    assert f"and {256 - shown} workers more"[:columns] in map(str.rstrip, lines)


def test_a_terminal_that_has_wrapped_the_last_picture_is_cleared(term: Terminal) -> None:
    view = make_view(term.stream)
    view.event(RUN_START)
    view.refresh(STATE)
    term.resize(24, 60)
    term.raw()
    view.refresh(STATE)
    _, cleared, after = term.raw().partition(CLEARED)
    assert cleared
    assert "\x1b[1A" not in after
    view.refresh(STATE)
    drawn = term.raw()
    assert "\x1b[1A" in drawn
    assert CLEARED not in drawn


def test_live_pictures_of_several_targets_stand_together_until_the_end(term: Terminal) -> None:
    many_workers = replace(STATE, workers=STATE.workers * 20)
    views = make_views(term.stream, ["vault", "usb"])
    for name, view in views.items():
        view.event(replace(RUN_START, target=name))
        for _ in range(5):
            view.event(OUTAGE)
    views["vault"].refresh(many_workers)
    term.raw()
    views["usb"].refresh(many_workers)
    lines = term.text().rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert [line for line in lines if "target vault" in line or "target usb" in line]
    views["usb"].event(RUN_STOP)
    views["usb"].close()
    term.raw()
    views["vault"].refresh(STATE)
    text = term.text()
    assert f"usb: {RUN_STOP.line}" in text
    assert "worker 1" in text
    views["vault"].close()
    term.raw()
    views["vault"].refresh(STATE)
    assert term.text() == ""


class BrokenPipe(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_a_view_that_nobody_sees_any_more_is_silent() -> None:
    term = Terminal(24, 80)
    views = [make_view(BrokenPipe()), make_view(term.stream)]
    views[1].refresh(STATE)
    term.hang_up()
    for view in views:
        view.event(RUN_START)
        view.refresh(STATE)
        view.event(RUN_STOP)
        view.close()


def test_nothing_that_others_said_controls_the_terminal(term: Terminal) -> None:
    view = make_view(term.stream)
    view.event(replace(BLOB_FAILED, detail=HOSTILE))
    view.refresh(replace(STATE, workers=(WorkerStatus(0, "sending", HOSTILE, 0, 0.0),)))
    raw = term.raw()
    assert "[red]" in raw
    assert "\x1b]" not in raw
    assert "\x1b[2J" not in raw
    assert not {"\x07", "\x9b", "\x00", "\u202e"} & set(raw)


def test_a_line_that_does_not_fit_ends_with_an_ellipsis_and_a_dump_is_seen(term: Terminal) -> None:
    view = make_view(term.stream)
    view.event(RUN_START)
    view.refresh(STATE)
    view.event(DumpStart(reason="first", program="17"))
    for nth in range(6):
        view.event(events.Warning(reason=f"{nth} " + "much to say " * 20))
    term.raw()
    view.refresh(STATE)
    text = term.text()
    assert "dumping the catalog (there is none yet)" in text
    assert re.search(r"warning: 5 much to say .*\u2026", text)
