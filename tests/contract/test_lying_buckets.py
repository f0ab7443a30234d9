"""What an object store answers is bounded before it is kept, and checked before it is used.

The server of these tests answers whatever a test wants: listings without an end, pages of HTML,
headers of megabytes, redirects to other hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import RemoteDenied, RemoteError, RemoteUnreachable
from ntt_backup.formatting import render_error
from ntt_backup.objects import s3_answers
from ntt_backup.objects.bucket import sweep
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.objects.s3_bucket import S3Bucket
from tests.helpers.program import share_models
from tests.helpers.s3_servers import Account, as_account
from tests.helpers.sshd import HOST

MEGA = 1_000_000
FULL = "<IsTruncated>true</IsTruncated>"
LAST = "<IsTruncated>false</IsTruncated>"
TIME = "<LastModified>2026-11-23T06:20:08.123Z</LastModified>"


class Liar:
    """A server whose answers are a function's. sent: bytes of its answers' content."""

    def __init__(self) -> None:
        self.say: Callable[[BaseHTTPRequestHandler], None] = lambda handler: None
        self.sent = 0
        self.asked = 0
        liar = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", "0")))
                liar.asked += 1
                self.close_connection = True
                with suppress(OSError):
                    liar.say(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None: ...

        self._http = ThreadingHTTPServer((HOST, 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://{HOST}:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answers(
        self, body: bytes | Iterator[bytes], status: int = 200, **headers: str
    ) -> Callable[[BaseHTTPRequestHandler], None]:
        """An answer; one without an end where the body is an iterator."""

        def say(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response_only(status)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            if isinstance(body, bytes) and "Content_Length" not in headers:
                handler.send_header("Content-Length", str(len(body)))
            handler.send_header("Connection", "close")
            handler.end_headers()
            if handler.command != "HEAD":
                for piece in [body] if isinstance(body, bytes) else body:
                    self.sent += len(piece)
                    handler.wfile.write(piece)

        return say


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    as_account(monkeypatch, Account("nobody"))
    server = Liar()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def bucket(liar: Liar) -> S3Bucket:
    values = {"url": "s3://bucket/backup", "endpoint": liar.endpoint, "addressing": "path"}
    share_models()
    opened = open_bucket(RemoteSettings.model_validate(values))
    assert isinstance(opened, S3Bucket)
    opened.patience = 0.0
    return opened


def page(*keys: str, more: str = LAST, token: str = "") -> bytes:
    """A page of a listing that has these keys."""
    entries = "".join(f"<Contents><Key>{key}</Key><Size>1</Size>{TIME}</Contents>" for key in keys)
    following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<ListBucketResult>{more}{following}{entries}</ListBucketResult>".encode()


def flood(begin: bytes, piece: bytes) -> Iterator[bytes]:
    yield begin
    while True:
        yield piece * (1 + 100_000 // len(piece))


@pytest.mark.parametrize(
    "piece",
    [
        b"<Contents><Key>backup/packs/aa</Key><Size>1</Size></Contents>",
        b"<a/>",
        b" ",
        b"x",
    ],
)
def test_a_listing_without_an_end_is_not_read_to_its_end(
    liar: Liar, bucket: S3Bucket, piece: bytes
) -> None:
    liar.say = liar.answers(flood(b"<ListBucketResult>", piece))
    with pytest.raises(RemoteUnreachable, match="longer than"):
        list(bucket.list("packs/"))
    assert liar.sent < 32 * MEGA


def test_an_error_without_an_end_is_not_read_to_its_end(liar: Liar, bucket: S3Bucket) -> None:
    liar.say = liar.answers(flood(b"<Error><Message>", b"x"), 403)
    for ask in (lambda: bucket.get_range("packs/a", 0, 10), lambda: list(bucket.list(""))):
        with pytest.raises(RemoteUnreachable, match="longer than"):
            ask()
    assert liar.sent < 64 * MEGA


@pytest.mark.parametrize(
    "body",
    [
        b"<ListBucketResult>" + b"<a/>" * 600_000 + b"</ListBucketResult>",
        b"<ListBucketResult " + b" ".join(b"a%d='1'" % n for n in range(200_000)) + b"/>",
        b"<!DOCTYPE r [<!ENTITY a '" + b"a" * 60_000 + b"'>]><r>" + b"&a;" * 1000 + b"</r>",
    ],
)
def test_a_listing_that_unfolds_to_more_than_it_is_long_is_not_parsed(
    liar: Liar, bucket: S3Bucket, body: bytes
) -> None:
    liar.say = liar.answers(body)
    with pytest.raises(RemoteError, match="no object store"):
        list(bucket.list("packs/"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"<html><body>maintenance</body></html>",
        b"<!DOCTYPE html><p>log in first",
        b"not even XML",
        b"\0\xff\xfe",
        b"<ListBucketResult><IsTruncated>fal",
        b"<ListBucketResult></ListBucketResult>",
        b"<ListBucketResult><Name>bucket</Name></ListBucketResult>",
        b"<Error><Code>AccessDenied</Code></Error>",
    ],
)
def test_what_is_no_listing_is_never_taken_for_an_empty_one(
    liar: Liar, bucket: S3Bucket, body: bytes
) -> None:
    liar.say = liar.answers(body)
    with pytest.raises(RemoteError):
        list(bucket.list("packs/"))
    with pytest.raises(RemoteError):
        bucket.facts()


def test_a_proxys_page_about_an_error_is_that_error(liar: Liar, bucket: S3Bucket) -> None:
    page = b"<!DOCTYPE html><html><body><h1>503 Service Unavailable</h1></body></html>"
    liar.say = liar.answers(page, 503)
    for ask in (lambda: bucket.get_range("packs/a", 0, 10), lambda: list(bucket.list(""))):
        with pytest.raises(RemoteUnreachable):
            ask()
    liar.say = liar.answers(page, 404)
    assert bucket.head("packs/a") is None


@pytest.mark.parametrize(
    "entry",
    [
        "<Size>1</Size>",
        "<Key>backup/packs/a</Key>",
        "<Key>backup/packs/a</Key><Size>much</Size>",
        "<Key>backup/packs/a</Key><Size>-1</Size>",
        f"<Key>backup/packs/a</Key><Size>{'9' * 5000}</Size>",
        f"<Key>backup/packs/a</Key><Size>{'9' * 40}</Size>",
        "<Key>backup/pgdump/a</Key><Size>1</Size>",
        "<Key>other/packs/a</Key><Size>1</Size>",
        f"<Key>backup/packs/{'a' * 5000}</Key><Size>1</Size>",
        "<Key>backup/packs/a</Key><Size>1</Size><LastModified>soon</LastModified>",
    ],
)
@pytest.mark.parametrize("encoded", ["", "<EncodingType>url</EncodingType>"])
def test_an_entry_that_no_listing_has_is_an_error(
    liar: Liar, bucket: S3Bucket, entry: str, encoded: str
) -> None:
    body = f"{encoded}{LAST}<Contents>{entry}</Contents>"
    liar.say = liar.answers(f"<ListBucketResult>{body}</ListBucketResult>".encode())
    with pytest.raises(RemoteError):
        list(bucket.list("packs/"))


def test_a_listing_must_advance(liar: Liar, bucket: S3Bucket) -> None:
    def same(handler: BaseHTTPRequestHandler) -> None:
        liar.answers(page("backup/packs/a", more=FULL, token=f"t{liar.asked}"))(handler)

    liar.say = same
    with pytest.raises(RemoteUnreachable, match="not in order"):
        list(bucket.list("packs/"))
    assert liar.asked == 2


def test_a_listing_that_goes_back_is_an_error(liar: Liar, bucket: S3Bucket) -> None:
    liar.say = liar.answers(page("backup/packs/b", "backup/packs/a"))
    with pytest.raises(RemoteUnreachable, match="not in order"):
        list(bucket.list("packs/"))


def test_a_listing_may_be_in_the_order_of_bytes_or_of_directories(
    liar: Liar, bucket: S3Bucket
) -> None:
    for keys in (["a-b/1", "a/1", "b"], ["a/1", "a-b/1", "b"]):
        liar.say = liar.answers(page(*(f"backup/{key}" for key in keys)))
        assert [info.key for info in bucket.list("")] == keys
    liar.say = liar.answers(page("backup/a/1", "backup/a-b/1", "backup/a.b/1", "backup/a-c"))
    with pytest.raises(RemoteUnreachable, match="not in order"):
        list(bucket.list(""))


def test_a_listing_that_goes_on_and_does_not_say_where_is_not_whole(
    liar: Liar, bucket: S3Bucket
) -> None:
    last = liar.answers(page("backup/packs/b", more=FULL))

    def say(handler: BaseHTTPRequestHandler) -> None:
        liar.say = last
        liar.answers(page("backup/packs/a", more=FULL, token="a"))(handler)

    for first in (say, last):
        liar.say = first
        with pytest.raises(RemoteUnreachable, match="does not go on"):
            list(bucket.list("packs/"))


def test_a_listing_of_empty_pages_ends(liar: Liar, bucket: S3Bucket) -> None:
    def empty(handler: BaseHTTPRequestHandler) -> None:
        liar.answers(page(more=FULL, token=f"t{liar.asked}"))(handler)

    liar.say = empty
    with pytest.raises(RemoteUnreachable, match="does not end"):
        list(bucket.list("packs/"))
    assert liar.asked < 1000


def test_a_listing_of_more_than_any_bucket_has_ends(
    liar: Liar, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_answers, "MOST_PAGES", 5)

    def more(handler: BaseHTTPRequestHandler) -> None:
        key = f"backup/packs/{liar.asked:09}"
        liar.answers(page(key, more=FULL, token=key))(handler)

    liar.say = more
    with pytest.raises(RemoteUnreachable, match="does not end"):
        list(bucket.list("packs/"))
    assert liar.asked == 5


def test_uploads_without_an_end_are_not_all_swept(liar: Liar, bucket: S3Bucket) -> None:
    numbers = count()

    def more(handler: BaseHTTPRequestHandler) -> None:
        if "uploads" not in parse_qs(urlsplit(handler.path).query, keep_blank_values=True):
            liar.answers(b"", 204)(handler)
            return
        entries = "".join(
            f"<Upload><Key>backup/packs/{next(numbers):09}</Key><UploadId>u</UploadId>"
            "<Initiated>2020-01-01T00:00:00Z</Initiated></Upload>"
            for _ in range(1000)
        )
        after = "<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>"
        body = f"{FULL}{after}{liar.asked}</NextUploadIdMarker>{entries}"
        liar.answers(f"<ListMultipartUploadsResult>{body}</ListMultipartUploadsResult>".encode())(
            handler
        )

    liar.say = more
    sweep(bucket, ("packs/",), 1e9 + 1e9)
    assert liar.asked < 3000


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {}),
        (206, {"Content_Range": "bytes 10-29/nonsense"}),
        (206, {"Content_Range": "bytes 0-19/1000"}),
        (206, {"Content_Range": f"bytes 10-29/{'9' * 5000}"}),
        (200, {"ETag": "x" * 100_000}),
        (206, {"Content_Length": "much"}),
        (206, {"Content_Length": "-5"}),
    ],
)
def test_an_answer_of_another_form_is_no_range(
    liar: Liar, bucket: S3Bucket, status: int, headers: dict[str, Any]
) -> None:
    liar.say = liar.answers(bytes(20), status, **headers)
    with pytest.raises(RemoteError):
        bucket.get_range("packs/a", 10, 20)


def test_content_without_an_end_is_not_read_to_its_end(liar: Liar, bucket: S3Bucket) -> None:
    liar.say = liar.answers(flood(b"", b"x"), 206)
    with pytest.raises(RemoteUnreachable, match="more than was asked for"):
        bucket.get_range("packs/a", 0, 1000)
    assert liar.sent < 32 * MEGA


def test_headers_without_an_end_are_not_read_to_their_end(liar: Liar, bucket: S3Bucket) -> None:
    def many(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response_only(200)
        for number in range(100_000):
            handler.send_header(f"x-{number}", "x" * 1000)
            handler.flush_headers()
            liar.sent += 1000

    liar.say = many
    with pytest.raises(RemoteUnreachable):
        bucket.head("packs/a")
    assert liar.sent < 32 * MEGA


@pytest.mark.parametrize("length", ["", "-1", "much", "9" * 40])
def test_an_object_whose_size_is_not_told_is_an_error(
    liar: Liar, bucket: S3Bucket, length: str
) -> None:
    headers: dict[str, Any] = {"Content_Length": length} if length else {}
    liar.say = liar.answers(iter(()), **headers)
    with pytest.raises(RemoteError):
        bucket.head("packs/a")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_to_another_host_is_not_followed(
    liar: Liar, bucket: S3Bucket, status: int
) -> None:
    other = Liar()
    try:
        other.say = other.answers(page("backup/packs/a"))
        place = f"{other.endpoint}/bucket?list-type=2"
        body = b"<Error><Code>PermanentRedirect</Code><Endpoint>evil</Endpoint></Error>"
        liar.say = liar.answers(body, status, Location=place, x_amz_bucket_region="evil.example")
        with pytest.raises(RemoteDenied):
            list(bucket.list("packs/"))
        with pytest.raises(RemoteDenied):
            bucket.put("packs/a", b"content", bytes(32))
        assert other.asked == 0
    finally:
        other.close()


def test_what_a_store_says_is_shown_as_one_short_line(liar: Liar, bucket: S3Bucket) -> None:
    words = "\x1b]0;owned\x07\u202e" + "x" * 100_000
    code = f"<Code>{'C' * 5000}</Code>"
    body = f"<Error>{code}<Message>&#27;{words[1:5]}&#8238;{words[10:]}</Message></Error>"
    liar.say = liar.answers(body.replace("&#27;", "").encode(), 403)
    with pytest.raises(RemoteDenied) as caught:
        bucket.get_range("packs/a", 0, 10)
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) < 1000
    assert len(render_error(caught.value)) < 2000
    liar.say = liar.answers(page(), Server="evil\x1b[31m" + "x" * 50_000)
    facts = bucket.facts()
    assert facts.server.isprintable()
    assert len(facts.server) < 200


@pytest.mark.parametrize(
    "text", ["", "<UploadId></UploadId>", f"<UploadId>{'u' * 9999}</UploadId>"]
)
def test_an_upload_without_a_name_is_an_error(liar: Liar, bucket: S3Bucket, text: str) -> None:
    body = f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>"
    liar.say = liar.answers(body.encode())
    with pytest.raises(RemoteError):
        bucket.create_upload("packs/a")


def test_a_part_without_an_etag_is_an_error(liar: Liar, bucket: S3Bucket) -> None:
    liar.say = liar.answers(b"")
    with pytest.raises(RemoteError):
        bucket.put_part("packs/a", "u", 1, b"content", bytes(32))


def test_an_answer_that_dribbles_is_given_up(
    liar: Liar, bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_answers, "SLOWEST_SECONDS", 0.3)
    ended = threading.Event()

    def dribble(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response_only(200)
        handler.end_headers()
        while not ended.wait(0.02):
            handler.wfile.write(b" ")

    liar.say = dribble
    try:
        with pytest.raises(RemoteUnreachable, match="stopped answering"):
            list(bucket.list("packs/"))
    finally:
        ended.set()
