"""A fork is a child that copies this process: it runs a function of ours, not a program.

A worker as a program of its own costs 0.4 s of CPU each time, nearly all of it for loading what the
coordinator has loaded already, and an upgrade while a run lasts would mix two versions. The copy is
made of a process with one thread, and is cut off at once from what it must not share: it has its
own session, no descriptor but its pipes, no signal handler, and it ends without unwinding what lies
below it on the stack, so that no connection of the parent's is ever touched.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import IO, Final, NoReturn

from ntt_backup.process.pipeline import Child, die_with_parent, name_process

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
