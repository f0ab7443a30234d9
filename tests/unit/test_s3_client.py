"""The client of a bucket, without a server."""

import pytest
from botocore.loaders import JSONFileLoader

from ntt_backup.config.models import RemoteSettings
from ntt_backup.objects import s3


def test_what_was_loaded_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    s3.load()
    read: list[str] = []
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda _, path: read.append(path))

    s3.open_bucket(RemoteSettings.model_validate({"url": "s3://bucket/prefix"}))

    assert read == []
