"""`bench scenarios`: one payload and many round trips through one layer more each time.

A slow transfer has several suspects: Python and its pipes, the shell and its programs, ssh and the
network. So the same is done through a pipe inside one process, with a receiver that is a local
child process, and with one at the end of ssh; the differences are what each layer costs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ntt_backup.bench.helpers import Crew
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.results import Figure
from ntt_backup.bench.tasks import Download, Reach, Trips, Upload
from ntt_backup.config import RemoteSettings

PIPE: Final = "pipe in one process"
CHILD: Final = "local child"
SSH: Final = "ssh"

_CHUNK: Final = 256 * 1024
_TRIPS_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """How it is measured. size: bytes each way; trips: in all rounds together."""

    rounds: int = 3
    size: int = 20 * 10**6
    trips: int = 1000


@dataclass(slots=True)
class Findings:
    """The figures by layer, for the same work in the same order."""

    layers: dict[str, list[Figure]]

    def by_work(self) -> list[tuple[Figure, ...]]:
        """The figures of all layers for one thing that was done, thing by thing."""
        return list(zip(*self.layers.values(), strict=True))

    def figures(self) -> list[Figure]:
        return [figure for figures in self.layers.values() for figure in figures]


def measure(remote: RemoteSettings, patience: float, options: Options, view: StepView) -> Findings:
    """All of it. Raises what the remote or the link did."""
    found = Findings({layer: _figures(options, layer) for layer in (PIPE, CHILD, SSH)})
    count = -(-options.trips // options.rounds)
    view.begin(options.rounds * len(found.layers))
    with Crew(view.tick) as crew:
        for number in range(1, options.rounds + 1):
            for layer, (up, down, trips) in found.layers.items():
                view.doing(f"round {number} of {options.rounds}: {layer}")
                if layer == PIPE:
                    up.values.append(_upload(options.size))
                    down.values.append(_download(options.size))
                    trips.values += _round_trips(count)
                else:
                    reach = Reach(remote=remote if layer == SSH else None, patience=patience)
                    for figure, task in (
                        (up, Upload(reach=reach, size=options.size)),
                        (down, Download(reach=reach, size=options.size)),
                    ):
                        answer = crew.run([task])[0]
                        figure.values.append(answer.ended - answer.began)
                    there_and_back = Trips(reach=reach, count=count, seconds=_TRIPS_SECONDS)
                    trips.values += crew.run([there_and_back])[0].trips
                view.step(f"round {number} of {options.rounds}: {layer}: up {up.values[-1]:.3f} s")
    return found


def costs(found: Findings) -> list[str]:
    """What the layers add, in words. Pure."""
    said = []
    for figures in found.by_work():
        medians = [figure.spread.median for figure in figures if figure.spread]
        if len(medians) == len(found.layers):
            pipe, child, ssh = (_time(value) for value in medians)
            name = figures[0].name
            said.append(f"{name}: {pipe} in one process, {child} to a child, {ssh} through ssh.")
    return said


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} us"


def _figures(options: Options, layer: str) -> list[Figure]:
    payload = f"{options.size / 1e6:g} MB"
    return [
        Figure(f"{payload} up", "s", {"layer": layer, "work": "up", "bytes": options.size}),
        Figure(f"{payload} down", "s", {"layer": layer, "work": "down", "bytes": options.size}),
        Figure("round trip", "s", {"layer": layer, "work": "trip"}),
    ]


def _upload(size: int) -> float:
    """Seconds until the other thread has read size bytes out of a pipe, and has said so."""
    data = os.urandom(_CHUNK)

    def work(to: int, answers: int) -> None:
        _write(to, data, size)
        os.read(answers, 1)

    def other(source: int, to: int) -> None:
        _read(source, size)
        os.write(to, b".")

    return _between(work, other)


def _download(size: int) -> float:
    """Seconds until size bytes have come that the other thread was asked for."""
    data = os.urandom(_CHUNK)

    def work(to: int, answers: int) -> None:
        os.write(to, b".")
        _read(answers, size)

    def other(source: int, to: int) -> None:
        os.read(source, 1)
        _write(to, data, size)

    return _between(work, other)


def _round_trips(count: int) -> Sequence[float]:
    times: list[float] = []

    def work(to: int, answers: int) -> None:
        for _ in range(count):
            left = time.monotonic()
            os.write(to, b"-")
            os.read(answers, 1)
            times.append(time.monotonic() - left)

    def other(source: int, to: int) -> None:
        for _ in range(count):
            os.write(to, os.read(source, 1))

    _between(work, other)
    return times


def _between(work: Callable[[int, int], None], other: Callable[[int, int], None]) -> float:
    """Seconds that work takes, with other in a second thread at the far ends of its two pipes."""
    source, to = os.pipe()
    answers, back = os.pipe()

    def far_side() -> None:
        with suppress(OSError):  # work was interrupted
            other(source, back)

    thread = threading.Thread(target=far_side)
    try:
        thread.start()
        started = time.monotonic()
        work(to, answers)
        return time.monotonic() - started
    finally:
        for fd in (to, answers):
            os.close(fd)
        thread.join()
        for fd in (source, back):
            os.close(fd)


def _write(fd: int, data: bytes, size: int) -> None:
    while size:
        size -= os.write(fd, data[:size])


def _read(fd: int, size: int) -> None:
    while size > 0 and (got := len(os.read(fd, _CHUNK))):
        size -= got
