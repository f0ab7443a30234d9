"""Signals can be waited for, beside pipes and the clock.

A handler that acts may run between any two instructions; here handlers only note what came, and a
pipe wakes poll(2). The one exception is `time_limit`, for a call into a library that knows no
deadline.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ntt_backup.errors import Stopped


class SignalInbox:
    """Notes SIGINT, SIGTERM and SIGHUP. fd is readable after one came."""

    def __init__(self) -> None:
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stops: list[int] = []
        self._hangup = False
        self._raising = False

    @property
    def stops(self) -> int:
        return len(self._stops)

    @property
    def first_stop(self) -> int:
        """Returns the signal that asked first for the end; 0 for none."""
        return self._stops[0] if self._stops else 0

    def take_hangup(self) -> bool:
        """Returns whether SIGHUP came since the last call."""
        came, self._hangup = self._hangup, False
        return came

    def drain(self) -> None:
        """Makes fd unreadable again."""
        with suppress(BlockingIOError):
            while os.read(self.fd, 512):
                pass

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:
            self._hangup = True
        else:
            self._stops.append(signum)
            if self._raising:
                raise Stopped(signum)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raises a stop as Stopped while the context lasts: nothing is in flight."""
        self._raising = True
        try:
            if self._stops:  # it came just before
                raise Stopped(self.first_stop)
            yield
        finally:
            self._raising = False

    @contextmanager
    def installed(self) -> Iterator[SignalInbox]:
        """Handles the signals here while the context lasts, then as before."""
        ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {signum: signal.signal(signum, self._note) for signum in ours}
        old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(old_wake)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            os.close(self.fd)
            os.close(self._wake)


@contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Raises `error` in the main thread after `seconds`. Objects in use are broken then.

    The caller keeps no reference to the error: its traceback leads to the caller. Such a loop would
    keep open what was in use, such as a connection, until the next look for garbage.
    """
    errors = [error]

    def give_up(_signum: int, _frame: FrameType | None) -> None:
        raise errors.pop()

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, left)
    finally:
        signal.signal(signal.SIGALRM, before)
