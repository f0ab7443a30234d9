"""The coordinator of one of several targets: heard, started again, given up, whatever it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ntt_backup.client.backoff import RESTARTS, SOUND_SECONDS
from ntt_backup.config import Settings
from ntt_backup.daemon.control_socket import ask, report
from ntt_backup.daemon.events import TargetRestart
from ntt_backup.daemon.listeners import Listener, StateMessage
from ntt_backup.daemon.progress import RunState
from ntt_backup.daemon.target_supervisor import HANG_SECONDS, SupervisedTarget, SystemdWord
from ntt_backup.errors import LockHeld, WaitsToStart, worst
from ntt_backup.events import Error, Event, Warning
from ntt_backup.process.messages import Fatal, Message
from ntt_backup.process.spawn import Child, wait_for
from tests.helpers.waiting import PATIENCE
from tests.unit.sample_events import RUN_STOP, STATE


class Ear(Listener):
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.states: list[RunState] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def refresh(self, state: RunState) -> None:
        self.states.append(state)


class Machine:
    """A target whose coordinators are shell scripts, one after the other. seen: what views are
    told; logged: what the daemon itself writes into the log.
    """

    def __init__(self, watch: bool, socket: Path) -> None:
        self.seen, self.logged = Ear(), Ear()
        self.now = 0.0
        log: Any = self.logged
        self.settings = Settings(
            target="usb",
            source={"root": "/s"},
            remote={"url": "file:///r"},
            control={"socket": socket},
        )
        self.target = SupervisedTarget(
            self.settings,
            lambda _: 0,
            log,
            [self.seen],
            watch=watch,
        )

    def turn(self) -> None:
        self.target.turn(self.now)

    def until_it_ends(self) -> None:
        """It is started, if it is not, and ends."""
        self.now = self.target.due if self.target.due is not None else self.now
        self.turn()
        while self.target.due is None and self.target.busy:
            assert wait_for(reading=self.target.fds, timeout=PATIENCE), "no end"
            self.turn()


Make = Callable[..., Machine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Machine] = []

    def begin(*scripts: str, watch: bool = False) -> Machine:
        left = list(scripts)

        def fork(*_: object) -> Child:
            return Child(("/bin/sh", "-c", left.pop(0)))

        monkeypatch.setattr("ntt_backup.process.child.Fork", fork)
        made.append(Machine(watch, tmp_path / "control"))
        return made[-1]

    yield begin
    for machine in made:
        machine.target.close()


def say(*messages: Message) -> str:
    return "".join(f"echo '{message.encode().decode().strip()}'\n" for message in messages)


def stop(outcome: str, code: int) -> str:
    return f"{say(replace(RUN_STOP, outcome=outcome, exit_code=code))}exit {code}\n"


ODD = Warning(pid=1, reason="odd")
FATAL = say(Fatal.of(LockHeld("another one runs", detail="it holds /x", hint="wait")))
DIES = "echo MemoryError; kill -9 $$"
RESTART = ["target_restart"]


def test_what_it_says_is_passed_on_and_not_logged_again(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [SystemdWord(text="STATUS=at work"), StateMessage(state=STATE.fields)]
    machine = make(say(ODD, *words) + "echo a library prints\n" + stop("done", 0))
    machine.until_it_ends()
    assert [event.kind for event in machine.seen.events] == ["warning", "run_stop"]
    assert machine.seen.states == [STATE]
    assert machine.logged.events == []
    assert (machine.target.code, machine.target.busy, machine.target.ready) == (0, False, True)
    assert capsys.readouterr().err == "usb: a library prints\n"


@pytest.mark.parametrize(
    ("watch", "scripts", "code", "logged"),
    [
        (False, [stop("error", 5)], 5, []),
        # A mistake in the configuration does not mend itself.
        (True, [stop("error", 2)], 2, []),
        (True, [stop("stopped", 143)], 143, []),
        (True, [stop("error", 6), stop("stopped", 143)], 143, RESTART),
        (True, [DIES, stop("stopped", 143)], 143, RESTART),
        (False, [DIES, stop("stopped", 143)], 143, RESTART),
        # An error before its log is told by the daemon.
        (False, [f"{FATAL}exit 3"], 3, ["error"]),
        (False, ["exit 1"] * (RESTARTS + 1), 1, [*RESTART * RESTARTS, "error"]),
    ],
)
def test_a_coordinator_is_started_again_as_systemd_would_do_it(
    make: Make, watch: bool, scripts: list[str], code: int, logged: list[str]
) -> None:
    machine = make(*scripts, watch=watch)
    while machine.target.busy:
        machine.until_it_ends()
    assert (machine.target.code, [one.kind for one in machine.logged.events]) == (code, logged)
    assert code != 1 or "usb died 6 times" in str(machine.logged.events[-1].line)


def test_what_became_of_a_coordinator_is_said(make: Make) -> None:
    machine = make(DIES, f"{FATAL}exit 3")
    machine.until_it_ends()
    (event,) = machine.logged.events
    assert isinstance(event, TargetRestart)
    assert (event.status, event.detail, event.attempt) == (-9, "MemoryError", 1)
    assert machine.target.due == event.wait_s
    machine.until_it_ends()
    error = machine.logged.events[-1]
    assert isinstance(error, Error)
    assert (error.message, error.exit_code) == ("another one runs", 3)


def test_one_without_a_sign_of_life_is_ended_and_started_again(make: Make) -> None:
    alive = SystemdWord(text="WATCHDOG=1")
    machine = make(f"read -r never\n{say(alive)}read -r never", watch=True)
    machine.turn()
    machine.now = HANG_SECONDS
    machine.turn()
    assert machine.logged.events == []
    machine.now += 1.0
    machine.until_it_ends()
    (event,) = machine.logged.events
    assert isinstance(event, TargetRestart)
    assert (event.status, event.detail) == (-9, "it gave no sign of life for 3 min 0 s")


def test_a_long_sound_life_forgives_the_deaths_before(make: Make) -> None:
    machine = make("exit 1", "exit 1", "read -r never", watch=True)
    machine.until_it_ends()
    machine.until_it_ends()
    machine.now = machine.target.due or 0.0
    machine.turn()
    machine.now += SOUND_SECONDS + 1.0
    machine.until_it_ends()
    attempts = [one.attempt for one in machine.logged.events if isinstance(one, TargetRestart)]
    assert attempts == [1, 2, 1]


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_is_stopped_stays_ended(make: Make, waits: bool) -> None:
    """Also where it waits for its start, or had no time to prepare for signals."""
    machine = make("exit 1" if waits else "exec sleep 600", watch=True)
    if waits:
        machine.until_it_ends()
    else:
        machine.turn()
    machine.target.hang_up()
    machine.target.stop(15)
    while machine.target.busy:
        assert wait_for(reading=machine.target.fds, timeout=PATIENCE)
        machine.turn()
    assert machine.target.code == 143


def test_one_that_cannot_be_started_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> Child:
        raise OSError(12, "Cannot allocate memory")

    machine = make(stop("done", 0))
    with monkeypatch.context() as patched:
        patched.setattr("ntt_backup.process.child.Fork", no_memory)
        machine.turn()
    (event,) = machine.logged.events
    assert isinstance(event, TargetRestart)
    assert (event.status, event.detail) == (None, "Cannot allocate memory")
    machine.until_it_ends()
    assert machine.target.code == 0


def test_the_worst_exit_code_is_an_error_before_what_is_incomplete_before_a_stop() -> None:
    assert worst((0, 5)) == 5
    assert worst((7, 143, 0)) == 7
    assert worst((3, 7)) == 3
    assert worst((143, 0)) == 143
    assert worst((2, 5, 1)) == 1
    assert worst((8, 2)) == 2
    assert worst((7, 8)) == 7
    assert worst((2, 120)) == 120  # No code of ours.


def test_while_it_waits_to_start_again_it_says_why_and_when_and_may_be_hurried(
    make: Make, tmp_path: Path
) -> None:
    """Else it would look as if no daemon served this target."""
    full = Error(pid=1, exit_code=6, message="the remote is full", detail="no space", hint="x")
    machine = make(say(full) + stop("error", 6), stop("stopped", 143), watch=True)
    machine.until_it_ends()

    def asked(ask: Callable[[], object]) -> object:
        """What comes of a question, while the parent does its turns."""
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask)
            while not answer.done():
                wait_for(reading=machine.target.fds, timeout=0.05)
                machine.turn()
            return answer.exception() or answer.result()

    error = asked(lambda: report(machine.settings))
    assert isinstance(error, WaitsToStart)
    assert error.message.startswith("the daemon starts again at ")
    assert error.message.endswith("after the error: the remote is full: no space")
    assert isinstance(asked(lambda: ask(machine.settings, "pause")), WaitsToStart)
    assert machine.target.due != 0.0
    done = asked(lambda: ask(machine.settings, "now"))
    assert done == {"done": "it starts now", "target": "usb"}
    machine.until_it_ends()
    assert (machine.target.code, machine.target.busy) == (143, False)
    assert not (tmp_path / "control").exists()
