"""While a disk is slow: signs of life, and an ear for what else comes."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from ntt_backup.receiver import codec, hashing, session, sync_thread
from ntt_backup.wire import framing, write_messages
from ntt_backup.wire.framing import Inbox
from tests.patience import PATIENCE
from tests.receiver_driver import digest_of


class Answers:
    """Frames from a pipe, one after the other."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._inbox = Inbox(write_messages.TO_CLIENT)

    def next(self) -> tuple[int, bytes]:
        while (found := self._inbox.next()) is None:
            count = os.readv(self._fd, [self._inbox.space()])
            if count == 0:
                return 0, b""
            self._inbox.filled(count)
        return found[0], bytes(found[1])


def test_a_slow_sync_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(session, "_BUSY_SECONDS", 0.01)
    monkeypatch.setattr(session, "can_syncfs", lambda device: True)
    monkeypatch.setattr(sync_thread, "syncfs", lambda fd: may_end.wait(PATIENCE))
    to_receiver, to_client = os.pipe(), os.pipe()
    for fd in (to_receiver[0], to_client[1]):
        os.set_blocking(fd, False)
    terms = session.Terms(
        None, frozenset(session.ALLOWED), 60.0, hashing.available(), codec.available()
    )
    statuses: list[int] = []
    end = session.Receiver(terms, to_receiver[0], to_client[1])
    thread = threading.Thread(target=lambda: statuses.append(end.run()))
    thread.start()
    hello = {
        "protocol": framing.PROTOCOL,
        "root": str(tmp_path),
        "owner": "0",
        "run": "0",
        "slot": "0",
        "hash": "sha256",
        "sync": "syncfs",
    }
    raw = write_messages.table([digest_of(b"a")], [1]) + b"a"
    prefix = write_messages.part_prefix(write_messages.RAW, len(raw), hashlib.sha256(raw).digest())
    answers = Answers(to_client[0])
    try:
        os.write(to_receiver[1], write_messages.fields(framing.HELLO, hello))
        assert answers.next()[0] == framing.READY
        os.write(to_receiver[1], framing.frame(framing.PLACE))
        assert answers.next()[0] == framing.READY
        os.write(
            to_receiver[1],
            write_messages.batch(1, 1, 1) + framing.frame(framing.PACK, prefix, raw),
        )
        os.write(to_receiver[1], write_messages.numbered(framing.COMMIT, 1))
        assert [answers.next()[0] for _ in range(3)] == [framing.BUSY] * 3
        # The next batch is received meanwhile.
        os.write(
            to_receiver[1],
            write_messages.batch(2, 1, 1) + framing.frame(framing.PING, bytes(8)),
        )
        while (answer := answers.next())[0] == framing.BUSY:
            pass
        assert answer[0] == framing.PONG
        assert list((tmp_path / "by-hash").iterdir()) == []
    finally:
        may_end.set()
        os.close(to_receiver[1])
        thread.join(PATIENCE)
    while (answer := answers.next())[0] == framing.BUSY:
        pass
    assert answer[0] == framing.RECEIPT
    assert write_messages.read_receipt(answer[1]).stored == 1
    assert statuses == [0]
    for fd in (to_receiver[0], to_client[0], to_client[1]):
        os.close(fd)
