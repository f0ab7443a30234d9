"""The client of a bucket, without a server."""

from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import JSONFileLoader

from ntt_backup.config.sections import RemoteSettings
from ntt_backup.objects import s3
from ntt_backup.objects.s3_bucket import S3Bucket


def test_what_was_loaded_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    s3.load()
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _, path: read.append(path))

    s3.open_bucket(RemoteSettings.model_validate({"url": "s3://bucket/prefix"}))

    assert read == []


def _error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "GetObjectLockConfiguration")


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
    client.list_objects_v2.return_value = {"ResponseMetadata": {"HTTPHeaders": {}}}
    client.get_bucket_versioning.return_value = {"Status": "Enabled"}
    client.get_object_lock_configuration.side_effect = answer

    facts = S3Bucket(client, RemoteSettings.model_validate({"url": "s3://bucket"})).facts()

    assert (facts.versioning, facts.lock, facts.lock_days) == ("on", state, days)
