"""A running daemon is shown on another terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live

from ntt_backup import events
from ntt_backup.config.timetable import speed
from ntt_backup.daemon.control.run_report import DaemonReport
from ntt_backup.format import duration, many, moment, printable, size
from ntt_backup.ui.live import LEVEL_STYLES, fit, one_line, picture_of

_RECENT: Final = 5
_MINUTE: Final = 60
_UNWRAPPED: Final = 100_000  # Columns, where nothing is drawn; no line is that long.
_WIDEST: Final = 200
_LEAST_LINES: Final = 12
# What the catalog's figures take below.
_TABLE_LINES: Final = 14
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_LETTERS: Final = " .:-=+*#@"


def daemon_line(report: DaemonReport) -> str:
    """Returns who the daemon is, and under what it works, in one line."""
    parts = [
        "PAUSED" if report.paused else "",
        *(f"a {name} is made" for name, running in report.jobs.items() if running),
        speed(report.bwlimit),
        many(len(report.state.workers), "worker"),
        f"strategy {report.strategy}",
        f"PID {report.pid} since {moment(datetime.fromisoformat(report.started_at))}",
    ]
    return printable(", ".join(filter(None, parts)))


def outage_lines(report: DaemonReport, now: datetime) -> list[str]:
    """Returns a line for each side that is away: for how long, who misses it, and why."""
    lines = []
    for what in dict.fromkeys(one.what for one in report.outages):
        missed = [one for one in report.outages if one.what == what]
        since = min(datetime.fromisoformat(one.since) for one in missed)
        lasts = duration(max(0.0, (now - since).total_seconds()))
        who = "" if missed[0].worker is None else f" (worker {missed[0].worker})"
        if len(missed) > 1:
            who = f" ({many(len(missed), 'worker')})"
        why = f": {missed[-1].reason}" if missed[-1].reason else ""
        lines.append(printable(f"{events.away(what)} for {lasts}{who}{why}"))
    return lines


def daemon_picture(
    report: DaemonReport, now: datetime, width: int, height: int, *, letters: bool = False
) -> RenderableType:
    """Returns a daemon as a picture of about so many columns and lines. letters: the terminal can
    show nothing else.
    """
    recent = list(report.recent)[-_RECENT:]
    outages = outage_lines(report, now)
    room = height - 4 - len(outages) - len(recent)
    style = "bold yellow" if report.paused else "bold"
    return Group(
        one_line(
            f"target {printable(report.target)}: {daemon_line(report)}", style, letters=letters
        ),
        *picture_of(report.state, width, room),
        *_hour(report.minutes, now.timestamp(), width, _LETTERS if letters else _BLOCKS),
        *(one_line(line, "yellow", letters=letters) for line in outages),
        *(
            one_line(printable(line), LEVEL_STYLES.get(level, ""), letters=letters)
            for _, level, line in recent
        ),
    )


def sparkline(rates: Sequence[float], marks: str = _BLOCKS) -> str:
    """Returns a mark for each rate, the highest one for the highest."""
    top, best = len(marks) - 1, max(rates, default=0.0)
    # What is more than nothing is seen.
    places = (max(1, math.ceil(rate / best * top)) if rate > 0 else 0 for rate in rates)
    return "".join(marks[place] for place in places)


def _hour(
    minutes: Sequence[tuple[int, int]], now: float, width: int, marks: str
) -> Iterator[RenderableType]:
    """Yields the rates of the last hour, a mark for each minute."""
    sent = dict(minutes)
    current = int(now) // _MINUTE * _MINUTE
    shown = range(current - (min(60, max(1, width - 40)) - 1) * _MINUTE, current + 1, _MINUTE)
    # The minute that is not over yet would look slower than it is.
    lasted = {current: max(1.0, now - current)}
    rates = [sent.get(minute, 0) / lasted.get(minute, _MINUTE) for minute in shown]
    best = size(int(max(rates)))
    text = f"last {many(len(rates), 'minute')} |{sparkline(rates, marks)}| at most {best}/s"
    yield one_line(text, letters=True)


def console_for(stream: TextIO) -> Console:
    """Returns a console. Where nothing is drawn, for a mail or grep, each row is one line."""
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _UNWRAPPED)


def print_to(console: Console, parts: Iterable[RenderableType]) -> None:
    """Prints the parts, one below the other, without the blanks that make a table's lines even."""
    with console.capture() as drawn:
        console.print(*parts, sep="\n")
    console.file.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())
    console.file.flush()


class Watch:
    """A place for a picture that is drawn again and again: over itself on a terminal, and one below
    the other elsewhere.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = console_for(stream)
        self._live = None
        if stream.isatty():
            self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def picture(self, report: DaemonReport, targets: int) -> RenderableType:
        """Returns a daemon's picture. targets: the pictures that share the place."""
        if self._live is not None:
            fit(self._console)
        height = max(_LEAST_LINES, self._console.height // targets - _TABLE_LINES)
        letters = not self._console.encoding.startswith("utf")
        width = min(self._console.width, _WIDEST)
        return daemon_picture(report, datetime.now(UTC), width, height, letters=letters)

    def show(self, parts: Iterable[RenderableType]) -> None:
        """Shows the parts, one below the other."""
        if self._live is not None:
            self._live.update(Group(*parts), refresh=True)
        else:
            print_to(self._console, parts)
