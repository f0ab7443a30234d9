"""A running daemon as it is drawn on another terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ntt_backup import events
from ntt_backup.cli.app import cli
from ntt_backup.cli.commands import status
from ntt_backup.cli.global_options import Common
from ntt_backup.cli.results import EachTarget
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control_socket import DaemonReport, RunReport
from ntt_backup.daemon.progress import RunProgress
from ntt_backup.errors import CatalogError
from ntt_backup.process.messages import Tick
from ntt_backup.report import target_facts
from ntt_backup.report.live import Watch, daemon_line, daemon_picture, sparkline
from ntt_backup.report.status import Status
from tests.helpers import documents
from tests.unit.sample_events import OUTAGE

NOW = 1_800_000_000.0
PAUSED = "Somebody paused it"


def a_report(*, paused: bool = False, workers: int = 2) -> DaemonReport:
    progress = RunProgress(0.0, workers)
    progress.take(1, Tick(state="sending", sent=3_000_000, content=3_000_000), 1.0)
    if paused:
        progress.hold(2.0)
    made = RunReport("run-1", workers, lambda: NOW - 180)
    made.event(events.Warning(reason="evil\x1b[2J"))
    for worker in (0, 1):
        made.event(replace(OUTAGE, worker=worker))
    made.refresh(progress.state(2.0))
    return made.report(
        "vault", paused=paused, bwlimit=4_000_000, jobs={"dump": True, "snapshot": False}
    )


def drawn(
    report: DaemonReport, columns: int = 100, rows: int = 30, *, letters: bool = False
) -> str:
    console = Console(file=io.StringIO(), width=columns, height=rows)
    now = datetime.fromtimestamp(NOW, UTC)
    console.print(daemon_picture(report, now, columns, rows, letters=letters))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_has_workers_rates_outages_and_the_last_lines() -> None:
    text = drawn(a_report())
    for words in (
        "target vault: a dump is made, at most 4.0 MB/s, 2 workers, strategy auto, PID ",
        "worker 1  sending",
        "remote is unreachable for 3 min 0 s (2 workers): no answer: timed out",
        "last 60 minutes |",
        "█",
        "at most 50.0 kB/s",
        "warning: evil\\x1b",
    ):
        assert words in text
    assert "PAUSED" not in text


def test_a_pause_is_seen_at_once() -> None:
    report = a_report(paused=True)
    assert daemon_line(report).startswith("PAUSED, a dump is made, ")
    assert "worker 1  paused" in drawn(report)


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (40, 12), (300, 80)])
def test_it_fits_any_terminal(columns: int, rows: int) -> None:
    lines = drawn(a_report(workers=40), columns, rows).splitlines()
    assert all(len(line) <= columns for line in lines)
    assert len(lines) <= max(rows + 1, 10)


@pytest.fixture
def no_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise CatalogError("the catalog is not available")

    monkeypatch.setattr(status, "open_catalog", away)


@pytest.mark.usefixtures("no_catalog")
def test_a_daemon_is_seen_while_its_catalog_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = iter([a_report(), a_report(paused=True)])
    monkeypatch.setattr(target_facts, "report", lambda _: next(reports))
    settings = {"vault": CatalogConfig(target="vault")}
    vault = EachTarget[Status](Common(None, "vault"), settings)
    stream = io.StringIO()
    with Watch(stream) as shown:
        status.look(vault, exact=False)
        shown.show(status.picture(vault, shown))
        assert PAUSED not in str(vault.found["vault"].json()["health"])
        status.look_at_daemons(vault)
        shown.show(status.picture(vault, shown))
    assert PAUSED in str(vault.found["vault"].json()["health"])
    said = stream.getvalue()
    assert said.count("target vault: error: the catalog is not available") == 2
    assert said.count("remote is unreachable for") == 2
    assert said.count("target vault: PAUSED") == 1


@pytest.mark.usefixtures("no_catalog")
@pytest.mark.parametrize("as_json", [False, True])
def test_status_tells_of_a_daemon_whose_catalog_is_away(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr(target_facts, "report", lambda _: a_report())
    monkeypatch.setenv("NTT_CONFIG", "/dev/null")
    done = CliRunner().invoke(cli, ["status", *["--json"] * as_json])
    assert isinstance(done.exception, CatalogError)
    if as_json:
        said = json.loads(done.stdout)
        assert said["error"]["message"] == "the catalog is not available"
        assert said["exit_code"] == CatalogError.exit_code
        assert said["daemon"] == json.loads(json.dumps(a_report().fields))
    else:
        for text in ("2 workers, ", "remote is unreachable for ", "the catalog is not available"):
            assert text in done.stdout


def test_a_terminal_that_knows_only_letters_gets_these() -> None:
    assert drawn(a_report(), letters=True).isascii()


def test_the_report_keeps_to_the_schema() -> None:
    schema = documents.status_schema()
    jsonschema.validate(
        json.loads(json.dumps(a_report().fields)),
        {**schema["$defs"]["DaemonReport"], "$defs": schema["$defs"]},
    )


@given(st.lists(st.floats(0, 1e12), max_size=60))
def test_a_sparkline_has_a_mark_for_each_rate_and_shows_all_that_moves(rates: list[float]) -> None:
    marks = sparkline(rates, "0123")
    assert len(marks) == len(rates)
    for rate, mark in zip(rates, marks, strict=True):
        assert (mark == "0") == (rate == 0)
        if rate == max(rates) > 0:
            assert mark == "3"
