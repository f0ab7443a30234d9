"""Commands of the program without its start, which takes longer than most of them do.

A process that has loaded all of the program makes a copy of itself for each command: as real a
process as any, with descriptors, signals and children of its own. This file is that process too.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Final

from ntt_backup.process.spawn import name_process

# In the environment of that process, and so of its copies.
_MARK: Final = "ACCEPTANCE_PROGRAM"
# What lists of processes call those that only make copies, and wait for them.
MAKER: Final = "ntt-maker"

Output = int | IO[str]


def mark() -> str:
    """What the environment of each copy made for this process has, besides its own."""
    return f"{_MARK}={os.getpid()}"


class Started:
    """`python -m ntt_backup ARGS`, with nothing on its stdin; as much of `Popen` as tests need."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: Output, stderr: Output
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._connection = _Server.of_all().connect()
        told = json.dumps({"args": self.args, "env": dict(env), "cwd": os.getcwd()}).encode()
        with open(os.devnull) as nothing:
            printed = [one if isinstance(one, int) else one.fileno() for one in (stdout, stderr)]
            fds = [nothing.fileno(), *printed]
            socket.send_fds(self._connection, [len(told).to_bytes(4, "big")], fds)
        self._connection.sendall(told)
        self.pid = _number(self._connection)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = _number(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # It has ended since, and its parent took note.
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


Process = Started | subprocess.Popen[str]


def run(
    args: Sequence[str],
    env: Mapping[str, str],
    timeout: float,
    stdout: Output = subprocess.PIPE,
    stderr: Output = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Such a command to its end."""
    with ExitStack() as stack:
        kept = [
            stack.enter_context(tempfile.TemporaryFile("w+")) if one == subprocess.PIPE else None
            for one in (stdout, stderr)
        ]
        started = Started(args, env, kept[0] or stdout, kept[1] or stderr)
        try:
            code = started.wait(timeout)
        finally:
            started.kill()
            started.wait()
        said = []
        for one in kept:
            said.append(None if one is None or one.seek(0) else one.read())
        return subprocess.CompletedProcess(started.args, code, *said)


@functools.cache
def share_models() -> None:
    """Has botocore read its models once for all clients of this process and of its copies: that is
    nine tenths of the work of making a client.
    """
    from botocore import session

    vars(session)["create_loader"] = functools.cache(session.create_loader)
    session.get_session().create_client(
        "s3", "us-east-1", aws_access_key_id="nobody", aws_secret_access_key="none"
    )


class _Server:
    """The process that makes the copies; it ends with this one."""

    _one: _Server | None = None

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.program", str(theirs.fileno())],
                env={**os.environ, _MARK: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    @classmethod
    def of_all(cls) -> _Server:
        cls._one = cls._one or cls()
        return cls._one

    @classmethod
    def end(cls) -> None:
        if cls._one is not None:
            cls._one._connection.close()
            cls._one._process.wait()
            cls._one = None

    def connect(self) -> socket.socket:
        """The way to a new copy."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._connection, [b"."], [theirs.fileno()])
        return ours


def pytest_unconfigure() -> None:
    _Server.end()


def _number(connection: socket.socket) -> int:
    return int.from_bytes(_exactly(connection, 4), "big", signed=True)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("the process that makes copies has ended")
        data += piece
    return data


# --- in that process


def _load() -> None:
    """Loads whatever a command may load."""
    name_process(MAKER)
    package = import_module("ntt_backup")
    for module in pkgutil.walk_packages(package.__path__, "ntt_backup."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    share_models()
    gc.freeze()


def _serve(connection: socket.socket) -> None:
    """Returns in a copy of a copy, which is to be the program: each command has a parent that
    waits for it.
    """
    while True:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not fds:
            with suppress(ChildProcessError):
                while os.wait():
                    pass
            os._exit(0)
        if os.fork() == 0:
            connection.close()
            _wait_for_one(socket.socket(fileno=fds[0]))
            return
        os.close(fds[0])


def _wait_for_one(connection: socket.socket) -> None:
    size, fds, _, _ = socket.recv_fds(connection, 4, 3)
    told = json.loads(_exactly(connection, int.from_bytes(size, "big")))
    pid = os.fork()
    if pid != 0:
        for fd in fds:
            os.close(fd)
        with suppress(OSError):
            connection.sendall(pid.to_bytes(4, "big", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            connection.sendall(code.to_bytes(4, "big", signed=True))
        os._exit(0)
    connection.close()
    name_process(Path(sys.executable).name)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    # As Python makes them for what its descriptors are.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    tempfile.tempdir = None  # That of this environment.
    # Copies must not have the same luck.
    random.seed()
    sys.argv = ["ntt-backup-remote", *told["args"]]


if __name__ == "__main__":
    _load()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from ntt_backup.__main__ import main

    main()
