"""Metrics of real runs: in the file that node-exporter reads, and scraped by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers import documents
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.sshd import HOST, free_port
from tests.helpers.waiting import PATIENCE, wait_until

RULES = documents.DOCS / "monitoring" / "alerts.yml"
PROMETHEUS = shutil.which("prometheus")
ABSENT = "ab" * 32


def test_runs_leave_their_figures_and_those_of_the_catalog_in_one_file(env: Environment) -> None:
    for name in ("disk", "usb"):
        (env.root / name).mkdir()
    env.settings["remote"] = {"url": f"file://{env.root}/disk"}
    env.write_config()
    env.fill(5)
    assert env.run("run").returncode == 0
    textfile, usb = env.root / "ntt.prom", {"url": f"file://{env.root}/usb"}
    env.write_config(metrics={"textfile": str(textfile)}, **{"targets.usb": usb})
    env.write_config(lock={"file": str(env.root / "lock-{target}")})
    assert env.call("--target", "usb", "init-db").returncode == 0
    env.register([ABSENT])
    done = env.run("--target", "all", "run")
    assert done.returncode == 7, done.stdout + done.stderr

    found = {
        (sample.name.removeprefix("ntt_backup_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(textfile.read_text())
        for sample in family.samples
    }
    assert found["up", "remote"] == found["up", "usb"] == 0
    assert found["blobs_copied_total", "0", "usb"] == 5
    assert found["last_run_exit_code", "remote"] == 7
    assert found["blobs_still_failed", "remote"] == 1
    assert found["failures_total", "missing", "remote"] == 1
    assert found["blobs_copied_total", "0", "remote"] == 0
    succeeded = found["last_success_timestamp_seconds", "remote"]
    assert 0 < succeeded < found["run_start_timestamp_seconds", "remote"]
    assert env.processes() == {}


class Prometheus:
    """A Prometheus that scrapes a page each second, with our rules."""

    def __init__(self, listen: str) -> None:
        self._listen = listen

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None where there is none yet."""
        url = f"http://{self._listen}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with suppress(OSError), urllib.request.urlopen(url) as answer:
            return json.load(answer)["data"]
        return None

    def value(self, query: str) -> float | None:
        found = self.ask("query", query=query)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def alerts(self) -> set[tuple[str, str]]:
        """Names and states."""
        found = self.ask("alerts") or {"alerts": []}
        return {(one["labels"]["alertname"], one["state"]) for one in found["alerts"]}


@contextmanager
def prometheus(place: Path, page: str) -> Iterator[Prometheus]:
    config = place / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{json.dumps(str(RULES))}]\n"
        f"scrape_configs: [{{job_name: ntt-backup, static_configs: [{{targets: ['{page}']}}]}}]\n"
    )
    listen = f"{HOST}:{free_port()}"
    argv = [
        PROMETHEUS or "",
        f"--config.file={config}",
        f"--storage.tsdb.path={place / 'tsdb'}",
        f"--web.listen-address={listen}",
    ]
    with (place / "prometheus.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(listen)
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_scrapes_a_daemon_and_raises_its_alerts(
    env: Environment, link: Link, tmp_path: Path
) -> None:
    env.register([ABSENT])
    before = set(env.fill(40))
    assert env.run("run").returncode == 7
    new = set(env.fill(30, seed=2)) - before
    page = f"{HOST}:{free_port()}"
    env.write_config(metrics={"listen": page}, run={"workers": 2, "poll_interval": 0.2})
    env.through(env.sshd.through(link.port))
    with prometheus(tmp_path, page) as server, env.running("run", "--watch") as run:
        env.await_copied(before | new)
        copied = "sum(ntt_backup_blobs_copied_total)"
        wait_until(lambda: server.value(copied) == len(new), "what was copied")
        wait_until(lambda: server.value("ntt_backup_blobs_pending") == 0, "nothing pending")
        failed = ("NttBackupBlobsFailed", "firing")
        wait_until(lambda: failed in server.alerts(), "the alert for the failed blob")
        assert server.value("ntt_backup_up") == 1
        assert server.value("time() - ntt_backup_last_success_timestamp_seconds < 60") is not None
        assert server.value("count(ntt_backup_batch_duration_seconds_bucket)") == 2 * 15
        assert not re.search("NttBackup(Gone|Silent|Outage)", str(server.alerts()))

        link.cut()
        late = set(env.fill(5, seed=3))
        outage = 'ntt_backup_outage_seconds_total{what="remote"}'
        wait_until(lambda: (server.value(outage) or 0) > 2, "seconds of an outage")
        wait_until(lambda: ("NttBackupOutage", "pending") in server.alerts(), "the next alert")
        link.restore()
        env.await_copied(before | new | late)
        wait_until(lambda: server.value("sum(ntt_backup_outage)") == 0, "the end of the outage")

        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 143, env.output()
        wait_until(lambda: ("NttBackupGone", "pending") in server.alerts(), "that it is gone")
    assert env.processes() == {}
