"""While a disk is slow, the receiver shows signs of life, and takes what else comes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ntt_backup.receiver import codec, connection, dispatcher, group_commit, hashing
from ntt_backup.receiver.terms import ALLOWED, Terms
from ntt_backup.wire import messages
from tests.helpers.receivers import PING, Client
from tests.helpers.waiting import PATIENCE


class Local(Client):
    """A client of a receiver in a thread of this process."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        reading, to_receiver = os.pipe()
        from_receiver, writing = os.pipe()
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._fds = (reading, writing)
        self.stdin, self.stdout = os.fdopen(to_receiver, "wb"), os.fdopen(from_receiver, "rb")
        terms = Terms(None, frozenset(ALLOWED), 60.0, hashing.available(), codec.available())
        receiver = dispatcher.Receiver(terms, reading, writing)
        self.statuses: list[int] = []
        self._thread = threading.Thread(target=lambda: self.statuses.append(receiver.run()))
        self._thread.start()

    def hang_up(self) -> None:
        self.stdin.close()
        self._thread.join(PATIENCE)

    def close(self) -> None:
        self.stdout.close()
        for fd in self._fds:
            os.close(fd)


def test_a_slow_sync_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(connection, "_BUSY_SECONDS", 0.01)
    monkeypatch.setattr(dispatcher, "can_syncfs", lambda device: True)
    monkeypatch.setattr(group_commit, "syncfs", lambda fd: may_end.wait(PATIENCE))
    client = Local(tmp_path)
    try:
        client.hello()
        client.write(client.batch(1, [b"a"]))
        assert [client.frame()[0] for _ in range(3)] == [messages.BUSY] * 3
        # The next batch is received meanwhile.
        client.write(messages.BATCH.frame(2, 1, 1), PING)
        assert client.answer()[0] == messages.PONG
        assert list((tmp_path / "by-hash").iterdir()) == []
    finally:
        may_end.set()
        client.hang_up()
    assert client.receipt().stored == 1
    assert client.statuses == [0]
    client.close()
