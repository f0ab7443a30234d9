"""The page is read over HTTP with GET and HEAD, and nothing else is answered.

One thread, the main one, reads and draws; those of the requests wait for it, and share what it drew
for a second. So a hundred viewers cost as much as one, nobody costs nothing, and no request
waits long for a catalog that hangs. The page has no password: by default only this host sees it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Final
from urllib.parse import urlsplit

from ntt_backup.config.values import address_of, is_loopback
from ntt_backup.daemon.web_server import BriefRequest, WebServer
from ntt_backup.errors import ConfigError

_FRESH_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 15.0
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


@dataclass(frozen=True, slots=True)
class Shown:
    """Holds what is shown at a moment. policy: the page's Content-Security-Policy. health: a line
    for each target; healthy: whether none needs a person.
    """

    page: str
    policy: str
    health: str
    healthy: bool


class Board:
    """Shares one drawn page between the main thread and the requests. make: draws the page."""

    def __init__(self, make: Callable[[], Shown]) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._wanted = self._closed = False
        self._shown = make()
        self._made_at = time.monotonic()

    def get(self) -> Shown:
        """Returns the page, not older than a second unless drawing takes longer."""
        with self._changed:
            if time.monotonic() - self._made_at >= _FRESH_SECONDS:
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wanted, _PATIENCE_SECONDS)
            return self._shown

    def serve(self) -> None:
        """Draws the page when a request wants it, until the board is closed."""
        while True:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._wanted or self._closed, _SIGNAL_SECONDS
                ):
                    continue
                if self._closed:
                    return
            shown = self._make()
            with self._changed:
                self._shown, self._made_at, self._wanted = shown, time.monotonic(), False
                self._changed.notify_all()

    def close(self) -> None:
        """Ends `serve`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PageServer(WebServer):
    """Listens at host:port, an address of this host. exposed: it need not be a loopback address.
    names: those by which the page may be asked for, besides its own. Raises ConfigError.
    """

    def __init__(self, listen: str, board: Board, *, exposed: bool, names: Sequence[str]) -> None:
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
        self.board = board
        try:
            super().__init__(host, port, _Handler, names)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen}",
                detail=error.strerror or str(error),
                hint="name another port with --listen",
            ) from error

    @property
    def url(self) -> str:
        """Returns where the page is."""
        host, port = self.server_address[:2]
        named = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{named}:{port}/"

    def start(self) -> None:
        """Answers requests from now on, in threads."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        """Stops listening, and ends the board."""
        super().server_close()
        self.board.close()


class _Handler(BriefRequest, BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/":
                shown = self.server.board.get()
                self._answer(HTTPStatus.OK, shown.page, "text/html", shown.policy)
            case "/healthz":
                shown = self.server.board.get()
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
