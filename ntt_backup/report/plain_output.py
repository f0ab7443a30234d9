"""A run and a long command tell of themselves in plain lines, for a mail, the journal, a pipe.

A view never ends a run: once nobody reads any more, the view is silent. Nothing here loads rich,
which a cron job never needs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, Self, TextIO

from ntt_backup import events
from ntt_backup.daemon.listeners import Listener
from ntt_backup.errors import SOME_FAILED, BackupError
from ntt_backup.formatting import duration, printable, size

FAILURES_SHOWN: Final = 20
_OF_AN_ERROR: Final = ("exit_code", "message", "detail", "hint")
# In the environment as TERM.
_CANNOT_DRAW: Final = ("dumb", "unknown")
_LINE_SECONDS: Final = 60.0
_IN_PLACE_SECONDS: Final = 0.5


def make_views(
    stream: TextIO, targets: Collection[str], *, quiet: bool = False
) -> Mapping[str, Listener]:
    """Returns the views of the targets, by the name of the target.

    A view is a live picture on a terminal, else plain lines; when quiet, lines about problems only.
    Several pictures stand one below the other, and lines then begin with the name of the target.
    """
    labels = {name: name if len(targets) > 1 else "" for name in targets}
    if quiet:
        return {name: QuietView(stream, label) for name, label in labels.items()}
    if not stream.isatty() or os.environ.get("TERM") in _CANNOT_DRAW:
        return {name: PlainView(stream, label) for name, label in labels.items()}
    from ntt_backup.report.live import Screen  # It loads rich, which a cron job never needs.

    screen = Screen(stream)
    return {name: screen.add(label) for name, label in labels.items()}


class PlainView(Listener):
    """Prints one line, without colours, for each event that an operator wants in a mail.

    target: The beginning of each line, if there are several targets.
    """

    def __init__(self, stream: TextIO, target: str = "") -> None:
        self._stream: TextIO | None = stream
        self._prefix = f"{target}: " if target else ""
        self._failures = 0

    def event(self, event: events.Event) -> None:
        """Prints the event's lines, of failed blobs only the first ones."""
        lines = event.lines
        if isinstance(event, events.BlobFailed):
            self._failures += 1
            if self._failures == FAILURES_SHOWN + 1:
                lines = ["more blobs failed, see the log"]
            elif self._failures > FAILURES_SHOWN:
                return
        for line in lines:
            self._print(f"{self._prefix}{line}")

    def _print(self, line: str) -> None:
        if self._stream is not None:
            try:
                print(line, file=self._stream, flush=True)
            except OSError:
                self._stream = None


class QuietView(PlainView):
    """Prints only problems at the end of a run, so that each mail deserves reading."""

    def event(self, event: events.Event) -> None:
        """Prints the line of an event that reports a problem."""
        failed = isinstance(event, events.RunStop) and event.exit_code == SOME_FAILED
        if failed or isinstance(event, events.StillFailed) or event.level == "error":
            super().event(event)


class JsonResult(PlainView):
    """Prints one JSON object at the end of a run: the fields of its last event, and its error.

    For a run that could not begin, the error is all.
    """

    def __init__(self, stream: TextIO, target: str) -> None:
        super().__init__(stream)
        self._target = target
        self._error: dict[str, Any] | None = None

    def event(self, event: events.Event) -> None:
        """Prints the fields, where the run has ended."""
        if isinstance(event, events.Error):
            self._error = {name: event.fields[name] for name in _OF_AN_ERROR}
        elif isinstance(event, events.RunStop):
            self._tell(event.fields)

    def close(self) -> None:
        """Prints the error that no end of a run came after."""
        if self._error is not None:
            self._tell({"exit_code": self._error["exit_code"]})

    def _tell(self, fields: Mapping[str, Any]) -> None:
        error, self._error = self._error, None
        with_error = {} if error is None else {"error": error}
        self._print(json.dumps({"target": self._target, **with_error, **fields}))


class ProgressLine:
    """Prints progress to a stream, usually stderr; nothing if quiet or if nobody reads."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._step = _IN_PLACE_SECONDS if self._in_place else _LINE_SECONDS
        self._next = time.monotonic() + self._step
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_line()

    def show(self, text: Callable[[], str]) -> None:
        """Shows the present state. text: is called only when a line is due."""
        if self._stream is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._step
            self._print(f"\r\x1b[K{text()}" if self._in_place else f"{text()}\n")
            self._open = self._in_place

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.end_line()
        self._print(f"{printable(text)}\n")

    def outage(self, error: BackupError, wait_s: float) -> None:
        """Says that the remote is unreachable, and when it is tried again."""
        self.say(f"remote is unreachable, again in {duration(wait_s)}: {error}")

    def end_line(self) -> None:
        """Lets other output begin in a line of its own."""
        if self._open:
            self._print("\n")
        self._open = False

    def _print(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()


def pace(bytes_: int, seconds: float) -> str:
    """Returns an amount with its rate: `3.0 GB (12.0 MB/s)`."""
    return f"{size(bytes_)} ({size(int(bytes_ / max(seconds, 1e-3)))}/s)"


def time_left(part: float, seconds: float) -> str:
    """Returns `, about 3 min 2 s left`, where a part from 0 to 1 took so many seconds."""
    return f", about {duration(seconds * (1 - part) / part)} left" if 0 < part < 1 else ""
