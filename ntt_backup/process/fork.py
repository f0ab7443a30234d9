"""A fork is a child that copies this process: it runs a function of ours, not a program.

A worker as a program of its own costs 0.4 s of CPU each time, nearly all of it for loading what the
coordinator has loaded already, and an upgrade while a run lasts would mix two versions. The copy is
made of a process with one thread, and is cut off at once from what it must not share: it has its
own session, no descriptor but its pipes, no signal handler, and it ends without unwinding what lies
below it on the stack, so that no connection of the parent's is ever touched.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO, Any, Final, NoReturn

from ntt_backup.errors import BackupError, WorkerFailed
from ntt_backup.process.pipeline import Child, die_with_parent, name_process, wait_for

Report = dict[str, Any]

_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
_MOST_FDS: Final = 1 << 20


class Fork(Child):
    """A copy of this process that leads a session of its own; see `pipeline.Child`.

    Args:
        body: The function that the copy runs. Its result is the exit status, 1 where it raises.
        name: The process name in lists of processes, at most 15 bytes.
        stays: Whether the copy outlives this process. The end of its stdin tells it that this
            process has ended.

    Raises:
        OSError: The copy cannot be made.
    """

    def __init__(self, body: Callable[[], int], name: str, *, stays: bool = False) -> None:
        self._adopt(_Copy(body, name, stays=stays))


class _Copy:
    """Implements `pipeline.Process`."""

    def __init__(self, body: Callable[[], int], name: str, *, stays: bool) -> None:
        if threading.active_count() > 1:
            raise OSError("a process with several threads cannot be copied")
        prepare = None if stays else die_with_parent()
        with ExitStack() as otherwise:
            pipes: list[int] = []
            for _ in range(3):
                for fd in os.pipe():
                    otherwise.callback(os.close, fd)
                    pipes.append(fd)
            theirs = (pipes[0], pipes[3], pipes[5])
            held = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    _run_child(prepare, body, name, theirs, held)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
            otherwise.pop_all()
        for fd in theirs:
            os.close(fd)
        self.stdin: IO[bytes] = os.fdopen(pipes[1], "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(pipes[2], "rb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(pipes[4], "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._reap(os.WNOHANG)
        return self.returncode

    def wait(self) -> int:
        self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)


def _run_child(
    prepare: Callable[[], None] | None,
    body: Callable[[], int],
    name: str,
    ends: tuple[int, int, int],
    held: Iterable[int],
) -> NoReturn:
    """Runs body in the child, and ends the process."""
    status = 1
    try:
        if prepare is not None:
            prepare()
        # The existing objects belong to the parent: they are neither finalized nor traversed.
        gc.freeze()
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in _HANDLED:
            signal.signal(signum, signal.SIG_DFL)
        for fd, end in enumerate(ends):
            os.dup2(end, fd)
        os.closerange(len(ends), _MOST_FDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        name_process(name)
        status = body()
    except BaseException:  # noqa: BLE001 - nothing may get past this frame
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


def run_helpers(
    bodies: Sequence[Callable[[], Iterator[Report]]],
    name: str,
    error_class: type[BackupError] = BackupError,
) -> Iterator[Report]:
    """Runs each body in a process of its own, and yields the reports that the bodies yield.

    Args:
        bodies: The functions to run. A report is a dict that JSON can hold and is not empty. A
            body has no descriptors of this process.
        name: The name of the processes, see `Fork`.
        error_class: The class of the error that is raised for an error of a body.

    Raises:
        BackupError: A body raised an error. The other processes are killed.
        WorkerFailed: A process died.
    """
    with ExitStack() as stack:
        helpers: list[_Helper] = []
        for body in bodies:
            helper = _Helper(partial(_write_reports, body), name)
            stack.callback(helper.release)
            stack.callback(helper.kill)
            helpers.append(helper)
        while helpers:
            wait_for(reading=[fd for one in helpers for fd in one.fds], timeout=None)
            for helper in list(helpers):
                for report in helper.read_reports():
                    if "message" in report:
                        raise error_class(**report)
                    if report:
                        yield report
                    else:
                        helpers.remove(helper)


class _Helper(Fork):
    """A process that writes each report as a line of JSON, and an empty report at its end."""

    _unfinished = b""

    def read_reports(self) -> Iterator[Report]:
        """Yields the reports that have arrived."""
        self.drain_stderr()
        data = self.read()
        if data == b"":
            status = self.wait(1.0)
            last = self.stderr.text.splitlines()[-1:] or [f"it ended with status {status}"]
            raise WorkerFailed("a helper process died", detail=last[0])
        *lines, self._unfinished = (self._unfinished + (data or b"")).split(b"\n")
        yield from map(json.loads, lines)


def _write_reports(body: Callable[[], Iterator[Report]]) -> int:
    with os.fdopen(1, "wb", closefd=False) as output:
        last: Report = {}
        try:
            for report in body():
                output.write(json.dumps(report).encode() + b"\n")
                output.flush()
        except BackupError as error:
            last = error.fields
        output.write(json.dumps(last).encode() + b"\n")
    return 0
