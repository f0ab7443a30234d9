"""`bench link` measures what the link gives by the job's own ssh.

A rate depends on the direction, the number of streams and the cipher. All of them share one link
and two machines, so they are measured in turns, each once a round. Nothing is written on the
remote.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from ntt_backup.bench.helpers import Answer, run_together
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.remote import MeasuredSsh
from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.bench.streams import download, round_trips, upload
from ntt_backup.client.shell import ask
from ntt_backup.client.ssh import Ssh, endpoint, explain, query_argv
from ntt_backup.config import RemoteSettings
from ntt_backup.errors import ConfigError, RemoteDenied
from ntt_backup.format import many
from ntt_backup.process.pipeline import output_of

CIPHERS: Final = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "chacha20-poly1305@openssh.com",
)

_PROBE_SECONDS: Final = 1.0
_WARM_SECONDS: Final = 0.4
_LEAST_WARM: Final = 128 * 1024
_TRIPS_SECONDS: Final = 60.0
_QUERY_SECONDS: Final = 10.0

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Options:
    """How it is measured. streams: numbers of connections side by side."""

    rounds: int = 3
    seconds: float = 3.0
    trips: int = 1000
    streams: tuple[int, ...] = (1, 2, 4, 8)
    ciphers: tuple[str, ...] = CIPHERS


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of measurement. cipher "" is the job's own choice."""

    direction: Direction
    streams: int = 1
    cipher: str = ""

    @property
    def name(self) -> str:
        words = [self.direction, many(self.streams, "stream")]
        return ", ".join([*words, self.cipher.partition("@")[0]] if self.cipher else words)

    def labels(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "streams": self.streams,
            "cipher": self.cipher or "job",
        }


@dataclass(slots=True)
class Findings:
    """What was found. rates are in bytes a second, the rest in seconds.

    connect: the TCP connection alone; no value where ssh goes by a proxy. opening: from the start
    of ssh to the first word of a command on the remote.
    """

    rates: dict[Cell, Figure]
    connect: Figure
    opening: Figure
    trip: Figure
    skipped: dict[str, str] = field(default_factory=dict)

    def figures(self) -> list[Figure]:
        timings = (self.connect, self.opening, self.trip)
        return [figure for figure in (*timings, *self.rates.values()) if figure.values]


class Link:
    """The link by the job's own ssh. It is measured once at the start: warm is how many bytes it
    carries while TCP gets up to speed, bytes_per_s a first guess.

    patience: seconds for which nothing may move. Methods raise what the remote or the link did.
    """

    def __init__(self, ssh: Ssh, patience: float, on_tick: Callable[[], None]) -> None:
        self._ssh = ssh
        self._patience = patience
        self._on_tick = on_tick
        self._warm = _LEAST_WARM
        self.bytes_per_s = self.rate(Cell("up"), _PROBE_SECONDS)
        self._warm = max(_LEAST_WARM, int(_WARM_SECONDS * self.bytes_per_s))

    def rate(self, cell: Cell, seconds: float) -> float:
        """Returns the bytes a second of all streams of a cell together."""
        ssh = MeasuredSsh(self._ssh, {"Ciphers": cell.cipher} if cell.cipher else {})
        measure = upload if cell.direction == "up" else download
        warm = max(1, self._warm // cell.streams)
        task = partial(measure, ssh, self._patience, seconds, warm)
        return rate_of(run_together([task] * cell.streams, self._on_tick))

    def round_trips(self, count: int) -> Answer:
        task = partial(round_trips, self._ssh, self._patience, count, _TRIPS_SECONDS)
        return run_together([task], self._on_tick)[0]


def cells(options: Options, ciphers: Sequence[str]) -> list[Cell]:
    """Returns what is measured in each round."""
    directions: tuple[Direction, ...] = ("up", "down")
    every = sorted({1, *options.streams})  # ciphers are compared with one stream
    found = [Cell(way, streams) for way in directions for streams in every]
    return found + [Cell(way, cipher=cipher) for way in directions for cipher in ciphers]


def measure(remote: RemoteSettings, patience: float, options: Options, view: StepView) -> Findings:
    """Measures all of it. Raises what the remote or the link did."""
    ssh = Ssh(remote)
    view.doing("asking the remote for its ciphers")
    ciphers, skipped = _usable(ssh, options.ciphers)
    address = endpoint(output_of(query_argv(ssh.argv("")), _QUERY_SECONDS))
    wanted = cells(options, ciphers)
    found = Findings(
        rates={cell: Figure(cell.name, "bytes/s", cell.labels()) for cell in wanted},
        connect=Figure("TCP connection", "s"),
        opening=Figure("ssh session", "s"),
        trip=Figure("round trip", "s"),
        skipped=skipped,
    )
    if address is None:
        found.skipped["TCP connection"] = "ssh goes by a proxy"
    link = Link(ssh, patience, view.tick)
    view.begin(options.rounds * (len(wanted) + 1))
    for number in range(1, options.rounds + 1):
        mark = f"round {number} of {options.rounds}: "
        if address is not None:
            found.connect.values.append(_connect_s(address, remote.connect_timeout))
        view.doing(mark + "round trips")
        answer = link.round_trips(-(-options.trips // options.rounds))
        found.trip.values += answer.trips
        found.opening.values.append(answer.opening_s)
        view.step(f"{mark}{many(len(answer.trips), 'round trip')}")
        for cell in wanted:
            view.doing(mark + cell.name)
            rate = link.rate(cell, options.seconds)
            found.rates[cell].values.append(rate)
            view.step(f"{mark}{cell.name}: {rate / MEGA:.1f} MB/s")
    return found


def rate_of(answers: Sequence[Answer]) -> float:
    """Returns the bytes a second of streams side by side, from when all were up to speed until all
    had ended.

    What a stream moved before the last one was up to speed is taken out in proportion; they begin
    within tenths of a second of each other. Towards the end fewer are left, and if these cannot
    fill the link, the figure is too low.
    """
    start = max(one.began for one in answers)
    end = max(one.ended for one in answers)
    moved = sum(
        one.size * max(0.0, one.ended - start) / max(one.ended - one.began, 1e-9) for one in answers
    )
    return moved / max(end - start, 1e-9)


def _usable(ssh: Ssh, ciphers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the ciphers that both sides have, and why the others are left out."""
    usable, skipped = [], {}
    # Where the job's own options fail, no cipher is to blame.
    ask(ssh, ":", {}, doing="a first word", timeout=ssh.connect_timeout)
    for cipher in ciphers:
        with_cipher = MeasuredSsh(ssh, {"Ciphers": cipher})
        try:
            ask(with_cipher, ":", {}, doing=f"a word by {cipher}", timeout=ssh.connect_timeout)
        except (ConfigError, RemoteDenied) as error:
            skipped[cipher] = str(error)
        else:
            usable.append(cipher)
    return usable, skipped


def _connect_s(address: tuple[str, int], timeout: float) -> float:
    started = time.monotonic()
    try:
        socket.create_connection(address, timeout).close()
    except OSError as error:
        raise explain(None, str(error)) from error
    return time.monotonic() - started
