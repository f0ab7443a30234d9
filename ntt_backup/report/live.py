"""A run is a live picture on a terminal: share, speeds, a line for each worker, recent events.

A view never ends a run: once the terminal is closed, the view is silent. There is no thread;
`refresh` is to be called a few times a second. `status --watch` draws a running daemon alike.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Final, Self, TextIO

from rich.console import Console, ConsoleDimensions, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ntt_backup import events
from ntt_backup.config.bandwidth_timetable import limit_text
from ntt_backup.daemon.control_socket import DaemonReport
from ntt_backup.daemon.listeners import Listener
from ntt_backup.daemon.progress import RunState, WorkerStatus
from ntt_backup.dump.events import DumpComplete, DumpFailed, DumpStart
from ntt_backup.formatting import duration, many, moment, printable, rate, size
from ntt_backup.snapshot.events import SnapshotComplete, SnapshotFailed, SnapshotProgress

_RECENT: Final = 5
_BAR_WIDTH: Final = 40
# The lines that are neither a worker's nor an event's: header, bar, speeds, snapshot, cursor.
_OTHER_LINES: Final = 5
_GAP: Final = 2
_COLUMNS: Final[tuple[JustifyMethod, ...]] = ("left", "left", "right", "right", "left")
# Red has failed, yellow wants a look; what is well has no colour, or green.
_RED: Final = "red"
_YELLOW: Final = "yellow"
LEVEL_STYLES: Final = {"info": "", "warning": _YELLOW, "error": _RED}
_STATE_STYLES: Final = {"outage": _YELLOW, "paused": _YELLOW, "stalled": _YELLOW, "stopped": "dim"}
_MINUTE: Final = 60
_UNWRAPPED: Final = 100_000  # Columns, where nothing is drawn; no line is that long.
_WIDEST: Final = 200
_LEAST_LINES: Final = 12
# What the catalog's figures take below.
_TABLE_LINES: Final = 14
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_LETTERS: Final = " .:-=+*#@"


def fit(console: Console) -> None:
    """Gives the console the size of its terminal. Raises OSError if the terminal has gone.

    Rich would ask stdin, which may be another terminal or none; and windows are resized.
    """
    size_now = os.get_terminal_size(console.file.fileno())
    if all(size_now):  # a terminal that does not know its size says 0
        console.size = ConsoleDimensions(*size_now)


class Screen:
    """A terminal, on which pictures stand one below the other, with an empty line between."""

    def __init__(self, terminal: TextIO) -> None:
        self._console = console = Console(file=terminal, highlight=False)
        self._views: list[LiveView] = []
        self._live: Live | None = _undrawn(console)

    def add(self, target: str) -> LiveView:
        """Returns a new picture, below the others."""
        self._views.append(LiveView(self, target))
        return self._views[-1]

    @property
    def letters(self) -> bool:
        """Returns whether the terminal shows nothing but letters."""
        return not self._console.encoding.startswith("utf")

    @property
    def width(self) -> int:
        return self._console.width

    @property
    def height(self) -> int:
        """Returns the lines of one picture."""
        between = len(self._views) - 1
        return (self._console.height - between) // len(self._views)

    @property
    def recent(self) -> int:
        """Returns the recent events that one picture shows."""
        return max(1, _RECENT // len(self._views))

    def draw(self) -> None:
        """Draws all pictures, made for the size that the terminal has now."""
        if self._live is None:
            return
        last = all(view.closed for view in self._views)
        try:
            before = self._console.width
            fit(self._console)
            if self._live.is_started and self._console.width != before:
                # The terminal has wrapped the lines of the last picture: it has another height now.
                self._live.stop()
                self._console.clear()
                self._live = _undrawn(self._console)
            self._live.start()  # does nothing the second time
            first, *others = (view.picture() for view in self._views)
            picture = Group(first, *(line for one in others for line in ("", one)))
            self._live.update(picture, refresh=True)
            if last:
                self._live.stop()
        except OSError:  # the terminal has gone; the backup matters, not the view
            last = True
        if last:
            self._live = None


def _undrawn(console: Console) -> Live:
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


class LiveView(Listener):
    """Draws a picture over itself, and replaces the picture by a short summary at the end.

    target: The name of the target, if there are several.
    """

    def __init__(self, screen: Screen, target: str) -> None:
        self._screen = screen
        self._prefix = f"{target}: " if target else ""
        self.closed = False
        self._header = f"{self._prefix}starting"
        self._summary: Text | None = None
        self._recent: deque[Text] = deque(maxlen=_RECENT)
        self._state: RunState | None = None
        self._taking: list[Text] = []

    def event(self, event: events.Event) -> None:
        """Keeps the event's line to be shown; progress is seen in the picture itself."""
        line = event.line
        if line is None or isinstance(event, events.Progress):
            return
        if isinstance(event, SnapshotProgress | DumpStart):
            self._taking = [one_line(line, letters=self._screen.letters)]
            return
        if isinstance(event, SnapshotComplete | SnapshotFailed | DumpComplete | DumpFailed):
            self._taking = []
        if isinstance(event, events.RunStart):
            self._header = line
            self._summary = None
        elif isinstance(event, events.RunStop):
            bad = event.outcome not in ("done", "stopped")
            self._summary = Text(self._prefix + line, style=_RED if bad else "")
            self._state = None
        else:
            failed = isinstance(event, events.BlobFailed)
            style = _RED if failed else LEVEL_STYLES[event.level]
            self._recent.extend(Text(self._prefix + one, style=style) for one in event.lines)
        if self._state is None:  # before the workers start, only events move the picture
            self._screen.draw()

    def refresh(self, state: RunState) -> None:
        """Draws the present state of the run."""
        self._state = state
        self._screen.draw()

    def close(self) -> None:
        """Leaves a summary in place of the picture."""
        self.closed = True
        self._screen.draw()

    def picture(self) -> RenderableType:
        """Returns the picture for the size that the terminal has now."""
        if self.closed:
            return Group(*self._recent, self._summary or Text(f"{self._prefix}ended"))
        shown = list(self._recent)[-self._screen.recent :]
        letters = self._screen.letters
        recent = [one_line(line.plain, str(line.style), letters=letters) for line in shown]
        header = one_line(self._header, "bold", letters=letters)
        if self._summary is not None:
            return Group(header, *recent, self._summary)
        if self._state is None:
            return Group(header, *recent)
        room = self._screen.height - _OTHER_LINES - self._screen.recent
        picture = picture_of(self._state, self._screen.width, room)
        return Group(header, *picture, *self._taking, *recent)


def picture_of(state: RunState, width: int, room: int) -> Iterator[RenderableType]:
    """Yields progress, speeds, and a line per worker, as many as there is room for."""
    yield _bar(state, width)
    yield _speeds(state, width)
    yield from _workers(state.workers, width, max(1, room))


def _bar(state: RunState, room: int) -> RenderableType:
    if state.share is None:
        return one_line(_fitting(_how_far(state), room), letters=True)
    width = min(_BAR_WIDTH, room // 3)
    bar = ProgressBar(total=1, completed=state.share, width=width, complete_style="green")
    grid = Table.grid(padding=(0, _GAP))
    grid.add_row(bar, one_line(_fitting(_how_far(state), room - width - _GAP), letters=True))
    return grid


def _workers(workers: Sequence[WorkerStatus], width: int, room: int) -> Iterator[RenderableType]:
    shown = workers if len(workers) <= room else workers[: room - 1]
    rows = [
        (
            Text(f"worker {worker.worker}"),
            Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
            Text(rate(worker.mb_per_s)),
            Text(many(worker.copied, "blob")),
            Text(f"batch {printable(worker.batch)}" if worker.batch else ""),
        )
        for worker in shown
    ]
    table = Table.grid(padding=(0, _GAP))
    columns = _columns_that_fit(rows, width)
    for justify in _COLUMNS[:columns]:
        table.add_column(justify=justify, no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*row[:columns])
    yield table
    if len(shown) < len(workers):
        yield one_line(f"and {many(len(workers) - len(shown), 'worker')} more", letters=True)


def one_line(text: str, style: str = "", *, letters: bool = False) -> Text:
    """Returns a text that is cut off at the end of the line.

    letters: Whether the terminal can show letters only; else an ellipsis marks the cut.
    """
    return Text(text, style=style, no_wrap=True, overflow="crop" if letters else "ellipsis")


def _how_far(state: RunState) -> list[str]:
    """Returns the progress and the remaining time, the most important part first."""
    pending, done = state.pending, state.done
    if pending is None:
        return [many(done, "blob"), "counting what is pending"]
    if state.share is None:
        return ["nothing is pending"]
    about = "about " if state.estimated else ""
    # Rounded down: 100 % is for when nothing is pending.
    parts = [f"{about}{int(state.share * 100)}%"]
    if pending and state.eta_s is not None:
        parts.append(f"about {duration(state.eta_s)} left")
    return [*parts, f"{done:,} of {about}{done + pending:,} confirmed"]


def _speeds(state: RunState, room: int) -> Text:
    failed = f"{state.failed:,} failed" if state.failed else ""
    parts = [
        f"{size(state.sent)} sent in {duration(state.elapsed_s)}",
        f"{rate(state.mb_per_s)} on the link",
        f"{state.blobs_per_s:,.0f} files/s",
    ]
    line = one_line(_fitting([failed, *parts] if failed else parts, room), letters=True)
    line.stylize(_RED, 0, len(failed))
    return line


def _columns_that_fit(rows: Sequence[Sequence[Text]], room: int) -> int:
    """Returns the number of leading columns that fit; the first one is always shown."""
    widths = (max(cell.cell_len for cell in column) + _GAP for column in zip(*rows, strict=True))
    ends = accumulate(widths, initial=-_GAP)
    return max(1, sum(1 for end in ends if end <= room) - 1)


def _fitting(parts: Sequence[str], room: int) -> str:
    """Returns as many of the parts as fit: a number that is cut short would be another number."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + len(part) + 2 > room:
            break
        text += f", {part}"
    return text


def daemon_line(report: DaemonReport) -> str:
    """Returns one line on the daemon: its process, limits and side jobs."""
    parts = [
        "PAUSED" if report.paused else "",
        *(f"a {name} is made" for name, running in report.jobs.items() if running),
        limit_text(report.bwlimit),
        many(len(report.state.workers), "worker"),
        f"strategy {report.strategy}",
        f"PID {report.pid} since {moment(datetime.fromisoformat(report.started_at))}",
    ]
    return printable(", ".join(filter(None, parts)))


def outage_lines(report: DaemonReport, now: datetime) -> list[str]:
    """Returns a line for each side that is unreachable: for how long, who misses it, and why."""
    lines = []
    for what, since in report.unreachable.items():
        missed = [one for one in report.outages if one.what == what]
        lasts = duration(max(0.0, (now - since).total_seconds()))
        who = "" if missed[0].worker is None else f" (worker {missed[0].worker})"
        if len(missed) > 1:
            who = f" ({many(len(missed), 'worker')})"
        why = f": {missed[-1].reason}" if missed[-1].reason else ""
        lines.append(printable(f"{events.unreachable(what)} for {lasts}{who}{why}"))
    return lines


def daemon_picture(
    report: DaemonReport, now: datetime, width: int, height: int, *, letters: bool = False
) -> RenderableType:
    """Returns a picture of a daemon, of about so many columns and lines.

    letters: Whether the terminal can show letters only.
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
    """A place for a picture that is drawn again and again.

    On a terminal the picture is drawn over itself, elsewhere one picture stands below the other.
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
