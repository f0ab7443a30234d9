"""systemd is told of a run: that it can begin, what it does, that it lives, that it ends.

The watchdog is fed by the event loop, but only while the run makes progress, or waits for something
that is known: an event loop that turns while all workers hang is no sign of life, and only a new
start ends that. Nothing is told where no systemd listens ($NOTIFY_SOCKET).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

WATCHDOG_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 1.0


def notify(text: str) -> None:
    """Tells systemd something, as sd_notify(3) does."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, suppress(OSError):
        systemd.settimeout(_PATIENCE_SECONDS)
        systemd.sendto(text.encode(), path.replace("@", "\0", 1) if path[0] == "@" else path)


class Systemd:
    """Sends the state of one run to systemd. send: sends a text, as `notify` does."""

    def __init__(self, send: Callable[[str], None] = notify) -> None:
        self._tell = send
        self._ready = False
        self._next_watchdog = 0.0
        self._status = ""

    def ready(self) -> None:
        """Says, once, that the start is over."""
        if not self._ready:
            self._ready = True
            self._tell("READY=1")

    def status(self, text: str) -> None:
        """Shows one line in `systemctl status`."""
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={text}")

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Tells systemd that the settings are read again while the context lasts.

        Before the start is complete, nothing is told: the start must not seem complete.
        """
        if self._ready:
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self._tell(f"RELOADING=1\nMONOTONIC_USEC={now}")
        yield
        if self._ready:
            self._tell("READY=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def watchdog(self, *, alive: bool) -> bool:
        """Notifies the watchdog every few seconds while `alive`. Returns whether a status is due.

        More messages would fill the socket of systemd, and block the run.
        """
        now = time.monotonic()
        if due := now >= self._next_watchdog:
            self._next_watchdog = now + WATCHDOG_SECONDS
            if alive:
                self._tell("WATCHDOG=1")
        return due
