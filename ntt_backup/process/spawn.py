"""Starts child processes: programs and forks, each with pipes, a status and a bounded stderr.

A pipeline of a shell does not tell which member failed, and with which message. So members are
started one by one and joined by our own pipes. The exit status of each member is checked, and the
end of its stderr is kept. There is one thread and poll(2): a worker waits for the link, tar, the
remote's answer and the coordinator at the same time, and each wait has a deadline.

Child processes die with this process: Linux sends them SIGKILL when the process that started them
ends (PR_SET_PDEATHSIG), so that no tar or ssh outlives a worker that was killed with -9.

A fork runs a function of ours. A worker as a program of its own costs 0.4 s of CPU each time,
nearly all of it for loading what the coordinator has loaded already, and an upgrade while a run
lasts would mix two versions. The copy is made of a process with one thread, and is cut off at once
from what it must not share: it has its own session, no descriptor but its pipes, no signal handler,
and it ends without unwinding what lies below it on the stack, so that no connection of the parent's
is ever touched.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, Final, NoReturn

from ntt_backup.errors import SourceError

PIPE_BYTES: Final = 1 << 20
READ_BYTES: Final = 1 << 18
TAIL_BYTES: Final = 8192

_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED: Final = (*_STOPS, signal.SIGALRM)
_MOST_FDS: Final = 1 << 20
_VERSION_SECONDS: Final = 5.0
_READS_AT_ONCE: Final = 8
_FIRST_NAP_SECONDS: Final = 0.001
_LONGEST_NAP_SECONDS: Final = 0.05
_PACKAGES: Final = {"ssh": "openssh-client"}


class Tail:
    """The last TAIL_BYTES of the stderr of a process. size: the bytes that were written in all."""

    def __init__(self) -> None:
        self._data = b""
        self.size = 0

    def add(self, data: bytes) -> None:
        self._data = (self._data + data)[-TAIL_BYTES:]
        self.size += len(data)

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "backslashreplace").strip()


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns a preexec_fn that ties the life of a new process to the thread that starts it.

    The kernel sends signum to the process when that thread ends.
    """
    parent = os.getpid()

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        # The parent may have died between fork and prctl; then there will be no signal.
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def name_process(name: str) -> None:
    """Sets the name of this process in lists of processes, which show 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class Child:
    """A running subprocess with pipes that never block, a bounded stderr, and an exit status.

    The subprocess leads a session of its own: a Ctrl-C at the terminal is handled by this process,
    and would look like an outage.

    Args:
        argv: The arguments of execvp.
        stdin: A descriptor; None for a pipe (`stdin_fd`).
        env: The environment; None for the environment of this process.
        capable: Whether the program gets the capabilities that systemd has given to this process,
            such as to read every file. Others, which talk to strangers, do without.
        how: Further arguments of Popen, such as the user that the program runs as.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: int | None = None,
        env: Mapping[str, str] | None = None,
        capable: bool = False,
        **how: Any,
    ) -> None:
        die_with_us = die_with_parent()
        # Python runs callbacks around a fork, and drops exceptions of signal handlers in them.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)

        def prepare() -> None:
            die_with_us()
            if not capable:
                _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

        try:
            process = subprocess.Popen(
                tuple(argv),
                stdin=subprocess.PIPE if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                bufsize=0,
                start_new_session=True,
                preexec_fn=prepare,
                **how,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self._adopt(process)

    def _adopt(self, process: subprocess.Popen[bytes] | _Copy) -> None:
        self.stderr = Tail()
        self._process = process
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
        for data_pipe in (self._process.stdin, self._process.stdout):
            if data_pipe is not None:
                with suppress(PermissionError):  # The user's quota of pipe buffers is used up.
                    # With 64 KiB tar and ssh run in turns, with 1 MiB at the same time.
                    fcntl.fcntl(data_pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def _pipes(self) -> Iterable[IO[bytes]]:
        process = self._process
        return [p for p in (process.stdin, process.stdout, process.stderr) if p is not None]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin_fd(self) -> int:
        return _open_fd(self._process.stdin)

    @property
    def stdout_fd(self) -> int:
        return _open_fd(self._process.stdout)

    @property
    def stderr_fd(self) -> int:
        """The descriptor of stderr; -1 after its end."""
        return _open_fd(self._process.stderr)

    @property
    def fds(self) -> list[int]:
        """The open descriptors of stdout and stderr."""
        return [fd for fd in (self.stdout_fd, self.stderr_fd) if fd >= 0]

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def read(self, limit: int = READ_BYTES) -> bytes | None:
        """Returns the data of stdout; b"" at its end, None if there is none yet."""
        return _read(self.stdout_fd, limit)

    def drain_stderr(self) -> None:
        """Reads a bounded part of the data of stderr, and closes stderr at its end."""
        for _ in range(_READS_AT_ONCE):
            data = _read(self.stderr_fd, READ_BYTES) if self.stderr_fd >= 0 else None
            if data is None:
                return
            if not data and self._process.stderr is not None:
                self._process.stderr.close()
                return
            self.stderr.add(data)

    def output(self, timeout: float) -> bytes:
        """Returns the data of stdout up to its end, or within timeout seconds."""
        said = bytearray()
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            wait_for(reading=self.fds, timeout=left)
            self.drain_stderr()
            data = self.read()
            if data == b"":
                break
            said += data or b""
        self.wait(max(0.0, deadline - time.monotonic()))
        return bytes(said)

    def close_stdin(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def wait(self, timeout: float) -> int | None:
        """Waits some seconds for the end, and returns the exit status; None while it runs.

        stdout and stderr are read meanwhile, so that the process never waits for a reader.
        """
        deadline = time.monotonic() + timeout
        nap = _FIRST_NAP_SECONDS
        while self.status is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # The pipes are closed shortly before the process has ended.
            ready = wait_for(reading=self.fds, timeout=min(left, nap))
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
            if self.stdout_fd in ready and self.read() == b"" and self._process.stdout is not None:
                self._process.stdout.close()
            self.drain_stderr()
        self.drain_stderr()
        return self.status

    def end(self) -> None:
        """Kills the process and its session. The output can still be read."""
        if self.status is None:
            self._process.kill()
            with suppress(ProcessLookupError):  # A fork that leads no session yet.
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int:
        """Kills the process, closes its pipes, and returns the exit status."""
        self.end()
        self.drain_stderr()
        return self.release()

    def release(self) -> int:
        """Closes the pipes, waits for the end of the process, and returns the exit status."""
        for pipe in self._pipes():
            pipe.close()
        return self._process.wait()


class Fork(Child):
    """A copy of this process that leads a session of its own, see `Child`. Raises OSError.

    Args:
        body: The function that the copy runs. Its result is the exit status, 1 where it raises.
        name: The process name in lists of processes, at most 15 bytes.
        stays: Whether the copy outlives this process. The end of its stdin tells it that this
            process has ended.
    """

    def __init__(self, body: Callable[[], int], name: str, *, stays: bool = False) -> None:
        self._adopt(_Copy(body, name, stays=stays))


class _Copy:
    """The part of `subprocess.Popen` that a `Child` uses, for a copy."""

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


def start(
    argv: Sequence[str],
    *,
    stdin: int | None = None,
    env: Mapping[str, str] | None = None,
    capable: bool = False,
    **how: Any,
) -> Child:
    """Starts a program, as `Child`.

    Raises:
        SourceError: The program is missing, or cannot be started.
    """
    try:
        return Child(argv, stdin=stdin, env=env, capable=capable, **how)
    except FileNotFoundError as error:
        package = _PACKAGES.get(argv[0], argv[0])
        raise SourceError(
            f"{argv[0]} is not installed on this machine", hint=f"apt-get install {package}"
        ) from error
    except OSError as error:
        raise SourceError(
            f"{argv[0]} cannot be started on this machine", detail=error.strerror or str(error)
        ) from error


def _open_fd(pipe: IO[bytes] | None) -> int:
    return -1 if pipe is None or pipe.closed else pipe.fileno()


def _read(fd: int, limit: int) -> bytes | None:
    try:
        return os.read(fd, limit)
    except BlockingIOError:
        return None


def write(fd: int, data: bytes | memoryview) -> int:
    """Writes to a pipe; returns the bytes written, 0 for a full pipe. Raises BrokenPipeError."""
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0


def wait_for(
    *, reading: Iterable[int] = (), writing: Iterable[int] = (), timeout: float | None
) -> frozenset[int]:
    """Returns the descriptors that are ready, at their end or broken within timeout seconds."""
    poller = select.poll()
    events: dict[int, int] = {}
    for fd in reading:
        events[fd] = events.get(fd, 0) | select.POLLIN
    for fd in writing:
        events[fd] = events.get(fd, 0) | select.POLLOUT
    for fd, mask in events.items():
        poller.register(fd, mask)
    ready = poller.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
    return frozenset(fd for fd, _ in ready)


def version_of(argv: Sequence[str]) -> str:
    """Returns the first line of the output of a program, or "". Raises SourceError."""
    return output_of(argv, timeout=_VERSION_SECONDS).partition("\n")[0]


def output_of(argv: Sequence[str], timeout: float) -> str:
    """Returns the output of a program: stdout, or else stderr. Raises SourceError."""
    _, said, errors = run(argv, timeout)
    return said or errors


def run(argv: Sequence[str], timeout: float, **how: Any) -> tuple[int, str, str]:
    """Returns the exit status, stdout and stderr of a program, which is killed after a time.

    Args:
        argv: The program and its arguments.
        timeout: Seconds.
        how: Further arguments of `start`.

    Raises:
        SourceError: The program is missing, or cannot be started.
    """
    child = start(argv, **how)
    child.close_stdin()
    try:
        said = child.output(timeout)
    finally:
        status = child.kill()
    return status, said.decode("utf-8", "replace").strip(), child.stderr.text
