"""What the remote's disk does to a run, and what a run finds there already."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.sshd import FULL_SIZE, RemoteDir, Sshd

OTHER_HOST = "0123456789ab.9f0c8c4e-0000-4000-8000-000000000000.0.77"


def store_at(site: Site, directory: RemoteDir) -> None:
    site.remote = directory
    site.write_config(remote={"path": directory.path})


def on_the_remote(site: Site, command: str) -> None:
    """Run a command as the remote's account, in the remote's directory."""
    done = site.sshd.run(f"cd {site.remote.path} && {command}")
    assert done.returncode == 0, done.stderr


def place(site: Site, blobid: str, content: bytes) -> Path:
    """A file of the remote's account under the blob's name; its path here."""
    name = f"by-hash/{blobid[:2]}/{blobid[2:4]}/{blobid}"
    done = site.sshd.run(
        f"cd {site.remote.path} && mkdir -p {name[:13]} && cat >{name}", stdin=content
    )
    assert done.returncode == 0, done.stderr
    return site.remote.local / name


def assert_cannot_store(site: Site, done: subprocess.CompletedProcess[str], word: str) -> None:
    """Exit 6 with a hint; nothing is failed, and what is recorded is there to its last byte."""
    assert done.returncode == 6, done.stdout
    (error,) = site.events("error")
    assert word in f"{error['message']} {error['detail']}".lower()
    assert error["hint"]
    assert site.failures() == {}
    there = site.on_remote()
    for blobid in site.copied():
        name = f"{blobid[:2]}/{blobid[2:4]}/{blobid}"
        assert there[name] == site.path(blobid).read_bytes()


# --- no room, no permission


@pytest.mark.docker
def test_a_disk_that_fills_up_in_the_middle_of_a_run(site: Site, remote: Sshd) -> None:
    store_at(site, remote.full_directory())
    on_the_remote(site, f"head -c {FULL_SIZE - 5_000_000} /dev/zero >ballast")
    site.write_config(run={"workers": 1, "batch_size": 20})
    blobs = site.fill(500, size=lambda chance: chance.randrange(30_000))

    done = site.run("run", "--once")

    assert_cannot_store(site, done, "no space left")
    assert 0 < len(site.copied()) < len(blobs)

    on_the_remote(site, "rm ballast")
    assert site.run("run", "--once").returncode == 0
    site.assert_complete()


@pytest.mark.docker
def test_a_disk_that_is_too_small_from_the_start(site: Site, remote: Sshd) -> None:
    store_at(site, remote.full_directory())
    content = bytes(1000)
    blobid = site.put_in_store(content)
    site.register([blobid], [len(content)])
    on_the_remote(site, f"head -c {FULL_SIZE} /dev/zero >ballast || true")

    done = site.run("run", "--once")

    assert_cannot_store(site, done, "full")
    assert site.litter() == ["ballast"]


@pytest.mark.docker
def test_a_file_system_that_is_mounted_read_only(site: Site, remote: Sshd) -> None:
    store_at(site, remote.read_only_directory())
    site.fill(20)

    done = site.run("run", "--once")

    assert_cannot_store(site, done, "read-only")
    assert site.copied() == set()


@pytest.mark.docker
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_by_hash_that_belongs_to_somebody_else(site: Site, command: str) -> None:
    site.fill(20)
    on_the_remote(site, "mkdir -m 555 by-hash")

    done = site.run(command)

    assert done.returncode == 6, done.stdout
    assert "may not write below remote.path" in done.stdout
    assert "by-hash" in done.stdout
    assert (site.copied(), site.failures()) == (set(), {})
    assert site.on_remote() == {}
    assert site.litter() == []


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


def test_what_is_there_and_right_is_left_alone(site: Site) -> None:
    blobs = site.fill(30)
    known = {}
    for blobid in blobs[::2]:
        path = place(site, blobid, site.path(blobid).read_bytes())
        known[path] = path.stat().st_ino

    assert site.run("run", "--once").returncode == 0

    site.assert_complete()
    assert {path: path.stat().st_ino for path in known} == known


def test_what_is_there_and_wrong_is_replaced(site: Site) -> None:
    blobs = site.fill(30, size=lambda chance: chance.randrange(1, 5000))
    right = {blobid: site.path(blobid).read_bytes() for blobid in blobs}
    place(site, blobs[0], b"")
    place(site, blobs[1], right[blobs[1]][:-1])
    place(site, blobs[2], right[blobs[2]] + b"\0")
    place(site, blobs[3], bytes(len(right[blobs[3]])))

    assert site.run("run", "--once").returncode == 0

    site.assert_complete()


@pytest.mark.long
def test_a_link_in_a_blobs_place_is_replaced_and_not_followed(site: Site) -> None:
    blobs = site.fill(30, size=lambda chance: chance.randrange(1, 5000))
    right = site.path(blobs[0]).read_bytes()
    on_the_remote(site, "mkdir elsewhere && echo precious >elsewhere/file")
    for blobid, target in zip(blobs[:4], ("same", "file", "gone", "."), strict=True):
        place(site, blobid, b"").unlink()
        path = place(site, blobid, b"").relative_to(site.remote.local)
        on_the_remote(site, f"ln -sf {site.remote.path}/elsewhere/{target} {path}")
    assert site.sshd.run(f"cat >{site.remote.path}/elsewhere/same", stdin=right).returncode == 0

    done = site.run("run", "--once")

    assert done.returncode == 0, done.stdout
    top = site.remote.local / "by-hash"
    assert [path for path in top.rglob("*") if path.is_symlink()] == []
    assert site.on_remote() == site.in_store()
    assert site.litter() == ["elsewhere"]
    left = {path.name: path.read_bytes() for path in (site.remote.local / "elsewhere").iterdir()}
    assert left == {"same": right, "file": b"precious\n"}


@pytest.mark.long
def test_what_dead_sessions_left_goes_and_what_others_left_stays(
    site: Site, remote: Sshd, link: Link
) -> None:
    on_the_remote(
        site, f"mkdir -p .ntt-incoming/{OTHER_HOST}/1 && echo x >.ntt-incoming/{OTHER_HOST}/1/x"
    )
    site.through(remote.through(link.port))
    site.write_config(run={"batch_size": 10})
    site.fill(100, size=lambda chance: chance.randrange(20_000))
    incoming = site.remote.local / ".ntt-incoming"

    def ours() -> set[str]:
        return {path.name for path in incoming.iterdir()} - {OTHER_HOST}

    with site.running("run", "--once", "--bwlimit", "200kB") as run:
        wait_until(lambda: site.events("batch_complete"), "a batch")
        remote.stop()
        run.kill()
    remote.start()
    assert ours()

    assert site.run("run", "--once").returncode == 0

    assert ours() == set()
    assert (incoming / OTHER_HOST / "1" / "x").read_bytes() == b"x\n"
    assert site.on_remote() == site.in_store()
    assert site.copied() == {path.rpartition("/")[2] for path in site.in_store()}
