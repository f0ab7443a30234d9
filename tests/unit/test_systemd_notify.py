"""What systemd is told: that a run lives, what it does, that it reads its settings again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from ntt_backup.daemon.systemd import Systemd


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
