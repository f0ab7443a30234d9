"""`status --policy`: which blobs have fewer proved copies than the settings promise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import RemoteDir
from tests.helpers.waiting import wait_until


@pytest.fixture
def two(env: Environment) -> Environment:
    """The environment with two directories as targets, `remote` and `usb`."""
    for name in ("disk", "usb"):
        (env.root / name).mkdir()
    env.remote = RemoteDir(str(env.root / "disk"), env.root / "disk")
    env.settings["remote"] = {"url": f"file://{env.root}/disk"}
    changes: dict[str, Any] = {
        "targets.usb": {"url": f"file://{env.root}/usb"},
        "lock": {"file": str(env.root / "lock-{target}")},
        "policy": {"copies": 2, "proved": "30d", "every": "1s"},
    }
    env.write_config(**changes)
    env.call("--target", "usb", "init-db", expect=0)
    return env


def policy(env: Environment, *options: str, code: int) -> dict[str, Any]:
    done = env.call("status", "--policy", "--json", *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_promise_is_kept_once_all_targets_have_all_and_broken_by_an_old_check(
    two: Environment,
) -> None:
    blobids = sorted(set(two.fill(50)))
    before = policy(two, code=7)
    two.call("run", expect=0)
    half = policy(two, code=7)
    ran = two.call("--target", "usb", "run", expect=0).stdout.splitlines()
    kept = policy(two, code=0)
    two.query(
        "update blobs set usb_last_checked = now() - interval '31 days' where blobid = any(%s)",
        blobids[5:8],
    )
    two.query("update ntt_backup.contacts set met_at = now() - interval '1 year'")
    broken = policy(two, code=7)
    said = two.call("status", "--policy", expect=7).stdout

    assert f"{len(blobids)} of {len(blobids)} blobs on usb" in ran[-1]
    assert before["by_proofs"] == [len(blobids), 0, 0]
    assert half["by_proofs"] == [0, len(blobids), 0]
    assert half["kinds"] == [
        {
            "blobs": len(blobids),
            "first": blobids[0],
            "targets": {"remote": "proved", "usb": "none"},
        }
    ]
    assert (kept["short"], kept["by_proofs"]) == (0, [0, 0, len(blobids)])
    assert broken["short"] == 3
    assert broken["kinds"][0]["first"] == blobids[5]
    assert broken["targets"]["usb"]["old"] == 3
    assert "3 blobs have less than 2 proved copies" in said
    assert blobids[5] in said
    two.call("--target", "usb", "verify", expect=0)
    assert policy(two, code=0)["short"] == 0


def test_a_daemon_counts_and_status_asks_for_action(two: Environment) -> None:
    two.fill(20)
    two.call("--target", "all", "run", expect=0)
    two.query("update blobs set usb_last_checked = now() - interval '31 days'")
    two.query("update ntt_backup.contacts set met_at = now() - interval '1 year'")
    with two.running("run", "--watch"):
        found = two.await_event("check_complete")
        assert (found["command"], found["exit_code"]) == ("policy", 7)
        wait_until(lambda: two.status()["policy"] is not None, "the count is kept")
        status = two.status()
    assert status["policy"]["short"] == found["wrong"] == found["blobs"]
    assert status["health"]["level"] == "action_required"
    assert any("fewer than 2 proved copies" in one["what"] for one in status["health"]["points"])


def test_without_a_promise_there_is_nothing_to_show(env: Environment) -> None:
    refused = env.call("status", "--policy", expect=2)
    assert "policy.copies is not set" in refused.stderr
