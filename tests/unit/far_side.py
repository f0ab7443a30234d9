"""A receiver in memory, for the sender of `stream`: what is sent to it is kept as frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from ntt_backup.client import receiver_connection
from ntt_backup.client.bootstrap import Banner
from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import Local
from ntt_backup.config.sections import RunSettings
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.wire import messages
from ntt_backup.wire.framing import Inbox
from ntt_backup.wire.messages import Exceptional, Receipt

READY: dict[str, messages.Field] = {
    "free_bytes": 1,
    "free_inodes": 7,
    "clock_us": 0,
    "system": "Linux",
    "placed": 1,
}


class FarSide:
    """Stands for `Channel`. answer: returns the frames that answer one; the default stores all.
    lost: the link ends once that many frames were sent.
    """

    lingers = False
    quiet = False
    hint = ""

    def __init__(self) -> None:
        self.on_bytes: Callable[[int], object] = lambda count: None
        self.answer: Callable[[int, bytes], bytes] = self.stores
        self.ready = dict(READY)
        self.codecs: tuple[str, ...] = ("zlib",)
        self.connections = 0
        self.frames: list[tuple[int, bytes]] = []
        self.heard = time.monotonic()
        self.lost: int | None = None
        self.ended = False
        self._inbox = Inbox(messages.to_receiver(messages.WRITING))
        self._answers: list[bytes] = []
        self._blobs = 0
        self._withdrawn: list[Exceptional] = []

    def connect(self, *_: object) -> FarSide:
        """Begin another connection to it."""
        self.ended = False
        self.connections += 1
        self._answers.clear()
        return self

    def greet(self, *_: object) -> Banner:
        return Banner("1", "3.11", ("blake3",), "blake3", self.codecs, frozenset(["put"]))

    def of(self, kind: int) -> list[bytes]:
        """The payloads of the frames of a kind."""
        return [payload for one, payload in self.frames if one == kind]

    @property
    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.frames]

    def stores(self, kind: int, payload: bytes) -> bytes:
        """Store whatever comes."""
        if kind in (messages.HELLO, messages.PLACE):
            return messages.READY.frame(self.ready)
        if kind == messages.PACK:
            _, _, raw = messages.PACK.read(memoryview(payload))
            self._blobs += len(messages.read_table(raw)[1])
        if kind == messages.END:
            if payload[0] == messages.WITHDRAWN:
                self._withdrawn.append(Exceptional(self._blobs, messages.WITHDREW, ""))
            self._blobs += 1
        if kind == messages.COMMIT:
            count, self._blobs = self._blobs, 0
            withdrawn, self._withdrawn = self._withdrawn, []
            number = messages.COMMIT.read(payload)
            return self.receipt(number, count - len(withdrawn), *withdrawn)
        if kind == messages.ABORT:
            self._blobs, self._withdrawn = 0, []
            return messages.ABORTED.frame(messages.ABORT.read(payload))
        return b""

    def receipt(
        self, number: int, stored: int, *exceptions: Exceptional, outcome: int = 0
    ) -> bytes:
        said = Receipt(number, outcome, messages.BLAKE3, stored, exceptions)
        return messages.RECEIPT.frame(*said)

    # --- what a Channel has -----------------------------------------------------------------------

    def send(
        self, data: memoryview, hear: Callable[[bytes], None], *, patience: float, beside: Any = ()
    ) -> None:
        assert not self.ended
        if self.lost is not None and len(self.frames) >= self.lost:
            raise RemoteUnreachable("lost")
        self.on_bytes(len(data))
        while data:
            space = self._inbox.space()
            count = min(len(space), len(data))
            space[:count], data = data[:count], data[count:]
            self._inbox.filled(count)
            while (found := self._inbox.next()) is not None:
                kind, payload = found[0], bytes(found[1])
                self.frames.append((kind, payload))
                if answer := self.answer(kind, payload):
                    self._answers.append(answer)

    def hear(
        self, hear: Callable[[bytes], None], timeout: float, *, beside: Iterable[int] = ()
    ) -> None:
        answers, self._answers = self._answers, []
        for one in answers:
            self.heard = time.monotonic()
            hear(one)

    def is_silent(self, since: float, patience: float, now: float, more: float = 0.0) -> bool:
        """Nothing comes that is not there already."""
        return not self._answers

    def close(self, last_word: bytes = b"") -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


@pytest.fixture
def far_side(monkeypatch: pytest.MonkeyPatch) -> FarSide:
    """A far side to which every connection of this test leads."""
    far = FarSide()
    monkeypatch.setattr(receiver_connection, "greet", far.greet)
    monkeypatch.setattr(SessionSpec, "channel", far.connect)
    return far


def spec(**changes: Any) -> SessionSpec:
    run = RunSettings(**{"codec": "none", **changes.pop("run", {})})
    return replace(SessionSpec(Local(1.0), "/far", "owner", "run", "0", run), **changes)
