"""The speed of a link is that of random bytes each way, and of one byte to and fro.

TCP begins slowly, so the clock starts when the remote has read the first `warm` bytes. Kernels and
ssh buffer megabytes, so the clock stops when the remote says that it has read everything. The time
is fixed and not the size, which would be a moment on one link and half an hour on another.

The remote does not report every megabyte: a reader that stops to report, or reads in the small
pieces of `head`, slows the connection down by a tenth; `cat` does not. Nothing is written there.
What the remote sends is from /dev/urandom, which some kernels give no faster than 200 MB/s.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Final

from ntt_backup.bench.helpers import Answer, Ready
from ntt_backup.bench.remote import HELLO, connect
from ntt_backup.client.channel import Channel
from ntt_backup.client.transport import Transport
from ntt_backup.errors import RemoteUnreachable

_CHUNK: Final = 256 * 1024
# Longer than the memory of any compressor, so that it stays random when it is sent again and again.
_RANDOM: Final = 8 * 1024 * 1024


def upload(
    transport: Transport, patience: float, seconds: float, warm: int, ready: Ready
) -> Answer:
    """Sends for so many seconds after warm bytes. patience: seconds for which nothing may move."""
    data = memoryview(os.urandom(_RANDOM))
    clock = _RemoteClock()
    script = 'head -c "$warm" >/dev/null; echo warm; cat >/dev/null; echo end\n'
    channel = connect(transport, HELLO + script, warm=str(warm))
    try:
        ready()
        sent = 0
        for number in count():
            if clock.warm and time.monotonic() - clock.warm >= seconds:
                break
            start = number * _CHUNK % _RANDOM
            channel.send(data[start : start + _CHUNK], clock.hear, patience=patience)
            sent += _CHUNK
            channel.hear(clock.hear, 0.0)
        channel.end_input()
        deadline = time.monotonic() + patience
        while not clock.end:
            channel.hear(clock.hear, 1.0)
            if time.monotonic() > deadline:
                raise _stalled(patience)
    finally:
        channel.abort()
    return Answer(began=clock.warm, ended=clock.end, size=sent - warm)


class _RemoteClock:
    """The moments at which the remote said `warm` and `end`; 0 before."""

    def __init__(self) -> None:
        self._said = b""
        self.warm = self.end = 0.0

    def hear(self, data: bytes) -> None:
        now = time.monotonic()
        self._said += data
        if b"warm" in self._said and not self.warm:
            self.warm = now
        if b"end" in self._said:
            self.end = now


def download(
    transport: Transport, patience: float, seconds: float, warm: int, ready: Ready
) -> Answer:
    """Receives for so many seconds after warm bytes."""
    channel = connect(transport, HELLO + "IFS= read -r go; exec cat /dev/urandom\n")
    try:
        ready()
        channel.send(memoryview(b"go\n"), lambda _: None, patience=patience)
        began = 0.0
        got = uncounted = 0
        while True:
            got += len(_arrival(channel, patience))
            now = time.monotonic()
            if not began and got >= warm:
                began, uncounted = now, got
            if began and now - began >= seconds:
                return Answer(began=began, ended=now, size=got - uncounted)
    finally:
        channel.abort()


def round_trips(
    transport: Transport, patience: float, count: int, seconds: float, ready: Ready
) -> Answer:
    """Sends a byte and waits until it comes back: so many times, or for so many seconds."""
    channel = connect(transport, HELLO + "exec cat\n")
    try:
        ready()
        began = now = time.monotonic()
        trips: list[float] = []
        while len(trips) < count and now - began < seconds:
            left = now
            channel.send(memoryview(b"-"), lambda _: None, patience=patience)
            _arrival(channel, patience)
            now = time.monotonic()
            trips.append(now - left)
        return Answer(began=began, ended=now, trips=trips)
    finally:
        channel.abort()


def _arrival(channel: Channel, patience: float) -> bytes:
    """Returns what comes next. Raises RemoteUnreachable at the end, or after patience seconds."""
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        data = channel.read(left)
        if data == b"":
            raise channel.lost()
        if data is not None:
            return data
    raise _stalled(patience)


def _stalled(patience: float) -> RemoteUnreachable:
    return RemoteUnreachable("the link has stalled", detail=f"nothing came for {patience:.0f} s")
