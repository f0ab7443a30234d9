"""The web servers of the metrics and the status page grant a client little time and few bytes.

A client has a place among few, too. Whoever reaches the port can so take neither memory nor the
service from others: where all places are taken, who has been at it for longest makes room.
"""

from __future__ import annotations

import io
import socket
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from threading import Lock
from typing import Any, Final

MOST_CLIENTS: Final = 32
_MOST_BYTES: Final = 32768
_SECONDS: Final = 10.0


class WebServer(ThreadingMixIn, TCPServer):
    """Listens at an IP address and a port of this host; a thread for each client. Raises OSError
    where it cannot listen.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseRequestHandler]) -> None:
        self._clients: dict[socket.socket, None] = {}
        self._lock = Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

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
    """Hears a request as long as it is a short one, and comes soon. seconds: for all of it."""

    seconds = _SECONDS
    server_version = "ntt_backup"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Brief(self.connection, self.seconds))

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no request: a client asks every few seconds."""


class _Brief(io.RawIOBase):
    """What a client says. Raises TimeoutError for more than a request has, or needs."""

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
