"""A proxy before an object store: it counts requests, makes trouble, and may be as strict as R2.

    with S3Proxy(s3) as proxy:                          # s3: see tests.helpers.s3_servers
        settings = s3.bucket(endpoint=proxy.endpoint)
        proxy.trouble("part", status(503, "SlowDown"), times=2)
        proxy.trouble("complete", lose_answer)
        ...
        assert proxy.requests["part"] == 3              # by kind, those that met trouble, too

Kinds: put, create, part, complete, abort, uploads, head, get, list, delete, other; `any` is trouble
with all of them. Trouble is a function of an `Exchange`; those below are ready made. `after` lets
some requests pass before it begins, `when` picks them by their key.

Strict (`S3Proxy(s3, strict=True)`) is "R2 mode": parts of unequal size, checksums in trailers and
object-lock headers are refused. With `tls` it speaks TLS.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers.s3_servers import Account, S3Server
from tests.helpers.sshd import HOST
from tests.helpers.waiting import PATIENCE

_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}
_PIECE = 16 * 1024
# A trouble may sleep for longer, and ends by itself.
_LAST_SECONDS = 5.0
_SUM = re.compile(rb"<Checksum\w+>[^<]*</Checksum\w+>")

Trouble = Callable[["Exchange"], None]


@dataclass
class Answer:
    """What the store has answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Exchange:
    """One request, which a trouble may change, forward, and answer in its own way."""

    proxy: S3Proxy
    handler: BaseHTTPRequestHandler
    kind: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def forward(self) -> Answer:
        """Makes the request of the store, and returns its answer."""
        server = urlsplit(self.proxy.server.endpoint)
        connection = HTTPConnection(server.netloc, timeout=PATIENCE)
        try:
            kept = {name: value for name, value in self.headers.items() if name not in _HOP}
            command, path = self.handler.command, self.handler.path
            connection.putrequest(command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in kept.items():
                connection.putheader(name, value)
            connection.endheaders(self.body)
            response = connection.getresponse()
            headers = [
                (name, value) for name, value in response.getheaders() if name.lower() not in _HOP
            ]
            return Answer(response.status, headers, response.read())
        finally:
            connection.close()

    def answer(self, answer: Answer, cut: int = 0, pause: float = 0.0) -> None:
        """Passes an answer on; cut: without so many bytes of its end; pause: before each 16 KiB."""
        handler = self.handler
        handler.send_response_only(answer.status)
        length = str(len(answer.body))
        for name, value in answer.headers:
            if name.lower() == "content-length" and self.kind == "head":
                length = value
            elif name.lower() != "content-length":
                handler.send_header(name, value)
        handler.send_header("Content-Length", length)
        handler.end_headers()
        body = answer.body[: len(answer.body) - cut]
        for at in range(0, len(body), _PIECE):
            time.sleep(pause)
            handler.wfile.write(body[at : at + _PIECE])
        if cut:
            self.close()

    def refuse(self, status: int, code: str, message: str = "so says the proxy") -> None:
        """Answers with an error of the store's own form."""
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        content = b"" if self.kind == "head" else text.encode()
        self.answer(Answer(status, [("Content-Type", "application/xml")], content))

    def close(self) -> None:
        """Ends the connection, whether or not there was an answer."""
        self.handler.close_connection = True

    def signed_anew(self) -> None:
        """Signs the request for what it has become."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        account = self.proxy.account
        url = f"http://{self.headers['host']}{self.handler.path}"
        kept = {name: self.headers[name] for name in self.headers if name != "authorization"}
        request = AWSRequest(self.handler.command, url, kept, self.body)
        request.context["payload_signing_enabled"] = False
        S3SigV4Auth(Credentials(account.name, account.secret), "s3", "us-east-1").add_auth(request)
        self.headers = {name.lower(): value for name, value in request.headers.items()}


def status(code: int, word: str) -> Trouble:
    """The store refuses, such as 503 SlowDown or 500 InternalError."""
    return lambda exchange: exchange.refuse(code, word)


def closed(exchange: Exchange) -> None:
    """The connection breaks before the store hears of the request."""
    exchange.close()


def lose_answer(exchange: Exchange) -> None:
    """The store does what it is asked, and the connection breaks before its answer."""
    exchange.forward()
    exchange.close()


def short_body(exchange: Exchange) -> None:
    """The answer ends in the middle."""
    answer = exchange.forward()
    exchange.answer(answer, cut=max(1, len(answer.body) // 2))


def slow_body(pause: float) -> Trouble:
    """The answer comes slowly: so many seconds for every 16 KiB."""
    return lambda exchange: exchange.answer(exchange.forward(), pause=pause)


def passed(exchange: Exchange) -> None:
    """The request and its answer pass as they are."""
    exchange.answer(exchange.forward())


def damage(exchange: Exchange) -> None:
    """The store takes content that its checksum does not fit, and keeps the sum of what it has."""
    spoil(exchange)
    passed(exchange)


def spoil(exchange: Exchange) -> None:
    """Alters content and the sum that goes with it, before they are forwarded."""
    exchange.body = bytes([exchange.body[0] ^ 1]) + exchange.body[1:]
    summed = b64encode(sha256(exchange.body).digest()).decode()
    exchange.headers["x-amz-checksum-sha256"] = summed
    exchange.signed_anew()


def weak(exchange: Exchange) -> None:
    """The store tells no checksum of what it has."""
    if exchange.kind == "complete":
        exchange.body = _SUM.sub(b"", exchange.body)
        exchange.headers["content-length"] = str(len(exchange.body))
        exchange.signed_anew()
    answer = exchange.forward()
    answer.headers = [one for one in answer.headers if "x-amz-checksum" not in one[0].lower()]
    answer.body = _SUM.sub(b"", answer.body)
    exchange.answer(answer)


@dataclass
class _Plan:
    kind: str
    trouble: Trouble
    after: int
    times: int
    when: Callable[[str], bool]


class S3Proxy:
    """See the module. account: whose requests go through it. seen: kind and key of each, in order.

    in_flight and most_in_flight: requests at once, now and at most.
    """

    def __init__(
        self,
        server: S3Server,
        account: Account | None = None,
        *,
        strict: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.server = server
        self.account = account or server.sender
        self.strict = strict
        self.seen: list[tuple[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self._plans: list[_Plan] = []
        self._sizes: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Answers come in several writes.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                proxy._open[threading.current_thread()] = self.connection

            def finish(self) -> None:
                del proxy._open[threading.current_thread()]
                with suppress(OSError):
                    super().finish()

            def handle_one_request(self) -> None:
                try:
                    self.raw_requestline = self.rfile.readline(65537)
                    if not self.raw_requestline or not self.parse_request():
                        self.close_connection = True
                        return
                    proxy._serve(self)
                except OSError:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer((HOST, 0), Handler)
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._scheme = "http" if tls is None else "https"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://{HOST}:{self._http.server_port}"

    @property
    def requests(self) -> Counter[str]:
        """How many requests of each kind have come."""
        with self._lock:
            return Counter(kind for kind, _ in self.seen)

    def trouble(
        self,
        kind: str,
        trouble: Trouble,
        *,
        times: int = 1,
        after: int = 0,
        when: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """Plans trouble for the next requests of a kind."""
        with self._lock:
            self._plans.append(_Plan(kind, trouble, after, times, when))

    def peace(self) -> None:
        """Plans no trouble any more."""
        with self._lock:
            self._plans.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        # A process in which one of them still waits for a request cannot be forked by a later test.
        for thread, connection in list(self._open.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_LAST_SECONDS)

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        url = urlsplit(handler.path)
        fields = parse_qs(url.query, keep_blank_values=True)
        query = {name: values[0] for name, values in fields.items()}
        key = unquote(url.path).lstrip("/").partition("/")[2]
        kind = _kind(handler.command, key, query)
        with self._lock:
            self.seen.append((kind, key))
            trouble = self._planned(kind, key)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            body = handler.rfile.read(int(headers.get("content-length", "0")))
            exchange = Exchange(self, handler, kind, key, query, headers, body)
            if self.strict and self._refuses(exchange):
                return
            (trouble or passed)(exchange)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _planned(self, kind: str, key: str) -> Trouble | None:
        for plan in self._plans:
            if plan.times and plan.kind in (kind, "any") and plan.when(key):
                if plan.after:
                    plan.after -= 1
                else:
                    plan.times -= 1
                    return plan.trouble
        return None

    def _refuses(self, exchange: Exchange) -> bool:
        """Refuses what R2 refuses."""
        headers, upload = exchange.headers, exchange.query.get("uploadId", "")
        locks = [name for name in headers if name.startswith("x-amz-object-lock")]
        if "x-amz-trailer" in headers or "aws-chunked" in headers.get("content-encoding", ""):
            exchange.refuse(501, "NotImplemented", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")
        elif locks:
            exchange.refuse(501, "NotImplemented", f"Header '{locks[0]}' not implemented")
        elif exchange.kind == "complete" and len({*self._bodies(upload)}) > 1:
            words = "All non-trailing parts must have the same length."
            exchange.refuse(400, "InvalidPart", words)
        else:
            if exchange.kind == "part":
                self._sizes[upload][int(exchange.query["partNumber"])] = len(exchange.body)
            return False
        return True

    def _bodies(self, upload: str) -> list[int]:
        """The sizes of an upload's parts but the last."""
        return [size for _, size in sorted(self._sizes[upload].items())][:-1]


def _kind(method: str, key: str, query: dict[str, str]) -> str:
    if not key:
        return "uploads" if "uploads" in query else "list" if "list-type" in query else "other"
    match method:
        case "PUT":
            return "part" if "uploadId" in query else "put"
        case "POST":
            return "create" if "uploads" in query else "complete"
        case "DELETE":
            return "abort" if "uploadId" in query else "delete"
    return method.lower()
