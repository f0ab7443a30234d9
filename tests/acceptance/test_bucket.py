"""Runs to a bucket by the real program: all is copied once, whatever dies on the way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from datetime import UTC, datetime, timedelta

import pytest
from botocore.exceptions import ClientError

from ntt_backup.config import Settings, load
from ntt_backup.daemon.checks import check_due
from tests.helpers.bucket_environment import BucketEnvironment, as_reader
from tests.helpers.s3_servers import as_account
from tests.helpers.waiting import PATIENCE, await_silence, wait_until


def test_a_first_run_a_second_one_and_one_with_more(bucket_env: BucketEnvironment) -> None:
    env = bucket_env
    env.fill(300)

    env.run("run", expect=0)
    env.assert_complete()
    assert len(env.packs()) == 1
    (told,) = env.events("batch_complete")
    assert told["pack"] in env.packs()
    assert env.events("worker_start")[0]["strategy"] == "packs"
    before = set(env.packs())
    env.run("run", expect=0)
    assert set(env.packs()) == before
    env.put(b"one more")
    env.run("run", expect=0)
    env.assert_complete()
    assert len(env.packs()) == 2


def test_check_looks_at_all_that_a_run_needs(bucket_env: BucketEnvironment) -> None:
    env = bucket_env
    env.fill(3)

    done = env.call("check", expect=0)
    assert re.search(r"^ok +remote +s3://.*strategy packs", done.stdout, re.MULTILINE)
    assert re.search(r"^ok +store +s3://.*/format.json will be made", done.stdout, re.MULTILINE)
    # The server's policies know no condition on deleting for the sender.
    warned = r"^warning +transfer .*not append-only: .* allowed \(docs/object-stores.md\)"
    assert re.search(warned, done.stdout, re.MULTILINE)
    assert env.on_remote() == {}
    env.run("run", expect=0)
    assert " will be made" not in env.call("check").stdout


def test_locks_are_renewed_and_keep_what_is_stored(
    bucket_env: BucketEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real server that has object lock, whose default is too short."""
    env, name = bucket_env, "renewed"
    as_account(monkeypatch, env.server.owner)
    client = env.server.client()
    client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket=name,
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}},
        },
    )
    env.move(env.place.model_copy(update={"url": f"s3://{name}/backup"}))
    env.fill(20)
    env.run("run", expect=0)
    until = datetime.now(UTC) + timedelta(days=40)
    day = until.strftime("%Y-%m-%d")
    done = json.loads(env.call("protect", "--until", day, "--json", expect=0).stdout)
    assert (done["renewed"], done["objects"], done["default_days"]) == (2, 2, 1)
    listed = client.list_objects_v2(Bucket=name, Prefix="backup/packs/")["Contents"]
    (pack,) = [one["Key"].removeprefix("backup/") for one in listed]
    for key in (pack, "format.json"):
        told = client.get_object_retention(Bucket=name, Key=f"backup/{key}")["Retention"]
        assert (told["Mode"], told["RetainUntilDate"].strftime("%Y-%m-%d")) == ("GOVERNANCE", day)
    version = client.head_object(Bucket=name, Key=f"backup/{pack}")["VersionId"]
    with pytest.raises(ClientError):
        client.delete_object(Bucket=name, Key=f"backup/{pack}", VersionId=version)
    env.call("verify", "--download", expect=0)
    # What arrives now is locked for a day, and that is what counts.
    lock = env.status()["lock"]
    assert lock["marker_until"].startswith(day)
    assert datetime.fromisoformat(lock["until"]) < datetime.now(UTC) + timedelta(days=1)
    assert re.search(r"^ok +locks +object locks end ", env.call("check").stdout, re.MULTILINE)
    # A daemon looks at the lock, too, where nobody on this host has.
    (note,) = env.root.rglob("locks-remote.json")
    note.unlink()
    assert env.status()["lock"] is None
    env.query("delete from ntt_backup.checks")
    env.write_config(**{"checks.verify": {"every": "1h"}})
    settings = load(Settings, file=env.config, environ={})
    assert not check_due(settings, lambda _: None, patient=True).failed
    assert env.status()["lock"]["marker_until"].startswith(day)
    for wrong in (("--for", "4000d"), ("--until", "2020-01-01"), ()):
        env.call("protect", *wrong, expect=2)


def test_wrong_credentials_and_a_missing_bucket_end_with_5(bucket_env: BucketEnvironment) -> None:
    env = bucket_env
    env.fill(3)
    as_reader(env)
    env.run("run", expect=5)
    env.environ = {**env.server.sender.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    wrong = env.run("run", expect=5)
    assert "does not accept the credentials" in wrong.stdout
    env.environ = {}
    env.write_config(remote={"url": "s3://no-such-bucket/backup"})
    missing = env.run("run", expect=5)
    assert "no such bucket" in missing.stdout
    # Nothing was copied, so there is nothing that verify asks for.
    looked = env.call("verify")
    assert (looked.returncode, looked.stdout) == (5, "")
    assert "no such bucket" in looked.stderr
    assert env.copied() == set()
    assert env.failures() == {}


@pytest.mark.parametrize("victim", ["worker", pytest.param("coordinator", marks=pytest.mark.long)])
def test_what_is_killed_is_finished(bucket_env: BucketEnvironment, victim: str) -> None:
    env = bucket_env
    env.fill(36, size=lambda chance: chance.randrange(500_000, 1_500_000))
    env.write_config(
        run={"workers": 2, "batch_bytes": "12MiB", "bwlimit": "8MB/s"},
        remote={"part_size": "5MiB"},
    )
    with env.running("run") as run:
        dead = env.await_event("batch_complete")["pid"]
        wait_until(env.litter, "an upload that is under way")
        os.kill(dead if victim == "worker" else run.pid, signal.SIGKILL)
        if victim == "worker":
            env.await_event("worker_restart")
        run.send_signal(signal.SIGTERM)
        run.wait(PATIENCE)
        wait_until(lambda: not env.processes(), "the end of all")
    env.assert_nothing_half()

    env.write_config(run={"bwlimit": "1GB/s"})
    env.run("run", expect=0)
    env.assert_complete()


def test_a_run_that_watches_sends_what_comes_but_nothing_while_it_is_paused(
    bucket_env: BucketEnvironment,
) -> None:
    env = bucket_env
    env.write_config(run={"poll_interval": 0.2}, remote={"part_size": "5MiB"})
    env.put(b"first")
    with env.running("run", "--watch") as run:
        env.await_copied(env.copied() | {env.put(b"second")})
        env.call("bwlimit", "4MB/s", expect=0)
        third = env.put(random.Random(3).randbytes(16_000_000))
        wait_until(env.litter, "an upload that is under way")
        env.call("pause", expect=0)
        env.call("bwlimit", "off", expect=0)
        fourth = env.put(b"fourth")
        env.call("now")
        await_silence(lambda: env.status()["daemon"]["state"]["sent"])
        assert env.litter()
        assert env.copied().isdisjoint({third, fourth})
        env.call("resume", expect=0)
        env.await_copied({third, fourth})
        run.send_signal(signal.SIGTERM)
        assert run.wait(PATIENCE) == 128 + signal.SIGTERM
    env.assert_complete()
    assert [line for kind in ("outage", "worker_stall", "error") for line in env.events(kind)] == []
    assert json.loads(env.log.read_text().splitlines()[-1])["outcome"] == "stopped"


def test_check_tells_that_the_newest_pack_is_not_there(bucket_env: BucketEnvironment) -> None:
    env = bucket_env
    env.fill(5)
    env.run("run", expect=0)
    (key,) = env.packs()
    assert f"lacks the pack {key}" not in env.run("check").stdout
    env.bucket.delete(key)
    assert f"lacks the pack {key}" in env.run("check").stdout
