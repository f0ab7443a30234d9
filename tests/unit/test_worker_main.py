"""What a worker does before it knows whether there is work."""

from __future__ import annotations

import os
import signal
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup import events
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.config import SourceSettings
from ntt_backup.errors import CatalogUnavailable
from ntt_backup.process.messages import Done, Fatal, RemoteProbed
from ntt_backup.source.store import Store
from ntt_backup.upload import worker_main
from ntt_backup.upload.strategies.probe import LINGERS, Facts
from ntt_backup.upload.worker_main import GO, PLACE, PROBE, TRY_OUT, Remote
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
    """The connection over which a session is opened."""

    def open_session(strategy: str, spec: SessionSpec, store: Store, over: Ahead | None) -> Ahead:
        return over or Ahead()

    monkeypatch.setattr(worker_main, "open_session", open_session)
    return Ahead()


@dataclass
class FakeProbe:
    """A probe of a remote that runs tar; done: what it was asked for."""

    connection: Ahead
    strategy: str = "tar"
    lingers: bool = False
    done: list[Any] = field(default_factory=list)

    def facts(self) -> Facts:
        self.done.append("facts")
        return Facts("Linux", "tar", 5, 0.5, placed=False)

    def try_out(self) -> str:
        return "well"

    def make_place(self) -> str:
        self.done.append("place")
        return "1d" * 16

    def hand_over(self) -> Ahead:
        return self.connection

    def close(self) -> None:
        self.lingers = True


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, ahead: Ahead) -> FakeProbe:
    probe = FakeProbe(ahead)

    def open_probe(strategy: str, spec: SessionSpec) -> FakeProbe:
        assert spec.pace is None  # A slow limit would make a trial last too long.
        return probe

    monkeypatch.setattr(worker_main, "open_probe", open_probe)
    return probe


@pytest.fixture
def probing(probe: FakeProbe) -> Remote:
    spec = SessionSpec(*cast(Any, (None, "/root", "owner", "run", "0", None, "the limit")))
    remote = Remote("auto", spec, cast(Store, None))
    remote.begin_probe()
    return remote


def test_a_probe_answers_what_it_is_asked_and_goes_on_over_its_connection(
    probing: Remote, probe: FakeProbe
) -> None:
    found = probing.answer(PROBE)
    assert isinstance(found, RemoteProbed)
    assert Facts(**found.facts) == Facts("Linux", "tar", 5, 0.5, placed=False)
    assert [probing.answer(TRY_OUT), probing.answer(PLACE)] == [
        Done(text="well"),
        Done(text="1d" * 16),
    ]
    assert (found.strategy, probing.strategy, probe.done) == ("tar", "tar", ["facts", "place"])
    probing.end_probe(go_on=True)
    assert probe.connection.channel.pace == "the limit"
    opened: list[object] = [probing.connect(), probing.connect()]
    assert [one is probe.connection for one in opened] == [True, False]
    assert not probing.lingers


def test_a_session_is_kept_by_whoever_uses_it_alone(probing: Remote) -> None:
    session = weakref.ref(probing.connect())
    assert session() is None


def test_a_session_after_a_probe_that_is_long_ago_gets_another_connection(
    probing: Remote, probe: FakeProbe, clock: Clock
) -> None:
    probing.answer(PROBE)
    clock.now += SLOW
    probing.end_probe(go_on=True)
    assert cast(object, probing.connect()) is not probe.connection
    assert probe.connection.aborted


def test_a_probe_without_work_says_whether_its_connection_lingered(probing: Remote) -> None:
    probing.end_probe(go_on=False)
    assert probing.lingers


@dataclass
class Preparing:
    """What a worker has to do before it is told to go: it notes it. words: what it is told."""

    words: list[bytes]
    done: list[str] = field(default_factory=list)

    def begin_probe(self) -> None:
        self.done.append("probe")

    def answer(self, word: bytes) -> str:
        return word.decode().strip()

    def end_probe(self, *, go_on: bool) -> None:
        self.done.append("go on" if go_on else "end")

    def emit(self, said: str) -> None:
        self.done.append(said)

    def prepare(self, monkeypatch: pytest.MonkeyPatch, *, probes: bool) -> bool:
        words = iter([*self.words, b""])
        monkeypatch.setattr(worker_main, "_next_word", lambda: next(words))
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        spec, mine = SimpleNamespace(probes=probes), cast(Any, self)
        return worker_main._prepare(cast(Any, spec), mine, mine)


@pytest.mark.parametrize("word", [GO, b"", b"what\n"])
def test_a_worker_does_nothing_before_it_is_told_to_go(
    monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    made = Preparing([word])
    assert made.prepare(monkeypatch, probes=False) == (word == GO)
    assert made.done == []


@pytest.mark.parametrize("goes", [True, False])
def test_a_first_worker_answers_the_preflight_and_goes_on_if_it_passes(
    monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    made = Preparing([PROBE, TRY_OUT, PLACE, *[GO] * goes])
    assert made.prepare(monkeypatch, probes=True) == goes
    asked = [one.decode().strip() for one in (PROBE, TRY_OUT, PLACE)]
    assert made.done == ["probe", *asked, "go on" if goes else "end"]


def test_a_word_is_read_to_its_end_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, GO + b"stop\n")
    os.close(writing)
    monkeypatch.setattr(worker_main, "_STDIN", reading)
    assert worker_main._next_word() == GO
    assert os.read(reading, 100) == b"stop\n"
    assert worker_main._next_word() == b""
    os.close(reading)


@pytest.mark.parametrize("goes", [True, False])
def test_a_worker_says_that_it_has_started_and_stopped(
    monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    did: list[object] = []
    pipe = SimpleNamespace(emit=did.append, sent=print)
    worker = SimpleNamespace(run=lambda: did.append("run"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "EventPipe", lambda *_: pipe)
    monkeypatch.setattr(worker_main, "session_spec", lambda *_: None)
    monkeypatch.setattr(worker_main, "make_worker", lambda *_: worker)
    monkeypatch.setattr(worker_main, "_prepare", lambda *_: goes)
    settings = SimpleNamespace(source=SourceSettings(root=Path("/"), grace=0), by_path=False)
    spec = SimpleNamespace(settings=settings, strategy="tar", probes=False)
    assert worker_main.work(cast(Any, spec)) == 0
    ran = [events.WorkerStart(strategy="tar"), "run", events.WorkerStop()]
    assert did == (ran if goes else [])


@pytest.mark.parametrize(
    ("error", "status"),
    [(CatalogUnavailable("gone"), CatalogUnavailable.exit_code), (SystemExit(1), 1), (None, 0)],
)
def test_a_worker_says_why_it_ended_and_what_lingers(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int
) -> None:
    did: list[object] = []

    def make(*_: object) -> object:
        if error is not None:
            raise error
        return SimpleNamespace()

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "EventPipe", lambda *_: SimpleNamespace(emit=did.append))
    monkeypatch.setattr(worker_main, "session_spec", lambda *_: None)
    monkeypatch.setattr(worker_main, "make_worker", make)
    monkeypatch.setattr(worker_main, "_prepare", lambda *_: False)
    monkeypatch.setattr(Remote, "lingers", True)
    settings = SimpleNamespace(source=SourceSettings(root=Path("/"), grace=0), by_path=False)
    spec = cast(Any, SimpleNamespace(settings=settings, strategy="tar", probes=True))
    assert worker_main.work(spec) == status
    if isinstance(error, CatalogUnavailable):
        assert did == [Fatal.of(error)]
    elif error is not None:
        assert did == []
    else:
        assert did == [events.Warning(reason=f"login: {LINGERS}")]
        spec.probes = False
        assert worker_main.work(spec) == 0
        assert len(did) == 1
