"""What systemd is told: a run that hangs does not live, one that waits for what is known does."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from ntt_backup.client.backoff import Backoff
from ntt_backup.config import Settings
from ntt_backup.daemon.systemd import Systemd
from ntt_backup.daemon.workers import SupervisedWorker, WorkerPool
from ntt_backup.process.messages import Message, Tick
from ntt_backup.process.pipeline import Child, wait_for
from tests.helpers.waiting import PATIENCE

SETTINGS = Settings(
    source={"root": "/s"},
    remote={"host": "h", "path": "/p"},
    run={"workers": 2, "stall_timeout": 60},
)


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What systemd has heard since the last call."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        path = tmp_path / "notify"
        listener.bind(str(path))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))

        def hear() -> list[str]:
            said = []
            while True:
                try:
                    said.append(listener.recv(4096).decode())
                except BlockingIOError:
                    return said

        yield hear


def test_the_watchdog_is_fed_every_few_seconds_and_only_while_the_run_lives(
    heard: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count(100, 1)
    monkeypatch.setattr("ntt_backup.daemon.systemd.time.monotonic", lambda: float(next(seconds)))
    told = Systemd()
    assert [told.watchdog(alive=True) for _ in range(7)] == [True, *[False] * 4, True, False]
    assert heard() == ["WATCHDOG=1"] * 2
    assert [told.watchdog(alive=False) for _ in range(5)].count(True) == 1
    assert heard() == []


def test_a_status_is_told_once_and_a_reload_only_of_a_run_that_is_ready(
    heard: Callable[[], list[str]],
) -> None:
    told = Systemd()
    for text in ("1 copied", "1 copied", "2 copied"):
        told.status(text)
    with told.reloading():
        pass
    assert heard() == ["STATUS=1 copied", "STATUS=2 copied"]
    for _ in range(2):
        told.ready()
    with told.reloading():
        start, reload = heard()
    told.stopping()
    assert start == "READY=1"
    assert reload.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert int(reload.partition("MONOTONIC_USEC=")[2]) > 0
    assert heard() == ["READY=1", "STOPPING=1"]


# --- which silence is a hang ----------------------------------------------------------------------


class Workers(WorkerPool):
    """Two workers that say what a test has them say, at a time that it sets."""

    def __init__(self) -> None:
        def fork(_spec: object) -> Child:
            return Child(("/bin/cat",))

        super().__init__(SETTINGS, "run", Backoff(1, 60), watch=True)
        self._workers = [SupervisedWorker(one.spec, Backoff(1, 60), fork) for one in self]
        for worker in self:
            worker.start(0.0)
            self.hear(worker)  # The word that starts a worker comes back as a warning.

    def say(self, number: int, message: Message) -> None:
        worker = self._workers[number]
        worker.tell(message.encode())
        self.hear(worker)

    def hear(self, worker: SupervisedWorker) -> None:
        assert wait_for(reading=worker.fds, timeout=PATIENCE)
        list(worker.hear())

    def pass_time(self, now: float) -> bool:
        for worker in self:
            list(worker.mind_silence(now))
        return self.hang(now)


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers()
    yield pool
    pool.kill()
    for worker in pool:
        while worker.running:
            list(worker.hear())


def test_workers_hang_once_all_have_been_silent_for_longer_than_they_may(workers: Workers) -> None:
    assert not workers.pass_time(59)
    assert workers.pass_time(61)
    workers.say(1, Tick(state="sending"))
    assert not workers.pass_time(62)
    assert not workers.pass_time(121)
    assert workers.pass_time(123)


def test_a_wait_that_a_worker_has_announced_is_no_hang(workers: Workers) -> None:
    workers.say(0, Tick(state="idle", quiet=600))
    assert not workers.pass_time(61)
    assert not workers.pass_time(659)
    assert workers.pass_time(722)


def test_a_worker_that_will_be_started_again_is_waited_for(workers: Workers) -> None:
    assert workers.pass_time(61)
    first = workers.first
    first.kill()
    while first.running:
        list(first.hear())
    first.due = 90.0
    assert not workers.hang(62)
    assert workers.hang(91)
