"""`bench link`: what the link gives by the job's own ssh, and which of its options matter.

A rate depends on the direction, the number of streams, the cipher and on compression, and all of
them share one link and two machines; so they are measured in turns, each of them once a round. How
much the link carries in the time that TCP takes to get up to speed is found out first: so much is
sent before the clock starts.

Writes nothing on the remote.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ntt_backup.bench.helpers import Crew
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.remote import Varied
from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.bench.tasks import Answer, Content, Download, Reach, Task, Trips, Upload
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
_LEAST_WARM: Final = 128 * 1024
_MOST_WARM_COMPRESSED: Final = 4 * 1024 * 1024
WARM_SECONDS: Final = 0.4
_ZEROS_SECONDS: Final = 1.0
_TRIPS_SECONDS: Final = 60.0
_QUERY_SECONDS: Final = 10.0

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Options:
    """How it is measured. streams: how many side by side, one after the other."""

    rounds: int = 3
    seconds: float = 3.0
    trips: int = 1000
    streams: tuple[int, ...] = (1, 2, 4, 8)
    ciphers: tuple[str, ...] = CIPHERS


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of stream. cipher "" is what the job itself gets."""

    direction: Direction
    streams: int = 1
    cipher: str = ""
    compressed: bool = False
    content: Content = "random"

    @property
    def name(self) -> str:
        words = [self.direction, f"{self.streams} stream{'s' if self.streams > 1 else ''}"]
        words += [self.cipher.partition("@")[0]] if self.cipher else []
        words += ["ssh -C"] if self.compressed else []
        words += {"random": [], "zeros": ["zeros"], "halves": ["content that halves"]}[self.content]
        return ", ".join(words)

    def labels(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "streams": self.streams,
            "cipher": self.cipher or "job",
            "compressed": self.compressed,
            "content": self.content,
        }


ZEROS: Final = Cell("up", compressed=True, content="zeros")


@dataclass(slots=True)
class Findings:
    """What was found. rates are in bytes a second, the rest in seconds.

    connect: the TCP connection alone; no value where ssh goes by a proxy. opening: from the start
    of ssh to the first word of a command there. zeros is what a test with zeros would have claimed.
    """

    rates: dict[Cell, Figure]
    zeros: Figure
    connect: Figure
    opening: Figure
    trip: Figure
    skipped: dict[str, str] = field(default_factory=dict)

    def figures(self) -> list[Figure]:
        """All that may be shown: not the zeros."""
        timings = (self.connect, self.opening, self.trip)
        return [figure for figure in (*timings, *self.rates.values()) if figure.values]


def cells(options: Options, ciphers: Sequence[str]) -> list[Cell]:
    """What is measured in each round. Pure."""
    directions: tuple[Direction, ...] = ("up", "down")
    every = sorted({1, *options.streams})  # one is what ciphers and compression are held against
    found = [Cell(way, streams) for way in directions for streams in every]
    found += [Cell(way, cipher=cipher) for way in directions for cipher in ciphers]
    found += [Cell(way, compressed=True) for way in directions]
    return [*found, Cell("up", compressed=True, content="halves")]


def measure(remote: RemoteSettings, patience: float, options: Options, view: StepView) -> Findings:
    """All of it. patience: seconds for which nothing may move. Raises what the remote or the link
    did.
    """
    plain = Reach(remote=remote, patience=patience)
    view.doing("looking at what the remote offers")
    ciphers, skipped = _usable(Ssh(remote), options.ciphers)
    where = endpoint(output_of(query_argv(Ssh(remote).argv("")), _QUERY_SECONDS))
    wanted = cells(options, ciphers)
    found = Findings(
        rates={cell: Figure(cell.name, "bytes/s", cell.labels()) for cell in wanted},
        zeros=Figure("zeros through ssh -C", "bytes/s"),
        connect=Figure("TCP connection", "s"),
        opening=Figure("ssh session", "s"),
        trip=Figure("round trip", "s"),
        skipped=skipped,
    )
    if where is None:
        found.skipped["TCP connection"] = "ssh goes by a proxy"
    with Crew(view.tick) as crew:
        warm = warm_bytes(crew, plain)
        view.begin(options.rounds * (len(wanted) + 2))
        for number in range(1, options.rounds + 1):
            mark = f"round {number} of {options.rounds}: "
            if where is not None:
                found.connect.values.append(_connect_s(where, remote.connect_timeout))
            view.doing(mark + "round trips")
            count = -(-options.trips // options.rounds)
            trips = Trips(reach=plain, count=count, seconds=_TRIPS_SECONDS)
            answer = crew.run([trips])[0]
            found.trip.values += answer.trips
            found.opening.values.append(answer.opening_s)
            view.step(f"{mark}{many(len(answer.trips), 'round trip')}")
            for cell in (*wanted, ZEROS):
                view.doing(mark + cell.name)
                seconds = _ZEROS_SECONDS if cell == ZEROS else options.seconds
                rate = measure_rate(crew, plain, cell, seconds, warm)
                (found.zeros if cell == ZEROS else found.rates[cell]).values.append(rate)
                # A figure that fools is not shown, not even in passing.
                said = "done, see the verdict" if cell == ZEROS else f"{rate / MEGA:.1f} MB/s"
                view.step(f"{mark}{cell.name}: {said}")
    return found


def warm_bytes(crew: Crew, reach: Reach) -> int:
    """How much to send before the clock starts: what the link carries in WARM_SECONDS."""
    task = Upload(reach=reach, seconds=_PROBE_SECONDS, warm=_LEAST_WARM)
    return max(_LEAST_WARM, int(WARM_SECONDS * rate_of(crew.run([task]))))


def measure_rate(crew: Crew, reach: Reach, cell: Cell, seconds: float, warm: int) -> float:
    """Bytes a second of all streams of a cell together. warm: from `warm_bytes`."""
    options = {"Compression": "yes" if cell.compressed else "no"}
    if cell.cipher:
        options["Ciphers"] = cell.cipher
    way = reach.model_copy(update={"options": options})
    share = max(1, warm // cell.streams)
    if cell.compressed:
        share = min(share, _MOST_WARM_COMPRESSED)
    task: Task
    if cell.direction == "up":
        task = Upload(reach=way, seconds=seconds, warm=share, content=cell.content)
    else:
        task = Download(reach=way, seconds=seconds, warm=share)
    return rate_of(crew.run([task] * cell.streams))


def rate_of(answers: Sequence[Answer]) -> float:
    """Bytes a second of streams side by side, from when all were up to speed until all had ended.

    What a stream moved before the last one was up to speed is taken out in proportion; they begin
    within tenths of a second of each other. Towards the end fewer are left, and if these cannot
    fill the link, the figure is too low. Pure.
    """
    start = max(one.began for one in answers)
    end = max(one.ended for one in answers)
    moved = sum(
        one.size * max(0.0, one.ended - start) / max(one.ended - one.began, 1e-9) for one in answers
    )
    return moved / max(end - start, 1e-9)


def _usable(base: Ssh, ciphers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The ciphers that both sides have, and why the others are left out.

    That the job's own options work is seen first: what fails then is the cipher's fault.
    """
    usable, skipped = [], {}
    ask(base, ":", {}, doing="a first word", timeout=base.connect_timeout)
    for cipher in ciphers:
        way = Varied(base, {"Ciphers": cipher})
        try:
            ask(way, ":", {}, doing=f"a word by {cipher}", timeout=base.connect_timeout)
        except (ConfigError, RemoteDenied) as error:
            skipped[cipher] = str(error)
        else:
            usable.append(cipher)
    return usable, skipped


def _connect_s(where: tuple[str, int], timeout: float) -> float:
    started = time.monotonic()
    try:
        socket.create_connection(where, timeout).close()
    except OSError as error:
        raise explain(None, str(error)) from error
    return time.monotonic() - started
