"""How far a bench has got: a bar on a terminal, a line a step everywhere else, both on stderr.

What was measured goes to stdout at the end, so that it can be piped. There is no thread: a bench
calls `step` when one is done, and `tick` while it waits.
"""

from __future__ import annotations

import io
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ntt_backup.format import printable


class StepView:
    """Shows steps on stream. A stream that goes away ends no bench; the view falls silent."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream: TextIO | None = None if quiet else stream
        self._started = time.monotonic()
        console = Console(file=stream, highlight=False, quiet=quiet)
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(
                *columns, TimeElapsedColumn(), console=console, auto_refresh=False, transient=True
            )
            self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, steps: int) -> None:
        """So many steps are to come."""
        if self._bar is not None:
            self._bar.reset(self._task, total=steps)

    def doing(self, text: str) -> None:
        """What is done now; shown where it can be taken back."""
        if self._bar is not None:
            self._bar.update(self._task, description=printable(text))
            self._bar.refresh()

    def step(self, text: str) -> None:
        """A step is done, and this came of it."""
        if self._bar is not None:
            self._bar.advance(self._task)
        self.say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        line = printable(text)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, soft_wrap=True)
            return
        if self._stream is None:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        try:
            print(f"[{minutes:2d}:{seconds:02d}] {line}", file=self._stream, flush=True)
        except OSError:
            self._stream = None

    def tick(self) -> None:
        """Time goes by."""
        if self._bar is not None:
            self._bar.refresh()
