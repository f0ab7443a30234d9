"""A worker process seen from the coordinator: it may say or do anything, and ends when it must."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.config import Settings
from ntt_backup.daemon.supervisor import RESTARTS, SOUND_SECONDS, SupervisedWorker
from ntt_backup.errors import WorkerFailed
from ntt_backup.planner import Backoff
from ntt_backup.process.pipeline import Child, wait_for
from ntt_backup.upload.worker_main import Orders
from tests.environment import wait_until
from tests.patience import PATIENCE

ENDLESS = 500_000
ORDERS = Orders(
    settings=Settings(source={"root": "/s"}, remote={"host": "h", "path": "/p"}),
    worker=3,
    run_id="run",
    owner="0123456789ab",
    application="test",
    strategy="tar",
    watch=False,
)
Start = Callable[..., SupervisedWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a worker that does the scripts, one after the other, each time it is started, instead
    of orders; it is killed at the end.
    """
    workers: list[SupervisedWorker] = []

    def make(*scripts: str) -> SupervisedWorker:
        left = list(scripts)

        def employ(orders: Orders) -> Child:
            return Child(("/bin/sh", "-c", left.pop(0)), new_session=True)

        workers.append(SupervisedWorker(ORDERS, Backoff(1, 60), employ))
        workers[-1].start(0.0)
        return workers[-1]

    yield make
    for worker in workers:
        worker.kill()
        listen(worker)


def listen(worker: SupervisedWorker) -> list[dict[str, Any]]:
    """All that it says until it has ended."""
    heard: list[dict[str, Any]] = []
    while worker.running:
        assert wait_for(reading=worker.fds, timeout=PATIENCE), "no end"
        heard += worker.hear()
    return heard


def say(*events: dict[str, Any]) -> str:
    return "".join(f"echo '{json.dumps(event)}'\n" for event in events)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


START = {"event": "worker_start", "pid": 1}
STOP = {"event": "worker_stop", "pid": 1}


# --- what it says ---------------------------------------------------------------------------------


def test_a_worker_that_never_stops_talking_keeps_nobody_waiting(start: Start) -> None:
    """It may talk faster than it can be heard; signals and the other workers have their turn."""
    worker = start('exec yes \'{"event": "tick"}\'')
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    assert 0 < sum(1 for _ in islice(worker.hear(), ENDLESS)) < ENDLESS


def test_events_that_a_worker_sends_right_before_its_end_are_read(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It speaks and ends after a look at its stdout, and before one at its status."""
    go = tmp_path / "go"
    worker = start(f"until [ -e {go} ]; do :; done\n" + say(START, STOP))
    real_read = Child.read

    def read(child: Child, limit: int = 1 << 16) -> bytes | None:
        if not go.exists():
            go.touch()
            wait_until(lambda: gone(child.pid), "its end")
            return None
        return real_read(child, limit)

    monkeypatch.setattr(Child, "read", read)
    heard = list(worker.hear())
    assert heard + listen(worker) == [START, STOP]


@pytest.mark.parametrize(
    "garbage",
    [
        "echo",
        "echo 17",
        "echo '{}'",
        "echo '{\"event\": 5}'",
        "printf '\\000\\377\\n'",
        'echo \'{"event": "tick"\'',
        "printf '[%.0s' $(seq 9999); echo",
    ],
)
def test_what_is_no_event_is_told_and_the_rest_is_still_heard(start: Start, garbage: str) -> None:
    first, warning, last = listen(start(f"{say(START)}\n{garbage}\n{say(STOP)}"))
    assert (first, last) == (START, STOP)
    assert warning["event"] == "warning"
    assert "worker 3" in warning["reason"]


def test_garbage_without_end_is_told_once_and_not_kept(start: Start) -> None:
    script = f"yes | head -n 10000\nhead -c 30000000 /dev/zero\necho\n{say(STOP)}"
    assert [event["event"] for event in listen(start(script))] == ["warning", "worker_stop"]


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status"), [("exit 1", 1), ("exit 0", 0), ("kill -9 $$", -9), ("kill -SEGV $$", -11)]
)
def test_an_end_without_a_good_bye_is_a_death(start: Start, end: str, status: int) -> None:
    worker = start(f"{say(START)}echo 'Traceback: out of luck' >&2\n{end}")
    *_, died = listen(worker)
    assert died["event"] == "worker_died"
    assert died["status"] == status
    assert died["detail"] == "Traceback: out of luck"
    assert not worker.running
    assert worker.fds == []


def test_kill_ends_a_worker_and_all_that_it_started(start: Start, tmp_path: Path) -> None:
    worker = start(f"trap '' TERM INT; sleep 600 & echo $! > {tmp_path}/pid; echo; wait")
    wait_for(reading=worker.fds, timeout=PATIENCE)
    worker.kill()
    *_, died = listen(worker)
    assert died["status"] == -signal.SIGKILL
    wait_until(lambda: gone(int((tmp_path / "pid").read_text())), "the child to end")


def test_kill_ends_a_worker_that_leads_no_session_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of us that has just been made, and has not come so far."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "setsid", signal.pause)
    worker = SupervisedWorker(ORDERS, Backoff(1, 60))
    worker.start(0.0)
    worker.kill()
    (died,) = listen(worker)
    assert died["status"] == -signal.SIGKILL


# --- starting it again ----------------------------------------------------------------------------


def test_a_worker_is_restarted_a_bounded_number_of_times_with_growing_waits() -> None:
    worker = SupervisedWorker(ORDERS, Backoff(1, 60))
    waits = []
    for nth in range(1, RESTARTS + 1):
        waits.append(worker.plan_restart(100.0, random=0.5))
        assert worker.due == 100.0 + waits[-1]
        assert worker.restarts == nth
    assert waits == sorted(waits)
    with pytest.raises(WorkerFailed) as caught:
        worker.plan_restart(100.0, random=0.5)
    assert caught.value.exit_code == 1
    assert "worker 3 died 6 times" in caught.value.message
    assert caught.value.hint


def test_deaths_far_apart_do_not_add_up(start: Start) -> None:
    worker = start("exit 1")
    for nth in range(1, 4):
        worker.plan_restart(100.0, random=0.5)
        assert worker.restarts == nth
    worker.plan_restart(SOUND_SECONDS + 1, random=0.5)
    assert worker.restarts == 1


def test_the_half_line_of_a_dead_process_is_not_the_beginning_of_the_next_ones(
    start: Start,
) -> None:
    worker = start('printf \'{"event": "ti\'; exit 1', say(START, STOP))
    listen(worker)
    worker.start(0.0)
    assert listen(worker) == [START, STOP]


def test_one_that_was_prepared_goes_at_its_start(start: Start, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"echo ready; read word; echo $word >>{said}; {say(START, STOP)}"
    worker = start("exit 0", script)
    listen(worker)
    worker.prepare()
    worker.prepare()
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    assert not said.exists()
    worker.start(0.0)
    assert listen(worker)[-2:] == [START, STOP]
    assert said.read_text().split() == ["go"]


def test_one_that_was_prepared_for_other_orders_is_replaced(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    worker = start("exit 0", f"echo $$ >{pid}; echo; read word; exit 1", say(START, STOP))
    listen(worker)
    worker.prepare()
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    worker.orders = replace(worker.orders, strategy="stream")
    worker.start(0.0)
    assert listen(worker) == [START, STOP]
    assert gone(int(pid.read_text()))


def test_one_that_died_before_its_start_is_told_as_any_other(start: Start) -> None:
    worker = start("exit 0", "exit 7")
    listen(worker)
    worker.prepare()
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    worker.start(0.0)
    (died,) = listen(worker)
    assert (died["event"], died["status"]) == ("worker_died", 7)
