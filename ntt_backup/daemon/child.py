"""A child process, a worker or a side job, sends messages as lines of JSON on its stdout."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ntt_backup.process.messages import Message, decode
from ntt_backup.process.pipeline import Child, write

_LINE_BYTES: Final = 1 << 20
_END_SECONDS: Final = 5.0
_DETAIL_CHARS: Final = 2000


class EventChild:
    """A process that leads its own process group. ended: it has ended, and its output was read."""

    def __init__(self, process: Child) -> None:
        self._process = process
        self._rest = b""
        self.ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def fds(self) -> list[int]:
        """Returns the descriptors that become readable when the process says something or ends."""
        return self._process.fds

    @property
    def detail(self) -> str:
        """Returns the end of what it wrote to stderr."""
        return self._process.stderr.text[-_DETAIL_CHARS:]

    def hear(self) -> Iterator[Message | bytes]:
        """Yields the messages that have come, and as bytes the lines that are none, of one read: a
        child that talks faster than it is heard must not keep others waiting.
        """
        process = self._process
        process.drain_stderr()
        # Asked before reading: what it wrote before it ended is then read below.
        ended = process.status is not None
        while (data := process.read()) is not None:
            if not data:
                ended = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            for line in lines:
                yield decode(line) or line
            if not ended:
                break
        self.ended = ended

    def tell(self, data: bytes) -> None:
        """Writes to its stdin; a process that has ended is heard of by `hear`."""
        with suppress(BrokenPipeError):
            write(self._process.stdin_fd, data)

    def signal(self, signum: int) -> None:
        """Sends it a signal, if it still runs."""
        if self._process.status is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Ends it, and all that it started, now; what it wrote can still be heard."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.end()  # A copy that has only just been made leads no group yet.

    def reap(self) -> int:
        """Waits a moment for its end, kills what is left of its group, and returns its status."""
        self._process.wait(_END_SECONDS)
        self.kill()
        return self._process.kill()
