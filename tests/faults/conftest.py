"""The environment of a campaign: an environment that faults may strike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from tests.faults.buckets import LARGE_BLOB, BucketFaults, Store
from tests.faults.environment import SMALL_DISK, Disk, FaultEnvironment
from tests.faults.kinds import PROJECT
from tests.faults.packs import DirectoryPackFaults
from tests.helpers.blobs import Person
from tests.helpers.bucket_environment import environment as bucket_environment
from tests.helpers.environment import Environment
from tests.helpers.link import Link
from tests.helpers.postgres import Postgres
from tests.helpers.s3_proxy import S3Proxy
from tests.helpers.s3_servers import as_account, seaweedfs
from tests.helpers.sshd import HOST, Sshd

# The fixture for each kind of campaign, and the strategy of its runs.
_WAYS = {
    "stream": ("_by_ssh", "stream"),
    "tar": ("_by_ssh", "tar"),
    "packs": ("_bucket", "packs"),
    "sealed": ("_bucket", "packs"),
    "packs-ssh": ("_packs_by_ssh", "packs"),
    "sealed-ssh": ("_packs_by_ssh", "packs"),
    "packs-disk": ("_packs_on_disk", "packs"),
    "sealed-disk": ("_packs_on_disk", "packs"),
}
# In the layout `packs`: some blobs of a campaign are files of their own.
_LARGE_IN_DIRECTORY = 80_000


@pytest.fixture
def environment(request: pytest.FixtureRequest, postgres: Postgres) -> FaultEnvironment:
    """An environment with a remote that can fail, for the kind of campaign that is the
    parameter.
    """
    way, strategy = _WAYS[request.param]
    made: FaultEnvironment = request.getfixturevalue(way)
    made.strategy = request.param
    made.env.write_config(
        remote={"connect_timeout": 20},
        run={"workers": 2, "stall_timeout": 2, "receipt_timeout": 30, "strategy": strategy},
        dump={"bin": str(postgres.programs), "keep_daily": 0, "keep_weekly": 0},
    )
    made.add(2)
    first = made.env.run("run")  # from here on by-hash is there, and its absence means trouble
    assert first.returncode == 0, first.stdout
    return made


@pytest.fixture
def _by_ssh(
    env: Environment, postgres: Postgres, remote: Sshd, link: Link, tmp_path: Path
) -> Iterator[FaultEnvironment]:
    """One whose remote lies on a small disk of its own, behind a link that can fail."""
    small = True
    try:
        env.remote = remote.full_directory()
    except pytest.skip.Exception:
        small = False
    disk = Disk(env.remote.local, small)
    tools = tmp_path / "tools"
    tools.mkdir()
    env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    env.write_config(remote={"path": env.remote.path}, run={"batch_size": 6, "bwlimit": "1MB/s"})
    env.through(remote.through(link.port))
    chance = random.Random(0)  # a campaign sets its own
    yield FaultEnvironment(env, postgres, remote, link, disk, tools, "", chance)
    disk.remount("rw")
    disk.free()


@pytest.fixture
def _packs_by_ssh(_by_ssh: FaultEnvironment, request: pytest.FixtureRequest) -> FaultEnvironment:
    """The same with the layout `packs`."""
    return _with_packs(_by_ssh, "ssh", _large_blobs(request))


@pytest.fixture
def _packs_on_disk(_by_ssh: FaultEnvironment, request: pytest.FixtureRequest) -> FaultEnvironment:
    """The same disk, which a receiver of this machine writes to."""
    env = _by_ssh.env
    if _by_ssh.remote.kind != "local":
        pytest.skip("the small disk is the container's")
    env.settings["remote"] = {"url": f"file://{env.remote.local}"}
    return _with_packs(_by_ssh, "disk", _large_blobs(request))


def _large_blobs(request: pytest.FixtureRequest) -> bool:
    """Whether a campaign has large blobs: what is sealed has packs alone."""
    return "packs-" in request.node.name


def _with_packs(within: FaultEnvironment, target: str, large: bool) -> FaultEnvironment:
    env, owner = within.env, Person.new()
    if large:
        _patch_program(env, within.tools, _LARGE_IN_DIRECTORY)
    key = owner.file(within.tools / "key")
    env.write_config(remote={"layout": "packs"}, pack={"identity_file": str(key)})
    return DirectoryPackFaults(
        env=env,
        postgres=within.postgres,
        remote=within.remote,
        link=within.link,
        disk=within.disk,
        tools=within.tools,
        strategy="",
        chance=within.chance,
        owner=owner,
        target=target,
    )


def _patch_program(env: Environment, tools: Path, large_blob: int) -> None:
    """Every Python of the program begins with this. Where libfaketime moves the clock, each sleep
    fails by EINVAL.
    """
    (tools / "sitecustomize.py").write_text(
        f"from ntt_backup.pack import names\nnames.LARGE_BLOB = {large_blob}\n"
        "import select, time\ntime.sleep = lambda seconds: select.select((), (), (), seconds)\n"
    )
    env.environ["PYTHONPATH"] = f"{tools}:{PROJECT}"


@pytest.fixture
def _bucket(
    postgres: Postgres, catalog_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultEnvironment]:
    """One with an object store of its own, behind a proxy and a link that can fail."""
    nothing, owner = cast(Any, None), Person.new()
    tools = tmp_path / "tools"
    tools.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(seaweedfs(disk=SMALL_DISK))
        as_account(monkeypatch, server.sender)
        proxy = stack.enter_context(S3Proxy(server))
        link = stack.enter_context(Link(HOST, int(proxy.endpoint.rpartition(":")[2])))
        env = stack.enter_context(bucket_environment(tmp_path, catalog_url, server))
        env.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        _patch_program(env, tools, LARGE_BLOB)
        env.write_config(
            run={"batch_bytes": "8MiB", "bwlimit": "24MB/s"},
            remote={"part_size": "5MiB"},
            pack={"identity_file": str(owner.file(tmp_path / "key"))},
        )
        store = Store(server)
        stack.callback(store.kill)
        chance = random.Random(0)
        yield BucketFaults(
            env=env,
            postgres=postgres,
            remote=nothing,
            link=link,
            disk=Disk(server.data, server.data.is_mount()),
            tools=tools,
            strategy="",
            chance=chance,
            store=store,
            proxy=proxy,
            owner=owner,
        )
