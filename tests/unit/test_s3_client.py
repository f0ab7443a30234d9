"""The client of a bucket, without a server."""

import io
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from urllib3.exceptions import SSLError

from ntt_backup.client.throttle import SharedPace
from ntt_backup.config.bandwidth_timetable import parse_timetable
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.errors import RemoteDenied
from ntt_backup.objects.bucket import ContentDamaged, ObjectExists, ObjectInfo
from ntt_backup.objects.s3_bucket import S3Bucket, make_client
from tests.helpers.program import share_models


@pytest.mark.parametrize(
    "text",
    [
        *("2026-11-23T06:20:08.123Z", "2026-11-23T06:20:08.123+00:00", "2026-11-23T06:20:08.123"),
        *("2026-11-23 06:20:08.123 GMT", "2026-11-23T06:20:08.123 GMT", "1795414808.123"),
        *("Mon, 23 Nov 2026 06:20:08 GMT", "Mon, 23 Nov 2026 07:20:08 +0100"),
        *("Mon, 23 Nov 2026 06:20:08", "Mon, 2026-11-23 06:20:08"),
    ],
)
def test_a_listing_tells_when_an_object_was_made(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (found,) = _listed(monkeypatch, text)
    fraction = 123_000 if ".123" in text else 0
    assert found.modified == datetime(2026, 11, 23, 6, 20, 8, fraction, UTC)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z", "1e400", "nan"])
def test_a_listing_with_what_is_no_time_is_that_of_no_object_store(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with pytest.raises(RemoteDenied, match="no object store"):
        _listed(monkeypatch, text)


@pytest.mark.parametrize(
    ("text", "year"),
    [
        ("0001-01-01T00:00:00+14:00", 1970),
        ("0001-01-01T00:00:00Z", 1970),
        ("9999-12-31T23:59:59-14:00", 9999),
        ("Fri, 31 Dec 9999 23:59:59 -1400", 9999),
    ],
)
def test_a_time_that_no_clock_can_reach_leaves_room_to_count_from(
    monkeypatch: pytest.MonkeyPatch, text: str, year: int
) -> None:
    (found,) = _listed(monkeypatch, text)
    assert found.modified is not None
    assert (found.modified.year, found.modified.tzinfo) == (year, UTC)
    assert found.modified + timedelta(days=300) > found.modified.astimezone()


def _listed(monkeypatch: pytest.MonkeyPatch, modified: str) -> list[ObjectInfo]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    remote = RemoteSettings.model_validate({"url": "s3://bucket", "region": "eu-central-1"})
    share_models()
    client: Any = make_client(remote)
    one = f"<Contents><Key>a</Key><Size>1</Size><LastModified>{modified}</LastModified></Contents>"
    last = "<IsTruncated>false</IsTruncated>"
    page = f"<ListBucketResult>{last}{one}</ListBucketResult>".encode()
    answer = Mock(status_code=200, headers={}, content=page)
    client.meta.events.register("before-send.s3", lambda **_: answer)
    return list(S3Bucket(client, remote).list(""))


def _error(code: str) -> ClientError:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    return ClientError(response, "GetObjectLockConfiguration")


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (["BadDigest", "PreconditionFailed"], ObjectExists),
        (["BadDigest", "AccessDenied"], RemoteDenied),
        (["SlowDown", "BadDigest", "SlowDown", "BadDigest"], ContentDamaged),
    ],
)
def test_content_that_was_damaged_on_its_way_is_sent_once_more_and_its_error_is_the_last(
    answers: list[str], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    client = Mock()
    client.meta.endpoint_url = "http://127.0.0.1"
    client.put_object.side_effect = [*map(_error, answers), _error("NoSuchBucket")]
    bucket = S3Bucket(client, RemoteSettings.model_validate({"url": "s3://bucket"}))

    with pytest.raises(error):
        bucket.put("key", b"content", bytes(32))

    assert client.put_object.call_count == len(answers)


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_an_answer_that_tls_finds_damaged_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    damaged = Mock()
    damaged.read.side_effect = SSLError("[SSL: SSLV3_ALERT_BAD_RECORD_MAC] bad record mac")
    client = Mock()
    client.meta.endpoint_url = "https://127.0.0.1"
    client.get_object.side_effect = [
        {"Body": StreamingBody(stream, 7), "ContentLength": 7}
        for stream in (damaged, io.BytesIO(b"content"))
    ]
    settings = RemoteSettings.model_validate({"url": "s3://bucket"})
    fetch = SharedPace.of(parse_timetable(limit)) if limit else None

    assert S3Bucket(client, settings, fetch=fetch).get_range("key", 0, 7) == b"content"


@pytest.mark.parametrize(
    ("said", "state", "days"),
    [
        ({"ObjectLockEnabled": "Enabled"}, "on", 0),
        (
            {
                "ObjectLockEnabled": "Enabled",
                "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 14}},
            },
            "on",
            14,
        ),
        (
            {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Years": 2}}},
            "on",
            730,
        ),
        (_error("ObjectLockConfigurationNotFoundError"), "off", 0),
        (_error("AccessDenied"), "", 0),
    ],
)
def test_a_bucket_says_for_how_long_it_locks(
    said: dict[str, object] | ClientError, state: str, days: int
) -> None:
    answer = said if isinstance(said, ClientError) else [{"ObjectLockConfiguration": said}]
    client = Mock()
    client.meta.endpoint_url = "http://127.0.0.1"
    client.get_bucket_versioning.return_value = {"Status": "Enabled"}
    client.get_object_lock_configuration.side_effect = answer

    told = S3Bucket(client, RemoteSettings.model_validate({"url": "s3://bucket"})).protection()

    assert (told.versioning, told.lock, told.lock_days) == ("on", state, days)
