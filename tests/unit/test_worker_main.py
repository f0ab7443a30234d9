"""What a worker does before it knows whether there is work, and its signs of life after that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.source.inspection import Store
from ntt_backup.upload import worker_main
from ntt_backup.upload.event_pipe import read_event
from ntt_backup.upload.worker_main import PipeLine, Remote

SLOW = 100.0


class Ahead:
    """A connection without a session."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker_main, "time", clock)
    return clock


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Ahead:
    """The connection that a remote gives which takes its time."""
    connection = Ahead()

    def connect_ahead(strategy: str, spec: SessionSpec) -> Ahead:
        clock.now += SLOW
        return connection

    def open_session(
        strategy: str, spec: SessionSpec, store: Store, over: Ahead | None
    ) -> Ahead | None:
        return over

    monkeypatch.setattr(worker_main, "connect_ahead", connect_ahead)
    monkeypatch.setattr(worker_main, "open_session", open_session)
    return connection


@pytest.fixture
def opener(ahead: Ahead) -> Remote:
    opener = Remote("stream", cast(SessionSpec, None), cast(Store, None))
    opener.connect_ahead()
    return opener


def test_a_connection_is_used_once_however_long_it_took_to_make(
    opener: Remote, ahead: Ahead
) -> None:
    assert [opener.connect(), opener.connect()] == [ahead, None]


def test_a_connection_that_has_waited_for_long_is_made_anew(
    opener: Remote, ahead: Ahead, clock: Clock
) -> None:
    clock.now += SLOW
    assert opener.connect() is None
    assert ahead.aborted


# --- signs of life --------------------------------------------------------------------------------

Heard = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def line(clock: Clock) -> Iterator[tuple[PipeLine, Heard]]:
    """The line to a coordinator, and what that has heard since it was last asked."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    stdin = os.open(os.devnull, os.O_RDONLY)

    def heard() -> list[dict[str, Any]]:
        try:
            lines = os.read(reader, 1 << 16).splitlines()
        except BlockingIOError:
            return []
        return [event for one in lines if (event := read_event(one)) is not None]

    clock.now = 10.0
    yield PipeLine(stdin, writer), heard
    for fd in (reader, writer, stdin):
        os.close(fd)


def test_a_worker_that_waits_gives_a_sign_of_life_now_and_then(
    line: tuple[PipeLine, Heard], clock: Clock
) -> None:
    pipe, heard = line
    pipe.state("waiting")
    assert [one["state"] for one in heard()] == ["waiting"]
    pipe.state("waiting")
    pipe.sent(0)
    assert heard() == []
    for alive in (lambda: pipe.state("waiting"), lambda: pipe.sent(0)):
        clock.now += 1.0
        alive()
        assert [one["event"] for one in heard()] == ["tick"]


def test_a_worker_announces_how_long_it_will_be_quiet(line: tuple[PipeLine, Heard]) -> None:
    pipe, heard = line
    pipe.state("idle", 0.1)
    pipe.state("idle", 0.1)
    pipe.state("idle", 30.0)
    assert [one["quiet"] for one in heard()] == [0.1, 30.0]
