"""The environment of a campaign: an environment that faults may strike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import Environment
from tests.faults.environment import Disk, FaultEnvironment
from tests.link import Link
from tests.postgres import Postgres
from tests.sshd import Sshd


@pytest.fixture
def environment(
    request: pytest.FixtureRequest,
    env: Environment,
    postgres: Postgres,
    remote: Sshd,
    link: Link,
    tmp_path: Path,
) -> Iterator[FaultEnvironment]:
    """An environment whose remote lies on a small disk of its own, behind a link that can fail."""
    small = True
    try:
        env.remote = remote.full_directory()
    except pytest.skip.Exception:
        small = False
    disk = Disk(env.remote.local, small)
    tools = tmp_path / "tools"
    tools.mkdir()
    env.write_config(
        remote={"path": env.remote.path, "connect_timeout": 5},
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
    env.through(remote.through(link.port))
    chance = random.Random(0)  # a campaign sets its own
    made = FaultEnvironment(env, postgres, remote, link, disk, tools, request.param, chance)
    made.add(2)
    first = env.run("run")  # from here on by-hash is there, and its absence means trouble
    assert first.returncode == 0, first.stdout
    yield made
    disk.remount("rw")
    disk.free()
