"""What the remote's disk does to a run, and what a run finds there already."""

from __future__ import annotations

import pytest

from tests.helpers.environment import Environment
from tests.helpers.sshd import FULL_SIZE, RemoteDir, Sshd
from tests.helpers.waiting import wait_until

MIB = 1 << 20


def store_at(env: Environment, directory: RemoteDir) -> None:
    env.remote = directory
    env.write_config(remote={"path": directory.path})


def on_the_remote(env: Environment, command: str) -> None:
    """Run a command as the remote's account, in the remote's directory."""
    done = env.sshd.run(f"cd {env.remote.path} && {command}")
    assert done.returncode == 0, done.stderr


# --- no room, no permission


@pytest.mark.docker
def test_a_run_ends_with_6_when_the_remote_disk_is_read_only(
    env: Environment, remote: Sshd
) -> None:
    store_at(env, remote.read_only_directory())
    env.fill(20)

    env.run("run", "--once", expect=6)
    (error,) = env.events("error")
    assert "read-only" in f"{error['message']} {error['detail']}".lower()
    assert error["hint"]
    assert (env.copied(), env.failures()) == (set(), {})


@pytest.mark.docker
def test_check_and_run_end_with_6_when_by_hash_belongs_to_somebody_else(env: Environment) -> None:
    env.fill(20)
    on_the_remote(env, "mkdir -m 555 by-hash")

    for command in ("check", "run"):
        done = env.run(command, expect=6)
        assert "may not write below remote.path" in done.stdout
        assert "by-hash" in done.stdout
    assert (env.copied(), env.failures()) == (set(), {})
    assert env.on_remote() == {}
    assert env.litter() == []


@pytest.mark.docker
@pytest.mark.parametrize(
    ("size", "count", "room"),
    [(20_000, 400, 3 * MIB), (70 * MIB, 1, 12 * MIB)],
    ids=["in packs", "resumable"],
)
def test_a_run_ends_with_6_when_the_remote_disk_fills_up_and_completes_later(
    env: Environment, remote: Sshd, size: int, count: int, room: int
) -> None:
    store_at(env, remote.full_directory())
    env.write_config(
        run={
            "strategy": "stream",
            "codec": "none",
            "workers": 2,
            "batch_size": 40,
            "batch_bytes": 2 * MIB,
        }
    )
    on_the_remote(env, f"head -c {FULL_SIZE - room} /dev/zero >ballast")
    env.fill(count, size=lambda _: size)
    # The catalog does not tell the sizes: else the preflight would see it coming.
    env.run("run", expect=6)
    (error,) = env.events("error")
    assert error["message"] == "the remote is full"
    assert "ENOSPC" in error["detail"]
    assert env.failures() == {}
    env.assert_nothing_half()
    wait_until(lambda: env.litter() == ["ballast"], "the receivers to clear up")

    if count * size < FULL_SIZE - 2 * MIB:
        on_the_remote(env, "rm ballast")
        env.run("run", expect=0)
        wait_until(lambda: env.litter() == [], "the last receivers to clear up")
        env.assert_complete()


# --- what is there already


@pytest.mark.long
def test_a_disk_that_is_not_mounted_stops_the_run_and_nothing_is_written_below_it(
    env: Environment,
) -> None:
    env.fill(20)
    env.run("check", expect=0)
    assert not (env.remote.local / "by-hash").exists()
    env.run("run", "--once", expect=0)
    env.assert_complete()
    env.fill(20)

    on_the_remote(env, "mv by-hash ../elsewhere")
    for command in (["check"], ["run", "--once"]):
        done = env.run(*command, expect=5)
        assert "remote.path is gone" in done.stdout + done.stderr
        assert list(env.remote.local.iterdir()) == []
    assert env.failures() == {}

    on_the_remote(env, "mv ../elsewhere by-hash")
    env.run("run", "--once", expect=0)
    env.assert_complete()
