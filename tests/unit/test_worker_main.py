"""What a worker does before it knows whether there is work."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup.client.connection import SessionSpec
from ntt_backup.model import Batch
from ntt_backup.process.messages import Done, Found
from ntt_backup.source.inspection import Store
from ntt_backup.upload import worker_main
from ntt_backup.upload.strategies.probe import Facts
from ntt_backup.upload.worker_main import PLACE, PROBE_AND_TRY, TRY_OUT, Remote
from tests.unit.fakes import Clock

SLOW = 100.0


class Ahead:
    """A connection without a session."""

    aborted = lingers = False

    def __init__(self) -> None:
        self.channel = SimpleNamespace(pace=None)

    def abort(self) -> None:
        self.aborted = True


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


@dataclass
class FakeProbe:
    """A probe of a remote that runs tar; done: what it was asked for."""

    connection: Ahead
    strategy: str = "tar"
    lingers: bool = False
    done: list[Any] = field(default_factory=list)

    def send_ahead(self, store: Store, batch: Batch) -> None:
        self.done.append(batch)

    def facts(self, *, will_try_out: bool) -> Facts:
        self.done.append(will_try_out)
        return Facts("Linux", "tar", 5, 0.5, placed=False)

    def try_out(self) -> str:
        return "well"

    def make_place(self) -> None:
        self.done.append("place")

    def hand_over(self) -> Ahead:
        return self.connection

    def close(self) -> None:
        self.lingers = True


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, ahead: Ahead) -> FakeProbe:
    probe = FakeProbe(ahead)

    def open_probe(strategy: str, spec: SessionSpec) -> FakeProbe:
        spec.meanwhile([])
        return probe

    monkeypatch.setattr(worker_main, "open_probe", open_probe)
    return probe


@pytest.fixture
def probing(probe: FakeProbe) -> Remote:
    spec = SessionSpec(*cast(Any, (None, "/root", "owner", "run", "0", None)))
    remote = Remote("auto", spec, cast(Store, None))
    remote.begin_probe(lambda _: None)
    return remote


def test_a_probe_answers_what_it_is_asked_and_goes_on_over_its_connection(
    probing: Remote, probe: FakeProbe
) -> None:
    found = probing.answer(PROBE_AND_TRY)
    assert isinstance(found, Found)
    assert Facts(**found.facts) == Facts("Linux", "tar", 5, 0.5, placed=False)
    assert [probing.answer(TRY_OUT), probing.answer(PLACE)] == [Done(text="well"), Done(text="")]
    assert (found.strategy, probing.strategy, probe.done) == ("tar", "tar", [True, "place"])
    probing.end_probe(go_on=True)
    assert cast(object, probing.connect()) is probe.connection
    assert not probing.lingers


def test_a_probe_sends_ahead_what_was_claimed_while_the_remote_answered(
    ahead: Ahead, probe: FakeProbe
) -> None:
    spec = SessionSpec(*cast(Any, (None, "/root", "owner", "run", "0", None)))
    remote, batch = Remote("auto", spec, cast(Store, None)), Batch("0.1", ())
    remote.begin_probe(lambda _: batch)
    remote.answer(PROBE_AND_TRY)
    assert probe.done == [batch, True]


def test_a_session_after_a_probe_that_is_long_ago_gets_another_connection(
    probing: Remote, probe: FakeProbe, clock: Clock
) -> None:
    probing.answer(PROBE_AND_TRY)
    clock.now += SLOW
    probing.end_probe(go_on=True)
    assert probing.connect() is None
    assert probe.connection.aborted


def test_a_probe_without_work_says_whether_its_connection_lingered(probing: Remote) -> None:
    probing.end_probe(go_on=False)
    assert probing.lingers
