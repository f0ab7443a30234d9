"""A process that hears of runs: whatever it does, the run goes on, and nothing is left of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ntt_backup.config.sections import LogSettings
from ntt_backup.daemon.event_log import EventLog
from ntt_backup.daemon.listeners import Body, Heard, Listener, ListenerProcess, Listeners
from ntt_backup.daemon.progress import RunProgress, RunState
from ntt_backup.events import Event, StillFailed, Stopping, Warning
from ntt_backup.process.child import tell_parent
from ntt_backup.process.spawn import PIPE_BYTES
from tests.helpers.waiting import PATIENCE

STATE = RunProgress(0.0, 2).state(5.0)
LONG = Warning(pid=1, worker=0, reason="x" * 10_000)


@pytest.fixture(autouse=True)
def _nothing_is_left(alone: None) -> Iterator[None]:
    """What a test has started is gone after it."""
    # A descriptor that an earlier test has dropped shall not be closed meanwhile.
    gc.collect()
    before = have()
    yield
    assert have() == before


def have() -> tuple[set[str], int]:
    """Our child processes, and how many descriptors we have."""
    tasks = Path("/proc/self/task").glob("*/children")
    children = {pid for task in tasks for pid in task.read_text().split()}
    return children, len(os.listdir("/proc/self/fd"))


def writes(path: Path, end: str = "end\n") -> Body:
    """A body that writes down what it hears."""

    def body(heard: Iterator[Heard]) -> None:
        with path.open("w") as file:
            for target, what in heard:
                name = f"state {what.elapsed_s}" if isinstance(what, RunState) else what.kind
                print(target, name, file=file, flush=True)
            file.write(end)

    return body


def hangs(heard: Iterator[Heard]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(heard: Iterator[Heard]) -> None:
    next(heard)
    raise ValueError("no good")


def said(process: ListenerProcess, wanted: int = 1) -> list[str]:
    """What it has to say, as soon as that is so much."""
    until = time.monotonic() + PATIENCE
    words: list[Event] = []
    while len(words) < wanted and time.monotonic() < until:
        words += process.hear()
        time.sleep(0.001)
    return [one.line or "" for one in words]


def test_a_body_hears_all_targets_and_has_an_end(tmp_path: Path) -> None:
    process = ListenerProcess("test", writes(tmp_path / "heard"), patience=PATIENCE)
    one, two = process.of("one"), process.of("two")
    one.event(Stopping(signal=2, within_s=None))
    two.refresh(STATE)
    two.event(StillFailed(blobs=3))
    one.close()
    two.event(Stopping(signal=15, within_s=None))
    two.close()
    assert (tmp_path / "heard").read_text().splitlines() == [
        "one stopping",
        "two state 5.0",
        "two still_failed",
        "two stopping",
        "end",
    ]


def test_what_a_body_says_at_its_end_is_told(tmp_path: Path) -> None:
    def last_words(heard: Iterator[Heard]) -> None:
        for _ in heard:
            tell_parent(Warning(reason="it did not go out"))

    log = EventLog(LogSettings(jsonl=tmp_path / "log"), "run-1", "one")
    process = ListenerProcess("test", last_words, patience=PATIENCE)
    listeners = Listeners([log, process.of("one")])
    listeners.event(Stopping(signal=2, within_s=None))
    listeners.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("reason") for line in lines] == [None, "it did not go out"]


def test_of_the_states_one_a_second_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1000.25, 1000.9, 1001.0, 1001.5])
    listener = ListenerProcess("test", writes(tmp_path / "heard"), patience=PATIENCE).of("one")
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: next(clock))
        for number in range(5):
            listener.refresh(replace(STATE, elapsed_s=float(number)))
    listener.close()
    heard = (tmp_path / "heard").read_text().splitlines()
    assert heard == ["one state 0.0", "one state 3.0", "end"]


def test_a_body_that_hangs_holds_nothing_up_and_is_killed_at_the_end() -> None:
    process = ListenerProcess("test", hangs, patience=0.1)
    listener = process.of("one")
    for _ in range(3 * PIPE_BYTES // len(LONG.reason)):
        listener.event(LONG)
    assert process.dropped > 0
    assert said(process) == [
        "warning: the process for test is too slow, and does not hear of all that happens"
    ]
    listener.close()


def test_a_body_that_is_slow_gets_all_that_was_kept(tmp_path: Path) -> None:
    begun = tmp_path / "go"

    def body(heard: Iterator[Heard]) -> None:
        while not begun.exists():
            time.sleep(0.001)
        writes(tmp_path / "heard")(heard)

    process = ListenerProcess("test", body, patience=PATIENCE)
    listener = process.of("one")
    for _ in range(PIPE_BYTES * 3 // 2 // len(LONG.reason)):
        listener.event(LONG)
    begun.touch()
    listener.close()
    lines = (tmp_path / "heard").read_text().splitlines()
    assert process.dropped == 0
    assert lines == ["one warning"] * (len(lines) - 1) + ["end"]
    assert len(lines) - 1 == PIPE_BYTES * 3 // 2 // len(LONG.reason)


def test_a_body_that_dies_is_told_of_once_and_the_others_hear_on() -> None:
    class Log(Listener):
        def __init__(self) -> None:
            self.told: list[str] = []

        def event(self, event: Event) -> None:
            self.told.append(event.line or "")

    log = Log()
    process = ListenerProcess("test", dies)
    listeners = Listeners([log, process.of("one")])
    until = time.monotonic() + PATIENCE
    while not any("died" in line for line in log.told) and time.monotonic() < until:
        listeners.event(LONG)
        listeners.refresh(STATE)
    listeners.event(Stopping(signal=2, within_s=None))
    listeners.refresh(STATE)
    listeners.close()
    died = "warning: the process for test died (status 1): ValueError: no good"
    assert next(line for line in log.told if "xxx" not in line) == died
    assert log.told.count(died) == 1


def test_what_a_body_says_is_heard_and_signals_do_not_end_it() -> None:
    def body(heard: Iterator[Heard]) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), signum)
        for _ in heard:
            tell_parent(Warning(reason="no port"))

    process = ListenerProcess("test", body, patience=PATIENCE)
    listener = process.of("one")
    listener.event(LONG)
    assert said(process) == ["warning: no port"]
    listener.close()


def test_a_process_that_cannot_be_started_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("ntt_backup.process.child.Fork", no_memory)
    process = ListenerProcess("test", dies)
    listener: Listener = process.of("one")
    for _ in range(2):
        listener.event(LONG)
    assert said(process) == ["warning: the process for test cannot be started: no memory"]
    assert list(process.hear()) == []
    listener.close()


def test_a_run_that_does_not_begin_starts_no_process(tmp_path: Path) -> None:
    ListenerProcess("test", writes(tmp_path / "heard")).of("one").close()
    assert not (tmp_path / "heard").exists()
