"""Metrics of real runs, in the file that node-exporter reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.environment import Environment

ABSENT = "ab" * 32


def test_runs_leave_their_figures_and_those_of_the_catalog_in_one_file(env: Environment) -> None:
    for name in ("disk", "usb"):
        (env.root / name).mkdir()
    env.settings["remote"] = {"url": f"file://{env.root}/disk"}
    env.write_config()
    env.fill(5)
    env.run("run", expect=0)
    textfile, usb = env.root / "ntt.prom", {"url": f"file://{env.root}/usb"}
    env.write_config(metrics={"textfile": str(textfile)}, **{"targets.usb": usb})
    env.write_config(lock={"file": str(env.root / "lock-{target}")})
    env.call("--target", "usb", "init-db", expect=0)
    env.register([ABSENT])
    env.run("--target", "all", "run", expect=7)

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
