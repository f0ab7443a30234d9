"""What a worker does before it knows whether there is work."""

from __future__ import annotations

from typing import cast

import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.source.inspection import Store
from ntt_backup.upload import worker_main
from ntt_backup.upload.worker_main import Remote

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
    opened: list[object] = [opener.connect(), opener.connect()]
    assert opened == [ahead, None]


def test_a_connection_that_has_waited_for_long_is_made_anew(
    opener: Remote, ahead: Ahead, clock: Clock
) -> None:
    clock.now += SLOW
    assert opener.connect() is None
    assert ahead.aborted
