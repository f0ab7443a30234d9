"""The demo asks for the packages of its own kind, and for no others."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from ntt_backup import demo
from ntt_backup.demo import story
from ntt_backup.errors import ConfigError


def test_boto3_is_needed_for_a_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_boto3(name: str) -> ModuleSpec | None:
        return None if name == "boto3" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_boto3)
    monkeypatch.setattr(story.Story, "tell", lambda _: 0)
    assert demo.run() == 0
    with pytest.raises(ConfigError, match="the demo needs boto3") as caught:
        demo.run(s3=True)
    assert "demo-s3" in caught.value.hint
