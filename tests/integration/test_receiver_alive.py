"""While a disk is slow: signs of life, and an ear for what else comes."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from ntt_backup.remote import barrier, codec, frames, hashing, receiver
from ntt_backup.remote.inbox import Inbox
from tests.far_side import digest_of
from tests.patience import PATIENCE


class Answers:
    """Frames from a pipe, one after the other."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._inbox = Inbox(frames.TO_CLIENT)

    def next(self) -> tuple[int, bytes]:
        while (found := self._inbox.next()) is None:
            count = os.readv(self._fd, [self._inbox.space()])
            if count == 0:
                return 0, b""
            self._inbox.filled(count)
        return found[0], bytes(found[1])


def test_a_slow_sync_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(receiver, "_BUSY_SECONDS", 0.01)
    monkeypatch.setattr(receiver, "can_syncfs", lambda device: True)
    monkeypatch.setattr(barrier, "syncfs", lambda fd: may_end.wait(PATIENCE))
    to_receiver, to_client = os.pipe(), os.pipe()
    for fd in (to_receiver[0], to_client[1]):
        os.set_blocking(fd, False)
    terms = receiver.Terms(
        None, frozenset(receiver.ALLOWED), 60.0, hashing.available(), codec.available()
    )
    statuses: list[int] = []
    end = receiver.Receiver(terms, to_receiver[0], to_client[1])
    thread = threading.Thread(target=lambda: statuses.append(end.run()))
    thread.start()
    hello = {
        "protocol": frames.PROTOCOL,
        "root": str(tmp_path),
        "owner": "0",
        "run": "0",
        "slot": "0",
        "hash": "sha256",
        "sync": "syncfs",
    }
    raw = frames.table([digest_of(b"a")], [1]) + b"a"
    prefix = frames.part_prefix(frames.RAW, len(raw), hashlib.sha256(raw).digest())
    answers = Answers(to_client[0])
    try:
        os.write(to_receiver[1], frames.fields(frames.HELLO, hello))
        assert answers.next()[0] == frames.READY
        os.write(to_receiver[1], frames.frame(frames.PLACE))
        assert answers.next()[0] == frames.READY
        os.write(to_receiver[1], frames.batch(1, 1, 1) + frames.frame(frames.PACK, prefix, raw))
        os.write(to_receiver[1], frames.numbered(frames.COMMIT, 1))
        assert [answers.next()[0] for _ in range(3)] == [frames.BUSY] * 3
        # The next batch is received meanwhile.
        os.write(to_receiver[1], frames.batch(2, 1, 1) + frames.frame(frames.PING, bytes(8)))
        while (answer := answers.next())[0] == frames.BUSY:
            pass
        assert answer[0] == frames.PONG
        assert list((tmp_path / "by-hash").iterdir()) == []
    finally:
        may_end.set()
        os.close(to_receiver[1])
        thread.join(PATIENCE)
    while (answer := answers.next())[0] == frames.BUSY:
        pass
    assert answer[0] == frames.RECEIPT
    assert frames.read_receipt(answer[1]).stored == 1
    assert statuses == [0]
    for fd in (to_receiver[0], to_client[0], to_client[1]):
        os.close(fd)
