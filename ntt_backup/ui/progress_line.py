"""A long command tells how far it is: by one line on a terminal, else by a line a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self, TextIO

from ntt_backup.errors import BackupError
from ntt_backup.format import duration, printable, size

_LINE_SECONDS: Final = 60.0
_IN_PLACE_SECONDS: Final = 0.5


class ProgressLine:
    """Prints to a stream, usually stderr; nothing where it is quiet or nobody reads any more."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._in_place = stream.isatty()
        self._step = _IN_PLACE_SECONDS if self._in_place else _LINE_SECONDS
        self._next = time.monotonic() + self._step
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def show(self, text: Callable[[], str]) -> None:
        """Shows the state of the moment. Text is only asked for when it is time to show it."""
        if self._stream is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._step
            self._print(f"\r\x1b[K{text()}" if self._in_place else f"{text()}\n")
            self._open = self._in_place

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._end_line()
        self._print(f"{printable(text)}\n")

    def outage(self, error: BackupError, wait_s: float) -> None:
        """Says that the remote is away, and when it is tried again."""
        self.say(f"remote is away, again in {duration(wait_s)}: {error}")

    def _end_line(self) -> None:
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
