"""What a worker does before it knows whether there is work."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ntt_backup import events
from ntt_backup.client.connection import SessionSpec
from ntt_backup.errors import CatalogUnavailable
from ntt_backup.model import Batch
from ntt_backup.process.messages import Done, Fatal, Found
from ntt_backup.source.inspection import Store
from ntt_backup.upload import worker_main
from ntt_backup.upload.strategies.probe import LINGERS, Facts
from ntt_backup.upload.worker_main import GO, PLACE, PROBE, PROBE_AND_TRY, TRY_OUT, Remote
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
    spec = SessionSpec(*cast(Any, (None, "/root", "owner", "run", "0", None, "the limit")))
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
    assert probe.connection.channel.pace == "the limit"
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


@dataclass
class Preparing:
    """What a worker has to do before it is told to go: it notes it. words: what it is told."""

    words: list[bytes]
    strategy: str = "stream"
    first: Batch | None = None
    done: list[str] = field(default_factory=list)

    def connect_ahead(self) -> None:
        self.done.append("connect")

    def claim_ahead(self) -> None:
        self.done.append("claim")

    def first_batch(self) -> Batch:
        self.done.append("first")
        return Batch("0.1", ())

    def begin_probe(self, meanwhile: Callable[[list[int]], Batch | None]) -> None:
        self.done.append("probe")
        self.first = meanwhile([])

    def answer(self, word: bytes) -> str:
        return word.decode().strip()

    def end_probe(self, *, go_on: bool) -> None:
        self.done.append("go on" if go_on else "end")

    def emit(self, said: str) -> None:
        self.done.append(said)

    def await_first(self, fds: list[int]) -> bytes:
        return self.words[0]

    def next(self) -> bytes:
        return self.words.pop(0) if self.words else b""

    def prepare(self, monkeypatch: pytest.MonkeyPatch, *, probes: bool, limit: Any = None) -> bool:
        monkeypatch.setattr(worker_main, "_Words", lambda fd: self)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        run = SimpleNamespace(bwlimit=limit)
        spec = SimpleNamespace(probes=probes, settings=SimpleNamespace(run=run))
        mine = cast(Any, self)
        return worker_main._prepare(cast(Any, spec), mine, mine, mine)


@pytest.mark.parametrize("word", [GO, b"", b"what\n"])
def test_a_worker_connects_and_claims_before_it_is_told_to_go(
    monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    made = Preparing([word])
    assert made.prepare(monkeypatch, probes=False) == (word == GO)
    assert made.done == ["connect", "claim"]


@pytest.mark.parametrize("strategy", ["stream", "objects"])
@pytest.mark.parametrize("limit", [None, "1MB"])
def test_a_first_worker_claims_while_the_remote_answers(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, strategy: str
) -> None:
    made = Preparing([PROBE_AND_TRY, TRY_OUT, PLACE, GO], strategy)
    words = [one.decode().strip() for one in (PROBE_AND_TRY, TRY_OUT, PLACE)]
    assert made.prepare(monkeypatch, probes=True, limit=limit)
    claims = ["probe", "claim"] + ([] if limit else ["first"])
    again = ["claim"] if strategy == "objects" else []
    assert made.done == [*claims, words[0], *again, *words[1:], "go on"]
    assert (made.first is None) == (limit is not None)


@pytest.mark.parametrize("goes", [True, False])
def test_a_worker_says_that_it_has_started_and_stopped(
    monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    did: list[object] = []
    pipe = SimpleNamespace(emit=did.append, sent=print)
    worker = SimpleNamespace(run=lambda: did.append("run"), let_go=lambda: did.append("let go"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "EventPipe", lambda *_: pipe)
    monkeypatch.setattr(worker_main, "session_spec", lambda *_: None)
    monkeypatch.setattr(worker_main, "make_worker", lambda *_: worker)
    monkeypatch.setattr(worker_main, "_prepare", lambda *_: goes)
    settings = SimpleNamespace(source=SimpleNamespace(root="/"))
    spec = SimpleNamespace(settings=settings, strategy="tar", probes=False)
    assert worker_main.work(cast(Any, spec)) == 0
    ran = [events.WorkerStart(strategy="tar"), "run", events.WorkerStop()]
    assert did == (ran if goes else ["let go"])


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
        return SimpleNamespace(let_go=lambda: None)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_main, "EventPipe", lambda *_: SimpleNamespace(emit=did.append))
    monkeypatch.setattr(worker_main, "session_spec", lambda *_: None)
    monkeypatch.setattr(worker_main, "make_worker", make)
    monkeypatch.setattr(worker_main, "_prepare", lambda *_: False)
    monkeypatch.setattr(Remote, "lingers", True)
    settings = SimpleNamespace(source=SimpleNamespace(root="/"))
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


def test_a_first_worker_that_only_looks_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Preparing([PROBE, b""])
    assert not made.prepare(monkeypatch, probes=True)
    assert made.done == ["probe", PROBE.decode().strip(), "end"]
    assert made.first is None
