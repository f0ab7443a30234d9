"""What the servers of the metrics and of the status page grant clients that mean no good."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

import pytest

from ntt_backup.report import web_server
from ntt_backup.report.web_server import BriefRequest, WebServer
from tests.helpers.waiting import PATIENCE

HOST = "127.0.0.1"


class Handler(BriefRequest, BaseHTTPRequestHandler):
    seconds = PATIENCE

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def port() -> Iterator[int]:
    server = WebServer(HOST, 0, Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), PATIENCE)


def answer(client: socket.socket) -> bytes:
    """What the client gets; nothing where the connection is ended."""
    said = bytearray()
    try:
        while data := client.recv(65536):
            said += data
    except ConnectionResetError:
        pass
    return bytes(said)


def test_hundreds_of_slow_clients_do_not_keep_others_out(port: int) -> None:
    """The first of them make room, long before their time is over."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(port)) for _ in range(200)]
        for one in slow:
            one.sendall(b"GET / HT")
        for _ in range(20):
            with connect(port) as quick:
                quick.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert answer(quick).startswith(b"HTTP/1.0 200 ")
        assert [answer(one) for one in slow[: 200 - web_server.MOST_CLIENTS]] == [b""] * (
            200 - web_server.MOST_CLIENTS
        )


def test_a_client_that_drips_has_no_more_time_than_another(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "seconds", 0.3)
    with connect(port) as client:
        client.settimeout(0.02)
        gone = False
        while not gone:  # The limit of the test's time ends it where the server does not.
            try:
                client.sendall(b"a")
                gone = client.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                gone = True


def test_a_request_has_an_end(port: int) -> None:
    request = b"GET / HTTP/1.1\r\n" + b"".join(b"%d: 1234567\r\n" % nth for nth in range(90))
    with connect(port) as client:
        client.sendall(request + b"a: " + b"b" * 40000)
        assert answer(client) == b""


def test_a_connection_has_one_request_and_no_body(port: int) -> None:
    inside = b"GET /inside HTTP/1.1\r\nHost: localhost\r\n\r\n"
    length = b"Content-Length: %d\r\n" % len(inside)
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n" + 2 * inside)
        assert answer(client).count(b"HTTP/1.0 200") == 1


@pytest.mark.parametrize(
    "name", ["10.1.2.3:80", "[fe80::1]", "localhost", "vault", "Vault.Test:80"]
)
def test_what_others_may_reach_is_asked_for_by_any_address_and_by_its_own_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vault")
    monkeypatch.setattr(socket, "getfqdn", lambda: "vault.test")
    with WebServer("0.0.0.0", 0, Handler) as everywhere, WebServer(HOST, 0, Handler) as here:
        assert everywhere.is_ours(name)
        assert not everywhere.is_ours("vault.evil.test")
        assert here.is_ours(name) == (name == "localhost")
