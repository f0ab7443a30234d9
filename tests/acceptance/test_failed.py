"""`failed`, `show` and `requeue`: what is told of failed blobs, and how they become pending."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ntt_backup.catalog.failures import UNKNOWN
from ntt_backup.cli.commands.blob import ADVICE, FILE_ADVICE
from ntt_backup.model import OF_CHECKS, FileReason, Reason
from tests.helpers.environment import Environment


@pytest.fixture
def failed(env: Environment) -> dict[str, str]:
    """Two blobs that failed: name to reason. A third one was copied."""
    gone, rotten, _ = env.fill(3, size=lambda chance: chance.randrange(100, 200))
    content = env.path(rotten).read_bytes()
    env.path(rotten).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    env.path(gone).unlink()
    env.run("run", "-q", expect=7)
    return {gone: "missing", rotten: "corrupt-source"}


def asked(env: Environment, *args: str) -> list[dict[str, Any]]:
    done = env.call(*args, "--json", expect=0)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_failed_is_listed_shown_and_requeued_one_by_one(
    env: Environment, failed: dict[str, str]
) -> None:
    (gone, rotten) = failed

    listed = asked(env, "failed")
    (alone,) = asked(env, "failed", "--reason", "missing", "--since", "1h")
    first = env.call("failed", "--limit", "1").stdout
    told = env.call("failed").stdout
    (shown,) = asked(env, "show", rotten[:20], "--verify")
    text = env.call("show", gone).stdout

    assert {one["blobid"]: one["reason"] for one in listed} == failed
    assert alone == listed[0 if listed[0]["blobid"] == gone else 1]
    assert alone["attempts"] == 1
    assert alone["first_at"].endswith("Z")
    assert sum(name in first for name in failed) == 1
    assert "requeue" in told
    by_reason = "".join(
        f"{reason}: 1 blob\n  {re.escape(ADVICE[reason])}\n    {name}.*\n"
        for name, reason in ((one["blobid"], one["reason"]) for one in listed)
    )
    told = told.replace(f"--config {env.config} ", "")
    assert re.fullmatch(f"{by_reason}2 blobs failed; .*requeue\n", told)
    assert shown["source"]["problem"] == "corrupt-source"
    assert shown["targets"][0]["failure"]["reason"] == "corrupt-source"
    assert "missing" in text
    assert "failed" in text
    assert asked(env, "requeue", gone[:20]) == [{"target": "remote", "requeued": 1}]
    assert env.failures() == {rotten: "corrupt-source"}
    assert "1 blob pending again" in env.call("requeue").stdout
    assert "nothing failed" in env.call("failed").stdout


def test_each_reason_has_advice() -> None:
    assert set(ADVICE) == {*Reason, UNKNOWN} - OF_CHECKS
    assert set(FILE_ADVICE) == set(FileReason)


def test_names_that_are_not_known_are_told_in_one_line(
    env: Environment, failed: dict[str, str]
) -> None:
    before = env.failures()
    for args in (["show", "zz"], ["requeue", min(failed), "zz"]):
        done = env.call(*args, expect=2)
        assert "the catalog has no blob 'zz'" in done.stderr
    env.call("requeue", "--reason", "missing", min(failed), expect=2)
    assert env.failures() == before


def test_runs_are_silent_about_failures_that_are_known(
    env: Environment, failed: dict[str, str]
) -> None:
    assert asked(env, "failed", "--known") == [{"target": "remote", "known": 2}]

    silent = env.run("run", "-q")

    assert (silent.returncode, silent.stderr) == (0, "")
    assert all(one["known_at"] for one in asked(env, "failed"))
    assert env.failures() == failed
