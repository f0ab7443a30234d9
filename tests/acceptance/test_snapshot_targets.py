"""Snapshots beside blobs, on each kind of target: they come back, and are no strays."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.helpers.blobs import Person, tree
from tests.helpers.bucket_environment import BucketEnvironment
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.s3_servers import as_account
from tests.helpers.waiting import PATIENCE


@pytest.fixture(params=["env", pytest.param("bucket_env", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    env: Environment = request.getfixturevalue(request.param)
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    return env


def test_snapshots_beside_blobs_come_back_and_are_no_strays(
    target: Environment, tmp_path: Path
) -> None:
    env, data = target, tmp_path / "data"
    env.fill(20)
    env.run("run", expect=0)
    (data / "below").mkdir(parents=True)
    for number in range(3):
        (data / "below" / str(number)).write_text("content " * 1000 * number)
        env.call("snapshot", "take", "data", str(data), expect=0)
    for command in (["reconcile"], ["verify", "--download"], ["scan"], ["check"]):
        done = env.run(*command, expect=0)
        assert "snapshots/" not in done.stdout
        assert "stray" not in done.stdout.replace("0 stray", "")
    env.run("run", expect=0)
    back = tmp_path / "back"
    env.run("snapshot", "restore", "data", "--to", str(back), expect=0)
    found = {path.name: path.read_text() for path in (back / str(data)[1:] / "below").iterdir()}
    assert found == {str(number): "content " * 1000 * number for number in range(3)}


def test_sealed_snapshots_are_taken_without_the_identity_and_restored_with_it(
    bucket_env: BucketEnvironment, tmp_path: Path
) -> None:
    env, data, owner = bucket_env, tmp_path / "data", Person.new()
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    env.write_config(pack={"recipients": [owner.public]})
    data.mkdir()
    parents = []
    for number in range(2):
        (data / "file").write_text("content" * (number + 1))
        done = env.call("snapshot", "take", "data", str(data), "--json", expect=0)
        parents.append(json.loads(done.stdout)["parent"])
    assert [bool(parent) for parent in parents] == [False, True]
    keys = [one.key for one in env.bucket.list("snapshots/")]
    assert len(keys) == 6
    assert all(key.endswith(".age") for key in keys)
    restoring = ["snapshot", "restore", "data", "--to"]
    env.run(*restoring, str(tmp_path / "none"), expect=2)
    env.environ["NTT_PACK_IDENTITY_FILE"] = str(owner.file(tmp_path / "key"))
    env.run(*restoring, str(tmp_path / "back"), expect=0)
    assert (tmp_path / "back" / str(data)[1:] / "file").read_text() == "content" * 2


@pytest.mark.long
def test_verify_and_restore_wait_out_a_link_that_drops_and_a_take_says_what_to_do(
    env: Environment, link: Link, tmp_path: Path
) -> None:
    data, back = tmp_path / "data", tmp_path / "back"
    data.mkdir()
    for number in range(24):
        (data / str(number)).write_bytes(random.Random(number).randbytes(500_000))
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    env.through(env.sshd.through(link.port))
    env.write_config(run={"backoff_base": 0.05, "backoff_cap": 0.1})
    link.cut_after(3_000_000)
    cut = env.run("snapshot", "take", "data", str(data), expect=5)
    assert "the next take begins again" in cut.stderr
    link.restore()
    env.call("snapshot", "take", "data", str(data), expect=0)
    for command in (["verify", "data", "--download"], ["restore", "data", "--to", str(back)]):
        link.throttle(5_000_000)
        with env.running("snapshot", *command) as process:
            link.drop_twice()
            link.throttle(None)
            assert process.wait(PATIENCE) == 0, env.output()
        assert env.output().count("remote is unreachable") == 2
    assert tree(back / str(data)[1:]) == tree(data)
    link.cut()
    for command in (["verify"], ["forget", "data", "--keep-last", "1"]):
        done = env.call("snapshot", *command, expect=5)
        assert "again in" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("days", "warns"), [(7, True), (200, False)])
def test_check_warns_of_a_real_lock_that_ends_before_versions_do(
    bucket_env: BucketEnvironment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    days: int,
    warns: bool,
) -> None:
    env, name = bucket_env, f"locked-{days}"
    as_account(monkeypatch, env.server.owner)  # The sender may not ask for the lock.
    env.put(b"one")
    client = env.server.client()
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=name,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": days}},
        },
    )
    env.move(env.place.model_copy(update={"url": f"s3://{name}/backup"}))
    kept = {"paths": [str(tmp_path)], "keep_daily": 7, "keep_weekly": 0, "keep_last": 1}
    env.write_config(**{"snapshots.data": kept})
    done = env.call("check")
    assert ("the bucket's object lock ends after 7 days" in done.stdout) is warns, done.stdout
    assert "data (" in done.stdout or not warns
