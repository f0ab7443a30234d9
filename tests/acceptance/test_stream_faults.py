"""The strategy `stream` under fire: processes killed at random, bits flipped, disks that fill up.

Whatever happens, what is recorded as copied is there and right, nothing half-written has a name,
and once the trouble is over one more run completes and leaves nothing lying around.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import Site, wait_until
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


# --- flipped bits ---------------------------------------------------------------------------------


def test_a_run_completes_when_bits_flip_between_it_and_ssh(streaming: Site, tmp_path: Path) -> None:
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
    [(20_000, 400, 3 * MIB), (70 * MIB, 1, 12 * MIB)],
    ids=["in packs", "resumable"],
)
def test_a_run_ends_with_6_when_the_remote_disk_fills_up_and_completes_later(
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
