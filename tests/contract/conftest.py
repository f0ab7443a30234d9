"""Every strategy, over every way to a remote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ntt_backup.client.transport import Local, Ssh
from ntt_backup.config.sections import RemoteSettings
from ntt_backup.upload.strategies import STRATEGIES
from tests.contract.harness import Harness, Machine
from tests.helpers.sshd import Sshd


@pytest.fixture(params=sorted(name for name, one in STRATEGIES.items() if not one.packs))
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A remote on this machine whose tools and startup files can be changed."""
    tools = tmp_path / "tools"
    tools.mkdir()
    return Machine(tools)


@pytest.fixture
def local(tmp_path: Path, strategy: str) -> Iterator[Harness]:
    """A harness whose remote is a directory of this machine."""
    store, remote_dir = tmp_path / "store", tmp_path / "remote"
    store.mkdir()
    (remote_dir / "by-hash").mkdir(parents=True)
    harness = Harness(strategy, store, Local(), str(remote_dir), remote_dir)
    yield harness
    harness.close()


@pytest.fixture
def over_ssh(tmp_path: Path, strategy: str, remote: Sshd) -> Iterator[Harness]:
    """A harness whose remote is the test server."""
    store = tmp_path / "store"
    store.mkdir()
    directory = remote.directory()
    remote.run(f"mkdir {directory.path}/by-hash").check_returncode()
    settings = RemoteSettings(host=remote.alias, path=directory.path, ssh_config=remote.ssh_config)
    harness = Harness(strategy, store, Ssh(settings), directory.path, directory.local)
    yield harness
    harness.close()


@pytest.fixture(params=["local", "ssh"])
def harness(request: pytest.FixtureRequest, strategy: str) -> Harness:
    """The same over either transport."""
    made: Harness = request.getfixturevalue("local" if request.param == "local" else "over_ssh")
    return made
