"""The strategy `stream` under fire: processes killed at random, bits flipped, disks that fill up.

Whatever happens, what is recorded as copied is there and right, nothing half-written has a name,
and once the trouble is over one more run completes and leaves nothing lying around.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
from tests.link import Link
from tests.patience import PATIENCE
from tests.sshd import FULL_SIZE, Sshd

MIB = 1 << 20
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def streaming(site: Site) -> Site:
    site.write_config(run={"strategy": "stream", "codec": "none"})
    return site


def assert_complete_once_all_have_left(site: Site) -> None:
    """A receiver that lost its client a moment ago may still be clearing up."""
    wait_until(lambda: site.litter() == [], "the last receivers to clear up")
    site.assert_complete()


# --- kill -9 --------------------------------------------------------------------------------------

# On the remote: kill the receivers that work below a directory, or what stands above them.
KILL = """
for pid in /proc/[0-9]*; do
    ls -l $pid/fd 2>/dev/null | grep -q -- '-> {path}/' || continue
    victim=${{pid#/proc/}}
    [ {above} = 0 ] || victim=$(sed -n 's/^PPid:[[:space:]]*//p' $pid/status)
    [ -z "$victim" ] || kill -KILL $victim
done 2>/dev/null
true
"""


def kill_there(site: Site, remote: Sshd, *, above: bool) -> None:
    script = KILL.format(path=site.remote.path, above=int(above))
    assert remote.run(script).returncode == 0


def kill_here(site: Site, name: str, chance: random.Random) -> None:
    workers = {line["pid"] for line in site.events("worker_start")} & set(site.processes())
    victims = sorted(workers)
    if name != "worker":
        children = [child for worker in workers for child in site.children(worker).items()]
        victims = sorted(pid for pid, comm in children if comm == name)
    if victims:
        with suppress(ProcessLookupError):
            os.kill(chance.choice(victims), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_whoever_is_killed_at_whatever_moment(
    streaming: Site, remote: Sshd, link: Link, seed: int
) -> None:
    """Moments are counted in bytes on the link. One blob is large enough to be resumed."""
    site, chance = streaming, random.Random(seed)
    site.through(remote.through(link.port))
    blobids = site.fill(100, seed=seed, size=lambda r: r.randrange(50_000, 300_000))
    blobids += site.fill(1, seed=100 + seed, size=lambda _: 66 * MIB)
    site.write_config(run={"batch_size": 5, "bwlimit": "30MB/s"})
    victims = ["worker", "ssh", "sshd", "receiver"] * 2
    chance.shuffle(victims)
    todo = list(victims)
    while todo:
        with site.running("run") as run:
            while todo:
                moment = link.sent + chance.randrange(1, 10 * MIB)
                wait_until(
                    lambda m=moment: link.sent >= m or run.poll() is not None, "the next moment"
                )
                if run.poll() is not None:
                    break
                victim = todo.pop()
                if victim in ("worker", "ssh"):
                    kill_here(site, victim, chance)
                else:
                    kill_there(site, remote, above=victim == "sshd")
                site.assert_nothing_half()
            if not todo:
                assert run.wait(PATIENCE) == 0, site.output()
        if todo:  # All was copied before the last one was killed: some of it again.
            assert run.returncode == 0, site.output()
            again = chance.sample(blobids, 60)
            site.query("update blobs set remote_copied = false where blobid = any(%s)", again)
    assert site.failures() == {}
    assert site.events("outage")
    assert site.events("worker_restart")

    assert site.run("run").returncode == 0
    assert site.failures() == {}
    assert_complete_once_all_have_left(site)


# --- flipped bits ---------------------------------------------------------------------------------


def test_a_run_whose_bits_flip_between_it_and_ssh(streaming: Site, tmp_path: Path) -> None:
    site, chance = streaming, random.Random(4)
    site.fill(1)
    assert site.run("run").returncode == 0  # From here on by-hash is there.
    site.fill(60, seed=3, size=lambda r: r.randrange(20_000))
    site.fill(2, seed=2, size=lambda _: 2 * MIB)
    tools, book = tmp_path / "tools", tmp_path / "book"
    tools.mkdir()
    ssh = subprocess.run(["sh", "-c", "command -v ssh"], capture_output=True, text=True).stdout
    wrapper = tools / "ssh"
    wrapper.write_text(
        f"#!/bin/sh\nPYTHONPATH={PROJECT} exec {sys.executable} -m tests.bit_flips {book}"
        f' {ssh.strip()} "$@"\n'
    )
    wrapper.chmod(0o755)
    site.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    flips = [("up", chance.randrange(300)), ("up", chance.randrange(3 * MIB))]
    flips += [("up", chance.randrange(100_000)), ("down", 150 + chance.randrange(40))] * 3
    # The first session is the preflight's, which is not tried again.
    book.write_text(
        "up 999999999 0\n" + "".join(f"{way} {byte} {chance.randrange(8)}\n" for way, byte in flips)
    )
    site.write_config(run={"workers": 1, "batch_size": 10, "receipt_timeout": 5})

    done = site.run("run")

    assert done.returncode == 0, done.stdout
    assert site.events("batch_retry")
    assert book.read_text().count("\n") < len(flips)
    assert site.failures() == {}
    assert_complete_once_all_have_left(site)


# --- full disks -----------------------------------------------------------------------------------


@pytest.mark.docker
@pytest.mark.parametrize(
    ("size", "count", "room"),
    [
        (300, 3000, 3 * MIB),
        (20_000, 600, 5 * MIB),
        (MIB, 20, 7 * MIB),
        (20 * MIB, 1, 10 * MIB),
        (70 * MIB, 1, 12 * MIB),
    ],
    ids=["tiny", "some in a pack", "one in a pack", "in pieces", "resumable"],
)
def test_a_disk_that_fills_up(
    streaming: Site, remote: Sshd, size: int, count: int, room: int
) -> None:
    site = streaming
    site.remote = remote.full_directory()
    site.write_config(
        remote={"path": site.remote.path},
        run={"workers": 2, "batch_size": 40, "batch_bytes": 2 * MIB},
    )
    full = site.sshd.run(f"head -c {FULL_SIZE - room} /dev/zero >{site.remote.path}/ballast")
    assert full.returncode == 0, full.stderr
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
        assert site.sshd.run(f"rm {site.remote.path}/ballast").returncode == 0
        assert site.run("run").returncode == 0
        assert_complete_once_all_have_left(site)
