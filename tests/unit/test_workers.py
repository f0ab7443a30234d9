"""Workers seen from the coordinator: each may say or do anything, and few start for little work."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ntt_backup import events
from ntt_backup.client.backoff import RESTARTS, SOUND_SECONDS, Backoff, Restarts
from ntt_backup.config import Settings
from ntt_backup.daemon.workers import SupervisedWorker, WorkerPool, workers_needed
from ntt_backup.errors import (
    AnotherTarget,
    BackupError,
    RemoteUnreachable,
    Unsupported,
    WorkerFailed,
)
from ntt_backup.model import PendingEstimate
from ntt_backup.process.messages import Drained, Fatal, Message, ProcessEnded, Tick, decode
from ntt_backup.process.spawn import Child, wait_for
from ntt_backup.upload.worker_main import WorkerSpec
from tests.helpers.processes import has_ended
from tests.helpers.waiting import PATIENCE, wait_until

ENDLESS = 500_000
DEATH = ProcessEnded(status=1, detail="killed")
SETTINGS = Settings(source={"root": "/s"}, remote={"host": "h", "path": "/p"})
SPEC = WorkerSpec(
    settings=SETTINGS,
    worker=3,
    run_id="run",
    application="test",
    strategy="tar",
    watch=False,
)
Start = Callable[..., SupervisedWorker]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a worker that does the scripts, one after the other, each time it is started; it is
    killed at the end.
    """
    workers: list[SupervisedWorker] = []

    def make(*scripts: str) -> SupervisedWorker:
        left = list(scripts)

        def fork(*_: object) -> Child:
            return Child(("/bin/sh", "-c", left.pop(0)))

        monkeypatch.setattr("ntt_backup.process.child.Fork", fork)
        workers.append(SupervisedWorker(SPEC, Backoff(1, 60)))
        workers[-1].start(0.0)
        return workers[-1]

    yield make
    for worker in workers:
        worker.kill()
        listen(worker)


def listen(worker: SupervisedWorker) -> list[Message]:
    """All that it says until it has ended."""
    heard: list[Message] = []
    while worker.running:
        assert wait_for(reading=worker.fds, timeout=PATIENCE), "no end"
        heard += worker.hear()
    return heard


def say(*messages: Message) -> str:
    return "".join(f"echo '{message.encode().decode().strip()}'\n" for message in messages)


START = events.WorkerStart(pid=1, worker=3, strategy="tar")
STOP = events.WorkerStop(pid=1, worker=3)
TICK = '{"event": "tick", "state": "sending"}'


# --- what it says ---------------------------------------------------------------------------------


def test_a_worker_that_never_stops_talking_keeps_nobody_waiting(start: Start) -> None:
    """It may talk faster than it can be heard; signals and the other workers have their turn."""
    worker = start(f"exec yes '{TICK}'")
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    assert 0 < sum(1 for _ in islice(worker.hear(), ENDLESS)) < ENDLESS


def test_its_events_are_heard_in_order_and_a_good_end_is_no_death(start: Start) -> None:
    tick = Tick(pid=1, state="sending", sent=5)
    assert listen(start(say(START, tick, STOP))) == [START, tick, STOP]


def test_what_it_says_right_before_its_end_is_heard(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It speaks and ends after a look at its stdout, and before one at its status."""
    go = tmp_path / "go"
    worker = start(f"until [ -e {go} ]; do :; done\n" + say(START, STOP))
    real_read = Child.read

    def read(child: Child, limit: int = 1 << 16) -> bytes | None:
        if not go.exists():
            go.touch()
            wait_until(lambda: has_ended(child.pid), "its end")
            return None
        return real_read(child, limit)

    monkeypatch.setattr(Child, "read", read)
    heard = list(worker.hear())
    assert heard + listen(worker) == [START, STOP]


def test_events_that_come_in_pieces_are_put_together(start: Start) -> None:
    script = 'printf \'{"event": "dra\'; sleep 0.05; printf \'ined", "pid": 1}\\n\'\n' + say(STOP)
    assert listen(start(script)) == [Drained(pid=1), STOP]


def test_a_flood_of_events_is_heard_to_its_end(start: Start) -> None:
    """More than twice what the pipe holds."""
    script = f"yes '{TICK}' | head -n 60000\n{say(STOP)}"
    assert len(listen(start(script))) == 60_001


@pytest.mark.parametrize(
    "garbage",
    [
        "echo",
        "echo 17",
        "echo '{}'",
        "echo '{\"event\": 5}'",
        "printf '\\000\\377\\n'",
        'echo \'{"event": "tick"\'',
        'echo \'{"event": "tick"}\'',
        'echo \'{"event": "unheard-of"}\'',
        "printf '[%.0s' $(seq 9999); echo",
    ],
)
def test_what_is_no_event_is_told_and_the_rest_is_still_heard(start: Start, garbage: str) -> None:
    first, warning, last = listen(start(f"{say(START)}\n{garbage}\n{say(STOP)}"))
    assert (first, last) == (START, STOP)
    assert isinstance(warning, events.Warning)
    assert "worker 3" in warning.reason


def test_garbage_without_end_is_told_once_and_not_kept(start: Start) -> None:
    script = f"yes | head -n 10000\nhead -c 30000000 /dev/zero\necho\n{say(STOP)}"
    assert [message.kind for message in listen(start(script))] == ["warning", "worker_stop"]


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status"), [("exit 1", 1), ("exit 0", 0), ("kill -9 $$", -9), ("kill -SEGV $$", -11)]
)
def test_an_end_without_a_good_bye_is_a_death(start: Start, end: str, status: int) -> None:
    worker = start(f"{say(START)}echo 'Traceback: out of luck' >&2\n{end}")
    *_, died = listen(worker)
    assert isinstance(died, ProcessEnded)
    assert (died.status, died.detail) == (status, "Traceback: out of luck")
    assert not worker.running
    assert worker.fds == []


def test_a_fatal_error_is_a_good_bye(start: Start) -> None:
    fatal = Fatal(pid=1, exit_code=6, message="full", detail="", hint="")
    assert listen(start(say(fatal) + "exit 6")) == [fatal]


@pytest.mark.parametrize(
    "error",
    [
        RemoteUnreachable("away", detail="why", hint="what to do"),
        Unsupported("away", detail="why", hint="what to do"),
        AnotherTarget("its id", "another id"),
    ],
)
def test_an_error_of_a_worker_is_of_the_same_class_at_the_coordinator(error: BackupError) -> None:
    said = Fatal.of(error)
    heard = decode(said.encode())
    assert isinstance(heard, Fatal)
    assert type(heard.error) is type(error)
    assert heard.error.fields == error.fields
    other = replace(said, error_class="os").error
    assert isinstance(other, WorkerFailed)
    assert other.exit_code == error.exit_code


def test_what_it_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    worker = start(f"sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/pid; exit 1")
    listen(worker)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: has_ended(pid), "the orphan to end")


def test_stop_is_a_word_on_its_stdin(start: Start) -> None:
    worker = start(f'read -r go; read -r word; [ "$word" = stop ] || exit 1\n{say(STOP)}')
    worker.stop()
    assert listen(worker) == [STOP]


def test_stopping_and_killing_what_has_ended_is_no_error(start: Start) -> None:
    worker = start(say(STOP))
    listen(worker)
    worker.stop()
    worker.kill()
    assert worker.due is None


# --- starting it again ----------------------------------------------------------------------------


def test_a_worker_is_restarted_a_bounded_number_of_times_with_growing_waits() -> None:
    worker = SupervisedWorker(SPEC, Backoff(1, 60))
    worker.restarts = Restarts(Backoff(1, 60), RESTARTS, lambda: 0.5)
    waits = []
    for nth in range(1, RESTARTS + 1):
        waits.append(worker.plan_restart(DEATH, 100.0).wait_s)
        assert worker.due == 100.0 + waits[-1]
        assert worker.restarts.count == nth
    assert waits == sorted(waits)
    with pytest.raises(WorkerFailed) as caught:
        worker.plan_restart(DEATH, 100.0)
    assert caught.value.exit_code == 1
    assert "worker 3 died 6 times" in caught.value.message
    assert caught.value.hint


def test_deaths_far_apart_do_not_add_up(start: Start) -> None:
    worker = start("exit 1")
    for nth in range(1, 4):
        worker.plan_restart(DEATH, 100.0)
        assert worker.restarts.count == nth
    worker.plan_restart(DEATH, SOUND_SECONDS + 1)
    assert worker.restarts.count == 1


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


def test_one_that_died_before_its_start_is_told_as_any_other(start: Start) -> None:
    worker = start("exit 0", "exit 7")
    listen(worker)
    worker.prepare()
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    worker.start(0.0)
    (died,) = listen(worker)
    assert isinstance(died, ProcessEnded)
    assert died.status == 7


@pytest.mark.parametrize("end", ["heard", "abandoned"])
def test_the_end_of_a_prepared_worker_does_not_cancel_its_start(start: Start, end: str) -> None:
    worker = start("exit 0", "exec sleep 600" if end == "abandoned" else "exit 7")
    listen(worker)
    worker.prepare()
    worker.due = 90.0
    if end == "abandoned":
        worker.discard(signal.SIGTERM)
    else:
        listen(worker)
    assert (worker.running, worker.due) == (False, 90.0)


# --- one that says nothing ------------------------------------------------------------------------


def hear_once(worker: SupervisedWorker) -> list[Message]:
    assert wait_for(reading=worker.fds, timeout=PATIENCE)
    return list(worker.hear())


def test_a_word_ends_a_stall_and_the_next_silence_is_another(start: Start) -> None:
    worker = start(f"read -r go; read -r word\n{say(Drained())}read -r word")
    assert [one.kind for one in worker.mind_silence(61.0)] == ["worker_stall"]
    worker.stop()
    hear_once(worker)
    (end,) = worker.mind_silence(100.0)
    assert isinstance(end, events.WorkerStallEnd)
    assert end.duration_s == 100.0
    assert list(worker.mind_silence(160.0)) == []
    assert [one.kind for one in worker.mind_silence(161.0)] == ["worker_stall"]


def test_a_silence_that_was_announced_is_none_before_its_end(start: Start) -> None:
    worker = start(f"{say(Tick(state='idle', quiet=1000.0))}read -r go; read -r word")
    hear_once(worker)
    assert list(worker.mind_silence(1.0)) == []
    assert list(worker.mind_silence(1061.0)) == []
    assert [one.kind for one in worker.mind_silence(1062.0)] == ["worker_stall"]


def test_one_that_has_ended_is_not_silent_and_its_successor_begins_anew(start: Start) -> None:
    worker = start("exit 1", "read -r go; read -r word")
    assert [one.kind for one in worker.mind_silence(61.0)] == ["worker_stall"]
    listen(worker)
    assert list(worker.mind_silence(999.0)) == []
    worker.start(1000.0)
    assert list(worker.mind_silence(1060.0)) == []


@pytest.mark.parametrize(
    ("workers", "hang"),
    [
        ([(True, True, None), (True, True, None)], True),
        ([(True, True, None), (True, False, None)], False),
        ([(True, True, None), (False, False, None)], True),
        # It will be started again, at 90 s.
        ([(True, True, None), (False, False, 90.0)], False),
        ([(True, True, None), (False, False, 50.0)], True),
        ([(False, False, None)], False),
    ],
)
def test_workers_hang_where_all_that_run_are_silent_and_none_will_start(
    workers: list[tuple[bool, bool, float | None]], hang: bool
) -> None:
    pool: Any = WorkerPool.__new__(WorkerPool)
    pool._workers = [SimpleNamespace(running=r, stalled=s, due=d) for r, s, d in workers]
    assert pool.hang(62.0) is hang


def estimate(blobs: int, size: int = 1_000_000, unsized: int = 0, *, exact: bool = True) -> Any:
    return PendingEstimate(blobs, size, unsized, exact=exact)


TO_BUCKET = Settings(source={"root": "/s"}, remote={"url": "s3://bucket/prefix"})
LITTLE, MORE, MUCH = estimate(100), estimate(60_001), estimate(10**6)


@pytest.mark.parametrize(
    ("pending", "workers"),
    [
        (estimate(0, 0), 1),
        (estimate(60_000, 800_000_000), 1),
        (MORE, 2),
        (estimate(10, 1_600_000_001), 3),
        (MUCH, 4),
        (estimate(10, unsized=1), 4),
        (estimate(10, exact=False), 4),
    ],
)
def test_a_run_starts_with_no_more_workers_than_little_work_is_worth(
    pending: PendingEstimate, workers: int
) -> None:
    assert workers_needed(pending, SETTINGS.run) == workers


@pytest.mark.parametrize(
    ("blobs", "size", "workers", "loads"),
    [
        (24_000, 60_000_000, 1, False),
        (48_000, 128_000_000, 2, True),
        (10**5, 1, 4, True),
        (10**6, 10**12, 4, True),
    ],
)
def test_a_run_to_a_bucket_makes_few_packs_of_little_work(
    blobs: int, size: int, workers: int, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loads what a bucket needs where more workers than the first will start."""
    loaded: list[object] = []
    monkeypatch.setattr("ntt_backup.objects.s3.load", lambda: loaded.append(1))
    pending = estimate(blobs, size)
    assert workers_needed(pending, SETTINGS.run.for_packs()) == workers
    a_pool(TO_BUCKET).load_ahead(pending)
    assert bool(loaded) is loads


def a_pool(settings: Settings = SETTINGS, *, watch: bool = False) -> WorkerPool:
    return WorkerPool(settings, "run", Backoff(1, 60), watch=watch)


@pytest.mark.parametrize(
    ("pool", "pending", "first", "more", "then"),
    [
        (a_pool(), LITTLE, [0.0, None, None, None], 60_000, [0.0, None, None, None]),
        (a_pool(), LITTLE, [0.0, None, None, None], None, [0.0, None, None, None]),
        (a_pool(), LITTLE, [0.0, None, None, None], 60_001, [0.0, 5.0, 5.0, 5.0]),
        (a_pool(), estimate(150_000), [0.0, 0.0, 0.0, None], 0, [0.0, 0.0, 0.0, None]),
        # The work that one worker was started for, more than a pack, does not start the others.
        (a_pool(TO_BUCKET), estimate(24_000), [0.0] + [None] * 3, 24_000, [0.0] + [None] * 3),
        (a_pool(watch=True), LITTLE, [0.0] * 4, None, [0.0] * 4),
    ],
)
def test_workers_that_little_work_does_not_need_follow_when_more_comes(
    pool: WorkerPool, pending: Any, first: list[Any], more: int | None, then: list[Any]
) -> None:
    pool.set_strategy("tar", pending)
    assert [worker.due for worker in pool] == first
    pool.start_reserve(more, 5.0)
    assert [worker.due for worker in pool] == then


def test_workers_that_were_told_to_stop_do_not_follow() -> None:
    pool = a_pool()
    pool.set_strategy("tar", LITTLE)
    pool.stop()
    pool.start_reserve(10**6, 5.0)
    assert not pool.busy
