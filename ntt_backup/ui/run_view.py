"""What a person sees of a run: a live picture on a terminal, plain lines everywhere else.

The JSONL file is for machines; a terminal wants figures in place, and a cron mail or the journal
wants few lines that say something. All three are fed by the same events. A view never ends a run:
where the terminal or the pipe behind it goes away, it falls silent. There is no thread; the
coordinator calls `refresh` a few times a second from its own loop.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console, ConsoleDimensions, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ntt_backup.audit.scan import ScanResult
from ntt_backup.blobdir.layout import Stray
from ntt_backup.daemon.progress import Snapshot, View, WorkerLine
from ntt_backup.errors import SOME_FAILED, BackupError, ConfigError
from ntt_backup.format import describe, duration, level_of, many, printable, size

FAILURES_SHOWN: Final = 20
STRAYS_SHOWN: Final = 20
SCAN_LINE_SECONDS: Final = 60.0
_RECENT: Final = 5
_BAR_WIDTH: Final = 40
# The lines that are no worker's: header, bar, figures, recent events, and one for the cursor.
_OTHER_LINES: Final = 4 + _RECENT
_GAP: Final = 2
_COLUMNS: Final[tuple[JustifyMethod, ...]] = ("left", "left", "right", "right", "left")
# Red has failed, yellow wants a look; what is well has no colour, or green.
_RED: Final = "red"
_YELLOW: Final = "yellow"
_LEVEL_STYLES: Final = {"warning": _YELLOW, "error": _RED}
_STATE_STYLES: Final = {"outage": _YELLOW, "stalled": _YELLOW, "stopped": "dim"}


def make_view(stream: TextIO, *, quiet: bool = False) -> View:
    """The view that fits: only what is wrong when quiet, a live picture on a terminal, else plain
    lines.
    """
    if quiet:
        return QuietView(stream)
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return PlainView(stream)


class PlainView:
    """One line an event that an operator would want in a mail; no colours, no cursor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._failures = 0

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "blob_failed":
            self._failures += 1
            if self._failures == FAILURES_SHOWN + 1:
                self._print("more blobs failed, see the log")
            if self._failures > FAILURES_SHOWN:
                return
        line = describe(event)
        if line is not None:
            self._print(line)

    def refresh(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            print(line, file=self._stream, flush=True)
        except OSError:  # nobody reads any more; the backup matters, not the view
            self._stream = None


class QuietView(PlainView):
    """Only what is wrong at a run's end: a mail that comes is one to be read."""

    def event(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        failed = name == "run_stop" and event["exit_code"] == SOME_FAILED
        if failed or name == "still_failed" or level_of(name) == "error":
            super().event(event)


class LiveView:
    """A picture that is drawn over itself, and in its place at the end a short summary."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._header = "starting"
        self._summary = Text("ended")
        self._recent: deque[Text] = deque(maxlen=_RECENT)
        self._snapshot: Snapshot | None = None
        self._live: Live | None = Live(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )

    def event(self, event: Mapping[str, Any]) -> None:
        line = describe(event)
        if line is None or event["event"] == "progress":
            return
        if event["event"] == "run_start":
            self._header = line
        elif event["event"] == "run_stop":
            bad = event["outcome"] not in ("done", "stopped")
            self._summary = Text(line, style=_RED if bad else "")
        else:
            self._recent.append(Text(line, style=_style(event)))
        if self._snapshot is None:  # before the workers start, only events move the picture
            self._draw(self._picture)

    def refresh(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._draw(self._picture)

    def close(self) -> None:
        summary = Group(*self._recent, self._summary)
        self._draw(lambda: summary, last=True)
        self._live = None

    def _draw(self, picture: Callable[[], RenderableType], *, last: bool = False) -> None:
        """Draw what picture makes, once it is known how large the terminal is."""
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
            _figures(snapshot, self._console.width),
            *self._workers(snapshot.workers),
            *recent,
        )

    def _bar(self, snapshot: Snapshot) -> RenderableType:
        room = self._console.width
        if snapshot.share is None:
            return _line(_fitting(_outlook(snapshot), room))
        width = min(_BAR_WIDTH, room // 3)
        bar = ProgressBar(
            total=1.0,
            completed=snapshot.share,
            width=width,
            complete_style="green",
            finished_style="green",
        )
        grid = Table.grid(padding=(0, _GAP))
        grid.add_row(bar, _line(_fitting(_outlook(snapshot), room - width - _GAP)))
        return grid

    def _workers(self, workers: tuple[WorkerLine, ...]) -> Iterator[RenderableType]:
        """A line a worker, as many as the terminal has room for."""
        room = max(1, self._console.height - _OTHER_LINES)
        shown = workers if len(workers) <= room else workers[: room - 1]
        rows = [
            (
                Text(f"worker {worker.index}"),
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


def _style(event: Mapping[str, Any]) -> str:
    if event["event"] == "blob_failed":
        return _RED
    return _LEVEL_STYLES.get(level_of(event["event"]), "")


def _outlook(snapshot: Snapshot) -> list[str]:
    """How far the work is and how long it will take, what matters most first."""
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


def _figures(snapshot: Snapshot, room: int) -> Text:
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
    """The number of leading columns that there is room for; the first is always shown."""
    widths = (max(cell.cell_len for cell in column) + _GAP for column in zip(*rows, strict=True))
    ends = accumulate(widths, initial=-_GAP)
    return max(1, sum(1 for end in ends if end <= room) - 1)


def _fitting(parts: Sequence[str], room: int) -> str:
    """As many of the parts as there is room for: a number that is cut short would be another."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + len(part) + 2 > room:
            break
        text += f", {part}"
    return text


class ScanView:
    """A scan under way: one line kept up to date on a terminal, a line a minute elsewhere.

    The first strays of all are shown as they are met. The file strays, where given, gets each as a
    JSON line, before the scan notes that it is past it; ConfigError is raised where it cannot be
    written.
    """

    def __init__(self, stream: TextIO, strays: Path | None, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._next_line = 0.0
        self._strays = 0
        self._path = strays
        with self._writing():
            self._file = None if strays is None else strays.open("a", buffering=1, encoding="utf-8")

    def begin(self, resumed_from: str | None) -> None:
        """The file of strays is made anew, unless the scan goes on where an earlier one ended."""
        if resumed_from is None and self._file is not None and self._file.seekable():
            with self._writing():
                self._file.truncate(0)

    def progress(self, result: ScanResult) -> None:
        """Show how far it has got."""
        now = result.duration_s
        if self._in_place or now >= self._next_line:
            self._next_line = now + SCAN_LINE_SECONDS
            done = f"{result.registered:,} registered, {result.known:,} known"
            self._print(f"{done}, at {result.directory}", end="" if self._in_place else "\n")

    def stray(self, stray: Stray) -> None:
        """Report one entry that is no blob."""
        if self._file is not None:
            line = {"path": stray.path, "kind": stray.kind.value, "detail": stray.detail}
            with self._writing():
                print(json.dumps(line), file=self._file)
        self._strays += 1
        if self._strays <= STRAYS_SHOWN:
            text = f"stray {printable(stray.path)}: {stray.kind.value} {printable(stray.detail)}"
            self._print(text.rstrip())
        elif self._strays == STRAYS_SHOWN + 1:
            self._print("more strays are not shown; --strays FILE has them all")

    def close(self) -> None:
        """End the line that was kept up to date, and the file."""
        if self._in_place:
            self._print("", end="")
        if self._file is not None:
            with self._writing():
                self._file.close()

    def _print(self, text: str, end: str = "\n") -> None:
        """Show text in place of the line that is kept up to date, where there is one."""
        start = "\r\x1b[K" if self._in_place else ""
        if self._stream is None:
            return
        try:
            print(start + text, file=self._stream, end=end, flush=True)
        except OSError:  # nobody reads any more
            self._stream = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the strays cannot be written to {self._path}",
                detail=error.strerror or str(error),
                hint="name another file with --strays; what was registered so far stays",
            ) from error


def render_error(error: BackupError) -> str:
    """What happened and why on one line, what to do on a second one where there is a hint."""
    lines = [f"error: {error}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return "\n".join(printable(line) for line in lines)
