"""An ssh server runs inside this process, for machines without OpenSSH's sshd.

It does what sshd does for `ssh host command`, and nothing else: it lets one public key in, runs
each command under `/bin/sh -c`, and passes on its three streams and its exit status. It listens on
loopback. It is not for production: whoever holds the key acts as the user of this process.

Each command has four threads: three copy one stream each, one supervises. A copy reads on only
after it has written, which slows the sender down; so memory is bounded by WINDOW_BYTES a command.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_SUCCEEDED,
)

from ntt_backup.blobdir.descriptors import write_all
from ntt_backup.demo.sshd import LOOPBACK

PACKET_BYTES: Final = 1 << 17
WINDOW_BYTES: Final = 4 << 20
_POLL_S: Final = 0.2
_JOIN_S: Final = 10.0
_NOT_STARTED: Final = 126  # as a shell says it of what it cannot execute

# Clients go away all the time; without a handler Python prints that to stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class ParamikoServer(paramiko.ServerInterface):
    """Serves from the moment it is made until `close`.

    host_key is a private key file without a passphrase, authorized_key a public key as in
    authorized_keys (`ssh-ed25519 AAAA...`). Any user name is accepted: commands always run as the
    user of this process. Raises paramiko.SSHException or ValueError for a bad host key.
    """

    def __init__(self, host_key: Path, authorized_key: str) -> None:
        self._host_key = paramiko.PKey.from_path(host_key)
        self._authorized_key = authorized_key.split()[:2]
        self._closing = threading.Event()
        self._transports: list[paramiko.Transport] = []
        self._sessions: list[_Session] = []
        self._listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="ssh-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Takes no more connections, drops those that are open, and ends their commands."""
        self._closing.set()
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for transport in self._transports:
            transport.close()
        for session in self._sessions:
            session.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # `close` has shut it down, or no descriptors are left for now
                self._closing.wait(_POLL_S)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = paramiko.Transport(
                connection, default_window_size=WINDOW_BYTES, default_max_packet_size=PACKET_BYTES
            )
            transport.add_server_key(self._host_key)
            # With an event this returns at once; a failed handshake only ends that connection.
            transport.start_server(event=threading.Event(), server=self)
            self._transports = [*filter(paramiko.Transport.is_alive, self._transports), transport]

    # What paramiko asks when a client wants something.

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = [key.get_name(), key.get_base64()] == self._authorized_key
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED if kind == "session" else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        session = _Session(channel, command)
        session.start()
        self._sessions.append(session)
        return True


class _Session(threading.Thread):
    """One command and its channel, from the exec request to the exit status."""

    def __init__(self, channel: paramiko.Channel, command: bytes) -> None:
        super().__init__(name="ssh-session", daemon=True)
        self._channel = channel
        self._command = command

    def run(self) -> None:
        environment = _environment()
        home = environment["HOME"]
        # The client may go away at any moment.
        with suppress(OSError, EOFError):
            try:
                process = subprocess.Popen(
                    [b"/bin/sh", b"-c", self._command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    cwd=home if Path(home).is_dir() else "/",
                    env=environment,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # too long, no processes left; a NUL in it
                self._channel.sendall_stderr(f"{error}\n".encode())
                self._channel.send_exit_status(_NOT_STARTED)
            else:
                _start(self._feed, process.stdin)
                self._await_end(
                    process,
                    _start(self._drain, process.stdout, self._channel.sendall),
                    _start(self._drain, process.stderr, self._channel.sendall_stderr),
                )
        with suppress(OSError, EOFError):
            self._channel.close()

    def _await_end(self, process: subprocess.Popen[bytes], *outputs: threading.Thread) -> None:
        """Sends the exit status once outputs and command have ended; ends them if the client goes.

        The command leads a process group and is reaped last, so no other group can have its number
        when it is killed. A command that signal N killed answers 128 + N.
        """
        for output in outputs:
            while output.is_alive() and not self._channel.closed:
                output.join(_POLL_S)
        while not self._channel.closed:
            try:
                status = process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            self._channel.send_exit_status(status if status >= 0 else 128 - status)
            return
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _feed(self, stdin: IO[bytes]) -> None:
        with stdin, suppress(BrokenPipeError):  # the command may read less than it is sent
            while data := self._channel.recv(PACKET_BYTES):
                write_all(stdin.fileno(), memoryview(data))

    @staticmethod
    def _drain(output: IO[bytes], send: Callable[[bytes], object]) -> None:
        # Where the client goes away, _await_end ends the command.
        with output, suppress(OSError, EOFError):
            while data := os.read(output.fileno(), PACKET_BYTES):
                send(data)


def _start(copy: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=copy, args=args, name="ssh-copy", daemon=True)
    thread.start()
    return thread


def _environment() -> dict[str, str]:
    """Returns the few variables of a login, and of our own only PATH."""
    user = pwd.getpwuid(os.geteuid())
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "SHELL": user.pw_shell or "/bin/sh",
    }
