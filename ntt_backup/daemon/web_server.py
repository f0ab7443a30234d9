"""The web servers of the metrics and the status page grant a client little time and few bytes.

A client has a place among few, too. Whoever reaches the port can so take neither memory nor the
service from others: where all places are taken, who has been at it for longest makes room.

Neither asks for a password. A hostile web page may have its own name lead to the address of a
server, and read it by a visitor's browser: so a request for a name that is not ours is refused.
"""

from __future__ import annotations

import io
import ipaddress
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit

MOST_CLIENTS: Final = 32
_MOST_BYTES: Final = 32768
_SECONDS: Final = 10.0


class WebServer(ThreadingMixIn, TCPServer):
    """Listens at an IP address and a port of this host; a thread for each client. names: those by
    which it may be asked for, besides its own. Raises OSError where it cannot listen.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseRequestHandler],
        names: Iterable[str] = (),
    ) -> None:
        self._loopback = ipaddress.ip_address(host).is_loopback
        self._given = names
        self._clients: dict[socket.socket, None] = {}
        self._lock = Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    @cached_property
    def _names(self) -> set[str]:
        """Returns the names of the server, in lower case. The DNS may answer slowly."""
        own = () if self._loopback else (socket.gethostname(), socket.getfqdn())
        return {"localhost", *(name.lower() for name in (*own, *self._given))}

    def is_ours(self, host: str) -> bool:
        """Returns whether a Host header names this server: by an address, or by a known name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            return ipaddress.ip_address(name).is_loopback or not self._loopback
        except ValueError:
            return name in self._names

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins to serve a client, and ends the oldest one where they are too many."""
        with self._lock:
            self._clients[request] = None
            oldest = next(iter(self._clients))
            if len(self._clients) > MOST_CLIENTS:
                del self._clients[oldest]
                with suppress(OSError):  # It has just gone.
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that went away is no trouble of ours."""


class BriefRequest(BaseHTTPRequestHandler):
    """Hears a request as long as it is a short one, comes soon, and is for this server. seconds:
    for all of it.
    """

    server: WebServer
    seconds = _SECONDS
    server_version = "ntt_backup"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Brief(self.connection, self.seconds))

    def parse_request(self) -> bool:
        """Returns whether there is a request to answer; refuses one for another name."""
        if not super().parse_request():
            return False
        if not self.server.is_ours(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "nothing is here under this name")
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no request: a client asks every few seconds."""


class _Brief(io.RawIOBase):
    """Reads a request. Raises TimeoutError for too many bytes or too much time."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._until = time.monotonic() + seconds
        self._left = _MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0 or not self._left:
            raise TimeoutError
        self._connection.settimeout(seconds)
        got = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= got
        return got
