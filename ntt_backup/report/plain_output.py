"""A run tells of itself in plain lines, for a mail, the journal, a pipe.

A view never ends a run: once nobody reads any more, the view is silent. Nothing here loads rich,
which a cron job never needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import Any, Final, TextIO

from ntt_backup import events
from ntt_backup.daemon.listeners import Listener
from ntt_backup.errors import SOME_FAILED

FAILURES_SHOWN: Final = 20
_OF_AN_ERROR: Final = ("exit_code", "message", "detail", "hint")
# In the environment as TERM.
_CANNOT_DRAW: Final = ("dumb", "unknown")


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
