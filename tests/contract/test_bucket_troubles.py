"""What becomes of a request in trouble: waited out, told once, or never taken for done."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from ntt_backup.client.throttle import SharedPace
from ntt_backup.errors import ConfigError, RemoteCannotStore, RemoteDenied, RemoteUnreachable
from ntt_backup.objects.bucket import Bucket, ObjectExists, Part, UploadGone, composite
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.objects.s3_bucket import S3Bucket
from tests.helpers import s3_proxy
from tests.helpers.fake_bucket import SMALLEST_PART
from tests.helpers.s3_proxy import S3Proxy, Trouble
from tests.helpers.s3_servers import Account, S3Server, as_account
from tests.helpers.sshd import HOST, free_port

KEY = "packs/ab/one.tar"
BUSY = s3_proxy.status(503, "SlowDown")


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3: S3Server, proxy: S3Proxy) -> S3Bucket:
    opened = open_bucket(s3.bucket(endpoint=proxy.endpoint))
    assert isinstance(opened, S3Bucket)
    return opened


def put(bucket: Bucket, content: bytes = b"content", key: str = KEY) -> None:
    bucket.put(key, content, sha256(content).digest())


def upload(bucket: Bucket, *contents: bytes) -> tuple[str, list[Part]]:
    upload_id = bucket.create_upload(KEY)
    return upload_id, [
        bucket.put_part(KEY, upload_id, number, content, sha256(content).digest())
        for number, content in enumerate(contents, 1)
    ]


@pytest.mark.parametrize(
    "trouble",
    [
        BUSY,
        s3_proxy.status(500, "InternalError"),
        s3_proxy.status(429, "TooManyRequests"),
        s3_proxy.status(409, "ConditionalRequestConflict"),
        pytest.param(s3_proxy.closed, marks=pytest.mark.long),
    ],
)
def test_trouble_that_passes_is_waited_out(
    bucket: S3Bucket, proxy: S3Proxy, trouble: Trouble
) -> None:
    for kind in ("create", "part", "complete", "get", "head", "list"):
        proxy.trouble(kind, trouble)
    content = os.urandom(300_000)
    bucket.complete(KEY, *upload(bucket, content))
    assert bucket.get_range(KEY, 0, len(content)) == content
    assert bucket.head(KEY) is not None
    assert [info.key for info in bucket.list("")] == [KEY]
    assert set(proxy.requests.values()) == {2}


def test_trouble_that_lasts_is_an_outage(bucket: S3Bucket, proxy: S3Proxy) -> None:
    proxy.trouble("any", BUSY, times=100)
    bucket.patience = 0.2
    with pytest.raises(RemoteUnreachable, match="busy"):
        put(bucket)
    assert proxy.requests["put"] > 1


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (403, "AccessDenied", RemoteDenied, "refuses to store an object"),
        (403, "InvalidAccessKeyId", RemoteDenied, "does not accept the credentials"),
        (403, "SignatureDoesNotMatch", RemoteDenied, "does not accept the credentials"),
        (401, "Unauthorized", RemoteDenied, "does not accept the credentials"),
        (400, "ExpiredToken", RemoteDenied, "credentials have expired"),
        (403, "RequestTimeTooSkewed", RemoteUnreachable, "the clocks of this machine"),
        (404, "NoSuchBucket", RemoteDenied, "no such bucket"),
        (507, "InsufficientStorage", RemoteCannotStore, "is full"),
        (507, "XMinioStorageFull", RemoteCannotStore, "is full"),
        (400, "InvalidStorageClass", RemoteDenied, "storage class"),
        (400, "EntityTooSmall", RemoteDenied, "parts of this size"),
        (501, "NotImplemented", RemoteDenied, "know the header x-amz-checksum-sha256"),
        (400, "AuthorizationHeaderMalformed", RemoteDenied, "cannot store an object"),
        (404, "404", RemoteDenied, "cannot store an object"),
    ],
)
def test_a_refusal_has_its_own_words(
    bucket: S3Bucket,
    proxy: S3Proxy,
    status: int,
    code: str,
    error: type[RemoteDenied],
    words: str,
) -> None:
    proxy.trouble("put", s3_proxy.status(status, code))
    with pytest.raises(error, match=words) as caught:
        put(bucket)
    assert proxy.requests["put"] == 1
    assert code in caught.value.detail
    assert caught.value.hint
    assert proxy.account.secret not in f"{caught.value} {caught.value.hint}"


def test_a_head_that_is_refused_is_asked_again_for_words(bucket: S3Bucket, proxy: S3Proxy) -> None:
    proxy.trouble("head", s3_proxy.status(400, "ExpiredToken"))
    proxy.trouble("get", s3_proxy.status(400, "ExpiredToken"))
    with pytest.raises(RemoteDenied, match="credentials have expired"):
        bucket.head(KEY)


def test_a_lost_answer_to_complete_is_told_by_the_object_that_is_there(
    bucket: S3Bucket, proxy: S3Proxy
) -> None:
    proxy.trouble("complete", s3_proxy.lose_answer)
    upload_id, parts = upload(bucket, b"content")
    with pytest.raises((ObjectExists, UploadGone)):
        bucket.complete(KEY, upload_id, parts)
    found = bucket.head(KEY)
    assert found is not None
    assert found.checksum == composite(parts)


@pytest.mark.parametrize("kind", ["put", "part"])
def test_content_that_the_server_takes_though_it_is_damaged_is_noticed(
    bucket: S3Bucket, proxy: S3Proxy, kind: str
) -> None:
    proxy.trouble(kind, s3_proxy.damage)
    with pytest.raises(RemoteCannotStore, match="something else than was sent"):
        put(bucket) if kind == "put" else upload(bucket, b"content")


def test_a_body_that_ends_early_is_asked_for_again(bucket: S3Bucket, proxy: S3Proxy) -> None:
    content = os.urandom(200_000)
    put(bucket, content)
    proxy.trouble("get", s3_proxy.short_body)
    assert bucket.get_range(KEY, 0, len(content)) == content
    assert proxy.requests["get"] == 2


def test_a_body_that_comes_slowly_comes_whole(bucket: S3Bucket, proxy: S3Proxy) -> None:
    content = os.urandom(100_000)
    put(bucket, content)
    proxy.trouble("get", s3_proxy.slow_body(0.02))
    assert bucket.get_range(KEY, -50_000, 50_000) == content[-50_000:]


def test_a_server_without_ranges_is_refused(bucket: S3Bucket, proxy: S3Proxy) -> None:
    def whole(exchange: s3_proxy.Exchange) -> None:
        del exchange.headers["range"]
        exchange.signed_anew()
        exchange.answer(exchange.forward())

    put(bucket, bytes(1000))
    proxy.trouble("get", whole)
    with pytest.raises(RemoteUnreachable, match="more than was asked for"):
        bucket.get_range(KEY, 10, 20)


def test_a_store_as_strict_as_r2_takes_equal_parts(s3: S3Server) -> None:
    with S3Proxy(s3, strict=True) as proxy:
        bucket = open_bucket(s3.bucket(endpoint=proxy.endpoint))
        part = bytes(SMALLEST_PART)
        upload_id, parts = upload(bucket, part, part + b"more", b"last")
        with pytest.raises(RemoteUnreachable, match="part"):
            bucket.complete(KEY, upload_id, parts)
        bucket.complete(KEY, *upload(bucket, part, part, b"last"))
        put(bucket, key="small")


def test_what_is_sent_keeps_its_pace(s3: S3Server) -> None:
    class Slow:
        sent = 0

        def allowance(self, *, begun: bool = False) -> int:
            return 1000

        def delay(self) -> float:
            return 0.001

        def spend(self, sent: int) -> None:
            self.sent += sent

    pace, content = Slow(), os.urandom(10_500)
    bucket = open_bucket(s3.bucket(), SharedPace(pace))
    put(bucket, content)
    assert pace.sent == len(content)
    assert bucket.get_range(KEY, 0, len(content)) == content


def test_a_store_that_is_away_is_an_outage(s3: S3Server) -> None:
    settings = s3.bucket(endpoint=f"http://{HOST}:{free_port()}")
    with pytest.raises(RemoteUnreachable, match="nothing answers") as caught:
        open_bucket(settings).head(KEY)
    assert settings.endpoint is not None
    assert settings.endpoint in caught.value.detail


def test_a_name_that_is_not_known_is_told(s3: S3Server) -> None:
    with pytest.raises(RemoteUnreachable, match="its name is not known"):
        open_bucket(s3.bucket(endpoint="http://bucket.invalid")).head(KEY)


def test_a_server_that_speaks_no_tls_is_told(s3: S3Server) -> None:
    endpoint = s3.endpoint.replace("http:", "https:")
    with pytest.raises(RemoteDenied, match="does not speak TLS"):
        open_bucket(s3.bucket(endpoint=endpoint)).head(KEY)


def test_a_certificate_is_trusted_by_its_authority_alone(s3: S3Server, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    name = ["-subj", "/CN=test", "-addext", f"subjectAltName=IP:{HOST}", "-days", "2"]
    making = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt"]
    making += ["ec_paramgen_curve:prime256v1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*making, *name], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with S3Proxy(s3, tls=context) as proxy:
        settings = s3.bucket(endpoint=proxy.endpoint)
        with pytest.raises(RemoteDenied, match="certificate is not trusted") as caught:
            open_bucket(settings).head(KEY)
        assert "remote.ca_bundle" in caught.value.hint
        trusting = settings.model_copy(update={"ca_bundle": certificate})
        content = os.urandom(600_000)
        bucket = open_bucket(trusting)
        bucket.complete(KEY, *upload(bucket, content))
        assert bucket.get_range(KEY, 0, len(content)) == content


def test_wrong_and_missing_credentials_are_told(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = s3.bucket()
    as_account(monkeypatch, Account("nobody"))
    with pytest.raises(RemoteDenied, match="does not accept the credentials"):
        open_bucket(settings).head(KEY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(RemoteDenied, match="no credentials") as caught:
        open_bucket(settings).head(KEY)
    assert "AWS_PROFILE" in caught.value.hint


def test_a_profile_or_an_authority_that_is_missing_is_told_at_once(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = s3.bucket()
    with pytest.raises(ConfigError, match="ca_bundle"):
        open_bucket(s3.bucket(ca_bundle=tmp_path / "missing.pem"))
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(ConfigError, match="settings cannot be used") as caught:
        open_bucket(settings)
    assert "missing" in caught.value.detail


def test_a_bucket_that_is_missing_is_told(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    as_account(monkeypatch, s3.owner)
    settings = s3.bucket(own=True)
    s3.client().delete_bucket(Bucket=settings.bucket)
    with pytest.raises(RemoteDenied, match="no such bucket"):
        list(open_bucket(settings).list(""))
