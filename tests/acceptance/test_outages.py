"""An outage has one length for workers, dumps and snapshots, and all go on as soon as it ends."""

from __future__ import annotations

import signal
from datetime import datetime
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE, wait_until

FAILED = ("dump_failed", "snapshot_failed", "error")


def when(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def stop(env: Environment, run: Any) -> None:
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE) == 143, env.output()


@pytest.mark.long
def test_the_first_worker_that_is_back_ends_the_outage_for_all(
    env: Environment, link: Link
) -> None:
    """Each waits for 4 to 40 seconds. The first one to come back wakes the others."""
    env.through(env.sshd.through(link.port))
    waits = {"backoff_base": 40, "backoff_cap": 40}
    env.write_config(run={"workers": 6, "batch_size": 20, "bwlimit": "1MB", **waits})
    blobids = set(env.fill(400, size=lambda chance: chance.randrange(20_000)))
    link.cut_after(1_500_000)
    with env.running("run", "--watch") as run:
        wait_until(lambda: len(_missing(env)) > 3, "the workers to miss the remote")
        link.restore()
        env.await_copied(blobids)
        stop(env, run)

    # A worker that was not sending may meet the cut connection later, and tell of it once more.
    end, *_ = env.events("outage_end")
    first = env.events("outage")[0]
    assert end["what"] == first["what"] == "remote"
    assert 0 < end["duration_s"] <= when(end) - when(first) + 0.1
    # The outage is over since the connection that answered, which then has a small batch to send.
    assert when(end) - when(first) - end["duration_s"] < 5 + PATIENCE / 60
    planned = {
        one["worker"]: when(one) + one["wait_s"]
        for one in env.events("outage")
        if when(one) <= when(end)
    }
    assert any(
        when(end) < when(one) < planned.get(one["worker"], 0.0)
        for one in env.events("batch_complete")
    ), "no worker has sent before its wait was over"


def _missing(env: Environment) -> set[int]:
    return {one["worker"] for one in env.events("outage")}


@pytest.fixture
def due(env: Environment, postgres: Postgres, link: Link) -> Environment:
    """A daemon that waits for blobs, whose dump and snapshot are due each second."""
    env.through(env.sshd.through(link.port))
    files = env.root / "etc"
    files.mkdir()
    (files / "hosts").write_bytes(b"127.0.0.1 localhost\n")
    env.environ["XDG_CACHE_HOME"] = str(env.root / "cache")
    env.write_config(
        run={"skip_pgdump": False, "poll_interval": 0.1},
        dump={"bin": str(postgres.programs), "interval": 1},
        **{"snapshots.etc": {"paths": [str(files)], "every": "1s"}},
    )
    env.fill(1)
    return env


def _looked(env: Environment) -> tuple[int, int]:
    """How many dumps were made or found to be good, and how many snapshots were taken."""
    dumps = len(env.events("dump_complete")) + len(env.events("dump_skipped"))
    return dumps, len(env.events("snapshot_complete"))


def _await_both(env: Environment) -> None:
    """Return once both have been looked at again, from now on."""
    dumps, snapshots = _looked(env)

    def both() -> bool:
        now = _looked(env)
        return now[0] > dumps and now[1] > snapshots

    wait_until(both, "a dump and a snapshot")


def _assert_no_failure(env: Environment) -> None:
    assert [one["event"] for one in env.events() if one["event"] in FAILED] == []
    status = env.status()
    assert [one["error"] for one in (*status["dumps"], *status["snapshots"])] == ["", ""]


@pytest.mark.parametrize(
    "blobs", [pytest.param(True, id="known", marks=pytest.mark.long), pytest.param(False, id="met")]
)
def test_a_dump_and_a_snapshot_wait_for_the_end_of_an_outage_and_are_no_failure(
    due: Environment, link: Link, blobs: bool
) -> None:
    """Whether workers know of it, or nothing is pending and the dump is the first to meet it."""
    with due.running("run", "--watch") as run:
        _await_both(due)
        link.cut()
        pending = {due.put(b"during the outage")} if blobs else set()
        wait_until(
            lambda: [one for one in due.events("outage") if one["attempt"] > 7],
            "an outage of some seconds",
        )
        _assert_no_failure(due)
        assert due.events("outage_end") == []
        link.restore()
        _await_both(due)
        due.await_copied(pending)
        _assert_no_failure(due)
        stop(due, run)
    assert {one["what"] for one in due.events("outage")} == {"remote"}
    assert {one["what"] for one in due.events("outage_end")} == {"remote"}
