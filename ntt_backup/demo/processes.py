"""Ctrl-C and SIGTERM raise an exception, but never between starting a process and noting it.

The demo starts servers and fills a directory; whenever it is stopped, all of it must go. An
exception out of a signal handler unwinds to the cleaning up from anywhere, except in the few lines
that start something and note how to end it. Those are `held`: a signal that comes there is raised
at their end.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from ntt_backup.errors import Stopped

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Raises `Stopped` in the main thread for the first SIGINT, SIGTERM or SIGHUP; ignores more."""

    def __init__(self) -> None:
        self._depth = 0
        self._stopped: Stopped | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals while the context lasts; an ignored one stays ignored (nohup)."""
        wanted = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, self._handle) for signum in wanted}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises nothing inside; where a signal has come by the end, or before, raises there."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        # Also for a signal from before: Python drops what is raised in some of its callbacks.
        if self._stopped is not None and not self._depth:
            raise self._stopped

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self._stopped is None:
            self._stopped = Stopped(signum)
            if not self._depth:
                raise self._stopped
