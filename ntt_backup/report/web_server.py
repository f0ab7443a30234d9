"""The web servers of the metrics and the status page are read, and grant a client little.

A client has little time, few bytes, and a place among few. Whoever reaches the port can so take
neither memory nor the service from others: where all places are taken, the oldest makes room.

Neither asks for a password. A hostile web page may have its own name lead to the address of a
server, and read it by a visitor's browser: so a request for a name that is not ours is refused. By
default only this host sees the page, which is read with GET and HEAD; nothing else is answered.

One thread, the main one, reads and draws the page; those of the requests wait for it, and share
what it drew for a second. So a hundred viewers cost as much as one, nobody costs nothing, and no
request waits long for a catalog that hangs.
"""

from __future__ import annotations

import io
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from threading import Condition, Lock, Thread
from typing import Any, Final
from urllib.parse import urlsplit

from ntt_backup.config.values import address_of, is_loopback
from ntt_backup.errors import ConfigError

MOST_CLIENTS: Final = 32
_MOST_BYTES: Final = 32768
_SECONDS: Final = 10.0
_FRESH_SECONDS: Final = 1.0
_DRAWN_SECONDS: Final = 15.0
# The handler of a signal runs in the main thread, and a signal that comes just before the thread
# waits, or that the system gives to another thread, does not wake it.
_SIGNAL_SECONDS: Final = 1.0
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NOTHING: Final = "default-src 'none'; frame-ancestors 'none'"


class WebServer(ThreadingMixIn, TCPServer):
    """Listens at an IP address and a port of this host, with a thread for each client.

    names: The host names that a request may use, besides the server's own names.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, handler: type[BaseRequestHandler], names: Iterable[str] = ()
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
    """Reads a request only if the request is short, arrives within `seconds`, and is for us."""

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


@dataclass(frozen=True, slots=True)
class Shown:
    """Holds the page and its Content-Security-Policy, and the health, a line for each target.

    healthy: Whether no target needs action by a person.
    """

    page: str
    policy: str
    health: str
    healthy: bool


class PageServer(WebServer):
    """Listens at an address of this host, and serves a page that the main thread draws.

    Args:
        listen: The address, as host:port.
        draw: Draws the page.
        exposed: Whether the address may be other than a loopback address.
        names: The host names that a request may use, besides the server's own names.

    Raises:
        ConfigError: The address is not valid or not allowed, or the server cannot listen there.
    """

    def __init__(
        self,
        listen: str,
        draw: Callable[[], Shown],
        *,
        exposed: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        try:
            host, port = address_of(listen)
        except ValueError as error:
            raise ConfigError(
                f"{listen!r} is no address to listen on",
                detail=str(error),
                hint="name an IP address of this host and a port, such as 127.0.0.1:9188",
            ) from error
        if not exposed and not is_loopback(listen):
            raise ConfigError(
                f"{host} is no loopback address, and the page has no password",
                hint="listen on 127.0.0.1 and reach it through ssh -L, or add --expose",
            )
        self._draw = draw
        self._changed = Condition()
        self._wanted = self._closed = False
        try:
            super().__init__(host, port, _PageRequest, names)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen}",
                detail=error.strerror or str(error),
                hint="name another port with --listen",
            ) from error
        self._shown, self._drawn_at = draw(), time.monotonic()

    @property
    def url(self) -> str:
        """Returns where the page is."""
        host, port = self.server_address[:2]
        named = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{named}:{port}/"

    def get_page(self) -> Shown:
        """Returns the page, not older than a second unless drawing takes longer."""
        with self._changed:
            if time.monotonic() - self._drawn_at >= _FRESH_SECONDS:
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wanted, _DRAWN_SECONDS)
            return self._shown

    def serve(self) -> None:
        """Answers requests in threads, and draws the page when one wants it, until the close."""
        Thread(target=self.serve_forever, daemon=True).start()
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, _SIGNAL_SECONDS)
            if self._wanted:
                shown = self._draw()
                with self._changed:
                    self._shown, self._drawn_at, self._wanted = shown, time.monotonic(), False
                    self._changed.notify_all()

    def server_close(self) -> None:
        """Stops listening, and ends `serve`."""
        super().server_close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _PageRequest(BriefRequest):
    server: PageServer

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/":
                shown = self.server.get_page()
                self._answer(HTTPStatus.OK, shown.page, "text/html", shown.policy)
            case "/healthz":
                shown = self.server.get_page()
                code = HTTPStatus.OK if shown.healthy else HTTPStatus.SERVICE_UNAVAILABLE
                self._answer(code, shown.health)
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        self.do_GET()  # `_answer` leaves out the body.

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers with an error in plain text. What is no known method is not allowed."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, None
        self.close_connection = True
        status = HTTPStatus(code)
        self._answer(status, f"{status.value} {message or status.phrase}\n")

    def _answer(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", policy: str = _NOTHING
    ) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
