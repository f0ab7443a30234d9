"""A connection by SFTP, over which several requests of several threads are under way at once."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Final

from paramiko import Message, SFTPClient, SFTPError, SSHException
from paramiko import sftp as fx

from ntt_backup.client.session_spec import SessionSpec
from ntt_backup.client.transport import SFTP
from ntt_backup.errors import ProtocolViolation, RemoteDenied, RemoteUnreachable

# The requests that are not answered. Of 32 KiB each, more than 100 MB/s carry in 30 ms.
_AHEAD: Final = 128
_GREETING_BYTES: Final = 4096


class SftpConnection:
    """A connection by the ssh of this machine, which asks for the subsystem `sftp`.

    paramiko speaks version 3 of the protocol over the input and the output of that ssh, so each
    wait has a limit, the pace is kept, and what ssh says explains a failure. Several requests may
    be under way, of several threads: a thread has the connection for one request, or one answer.

    on_wait is called while an answer is awaited, and may raise.

    Attributes:
        sent: The number of bytes that were sent.
        heard: The number of bytes that have come.
        asked: The requests that were sent ahead and are not answered.
        extensions: What the server says of the extensions that it has.

    Raises:
        BackupError: The login fails, or the account has no sftp.
    """

    def __init__(self, spec: SessionSpec, on_wait: Callable[[], None]) -> None:
        self._spec = spec
        self._lock = RLock()
        self._came = bytearray()
        self._patience = spec.transport.connect_timeout
        self.sent = self.heard = 0
        self.asked: dict[int, Answers] = {}
        self.extensions = b""
        self._on_wait = on_wait
        self.channel = spec.channel(SFTP)
        self.channel.on_bytes = self._count
        try:
            # Its types lack the methods by which requests are sent ahead.
            self.client: Any = SFTPClient(self)  # type: ignore[arg-type]
        except (SFTPError, SSHException) as error:
            self.channel.abort()
            said = bytes(self.extensions + self._came)[:200]
            raise RemoteDenied(
                "the remote does not speak sftp",
                detail=f"it said {said!r}",
                hint="make its startup files silent for shells that are not interactive; and use a"
                " key without a forced command, or with internal-sftp",
            ) from error
        except BaseException:
            self.channel.abort()
            raise
        self.channel.greeted = True
        self._patience = spec.run.receipt_timeout

    def ask(self, kind: int, *values: object) -> Message:
        """Returns the answer to a request; at the end of a listing one without names.

        Raises:
            OSError: The server refuses.
        """
        with self.alone() as client:
            try:
                message: Message = client._request(kind, *values)[1]
            except EOFError as error:
                if kind != fx.CMD_READDIR:
                    raise OSError("the server tells of an end of file") from error
                message = Message(bytes(4))
            return message

    def poll(self, timeout: float = 0.0) -> None:
        """Waits for an answer. Raises where the connection has ended."""
        with self.alone():
            self.channel.hear(self._came.extend, timeout)

    @contextmanager
    def alone(self) -> Iterator[Any]:
        """Gives this thread the connection. Any error but an answer of the server ends it."""
        with self._lock:
            if self.channel.ended:
                raise RemoteUnreachable("the connection to the remote was lost")
            try:
                yield self.client
            except OSError:
                raise
            except (SSHException, SFTPError, ValueError, struct.error) as error:
                self.channel.abort()
                raise ProtocolViolation(detail=str(error)[:200]) from error
            except BaseException:
                self.channel.abort()
                raise

    # --- what paramiko takes for a socket ---------------------------------------------------------

    def send(self, data: bytes) -> int:
        patience = self._spec.run.stall_timeout
        self.channel.send(memoryview(data), self._came.extend, patience=patience)
        return len(data)

    def recv(self, count: int) -> bytes:
        asked = time.monotonic()
        while not self._came:
            self._spec.cancelled()
            if self.channel.is_silent(asked, self._patience, time.monotonic()):
                detail = f"nothing came for {self._patience:.0f} s"
                raise RemoteUnreachable("the remote does not answer", detail=detail)
            self.channel.hear(self._came.extend, 1.0)
        data = bytes(self._came[:count])
        del self._came[:count]
        self.heard += len(data)
        if self.heard <= _GREETING_BYTES:
            self.extensions += data
        return data

    def get_name(self) -> str:
        return "ssh"

    def _count(self, sent: int) -> None:
        self.sent += sent
        self._on_wait()


class Answers:
    """Requests that are sent ahead, and the answers to them.

    Attributes:
        data: The bytes that were read, by the number of the request, in the order of the requests;
            b"" at the end of the file.
        error: The first error among the answers.
    """

    def __init__(self, connection: SftpConnection) -> None:
        self._connection = connection
        self._waiting: set[int] = set()
        self.data: dict[int, bytes] = {}
        self.error: OSError | None = None

    def ask(self, kind: int, *values: object) -> None:
        """Sends a request; waits for earlier answers where too many are missing."""
        with self._connection.alone() as client:
            while len(self._connection.asked) >= _AHEAD:
                client._read_response()
            number = client._async_request(self, kind, *values)
            self._connection.asked[number] = self  # paramiko keeps a weak reference.
            self._waiting.add(number)
            self.data[number] = b""

    def settle(self) -> None:
        """Returns when all requests are answered. Raises the first error among the answers."""
        while self._waiting:
            with self._connection.alone() as client:
                if self._waiting:
                    client._read_response()
        if self.error is not None:
            raise self.error

    def _async_response(self, kind: int, message: Message, number: int) -> None:
        """Is called by paramiko with an answer."""
        self._connection.asked.pop(number)
        self._waiting.remove(number)
        if kind == fx.CMD_DATA:
            self.data[number] = message.get_binary()
        elif kind != fx.CMD_STATUS:
            raise SFTPError("Expected data")
        else:
            try:
                self._connection.client._convert_status(message)
                del self.data[number]
            except EOFError:
                return
            except OSError as error:
                self.error = self.error or error
