"""The signs of life that a worker sends over its event pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from ntt_backup.catalog.connection import Server
from ntt_backup.errors import CatalogRefused
from ntt_backup.process.messages import Message, Tick, decode
from ntt_backup.upload import catalog_session, event_pipe
from ntt_backup.upload.event_pipe import NOW, EventPipe
from tests.unit.fakes import Clock

Received = Callable[[], list[Message | None]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(event_pipe, "time", clock)
    return clock


@pytest.fixture
def pipe(clock: Clock) -> Iterator[tuple[EventPipe, Received]]:
    """A worker's end of the pipe, and the messages that came since the last call."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    stdin = os.open(os.devnull, os.O_RDONLY)

    def received() -> list[Message | None]:
        try:
            return [decode(line) for line in os.read(reader, 1 << 16).splitlines()]
        except BlockingIOError:
            return []

    yield EventPipe(stdin, writer), received
    for fd in (reader, writer, stdin):
        os.close(fd)


def test_a_worker_that_waits_sends_a_tick_now_and_then(
    pipe: tuple[EventPipe, Received], clock: Clock
) -> None:
    worker, received = pipe
    worker.state("waiting")
    assert received() == [Tick(state="waiting")]
    worker.state("waiting")
    worker.sent(0)
    assert received() == []
    clock.now += 1.0
    worker.state("waiting")
    assert received() == [Tick(state="waiting")]
    clock.now += 1.0
    worker.sent(0)
    assert received() == [Tick(state="waiting")]


def test_a_tick_has_what_was_sent_since_the_last_one(
    pipe: tuple[EventPipe, Received], clock: Clock
) -> None:
    worker, received = pipe
    worker.state("sending")
    worker.carried(70)
    worker.carried(-10)
    worker.sent(100)
    clock.now += 1.0
    worker.sent(50)
    assert received()[1:] == [Tick(state="sending", sent=150, content=60)]


def test_once_told_to_stop_a_worker_has_no_word_to_wait_for(clock: Clock) -> None:
    stdin, coordinator = os.pipe()
    worker = EventPipe(stdin, -1)
    assert (worker.stopping, worker.fd) == (False, stdin)
    os.write(coordinator, NOW)
    assert (worker.stopping, worker.fd, worker.take_hurry()) == (False, stdin, True)
    os.close(coordinator)
    assert (worker.stopping, worker.fd, worker.take_hurry()) == (True, -1, False)
    os.close(stdin)


def test_a_worker_announces_how_long_it_will_be_quiet(pipe: tuple[EventPipe, Received]) -> None:
    worker, received = pipe
    worker.state("idle", 0.1)
    worker.state("idle", 0.1)
    worker.state("idle", 30.0)
    assert received() == [Tick(state="idle", quiet=0.1), Tick(state="idle", quiet=30.0)]


class Table:
    """A session of the catalog, which somebody has to close."""

    closed = False
    server = Server("7", 1)

    def close(self) -> None:
        self.closed = True

    def ask(self, doing: str, name: str) -> list[tuple[str, str]]:
        assert (doing, name) == ("read the identity of the target", "identities")
        return [("remote", "1d"), ("usb", "2d")]


def test_a_session_of_the_catalog_that_is_not_set_up_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, shown = Table(), list[object]()
    monkeypatch.setattr(catalog_session, "connect", lambda *_: table)
    monkeypatch.setattr(catalog_session, "Claims", lambda *_: None)
    monkeypatch.setattr(catalog_session, "Ledger", lambda *_: None)
    monkeypatch.setattr(catalog_session, "show_life", shown.append)
    monkeypatch.setattr(catalog_session, "end_when_idle", lambda *_: None)
    session = catalog_session.CatalogSession("dbname=c", "test", "remote", [], listen=False)
    assert (table.closed, session.identity) == (False, "1d")
    session.keep()
    assert shown == []
    monkeypatch.setattr(catalog_session, "_SPEAK_SECONDS", 0.0)
    session.keep()
    assert shown == [table]
    session.close()
    assert table.closed
    table.closed = False

    def refuse(*_: object) -> None:
        raise CatalogRefused("not prepared")

    monkeypatch.setattr(catalog_session, "end_when_idle", refuse)
    with pytest.raises(CatalogRefused, match="not prepared"):
        catalog_session.CatalogSession("dbname=c", "test", "remote", [], listen=False)
    assert table.closed
