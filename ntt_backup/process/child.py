"""A child process that sends messages is started, heard and killed by one set of rules.

A worker, a side job, the coordinator of one of several targets, a process that hears of runs, and
one that helps to restore are children. A child leads a session, and sends messages as lines of JSON
on its stdout. A child may print anything, hang, and die at any instant.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from ntt_backup.errors import BackupError, WorkerFailed
from ntt_backup.process.messages import Fatal, Message, ProcessEnded, decode
from ntt_backup.process.spawn import Child, Fork, wait_for, write

Report = dict[str, Any]

_LINE_BYTES: Final = 16 << 20
_END_SECONDS: Final = 5.0
_DETAIL_CHARS: Final = 2000
_STDOUT: Final = 1


class ChildProcess:
    """At most one child process at a time.

    A process that could not be started is heard of as one that ended at once.
    """

    def __init__(self) -> None:
        self._process: Child | None = None
        self._stillborn: ProcessEnded | None = None
        self._rest = b""

    @property
    def running(self) -> bool:
        """Returns whether a process was started whose end was not heard yet."""
        return self._process is not None or self._stillborn is not None

    @property
    def pid(self) -> int:
        """Returns the ID of the process; our own where there is none."""
        return os.getpid() if self._process is None else self._process.pid

    @property
    def fds(self) -> list[int]:
        """Returns the descriptors that become readable when the process says something or ends."""
        return [] if self._process is None else self._process.fds

    def begin(self, body: Callable[[], int], name: str) -> None:
        """Starts a process that runs body, see `Fork`."""
        self._rest = b""
        try:
            self._process = Fork(body, name)
        except OSError as error:
            self._stillborn = ProcessEnded(status=None, detail=error.strerror or str(error))

    def read_messages(self) -> Iterator[Message | bytes]:
        """Yields the messages of one read from the process.

        A process that writes faster than it is read must not keep others waiting. Lines that are no
        message are yielded as bytes. After the end of the process the last message is
        `ProcessEnded`.
        """
        if self._stillborn is not None:
            stillborn, self._stillborn = self._stillborn, None
            yield stillborn
        if (process := self._process) is None:
            return
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
        if ended:
            yield self._reap(process)

    def tell(self, data: bytes) -> None:
        """Writes to the stdin of the process; the end of a process is heard by reading."""
        if self._process is not None:
            with suppress(BrokenPipeError):
                write(self._process.stdin_fd, data)

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the process, if it still runs."""
        if self._process is not None and self._process.status is None:
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Kills the process and its child processes immediately. Its output can still be read."""
        if self._process is not None:
            _kill_group(self._process)

    def discard(self, signum: int = signal.SIGKILL) -> None:
        """Ends the process, and does not hear what it says.

        signum: SIGKILL, or a signal upon which the process ends within a moment.
        """
        self._stillborn = None
        if (process := self._process) is not None:
            if signum == signal.SIGKILL:
                _kill_group(process)
            else:
                self.send_signal(signum)
            self._reap(process)

    def _reap(self, process: Child) -> ProcessEnded:
        """Waits a moment for the end of the process, and kills what is left of its group."""
        process.wait(_END_SECONDS)
        _kill_group(process)
        status = process.kill()
        self._process = None
        detail = process.stderr.text[-_DETAIL_CHARS:]
        return ProcessEnded(pid=process.pid, status=status, detail=detail)


def _kill_group(process: Child) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.end()  # A copy that has only just been made leads no group yet.


def tell_parent(message: Message) -> None:
    """Sends a message to the parent, which hears it by `ChildProcess.read_messages`."""
    message.write(_STDOUT)


def run_helpers(
    bodies: Sequence[Callable[[], Iterator[Report]]],
    name: str,
    error_class: type[BackupError] = BackupError,
) -> Iterator[Report]:
    """Runs each body in a process of its own, and yields the reports that the bodies yield.

    A report is a dict that JSON can hold. A body has no descriptors of this process.

    Raises:
        BackupError: A body raised an error, raised here as error_class. The others are killed.
        WorkerFailed: A process died, or could not be started.
    """
    with ExitStack() as stack:
        helpers: list[ChildProcess] = []
        for body in bodies:
            helpers.append(ChildProcess())
            stack.callback(helpers[-1].discard)
            helpers[-1].begin(partial(_write_reports, body), name)
        while helpers:
            at_once = 0.0 if any(not one.fds for one in helpers) else None
            wait_for(reading=[fd for one in helpers for fd in one.fds], timeout=at_once)
            for helper in list(helpers):
                for message in helper.read_messages():
                    match message:
                        case bytes():
                            yield json.loads(message)
                        case Fatal():
                            raise error_class(**message.error.fields)
                        case ProcessEnded(status=0):
                            helpers.remove(helper)
                        case ProcessEnded():
                            last = message.detail.splitlines()[-1:]
                            ended = f"it ended with status {message.status}"
                            raise WorkerFailed("a helper process died", detail=(last or [ended])[0])


def _write_reports(body: Callable[[], Iterator[Report]]) -> int:
    try:
        with os.fdopen(_STDOUT, "wb", closefd=False) as output:
            for report in body():
                output.write(json.dumps(report).encode() + b"\n")
                output.flush()
    except BackupError as error:
        tell_parent(Fatal.of(error))
    return 0
