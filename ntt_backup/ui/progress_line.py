"""How far a long command is: one line kept up to date on a terminal, a line a minute elsewhere.

For the commands that are no runs and have no log of their own. On stderr, so that what they print
at the end can be piped. Where nobody reads any more, it falls silent.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final, TextIO

from ntt_backup.errors import BackupError
from ntt_backup.format import duration, printable

_LINE_SECONDS: Final = 60.0
_IN_PLACE_SECONDS: Final = 0.5


class Meter:
    """quiet: say nothing at all."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._step = _IN_PLACE_SECONDS if self._in_place else _LINE_SECONDS
        self._next = time.monotonic() + self._step
        self._open = False

    @property
    def due(self) -> bool:
        """Whether `show` would say anything now."""
        return self._stream is not None and time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """The state of the moment."""
        if self.due:
            self._next = time.monotonic() + self._step
            self._print(f"\r\x1b[K{text}" if self._in_place else f"{text}\n")
            self._open = self._in_place

    def say(self, text: str) -> None:
        """A line that stays."""
        self.close()
        self._print(f"{printable(text)}\n")

    def outage(self, error: BackupError, wait_s: float) -> None:
        """The remote is away, and waited for."""
        self.say(f"remote is away, again in {duration(wait_s)}: {error}")

    def close(self) -> None:
        """End the line that was kept up to date."""
        if self._open:
            self._print("\n")
        self._open = False

    def _print(self, text: str) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.write(text)
                self._stream.flush()
