"""A run as plain lines, for a cron mail, the journal, or a pipe; or live, on a terminal.

A view never ends a run: once nobody reads any more, it is silent.
"""

from __future__ import annotations

import os
from typing import Final, TextIO

from ntt_backup import events
from ntt_backup.daemon.progress import Snapshot, View
from ntt_backup.errors import SOME_FAILED

FAILURES_SHOWN: Final = 20
# In the environment as TERM.
_CANNOT_DRAW: Final = ("dumb", "unknown")


def make_view(stream: TextIO, *, quiet: bool = False) -> View:
    """Returns a live picture on a terminal, else plain lines; when quiet only what is wrong."""
    if quiet:
        return QuietView(stream)
    if not stream.isatty() or os.environ.get("TERM") in _CANNOT_DRAW:
        return PlainView(stream)
    from ntt_backup.ui.live import LiveView  # It loads rich, which a cron job never needs.

    return LiveView(stream)


class PlainView:
    """One line for each event that an operator wants in a mail; no colours, no cursor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._failures = 0

    def event(self, event: events.Event) -> None:
        """Prints the event's line, of failed blobs only the first ones."""
        line = event.line
        if isinstance(event, events.BlobFailed):
            self._failures += 1
            if self._failures == FAILURES_SHOWN + 1:
                line = "more blobs failed, see the log"
            elif self._failures > FAILURES_SHOWN:
                return
        if line is None or self._stream is None:
            return
        try:
            print(line, file=self._stream, flush=True)
        except OSError:
            self._stream = None

    def refresh(self, snapshot: Snapshot) -> None:
        """Does nothing: the event `progress` has a line."""

    def close(self) -> None:
        """Does nothing: each line is printed at once."""


class QuietView(PlainView):
    """Only what is wrong at a run's end: a mail that comes is one to be read."""

    def event(self, event: events.Event) -> None:
        """Prints the event's line where it says that the run is not well."""
        failed = isinstance(event, events.RunStop) and event.exit_code == SOME_FAILED
        if failed or isinstance(event, events.StillFailed) or event.level == "error":
            super().event(event)
