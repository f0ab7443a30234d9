"""`bench link` measures what the link gives by the job's own ssh.

All streams share one link and two machines, so the numbers of streams are measured in turns, each
once a round and direction. Nothing is written on the remote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from ntt_backup.bench.helpers import Answer, run_together
from ntt_backup.bench.output import Progress
from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.bench.streams import download, round_trips, upload
from ntt_backup.client.transport import Transport, transport_to
from ntt_backup.config import RemoteConfig
from ntt_backup.formatting import many

_PROBE_SECONDS: Final = 1.0
_WARM_SECONDS: Final = 0.4
_LEAST_WARM: Final = 128 * 1024
_TRIPS_SECONDS: Final = 60.0

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
