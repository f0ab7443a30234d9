"""The processes of the demo are started and ended so that none is left, however the demo ends.

The demo starts servers and fills a directory; whenever it is stopped, all of it must go. Ctrl-C and
SIGTERM raise an exception, which unwinds to the cleaning up from anywhere, except in the few lines
that start something and note how to end it. Those are `held`: a signal that comes there is raised
at their end.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ntt_backup.errors import Stopped
from ntt_backup.process.spawn import die_with_parent

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS: Final = 0.05
_LINES_SHOWN: Final = 5
# Signals that end a process, each with the seconds that it has to end then.
ASK_FIRST: Final = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


class Interrupts:
    """Raises `Stopped` in the main thread for the first SIGINT, SIGTERM or SIGHUP; ignores more."""

    def __init__(self) -> None:
        self._depth = 0
        self._stopped: Stopped | None = None

    @contextmanager
    def installed(self) -> Iterator[ExitStack]:
        """Handles the signals while the context lasts.

        An ignored signal stays ignored (nohup).

        Yields:
            A stack for the clean-up at the end, which no signal interrupts.
        """
        wanted = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, self._handle) for signum in wanted}
        stack = ExitStack()
        try:
            try:
                yield stack
            finally:
                with self.held():
                    stack.close()
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


class Server:
    """A server of the demo: one process, which ends with ours, and whose output is in `log`."""

    def __init__(self, log: Path, interrupts: Interrupts) -> None:
        self.log = log
        self.interrupts = interrupts
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process that listens; None if the server does not run."""
        return self.process.pid if self.process is not None else None

    @property
    def last_lines(self) -> str:
        """The end of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LINES_SHOWN:])

    def start_process(
        self, argv: Sequence[str], ready: Callable[[], bool], seconds: float, **how: Any
    ) -> bool:
        """Starts the process, and returns whether the server was ready in time and still runs.

        Args:
            argv: The command line.
            ready: Returns whether the server is ready.
            seconds: The most seconds to wait.
            how: Further arguments of Popen.
        """
        # In a session of its own: Ctrl-C on the terminal is for us, who end it in order.
        how = {"preexec_fn": die_with_parent(), "start_new_session": True, **how}
        with self.interrupts.held(), self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **how
            )
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if ready():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def end_process(self, signals: Iterable[tuple[signal.Signals, float]] = ASK_FIRST) -> None:
        """Ends the process, if there is one."""
        process, self.process = self.process, None
        if process is not None:
            end(process, signals)


def end(
    process: subprocess.Popen[bytes], signals: Iterable[tuple[signal.Signals, float]] = ASK_FIRST
) -> None:
    """Ends a process by the first signal after which it ends in time."""
    for signum, seconds in signals:
        process.send_signal(signum)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return
