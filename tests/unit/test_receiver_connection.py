"""The receiver's end of a connection: last words, and what counts as silence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ntt_backup.receiver import connection
from ntt_backup.receiver.connection import Connection
from ntt_backup.receiver.workspace import Refusal
from ntt_backup.wire import messages

# More than a pipe holds.
WORDS = bytes(range(256)) * 1024


class Line:
    """A connection, and the client's ends of its pipes."""

    def __init__(self) -> None:
        self.reading, self.client_out = os.pipe()
        self.client_in, self.writing = os.pipe()
        for fd in self.reading, self.writing, self.client_in:
            os.set_blocking(fd, False)
        self.connection = Connection(self.reading, self.writing, idle_timeout=10.0)

    def take(self) -> bytes:
        """What the client can read now."""
        found = b""
        while True:
            try:
                found += os.read(self.client_in, 1 << 20)
            except BlockingIOError:
                return found


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    for fd in made.reading, made.client_out, made.client_in, made.writing:
        os.close(fd)


def test_the_last_words_wait_for_the_client(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []

    class Poll:
        """The client takes something whenever the receiver waits."""

        def register(self, fd: int, events: int) -> None:
            self.fd = fd

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            assert milliseconds > 0
            assert self.fd == line.writing
            taken.append(line.take())
            return []

    line.connection.say(WORDS)
    assert line.connection.unread
    monkeypatch.setattr(connection, "_LAST_WORDS_SECONDS", 1.0)
    monkeypatch.setattr(connection, "select", SimpleNamespace(poll=Poll, POLLOUT=4))
    line.connection.close()
    assert b"".join(taken) + line.take() == WORDS


def test_a_client_that_takes_nothing_is_not_waited_for_long(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.connection.say(WORDS)
    monkeypatch.setattr(connection, "_LAST_WORDS_SECONDS", 0.01)
    line.connection.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(line.connection.wake)
    assert len(line.take()) < len(WORDS)


@pytest.mark.parametrize("moves", ["nothing", "a thread", "the client", "work"])
def test_only_the_client_and_work_end_a_silence(
    line: Line, monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    now = 1000.0
    line.connection.say(b"")
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now))
    line.connection.wait(reading=True, working=True)
    now += 9
    if moves == "a thread":
        os.write(line.connection.wake, b"\0")
    if moves == "the client":
        os.write(line.client_out, b"\0")
    line.connection.wait(reading=True, working=moves == "work")
    now += 2
    if moves in ("nothing", "a thread"):
        with pytest.raises(Refusal, match="nothing was heard for 10 s") as caught:
            line.connection.wait(reading=False, working=False)
        assert caught.value.code == "idle"
    else:
        line.connection.wait(reading=False, working=False)
    monkeypatch.undo()
    line.connection.close()


def test_a_thread_that_has_ended_is_told_of_once(line: Line) -> None:
    os.write(line.connection.wake, b"\0")
    line.connection.wait(reading=False, working=False)
    with pytest.raises(BlockingIOError):  # Else no later wait would rest.
        os.read(line.connection._wake, 1)
    line.connection.close()


def test_what_is_said_goes_at_once_as_far_as_the_client_takes_it(line: Line) -> None:
    line.connection.say(b"word")
    assert line.take() == b"word"
    assert not line.connection.unread
    line.connection.say(WORDS)
    assert line.connection.unread
    assert not line.connection.choked
    taken = line.take()
    assert 0 < len(taken) < len(WORDS)
    line.connection.say(bytes(connection._UNREAD_ANSWERS - len(WORDS) + len(taken)))
    taken += line.take()
    line.connection._outbox[:] = bytes(connection._UNREAD_ANSWERS)
    assert not line.connection.choked
    line.connection._outbox += b"x"
    assert line.connection.choked


def test_what_a_client_that_is_gone_does_not_take_is_dropped(line: Line) -> None:
    os.close(line.client_in)
    line.connection.say(b"word")
    assert line.connection.deaf
    assert not line.connection.unread
    line.client_in = os.dup(line.reading)
    assert not line.connection.read()
    os.close(line.client_out)
    assert line.connection.read()
    assert line.connection.ended
    line.client_out = os.dup(line.reading)


@pytest.mark.parametrize(("seconds", "said"), [(4.9, False), (5.0, True), (60.0, True)])
def test_life_is_shown_where_nothing_was_said_for_some_seconds(
    line: Line, monkeypatch: pytest.MonkeyPatch, seconds: float, said: bool
) -> None:
    now = line.connection._spoke + seconds
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now))
    line.connection.show_life()
    assert bool(line.take()) == said
    line.connection.show_life()
    assert line.take() == b""


def fill(line: Line) -> None:
    """Leaves no room for an answer."""
    while True:
        try:
            os.write(line.writing, b"~" * 4096)
        except BlockingIOError:
            return


def test_what_found_no_room_goes_when_there_is_some(line: Line) -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = Connection(line.reading, line.writing, 60.0)
    fill(line)
    made.say(b"second")
    assert made.unread
    assert line.take().strip(b"~") == b""
    made.wait(reading=False, working=False)
    assert line.take() == b"second"
    assert not made.unread
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_life_is_shown_by_who_works_and_to_who_listens(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_BUSY_SECONDS", 0.0)

    def wait(*, working: bool) -> bytes:
        os.write(line.connection.wake, b"\0")
        line.connection.wait(reading=False, working=working)
        return line.take().strip(b"~")

    assert wait(working=False) == b""
    assert wait(working=True) == messages.BUSY.frame()
    fill(line)
    line.connection.say(b"answer")
    assert wait(working=True) == b""
    assert wait(working=False) == b"answer"


def test_what_comes_is_heard_where_it_is_listened_to(line: Line) -> None:
    made = Connection(line.reading, line.writing, 0.0)
    assert not made.ended
    assert not made.read()
    os.write(line.client_out, messages.PING.frame(bytes(8)))
    made.wait(reading=True, working=False)
    with pytest.raises(Refusal):
        made.wait(reading=False, working=False)
    assert made.read()
    found = made.next()
    assert found is not None
    assert (found[0], bytes(found[1])) == (messages.PING, bytes(8))
    assert (made.waiting, made.ended) == (0, False)
    made.close()
