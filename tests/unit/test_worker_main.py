"""What a worker does with a connection that it made before it knew whether there is work."""

from __future__ import annotations

from typing import cast

import pytest

from ntt_backup.upload import worker_main
from ntt_backup.upload.strategies.session import SessionPlan
from ntt_backup.upload.worker_main import Remote

SLOW = 100.0


class Ahead:
    """A connection without a session."""

    aborted = False

    def begin(self) -> str:
        return "begun"

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

    def reach(strategy: str, plan: SessionPlan) -> Ahead:
        clock.now += SLOW
        return connection

    monkeypatch.setattr(worker_main, "reach", reach)
    monkeypatch.setattr(worker_main, "open_session", lambda strategy, plan: "opened")
    return connection


@pytest.fixture
def far(ahead: Ahead) -> Remote:
    remote = Remote("stream", cast(SessionPlan, None))
    remote.reach()
    return remote


def test_a_connection_is_used_once_however_long_it_took_to_make(far: Remote) -> None:
    assert [far.connect(), far.connect()] == ["begun", "opened"]


def test_one_that_has_waited_for_long_is_made_anew(far: Remote, ahead: Ahead, clock: Clock) -> None:
    clock.now += SLOW
    assert far.connect() == "opened"
    assert ahead.aborted
