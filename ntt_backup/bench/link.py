"""`bench link` measures what the link gives by the job's own ssh.

All streams share one link and two machines, so the numbers of streams are measured in turns, each
once a round and direction. Nothing is written on the remote.

Random bytes are sent each way. TCP begins slowly, so the clock starts when the remote has read the
first `warm` bytes. Kernels and ssh buffer megabytes, so the clock stops when the remote says that
it has read everything. The time is fixed and not the size, which would be a moment on one link and
half an hour on another.

The remote does not report every megabyte: a reader that stops to report, or reads in the small
pieces of `head`, slows the connection down by a tenth; `cat` does not. What the remote sends is
from /dev/urandom, which some kernels give no faster than 200 MB/s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final, Literal

from ntt_backup.bench.helpers import Answer, Ready, run_together
from ntt_backup.bench.output import Progress
from ntt_backup.bench.remote import connect
from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.client.channel import Channel
from ntt_backup.client.transport import Transport, transport_to
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.formatting import many

_PROBE_SECONDS: Final = 1.0
_WARM_SECONDS: Final = 0.4
_LEAST_WARM: Final = 128 * 1024
_TRIPS_SECONDS: Final = 60.0
_CHUNK: Final = 256 * 1024
# Longer than the memory of any compressor, so that it stays random when it is sent again and again.
_RANDOM: Final = 8 * 1024 * 1024

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Streams:
    """So many streams side by side in one direction."""

    direction: Direction
    count: int = 1

    @property
    def name(self) -> str:
        return f"{self.direction}, {many(self.count, 'stream')}"


@dataclass(slots=True)
class Findings:
    """Holds what was found. rates are in bytes a second, the rest in seconds.

    opening: from the start of ssh to the first word of a command on the remote.
    """

    rates: dict[Streams, Figure]
    opening: Figure
    trip: Figure

    def figures(self) -> list[Figure]:
        return [self.opening, self.trip, *self.rates.values()]


class Link:
    """The link, as the transport of the job uses it.

    The link is measured once at the start. This first guess gives the bytes that are sent before a
    clock starts: as many as the link sends in the time that TCP needs to reach full speed. The
    methods raise the errors of the remote and of the link.

    Args:
        transport: The transport of the job.
        patience: The seconds for which nothing may move.

    Attributes:
        bytes_per_s: The first guess of the speed, in bytes a second.
    """

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience = patience
        self._warm = _LEAST_WARM
        self.bytes_per_s = self.rate(Streams("up"), _PROBE_SECONDS)
        self._warm = max(_LEAST_WARM, int(_WARM_SECONDS * self.bytes_per_s))

    def rate(self, streams: Streams, seconds: float) -> float:
        """Returns the bytes a second of all streams together."""
        measure = upload if streams.direction == "up" else download
        warm = max(1, self._warm // streams.count)
        task = partial(measure, self._transport, self._patience, seconds, warm)
        return rate_of(run_together([task] * streams.count))


def measure(
    settings: RemoteConfig,
    progress: Progress,
    *,
    rounds: int,
    seconds: float,
    trips: int,
    streams: Sequence[int],
) -> Findings:
    """Measures the link by all streams, and the round trips.

    Args:
        settings: Of the target.
        progress: Shows the progress.
        rounds: The number of rounds.
        seconds: The duration of each measurement, in seconds.
        trips: The number of round trips in all rounds together.
        streams: The numbers of streams to measure.

    Raises:
        BackupError: The remote or the link has failed.
    """
    directions: tuple[Direction, ...] = ("up", "down")
    wanted = [Streams(way, count) for way in directions for count in sorted(streams)]
    found = Findings(
        rates={
            one: Figure(one.name, "bytes/s", {"direction": one.direction, "streams": one.count})
            for one in wanted
        },
        opening=Figure("ssh session", "s"),
        trip=Figure("round trip", "s"),
    )
    transport, patience = transport_to(settings.remote), settings.run.stall_timeout
    link = Link(transport, patience)
    count = -(-trips // rounds)
    task = partial(round_trips, transport, patience, count, _TRIPS_SECONDS)
    for number in range(1, rounds + 1):
        mark = f"round {number} of {rounds}: "
        (answer,) = run_together([task])
        found.trip.values += answer.trips
        found.opening.values.append(answer.opening_s)
        progress.say(f"{mark}{many(len(answer.trips), 'round trip')}")
        for one, figure in found.rates.items():
            rate = link.rate(one, seconds)
            figure.values.append(rate)
            progress.say(f"{mark}{one.name}: {rate / MEGA:.1f} MB/s")
    return found


def rate_of(answers: Sequence[Answer]) -> float:
    """Returns the bytes a second of parallel streams.

    The time begins when all streams are up to speed, and ends when all have ended. What a stream
    moved before the last one was up to speed is taken out in proportion; streams begin within
    tenths of a second of each other. Towards the end fewer streams are left, and if these cannot
    fill the link, the figure is too low.
    """
    start = max(one.began for one in answers)
    end = max(one.ended for one in answers)
    moved = sum(
        one.size * max(0.0, one.ended - start) / max(one.ended - one.began, 1e-9) for one in answers
    )
    return moved / max(end - start, 1e-9)


# --- what each helper process does ----------------------------------------------------------------


def upload(
    transport: Transport, patience: float, seconds: float, warm: int, ready: Ready
) -> Answer:
    """Sends for so many seconds after warm bytes. patience: seconds for which nothing may move."""
    data = memoryview(os.urandom(_RANDOM))
    clock = _RemoteClock()
    script = 'head -c "$warm" >/dev/null; echo warm; cat >/dev/null; echo end\n'
    channel = connect(transport, script, warm=str(warm))
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
    channel = connect(transport, "IFS= read -r go; exec cat /dev/urandom\n")
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
    channel = connect(transport, "exec cat\n")
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
