"""The environment of a campaign: a site that faults may strike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import Site
from tests.faults.environment import Disk, FaultEnvironment
from tests.link import Link
from tests.postgres import Postgres
from tests.sshd import Sshd


@pytest.fixture
def environment(
    request: pytest.FixtureRequest,
    site: Site,
    postgres: Postgres,
    remote: Sshd,
    link: Link,
    tmp_path: Path,
) -> Iterator[FaultEnvironment]:
    """A site whose remote lies on a small disk of its own, behind a link that can fail."""
    small = True
    try:
        site.remote = remote.full_directory()
    except pytest.skip.Exception:
        small = False
    disk = Disk(site.remote.local, small)
    tools = tmp_path / "tools"
    tools.mkdir()
    site.write_config(
        remote={"path": site.remote.path, "connect_timeout": 5},
        run={
            "strategy": request.param,
            "workers": 2,
            "batch_size": 6,
            "bwlimit": "1MB/s",
            "stall_timeout": 2,
            "receipt_timeout": 5,
        },
        dump={"bin": str(postgres.programs), "keep_daily": 0, "keep_weekly": 0},
    )
    site.through(remote.through(link.port))
    chance = random.Random(0)  # a campaign sets its own
    made = FaultEnvironment(site, postgres, remote, link, disk, tools, request.param, chance)
    made.add(2)
    first = site.run("run")  # from here on by-hash is there, and its absence means trouble
    assert first.returncode == 0, first.stdout
    yield made
    disk.remount("rw")
    disk.free()
