"""A run as a live picture on a terminal: share, speeds, a line for each worker, recent events.

A view never ends a run: once the terminal is closed, it is silent. There is no thread; `refresh` is
to be called a few times a second.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TextIO

from rich.console import Console, ConsoleDimensions, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ntt_backup import events
from ntt_backup.daemon.progress import Snapshot, WorkerStatus
from ntt_backup.format import duration, many, printable, size

_RECENT: Final = 5
_BAR_WIDTH: Final = 40
# The lines that are no worker's: header, bar, speeds, recent events, and one for the cursor.
_OTHER_LINES: Final = 4 + _RECENT
_GAP: Final = 2
_COLUMNS: Final[tuple[JustifyMethod, ...]] = ("left", "left", "right", "right", "left")
# Red has failed, yellow wants a look; what is well has no colour, or green.
_RED: Final = "red"
_YELLOW: Final = "yellow"
_LEVEL_STYLES: Final = {"info": "", "warning": _YELLOW, "error": _RED}
_STATE_STYLES: Final = {"outage": _YELLOW, "stalled": _YELLOW, "stopped": "dim"}


class LiveView:
    """A picture that is drawn over itself; a short summary takes its place at the end."""

    def __init__(self, terminal: TextIO) -> None:
        self._console = console = Console(file=terminal, highlight=False)
        self._header = "starting"
        self._summary = Text("ended")
        self._recent: deque[Text] = deque(maxlen=_RECENT)
        self._snapshot: Snapshot | None = None
        self._live: Live | None = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def event(self, event: events.Event) -> None:
        """Keeps the event's line to be shown; progress is seen in the picture itself."""
        line = event.line
        if line is None or isinstance(event, events.Progress):
            return
        if isinstance(event, events.RunStart):
            self._header = line
        elif isinstance(event, events.RunStop):
            bad = event.outcome not in ("done", "stopped")
            self._summary = Text(line, style=_RED if bad else "")
        else:
            failed = isinstance(event, events.BlobFailed)
            self._recent.append(Text(line, style=_RED if failed else _LEVEL_STYLES[event.level]))
        if self._snapshot is None:  # before the workers start, only events move the picture
            self._draw(self._picture)

    def refresh(self, snapshot: Snapshot) -> None:
        """Draws the run as it is now."""
        self._snapshot = snapshot
        self._draw(self._picture)

    def close(self) -> None:
        """Leaves a summary in place of the picture."""
        summary = Group(*self._recent, self._summary)
        self._draw(lambda: summary, last=True)
        self._live = None

    def _draw(self, picture: Callable[[], RenderableType], *, last: bool = False) -> None:
        """Draws the picture, made for the size that the terminal has now."""
        if self._live is None:
            return
        try:
            # Rich would ask stdin, which may be another terminal or none; and windows are resized.
            size_now = os.get_terminal_size(self._console.file.fileno())
            if all(size_now):  # a terminal that does not know its size says 0
                self._console.size = ConsoleDimensions(*size_now)
            self._live.start()  # does nothing the second time
            self._live.update(picture(), refresh=True)
            if last:
                self._live.stop()
        except OSError:  # the terminal has gone; the backup matters, not the view
            self._live = None

    def _picture(self) -> RenderableType:
        recent = [_line(line.plain, str(line.style)) for line in self._recent]
        snapshot = self._snapshot
        if snapshot is None:
            return Group(_line(self._header, "bold"), *recent)
        return Group(
            _line(self._header, "bold"),
            self._bar(snapshot),
            _speeds(snapshot, self._console.width),
            *self._workers(snapshot.workers),
            *recent,
        )

    def _bar(self, snapshot: Snapshot) -> RenderableType:
        room = self._console.width
        if snapshot.share is None:
            return _line(_fitting(_how_far(snapshot), room))
        width = min(_BAR_WIDTH, room // 3)
        bar = ProgressBar(total=1, completed=snapshot.share, width=width, complete_style="green")
        grid = Table.grid(padding=(0, _GAP))
        grid.add_row(bar, _line(_fitting(_how_far(snapshot), room - width - _GAP)))
        return grid

    def _workers(self, workers: tuple[WorkerStatus, ...]) -> Iterator[RenderableType]:
        """Yields a line for each worker, as many as fit."""
        room = max(1, self._console.height - _OTHER_LINES)
        shown = workers if len(workers) <= room else workers[: room - 1]
        rows = [
            (
                Text(f"worker {worker.worker}"),
                Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
                Text(f"{worker.mb_per_s:.1f} MB/s"),
                Text(many(worker.copied, "blob")),
                Text(printable(worker.batch)),
            )
            for worker in shown
        ]
        table = Table.grid(padding=(0, _GAP))
        columns = _columns_that_fit(rows, self._console.width)
        for justify in _COLUMNS[:columns]:
            table.add_column(justify=justify, no_wrap=True, overflow="crop")
        for row in rows:
            table.add_row(*row[:columns])
        yield table
        if len(shown) < len(workers):
            yield _line(f"and {many(len(workers) - len(shown), 'worker')} more")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="crop")


def _how_far(snapshot: Snapshot) -> list[str]:
    """Returns how far the work is and how long it will take, what matters most first."""
    pending, done = snapshot.pending, snapshot.done
    if pending is None:
        return [many(done, "blob"), "counting what is pending"]
    if snapshot.share is None:
        return ["nothing is pending"]
    about = "about " if snapshot.estimated else ""
    # Rounded down: 100 % is for when nothing is pending.
    parts = [f"{about}{int(snapshot.share * 100)}%"]
    if pending and snapshot.eta_s is not None:
        parts.append(f"about {duration(snapshot.eta_s)} left")
    return [*parts, f"{done:,} of {about}{many(done + pending, 'blob')}"]


def _speeds(snapshot: Snapshot, room: int) -> Text:
    failed = f"{snapshot.failed:,} failed" if snapshot.failed else ""
    parts = [
        f"{size(snapshot.sent)} sent in {duration(snapshot.elapsed_s)}",
        f"{snapshot.mb_per_s:.1f} MB/s on the link",
        f"{snapshot.blobs_per_s:,.0f} files/s",
    ]
    line = _line(_fitting([failed, *parts] if failed else parts, room))
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
