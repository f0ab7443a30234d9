"""The pipes of a worker to the coordinator: its messages go out, the word to stop comes in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from ntt_backup.process.messages import Message, Tick
from ntt_backup.process.spawn import wait_for

# Ends a wait; every other word asks for the end.
NOW: Final = b"now\n"

_TICK_SECONDS: Final = 0.5
# The time between two signs of life to the catalog in a long wait.
_SIGN_SECONDS: Final = 10.0


class EventPipe:
    """A worker's end of its stdin and stdout. A worker that sends nothing counts as stalled, so
    `state` and `sent` are signs of life, too; on_tick is called with each that is passed on.
    """

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stopping = False
        self.hurried = False
        self._state = ""
        self._sent = 0
        self._content = 0
        self._ticked = 0.0
        self.on_tick: Callable[[], None] = lambda: None

    @property
    def fd(self) -> int:
        """Returns the descriptor that becomes readable when the coordinator asks for the end; then
        -1.
        """
        return -1 if self._stopping else self._stdin

    @property
    def stopping(self) -> bool:
        """Returns whether the coordinator has asked for the end, or is dead."""
        while not self._stopping and wait_for(reading=[self._stdin], timeout=0):
            if os.read(self._stdin, len(NOW)) == NOW:
                self.hurried = True
            else:
                self._stopping = True  # It wrote `stop`, or the pipe is closed.
        return self._stopping

    def take_hurry(self) -> bool:
        """Returns whether the coordinator has asked to look for work at once, since the last
        call.
        """
        hurried, self.hurried = self.hurried, False
        return hurried

    def emit(self, message: Message) -> None:
        """Sends a message to the coordinator."""
        message.write(self._stdout)

    def state(self, state: str, quiet: float = 0.0) -> None:
        """Says what the worker is doing, and that it may say nothing for quiet seconds."""
        changed, self._state = state != self._state, state
        now = time.monotonic()
        if changed or max(quiet, now - self._ticked) >= _TICK_SECONDS:
            self._tick(now, quiet)

    def sent(self, count: int) -> None:
        """Counts bytes on the link, also none, and says so now and then."""
        self._sent += count
        now = time.monotonic()
        if now - self._ticked >= _TICK_SECONDS:
            self._tick(now)

    def carried(self, count: int) -> None:
        """Counts content that was sent; below zero for content that has to be sent again."""
        self._content += count

    def _tick(self, now: float, quiet: float = 0.0) -> None:
        self._ticked = now
        # What was sent before the work counts when that begins.
        content = self._content if self._state else 0
        self.emit(Tick(state=self._state, sent=self._sent, content=content, quiet=quiet))
        self._sent = 0
        self._content -= content
        self.on_tick()


def pause(
    pipe: EventPipe,
    seconds: float,
    state: str,
    *fds: int,
    heard: Callable[[], bool] = lambda: False,
) -> None:
    """Waits until the coordinator asks for the end or for a look, one of fds is readable, heard
    returns True, or time is up.
    """
    until = time.monotonic() + max(0.0, seconds)
    watched = [fd for fd in (pipe.fd, *fds) if fd >= 0]
    while not pipe.stopping:
        wait_s = min(_SIGN_SECONDS, max(0.0, until - time.monotonic()))
        pipe.state(state, wait_s)
        # What comes with the answer to a sign of life does not make the socket readable.
        if pipe.hurried or heard() or not wait_s or wait_for(reading=watched, timeout=wait_s):
            break
