"""`verify`: what is missing or wrong on the remote is found, told, pending again, and mended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import Sshd, give_b3sum, give_blake3

MIB = 1 << 20


@pytest.fixture
def hashing(env: Environment, remote: Sshd, startup: Path) -> Environment:
    """An environment whose remote has BLAKE3."""
    give_blake3(remote, startup)
    return env


def verified(env: Environment, *options: str, code: int = 0) -> dict[str, Any]:
    done = env.call("verify", "--json", *options)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def spoil(env: Environment, blobids: list[str]) -> dict[str, str]:
    """One blob missing, one cut short, one with other content; blobid to the reason to be found."""
    missing, cut, rotten = blobids[:3]
    env.remote_path(missing).unlink()
    os.truncate(env.remote_path(cut), env.remote_path(cut).stat().st_size - 1)
    content = bytearray(env.remote_path(rotten).read_bytes())
    content[len(content) // 2] ^= 1
    env.remote_path(rotten).write_bytes(content)
    return {missing: "remote-missing", cut: "remote-corrupt", rotten: "remote-corrupt"}


def backed_up(env: Environment, count: int = 200) -> list[str]:
    return env.fill_both(count, size=lambda chance: chance.randrange(1, 20_000))


@pytest.mark.parametrize(
    "hashed", ["by the module", pytest.param("by b3sum", marks=pytest.mark.long), "here"]
)
def test_wrong_blobs_are_found_and_the_next_run_repairs_them(
    env: Environment, remote: Sshd, request: pytest.FixtureRequest, hashed: str
) -> None:
    way = ("--download",) if hashed == "here" else ()
    if not way:
        give = give_b3sum if hashed == "by b3sum" else give_blake3
        give(remote, request.getfixturevalue("startup"))
    blobids = backed_up(env)
    env.fill_both(1, seed=7, size=lambda chance: 5 * MIB + 1)
    assert verified(env, *way)["wrong"] == {}
    wrong = spoil(env, blobids)

    found = verified(env, *way, code=7)

    assert {one["blobid"]: one["reason"] for one in found["failures"]} == wrong
    assert (found["checked"], found["requeued"], found["complete"]) == (201, 3, True)
    assert set(blobids) - env.copied() == set(wrong)
    assert env.failures() == {}
    reasons = dict(env.query("select blobid, reason from ntt_backup.failures"))
    assert reasons == wrong
    env.run("run", expect=0)
    env.assert_complete()
    assert env.query("select * from ntt_backup.failures") == []
    assert verified(env, *way)["wrong"] == {}


def test_the_text_says_how_many_are_wrong_which_and_what_to_do(hashing: Environment) -> None:
    wrong = spoil(hashing, backed_up(hashing))
    done = hashing.call("verify", expect=7)
    assert "checked 200 of 200 blobs" in done.stdout
    assert "3 of them (1.500%)" in done.stdout
    for blobid, reason in wrong.items():
        assert f"{blobid} {reason}" in done.stdout
    assert f"--config {hashing.config} run" in done.stdout


def test_the_oldest_check_comes_first_and_is_recorded(hashing: Environment) -> None:
    blobids = backed_up(hashing, 100)
    old, never = blobids[:10], blobids[10:15]
    set_checked = "update blobs set remote_last_checked = %s where blobid = any(%s)"
    hashing.query(set_checked, "2020-01-01", old)
    hashing.query(set_checked, None, never)

    found = verified(hashing, "--older-than", "30d")

    assert (found["total"], found["checked"]) == (15, 15)
    recent = "select count(*) from blobs where remote_last_checked > now() - interval '1 hour'"
    assert hashing.query(recent) == [(100,)]
    assert verified(hashing, "--older-than", "30d")["total"] == 0


@pytest.mark.long
def test_a_prefix_a_sample_or_a_limited_time_can_be_checked(hashing: Environment) -> None:
    blobids = backed_up(hashing)
    prefix = blobids[0][:2]
    expected = len([one for one in blobids if one.startswith(prefix)])
    assert verified(hashing, "--prefix", prefix)["checked"] == expected
    assert 0 < verified(hashing, "--sample", "30%")["checked"] < 200
    ended = verified(hashing, "--max-duration", "0s")
    assert (ended["checked"], ended["complete"]) == (0, False)
    done = hashing.call("verify", "--sample", "50%")
    assert "95% confidence" in done.stdout


def test_a_blob_that_is_larger_than_the_limit_holds_up_no_other(env: Environment) -> None:
    backed_up(env)
    (large,) = env.fill_both(1, seed=7, size=lambda chance: 200_000)
    env.query("update blobs set remote_last_checked = '2020-01-01' where blobid = %s", large)
    limited = verified(env, "--download", "--max-bytes", "100KB")
    assert 0 < limited["bytes"] <= 100_000
    assert (limited["left_out"], limited["complete"]) == (1, False)


def test_a_disk_that_is_not_mounted_marks_nothing(hashing: Environment) -> None:
    blobids = backed_up(hashing)
    by_hash = hashing.remote.local / "by-hash"
    by_hash.rename(by_hash.with_name("aside"))
    gone = hashing.call("verify")
    by_hash.mkdir()
    empty = hashing.call("verify")
    assert (gone.returncode, empty.returncode) == (5, 5), empty.stderr
    assert "mounted" in gone.stderr
    assert "mounted" in empty.stderr
    assert hashing.copied() == set(blobids)


def test_a_remote_without_blake3_finds_wrong_blobs_or_shows_the_way_out(
    env: Environment,
) -> None:
    blobids = backed_up(env)
    done = env.call("verify", "--trust-remote")
    if done.returncode == 0:
        pytest.skip("this remote has BLAKE3")
    assert done.returncode == 5
    assert "--download" in done.stderr
    assert "BLAKE3" in done.stderr
    wrong = spoil(env, blobids)
    found = verified(env, code=7)
    assert {one["blobid"]: one["reason"] for one in found["failures"]} == wrong


def test_a_remote_without_python_is_refused_with_the_way_out(
    env: Environment, remote: Sshd, startup: Path
) -> None:
    startup.write_text("PATH=/opt/bare\n")
    if remote.run("command -v python3").returncode == 0 or remote.run("tar --help").returncode:
        pytest.skip("this remote has no directory with all programs but Python")
    env.fill_both(3)
    for way in ([], ["--download"]):
        done = env.call("verify", *way, expect=5)
        assert "verify needs Python 3.8" in done.stderr
        assert "rsync" in done.stderr


def test_the_store_can_be_checked_and_is_not_changed(env: Environment) -> None:
    blobids = backed_up(env)
    content = bytearray(env.path(blobids[0]).read_bytes())
    content[0] ^= 1
    env.path(blobids[0]).write_bytes(content)
    env.path(blobids[1]).unlink()

    found = verified(env, "--local", code=7)

    reasons = {one["blobid"]: one["reason"] for one in found["failures"]}
    assert reasons == {blobids[0]: "corrupt-source", blobids[1]: "missing"}
    assert env.copied() == set(blobids)
    done = env.call("verify", "--local")
    assert "heal --blobid" in done.stdout
