"""Bytes to the far side, bytes from it, and one byte there and back: what a link gives.

Three things make the obvious measurement wrong. TCP begins slowly, so the first bytes say nothing
about the rest: the clock starts when the far side has read them. Kernels and ssh buffer megabytes,
so what was written has not arrived: the clock stops when the far side says that it has read all.
And a fixed size is a blink on one link and half an hour on another: it is the time that is fixed.
Both ends of the clock are words of the far side, so the way back is in none of the figures.

It would be better to hear of every megabyte. But a far side that stops for a moment to say so, or
reads in the small pieces of `head`, slows the connection down by a tenth; `cat` does not.

The far side is `head` and `cat` in its shell; nothing is written there. What it sends is of
/dev/urandom, which some kernels give no faster than 200 MB/s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Final

from ntt_backup.bench.remote import HELLO, connect, transport
from ntt_backup.bench.tasks import Answer, Content, Download, Trips, Upload
from ntt_backup.client.channel import Channel
from ntt_backup.errors import RemoteUnreachable

_CHUNK: Final = 256 * 1024
_STOCK: Final = 8 * 1024 * 1024
_GRAIN: Final = 512


def stock(content: Content) -> memoryview:
    """What is sent, again and again. It is longer than any compressor's memory, so random stays
    random; halves are grains of it between grains of zeros.
    """
    if content == "zeros":
        return memoryview(bytes(_CHUNK))
    if content == "random":
        return memoryview(os.urandom(_STOCK))
    grains = (os.urandom(_GRAIN) for _ in range(_STOCK // _GRAIN // 2))
    return memoryview(b"".join(grain + bytes(_GRAIN) for grain in grains))


def chunks(data: memoryview) -> Iterator[memoryview]:
    """data over and over, in pieces."""
    for number in count():
        start = number * _CHUNK % len(data)
        yield data[start : start + _CHUNK]


class UploadJob:
    """See `tasks.Upload` and `helper.Job`."""

    def __init__(self, task: Upload) -> None:
        self._task = task
        self._data = stock(task.content)
        script = 'head -c "$warm" >/dev/null; echo warm; cat >/dev/null; echo end\n'
        self._channel = connect(transport(task.reach), HELLO + script, warm=str(task.warm))
        self._words = b""
        self._warm = self._ended = 0.0

    def run(self) -> Answer:
        task = self._task
        began = time.monotonic()
        sent = 0
        for chunk in chunks(self._data):
            if task.size is not None:
                chunk = chunk[: task.size - sent]
            if not chunk or (task.seconds and self._over(task.seconds)):
                break
            self._channel.send(chunk, self._hear, patience=task.reach.patience)
            sent += len(chunk)
            self._channel.hear(self._hear, 0.0)
        self._channel.end_input()
        deadline = time.monotonic() + task.reach.patience
        while not self._ended:
            self._channel.hear(self._hear, 1.0)
            if time.monotonic() > deadline:
                raise _silent(task.reach.patience)
        began = self._warm if task.warm else began
        return Answer(began=began, ended=self._ended, size=max(0, sent - task.warm))

    def close(self) -> None:
        self._channel.abort()

    def _over(self, seconds: float) -> bool:
        return bool(self._warm) and time.monotonic() - self._warm >= seconds

    def _hear(self, data: bytes) -> None:
        now = time.monotonic()
        self._words += data
        if b"warm" in self._words and not self._warm:
            self._warm = now
        if b"end" in self._words:
            self._ended = now


class DownloadJob:
    """See `tasks.Download` and `helper.Job`."""

    def __init__(self, task: Download) -> None:
        self._task = task
        send = "exec cat" if task.size is None else f"exec head -c {task.size}"
        script = f"IFS= read -r go; {send} /dev/urandom\n"
        self._channel = connect(transport(task.reach), HELLO + script)

    def run(self) -> Answer:
        task = self._task
        began = now = time.monotonic()
        self._channel.send(memoryview(b"go\n"), lambda _: None, patience=task.reach.patience)
        counted_from = got = 0
        while data := arrival(self._channel, task.reach.patience):
            got += len(data)
            now = time.monotonic()
            if not counted_from and 0 < task.warm <= got:
                began, counted_from = now, got
            warm = counted_from or not task.warm
            over = warm and task.seconds is not None and now - began >= task.seconds
            if over or got == task.size:
                break
        else:
            raise self._channel.lost()
        return Answer(began=began, ended=now, size=got - counted_from)

    def close(self) -> None:
        self._channel.abort()


class TripsJob:
    """See `tasks.Trips` and `helper.Job`."""

    def __init__(self, task: Trips) -> None:
        self._task = task
        self._channel = connect(transport(task.reach), HELLO + "exec cat\n")

    def run(self) -> Answer:
        began = now = time.monotonic()
        trips: list[float] = []
        while len(trips) < self._task.count and now - began < self._task.seconds:
            left = now
            self._channel.send(memoryview(b"-"), lambda _: None, patience=self._task.reach.patience)
            if not arrival(self._channel, self._task.reach.patience):
                raise self._channel.lost()
            now = time.monotonic()
            trips.append(now - left)
        return Answer(began=began, ended=now, trips=trips)

    def close(self) -> None:
        self._channel.abort()


def arrival(channel: Channel, patience: float) -> bytes:
    """What comes next; nothing at the end. Raises RemoteUnreachable after patience seconds."""
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        if (data := channel.read(left)) is not None:
            return data
    raise _silent(patience)


def _silent(patience: float) -> RemoteUnreachable:
    return RemoteUnreachable("the link has stalled", detail=f"nothing came for {patience:.0f} s")
