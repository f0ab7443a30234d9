"""What a monitoring system is told: the figures, the page, the file, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any

import pytest
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from ntt_backup import events, rollback_detection
from ntt_backup.catalog.identities import Place
from ntt_backup.config import Settings, load
from ntt_backup.config.sections import LogSettings, RemoteSettings
from ntt_backup.daemon.progress import RunProgress, RunState, WorkerStatus
from ntt_backup.dump.events import DumpFailed
from ntt_backup.report import metrics
from ntt_backup.report.metrics import METRICS, PREFIX, Figures, class_of, metrics_process
from ntt_backup.report.target_facts import TargetFacts
from ntt_backup.snapshot.events import SnapshotFailed
from tests.helpers import documents
from tests.helpers.sshd import HOST, free_port
from tests.helpers.waiting import wait_until
from tests.unit.sample_events import (
    BATCH,
    BLOB_FAILED,
    DIED,
    OUTAGE,
    RUN_START,
    RUN_STOP,
    STALL,
    TARGET_DIED,
)

RULES = documents.DOCS / "monitoring" / "alerts.yml"
DASHBOARD = documents.DOCS / "monitoring" / "dashboard.json"
RULE_TESTS = Path(__file__).parents[1] / "samples" / "alerts-test.yml"
PROMTOOL = shutil.which("promtool")
AHEAD = 400 * 86400
START = replace(RUN_START, target="far", workers=2, watch=False)
DONE = replace(RUN_STOP, outcome="done", exit_code=0)
TEN = replace(
    BATCH, worker=1, blobs=10, copied=9, bytes=900, wire_bytes=400, duration_s=3.0, answer_s=0.3
)
LOST = events.MarksLost(worker=1, blobs=10, bytes=1000)
AWAY = replace(OUTAGE, worker=0)
WHY: dict[str, Any] = {"exit_code": 7, "message": "m", "detail": "", "hint": ""}
STATE = replace(
    RunProgress(0.0, 2).state(1.0),
    pending=5,
    mb_per_s=1.5,
    workers=(WorkerStatus(0, "outage", "", 0, 0.0), WorkerStatus(1, "sending", "", 0, 0.0)),
)


class Told:
    """The figures of a target, after what a run told. A number is the time since then."""

    def __init__(self, *heard: float | events.Event | RunState) -> None:
        self.figures = Figures({"far": ["etc"]})
        now = 0.0
        for what in heard:
            if isinstance(what, float | int):
                now = what
                self.figures.pass_time(now)
            else:
                self.figures.take("far", what, now)

    def __call__(self, name: str, **labels: str) -> float | None:
        labels = {"target": "far", **labels}
        return self.figures.registry.get_sample_value(PREFIX + name, labels)


RETRY = events.BatchRetry(
    worker=0, batch="b", blobs=1, attempt=2, reason="free text", wait_s=1.0, cause="rejected"
)
WENT_WRONG = [
    RETRY,
    events.BatchSplit(worker=0, batch="b", blobs=1, reason="free text"),
    BLOB_FAILED,
    events.BlobsFailed(count=5, reasons={"missing": 4, "unreadable": 1}),
    STALL,
    DumpFailed(**WHY),
    SnapshotFailed(set="etc", **WHY),
    events.StillFailed(blobs=4),
]
TWO_MISS_IT = [START, 10, AWAY, 12, replace(AWAY, worker=1)]
NOTHING_LEFT = replace(STATE, pending=0)
# What a run told, and figures with their labels.
FIGURES: dict[str, tuple[list[Any], str]] = {
    "batches, of their worker": (
        [START, TEN, TEN],
        "blobs_copied_total worker=1: 18, copied_bytes_total worker=1: 1800,"
        " wire_bytes_total worker=1: 800, blobs_failed_total worker=1: 2,"
        " batch_duration_seconds_sum worker=1: 6, batch_duration_seconds_bucket worker=1 le=2.5: 0,"
        " batch_duration_seconds_bucket worker=1 le=5.0: 2,"
        " receipt_duration_seconds_bucket worker=1 le=0.5: 2",
    ),
    "counters begin at zero": (
        [START],
        "blobs_copied_total worker=0: 0, worker_restarts_total worker=0: 0,"
        " batch_retries_total worker=0 reason=protocol: 0, failures_total reason=missing: 0,"
        " dump_failures_total: 0, snapshot_failures_total set=etc: 0",
    ),
    "a line that stands for several batches": (
        [START, replace(TEN, batches=3)],
        "batch_duration_seconds_sum worker=1: 3, batch_duration_seconds_count worker=1: 3,"
        " receipt_duration_seconds_count worker=1: 3, blobs_copied_total worker=1: 9",
    ),
    "marks that a crash has lost count once": (
        [START, TEN, LOST, TEN],
        "blobs_copied_total worker=1: 9, copied_bytes_total worker=1: 900",
    ),
    "whichever worker sends them again": (
        [START, TEN, LOST, TEN, replace(TEN, worker=0)],
        "blobs_copied_total worker=1: 9, blobs_copied_total worker=0: 8,"
        " copied_bytes_total worker=0: 800, wire_bytes_total worker=1: 800",
    ),
    "what went wrong": (
        [START, *WENT_WRONG],
        "batch_retries_total worker=0 reason=rejected: 1, batch_splits_total worker=0: 1,"
        " failures_total reason=missing: 5, failures_total reason=unreadable: 1,"
        " worker_stalls_total worker=1: 1, dump_failures_total: 1,"
        " snapshot_failures_total set=etc: 1, blobs_still_failed: 4",
    ),
    "an outage of two workers counts once": (
        [*TWO_MISS_IT, 20, AWAY, 25],
        "outage what=remote: 1, outage_seconds_total what=remote: 15",
    ),
    "an outage lasts while one worker misses the side": (
        [*TWO_MISS_IT, 26, DIED, 28],
        "outage what=remote: 1, outage_seconds_total what=remote: 18",
    ),
    "an outage ends with the last worker that misses the side": (
        [*TWO_MISS_IT, 26, DIED, 30, events.WorkerStop(worker=1), 50],
        "outage what=remote: 0, outage_seconds_total what=remote: 20,"
        " outage_seconds_total what=catalog: 0",
    ),
    # An alert on the age of the last success would not come before that day.
    "the time of a clock that was ahead": (
        [AHEAD, START, DONE, 10, START, 20, DONE],
        "last_success_timestamp_seconds: 20, last_run_end_timestamp_seconds: 20",
    ),
    "a state": (
        [START, 1, STATE],
        "blobs_pending: 5, link_bytes_per_second: 1.5e6, workers state=sending: 1,"
        " workers state=outage: 1, workers state=idle: 0, last_heard_timestamp_seconds: 1,"
        " paused: 0",
    ),
    "not known any more": ([START, STATE, replace(STATE, pending=None)], "blobs_pending: nan"),
    "a run": (
        [5, START, 6, AWAY],
        "up: 1, run_start_timestamp_seconds: 5, last_success_timestamp_seconds: nan",
    ),
    "a run that ends well, and one that does not": (
        [5, START, 6, AWAY, 7, DONE, 8, START, 9, replace(DONE, exit_code=7)],
        "up: 0, outage what=remote: 0, last_success_timestamp_seconds: 7, last_run_exit_code: 7,"
        " last_run_end_timestamp_seconds: 9",
    ),
    "a run that is started again was down": (
        [START, STATE, AWAY, TARGET_DIED],
        "up: 0, workers state=sending: 0, outage what=remote: 0, run_restarts_total: 1",
    ),
    "a daemon with nothing left has succeeded": (
        [replace(START, watch=True), 2, NOTHING_LEFT],
        "last_success_timestamp_seconds: 2",
    ),
    "a run with nothing left has not yet": (
        [START, 2, NOTHING_LEFT],
        "last_success_timestamp_seconds: nan",
    ),
}


@pytest.mark.parametrize(("heard", "figures"), FIGURES.values(), ids=FIGURES)
def test_figures_follow_from_what_a_run_tells(heard: list[Any], figures: str) -> None:
    told = Told(*heard)
    for figure in figures.split(", "):
        sample, _, value = figure.rpartition(": ")
        name, *labels = sample.split()
        found = told(name, **dict(one.split("=") for one in labels))
        assert found == (None if value == "nan" else float(value)), sample


def test_an_end_that_the_catalog_knows_is_no_last_one_where_a_later_end_was_heard() -> None:
    told = Told(5, START, 20, DONE)
    for when in (3.0, AHEAD):
        told.figures.note_end("far", when, 7)
        assert (told("last_run_end_timestamp_seconds"), told("last_run_exit_code")) == (20, 0)


def test_what_a_target_lacks_and_how_status_judges_it_are_read(tmp_path: Path) -> None:
    """Of each target by its own settings: what is missed is known by the place."""
    places = {"far": "ssh://vault/srv", "usb": "file:///mnt/usb"}
    each = {
        name: settings().model_copy(
            update={
                "target": name,
                "remote": RemoteSettings(url=url),
                "log": LogSettings(jsonl=tmp_path / "log"),
            }
        )
        for name, url in places.items()
    }
    told = Told()
    rollback_detection.record(each["usb"], "dump", "the newest")
    for there in ([], ["the newest"]):
        rollback_detection.compare(each["usb"], {("dump", ""): there})
        for name in places:
            told.figures.note_facts(TargetFacts.of_host(each[name]))
        assert told("missed_on_target", target="usb") == (not there)
        assert told("health", target="usb") == (0 if there else 2)
        assert (told("missed_on_target"), told("health")) == (0, 0)


def test_the_identity_of_a_target_is_a_label_and_an_old_one_is_forgotten() -> None:
    told = Told()
    for one in ("a" * 32, "b" * 32, "b" * 32):
        place = Place(one, datetime.now(UTC))
        told.figures.note_facts(TargetFacts(settings(), place=place))
        assert told("target_info", target="remote", id=one) == 1
    assert told("target_info", target="remote", id="a" * 32) is None


# --- the page and the file ------------------------------------------------------------------------


def settings(**values: Any) -> Settings:
    flags = {
        "catalog.url": f"postgresql://{HOST}:{free_port()}/none",
        "source.root": "/srv/store",
        "remote.url": "file:///srv/backup",
        **{f"metrics.{name}": str(value) for name, value in values.items()},
    }
    return load(Settings, flags=flags, environ={}, file=None)


def page(listen: str) -> str | None:
    """What the page has, or None where nobody answers."""
    with suppress(OSError), urllib.request.urlopen(f"http://{listen}/metrics") as answer:
        return str(answer.read().decode())
    return None


def values(text: str | None) -> dict[str, float]:
    """The samples of the target without further labels."""
    found = text_string_to_metric_families(text or "")
    samples = [sample for family in found for sample in family.samples]
    return {one.name: one.value for one in samples if one.labels in ({}, {"target": "far"})}


@pytest.mark.usefixtures("alone")
def test_the_page_and_the_file_say_the_same_until_the_end(tmp_path: Path) -> None:
    listen, textfile = f"{HOST}:{free_port()}", tmp_path / "ntt.prom"
    process = metrics_process({"far": settings(listen=listen, textfile=textfile)})
    assert process is not None
    mask = os.umask(0o077)
    try:
        listener = process.of("far")
        listener.event(START)
        listener.refresh(STATE)
        wait_until(lambda: values(page(listen)).get(f"{PREFIX}blobs_pending") == 5, "the page")
        with socket.create_connection((HOST, int(listen.rpartition(":")[2]))):
            assert page(listen), "a client that says nothing holds up another one"
        hostile = urllib.request.Request(f"http://{listen}/metrics", headers={"Host": "evil.test"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(hostile)
        wait_until(textfile.exists, "the file")
        listener.event(DONE)
        listener.close()
    finally:
        os.umask(mask)
    assert page(listen) is None
    assert [path.name for path in tmp_path.iterdir()] == ["ntt.prom"]
    assert textfile.stat().st_mode & 0o777 == 0o644
    found = values(textfile.read_text())
    assert (found[f"{PREFIX}up"], found[f"{PREFIX}last_run_exit_code"]) == (0, 0)
    if PROMTOOL:
        lint = [PROMTOOL, "check", "metrics"]
        done = subprocess.run(lint, input=textfile.read_bytes(), capture_output=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["ntt.prom", "ntt.txt"])
def test_a_file_that_node_exporter_would_not_read_is_warned_of(tmp_path: Path, name: str) -> None:
    _, warning = metrics.check(settings(textfile=tmp_path / name))
    assert ("node-exporter reads *.prom" in warning) == (name == "ntt.txt")


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_served_is_a_warning_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_WRITE_SECONDS", 0.02)
    listen, textfile = f"{HOST}:{free_port()}", tmp_path / "later" / "ntt.prom"
    wanted = settings(listen=listen, textfile=textfile)
    process = metrics_process({"far": wanted})
    assert process is not None
    listener = process.of("far")
    with socketserver.TCPServer((HOST, int(listen.rpartition(":")[2])), BaseRequestHandler):
        said, warning = metrics.check(wanted)
        assert said == f"http://{listen}"
        assert warning == (
            f"no metrics at {listen}: Address already in use;"
            f" no metrics in {textfile}: its directory is missing"
        )
        listener.event(START)
        words: list[events.Event] = []

        def all_is_told() -> bool:
            words.extend(process.hear())
            return len(words) == 2

        wait_until(all_is_told, "two warnings")
    textfile.parent.mkdir()
    wait_until(lambda: page(listen) and textfile.exists(), "the page and the file")
    listener.close()
    assert [one.line for one in words] == [
        f"warning: no metrics at {listen}: Address already in use",
        f"warning: no metrics at {textfile}: No such file or directory",
    ]


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo"])
def test_what_others_put_beside_the_file_is_not_written_through(tmp_path: Path, kind: str) -> None:
    """Somebody else may write to the directory of node-exporter's files, too."""
    victim, new = tmp_path / "victim", tmp_path / "ntt.prom.new"
    victim.write_text("ours")
    match kind:
        case "symlink":
            new.symlink_to(victim)
        case "hard link":
            new.hardlink_to(victim)
        case "fifo":
            os.mkfifo(new)
    metrics._write(tmp_path / "ntt.prom", b"up 1\n")
    assert (victim.read_text(), victim.stat().st_nlink) == ("ours", 1)
    assert (tmp_path / "ntt.prom").read_text() == "up 1\n"
    assert (tmp_path / "ntt.prom").is_file()
    assert not (tmp_path / "ntt.prom").is_symlink()


# --- what is said of them -------------------------------------------------------------------------


def test_the_table_of_the_documentation_is_made_from_the_metrics() -> None:
    text = documents.MONITORING.read_text()
    assert text == documents.monitoring_text(), "`python -m tests.helpers.documents` writes it"


def queries() -> Iterator[str]:
    """Those of the rules and of the dashboard."""
    yield RULES.read_text()
    board = json.loads(DASHBOARD.read_text())
    yield from (one["expr"] for panel in board["panels"] for one in panel["targets"])
    yield from (one["query"] for one in board["templating"]["list"])


def test_rules_and_dashboard_use_only_metrics_and_labels_that_exist() -> None:
    known = {f"{PREFIX}{name}": {*one.labels} for name, one in METRICS.items()}
    for name, one in METRICS.items():
        if class_of(name) is Histogram:
            known[f"{PREFIX}{name}_bucket"] = {*one.labels, "le"}
    used = 0
    for query in queries():
        for name, matched in re.findall(rf"\b({PREFIX}\w+)(?:\{{(.*?)\}})?", query):
            used += 1
            assert name in known
            assert {*re.findall(r"(\w+)[=!]~?", matched)} <= known[name], query
    assert used > 40


def test_grafana_can_import_the_dashboard() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    assert not {"id", "__inputs"} & board.keys()  # Those of another Grafana.
    source, target = board["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    ours = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert target["datasource"] == ours
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["datasource"] == ours
        assert panel["type"] in ("stat", "timeseries")
        refs = [one["refId"] for one in panel["targets"]]
        assert sorted(set(refs)) == refs
        for one in panel["targets"]:
            assert {*re.findall(r"\$(\w+)", one["expr"])} <= {"target", "__rate_interval"}
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
        bounds = [step["value"] for step in steps]
        assert bounds[:1] in ([], [None])
        assert sorted(set(bounds[1:])) == bounds[1:], panel["title"]
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        assert x + w <= 24
        place = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert not place & taken, f"{panel['title']} lies over another panel"
        taken |= place
    ids = [panel["id"] for panel in board["panels"]]
    assert sorted(set(ids)) == ids


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_prometheus_can_parse_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [one["expr"] for panel in panels for one in panel["targets"]]
    told = [query.replace("$__rate_interval", "5m").replace("$target", "a") for query in queries]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(told)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    argv = [PROMTOOL or "", "check", "rules", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_the_rules_fire_when_they_should(tmp_path: Path) -> None:
    tests = tmp_path / "tests.yml"
    tests.write_text(RULE_TESTS.read_text().replace("RULES", str(RULES)))
    for what in (["check", "rules", str(RULES)], ["test", "rules", str(tests)]):
        done = subprocess.run([PROMTOOL or "", *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    assert all(alert in RULE_TESTS.read_text() for alert in alerts)
