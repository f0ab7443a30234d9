"""What the remote's disk does to a run, and what a run finds there already."""

from __future__ import annotations

import pytest

from tests.environment import Site, wait_until
from tests.sshd import FULL_SIZE, RemoteDir, Sshd

MIB = 1 << 20


def store_at(site: Site, directory: RemoteDir) -> None:
    site.remote = directory
    site.write_config(remote={"path": directory.path})


def on_the_remote(site: Site, command: str) -> None:
    """Run a command as the remote's account, in the remote's directory."""
    done = site.sshd.run(f"cd {site.remote.path} && {command}")
    assert done.returncode == 0, done.stderr


# --- no room, no permission


@pytest.mark.docker
def test_a_run_ends_with_6_when_the_remote_disk_is_read_only(site: Site, remote: Sshd) -> None:
    store_at(site, remote.read_only_directory())
    site.fill(20)

    done = site.run("run", "--once")

    assert done.returncode == 6, done.stdout
    (error,) = site.events("error")
    assert "read-only" in f"{error['message']} {error['detail']}".lower()
    assert error["hint"]
    assert (site.copied(), site.failures()) == (set(), {})


@pytest.mark.docker
def test_check_and_run_end_with_6_when_by_hash_belongs_to_somebody_else(site: Site) -> None:
    site.fill(20)
    on_the_remote(site, "mkdir -m 555 by-hash")

    for command in ("check", "run"):
        done = site.run(command)
        assert done.returncode == 6, done.stdout
        assert "may not write below remote.path" in done.stdout
        assert "by-hash" in done.stdout
    assert (site.copied(), site.failures()) == (set(), {})
    assert site.on_remote() == {}
    assert site.litter() == []


@pytest.mark.docker
@pytest.mark.parametrize(
    ("size", "count", "room"),
    [(20_000, 400, 3 * MIB), (70 * MIB, 1, 12 * MIB)],
    ids=["in packs", "resumable"],
)
def test_a_run_ends_with_6_when_the_remote_disk_fills_up_and_completes_later(
    site: Site, remote: Sshd, size: int, count: int, room: int
) -> None:
    store_at(site, remote.full_directory())
    site.write_config(
        run={
            "strategy": "stream",
            "codec": "none",
            "workers": 2,
            "batch_size": 40,
            "batch_bytes": 2 * MIB,
        }
    )
    on_the_remote(site, f"head -c {FULL_SIZE - room} /dev/zero >ballast")
    site.fill(count, size=lambda _: size)
    # The catalog does not tell the sizes: else the preflight would see it coming.
    done = site.run("run")

    assert done.returncode == 6, done.stdout
    (error,) = site.events("error")
    assert error["message"] == "the remote is full"
    assert "ENOSPC" in error["detail"]
    assert site.failures() == {}
    site.assert_nothing_half()
    wait_until(lambda: site.litter() == ["ballast"], "the receivers to clear up")

    if count * size < FULL_SIZE - 2 * MIB:
        on_the_remote(site, "rm ballast")
        assert site.run("run").returncode == 0
        wait_until(lambda: site.litter() == [], "the last receivers to clear up")
        site.assert_complete()


# --- what is there already


@pytest.mark.long
def test_a_disk_that_is_not_mounted_stops_the_run_and_nothing_is_written_below_it(
    site: Site,
) -> None:
    site.fill(20)
    assert site.run("check").returncode == 0
    assert not (site.remote.local / "by-hash").exists()
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()
    site.fill(20)

    on_the_remote(site, "mv by-hash ../elsewhere")
    for command in (["check"], ["run", "--once"]):
        done = site.run(*command)
        assert done.returncode == 5, done.stdout
        assert "remote.path is gone" in done.stdout + done.stderr
        assert list(site.remote.local.iterdir()) == []
    assert site.failures() == {}

    on_the_remote(site, "mv ../elsewhere by-hash")
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()
