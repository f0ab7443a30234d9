"""The errors of object stores that no server of the tests gives."""

from __future__ import annotations

import ssl
import sys
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import BackupError, ConfigError, RemoteDenied, RemoteUnreachable
from ntt_backup.objects import s3_errors
from ntt_backup.objects.bucket import ObjectArchived
from ntt_backup.objects.s3 import open_bucket
from ntt_backup.objects.s3_bucket import S3Bucket, make_client

ENDPOINT = "https://s3.example.org"


def answered(status: int, code: str, headers: dict[str, str], **said: str) -> boto.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": "no", **said},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(response, "GetObject")


def tls(words: str) -> boto.SSLError:
    return boto.SSLError(endpoint_url="", error=ssl.SSLError(words))


def translated(failure: Exception) -> BackupError:
    error = s3_errors.translated(failure, "get_object", "bucket/key", ENDPOINT)
    assert isinstance(error, BackupError)
    return error


@pytest.mark.parametrize(
    "failure",
    [
        answered(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-central-1"}),
        answered(400, "AuthorizationHeaderMalformed", {}, Region="eu-central-1"),
    ],
)
def test_the_right_region_is_told(failure: Exception) -> None:
    error = translated(failure)
    assert isinstance(error, RemoteDenied)
    assert error.message == "the bucket is in the region eu-central-1"
    assert error.hint == 'set remote.region = "eu-central-1"'


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-7230, "differ by 2 h 0 min: ours is ahead"), (7230, "differ by 2 h 0 min: ours is behind")],
)
def test_a_clock_that_is_wrong_is_told_by_how_much(seconds: float, words: str) -> None:
    date = formatdate(time() + seconds, usegmt=True)
    error = translated(answered(403, "RequestTimeTooSkewed", {"date": date}))
    assert isinstance(error, RemoteUnreachable)
    assert error.message.endswith(words)


def test_a_ca_bundle_that_cannot_be_read_is_an_error_with_a_hint(tmp_path: Path) -> None:
    values = {"url": "s3://bucket/backup", "ca_bundle": str(tmp_path / "missing.pem")}
    with pytest.raises(ConfigError, match=r"remote.ca_bundle cannot be read: .*missing.pem") as no:
        open_bucket(RemoteSettings.model_validate(values))
    assert "the system's authorities are trusted" in no.value.hint


def test_thawing_is_asked_for_as_s3_wants_it_and_one_that_is_under_way_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = RemoteSettings.model_validate(
        {"url": "s3://bucket/backup", "endpoint": "http://127.0.0.1:1", "region": "us-east-1"}
    )
    client = make_client(settings)
    bucket = S3Bucket(client, settings)
    wanted = {
        "Bucket": "bucket",
        "Key": "backup/packs/ab/one.tar",
        "RestoreRequest": {"Days": 3, "GlacierJobParameters": {"Tier": "Bulk"}},
    }
    with Stubber(client) as stub:
        stub.add_response("restore_object", {}, wanted)
        assert bucket.thaw("packs/ab/one.tar", 3, "bulk")
        stub.add_client_error("restore_object", "RestoreAlreadyInProgress", "", 409)
        assert not bucket.thaw("packs/ab/one.tar", 3, "bulk")
        stub.add_client_error("restore_object", "AccessDenied", "", 403)
        with pytest.raises(RemoteDenied, match="refuses to thaw an object") as caught:
            bucket.thaw("packs/ab/one.tar", 3, "bulk")
    assert "s3:RestoreObject" in caught.value.hint


def test_an_object_in_an_archive_class_is_no_outage() -> None:
    failure = answered(403, "InvalidObjectState", {})
    error = s3_errors.translated(failure, "get_object", "bucket/key", ENDPOINT)
    assert isinstance(error, ObjectArchived)


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (tls("CERTIFICATE_VERIFY_FAILED"), RemoteDenied, "not trusted"),
        (tls("EOF occurred"), RemoteUnreachable, "TLS"),
        (boto.ReadTimeoutError(endpoint_url=""), RemoteUnreachable, "stopped answering"),
        (boto.ConnectTimeoutError(endpoint_url=""), RemoteUnreachable, "does not answer"),
        (boto.ProxyConnectionError(proxy_url=""), RemoteUnreachable, "proxy"),
        (boto.UnauthorizedSSOTokenError(), RemoteDenied, "credentials cannot be fetched"),
        (boto.PartialCredentialsError(provider="", cred_var=""), RemoteDenied, "no credentials"),
        (ResponseParserError("<html>"), RemoteDenied, "no object store"),
        (boto.ParamValidationError(report="x"), RemoteDenied, "cannot be made"),
    ],
)
def test_trouble_on_the_way_has_words_and_a_class(
    failure: Exception, kind: type[BackupError], words: str
) -> None:
    error = translated(failure)
    assert isinstance(error, kind)
    assert words in error.message


def test_a_bucket_without_botocore_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("ntt_backup.objects.s3_")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("botocore.client", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="the libraries for buckets") as caught:
        open_bucket(RemoteSettings(url="s3://bucket/prefix"))
    assert caught.value.hint == "pip install 'ntt-backup[s3]'"
