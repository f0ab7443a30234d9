"""Hosts share one catalog and one target, and the store of each holds a part of the blobs."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
from blake3 import blake3

from ntt_backup.audit.reconcile import Difference
from ntt_backup.blobdir.layout import relative_path
from ntt_backup.model import Part
from tests.helpers.blobs import put, tree
from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE

# The second part has a single prefix in the middle of the third.
_PARTS = {"alpha": ["0-5"], "beta": ["60-af", "f3"], "gamma": ["b-e", "f0-f2", "f4-ff"]}
_TEXTS = {"alpha": "00-5f", "beta": "60-af f3", "gamma": "b0-f2 f4-ff"}


@dataclass
class Host:
    """A host: its environment, and the blobs that its store holds."""

    env: Environment
    part: str
    blobids: set[str]

    def json(self, *args: str, expect: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.env.call(*args, "--json", expect=expect).stdout)
        return found


Hosts = dict[str, Host]


@pytest.fixture
def hosts(env: Environment) -> Hosts:
    """The hosts, with empty stores. No store is that of `env` itself."""
    found = {}
    for name, prefixes in _PARTS.items():
        host = replace(env.beside(name), shared_store=None)
        host.store.mkdir()
        host.write_config(source={"root": str(host.store), "prefixes": prefixes})
        found[name] = Host(host, _TEXTS[name], set())
    return found


def fill(hosts: Hosts, count: int, *, seed: int = 1) -> set[str]:
    """Puts small blobs into the stores of the hosts that are to hold them; returns their names."""
    chance, blobids = random.Random(seed), set()
    parts = {name: one.env.settings["source"]["prefixes"] for name, one in hosts.items()}
    held = {name: _part(prefixes) for name, prefixes in parts.items()}
    for _ in range(count):
        content = chance.randbytes(chance.randrange(1, 300))
        name = blake3(content).hexdigest()
        (host,) = (hosts[one] for one, part in held.items() if part.has(name))
        put(host.env.store, content)
        host.blobids.add(name)
        blobids.add(name)
    return blobids


def _part(prefixes: list[str]) -> Part:
    from ntt_backup.config.values import parse_prefixes

    return parse_prefixes(prefixes)


def drain_at_once(hosts: Hosts, *args: str, patience: float = PATIENCE) -> None:
    """Runs all hosts at the same time. Each must end with 0."""
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(one.env.running("run", *args)) for name, one in hosts.items()
        }
        for name, run in runs.items():
            assert run.wait(patience) == 0, f"{name}: {hosts[name].env.output()}"


def assert_drained(hosts: Hosts, blobids: set[str]) -> None:
    """All is copied, nothing was sent twice or failed, and each host has sent what it holds."""
    env = next(iter(hosts.values())).env
    assert env.query("select count(*) from blobs where remote_copied is not true") == [(0,)]
    assert env.query("select count(*) from ntt_backup.failures") == [(0,)]
    for host in hosts.values():
        batches = host.env.events("batch_complete")
        assert sum(one["copied"] for one in batches) == len(host.blobids)
        assert sum(one["failed"] for one in batches) == 0
        (stop,) = host.env.events("run_stop")[-1:]
        assert (stop["outcome"], stop["exit_code"]) == ("done", 0)
        assert host.env.events("run_start")[-1]["prefixes"] == host.part
    assert env.copied() == blobids


def assert_right_about_its_part(host: Host) -> None:
    """All commands agree that the part of the host is complete, and tell of nothing else."""
    count = len(host.blobids)
    status = host.env.status()
    assert (status["copied"], status["pending"], status["failed"]) == (count, 0, 0)
    assert status["prefixes"] == host.part
    assert status["health"]["level"] == "healthy", status["health"]
    compared = host.json("reconcile")
    assert (compared["rows"], compared["in_store"], compared["on_remote"]) == (count,) * 3
    assert compared["agreed"] == count
    assert compared["differences"] == {str(what): 0 for what in Difference}
    for args in (["verify"], ["verify", "--local"]):
        checked = host.json(*args)
        assert (checked["total"], checked["checked"], checked["wrong"]) == (count, count, {})
    assert host.json("heal", "--all")["right"] == count


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=pytest.mark.long)])
def test_hosts_that_hold_parts_of_a_store_drain_one_catalog(
    env: Environment, hosts: Hosts, count: int
) -> None:
    blobids = fill(hosts, count)
    alpha, beta, gamma = hosts.values()
    # A blob of the third host, that lies in the first store alone.
    foreign = b"left by somebody"
    name = blake3(foreign).hexdigest()
    assert not _part(_PARTS["alpha"]).has(name)
    put(alpha.env.store, foreign)
    for host in hosts.values():
        scanned = host.json("scan")
        assert (scanned["registered"], scanned["strays"]) == (len(host.blobids), {})
        assert scanned["outside"] == ([name] if host is alpha else [])
    assert env.query("select count(*) from blobs") == [(len(blobids),)]
    assert f"such as {name}: they were left alone" in alpha.env.call("scan").stdout

    # The first one ends although the others have not begun.
    alpha.env.run("run", expect=0)
    assert env.copied() == alpha.blobids
    assert beta.env.status()["pending"] == len(beta.blobids)
    assert "nothing to send" not in beta.env.call("run", "--dry-run", expect=0).stdout
    drain_at_once(hosts)
    assert_drained(hosts, blobids)
    assert env.on_remote() == {
        path: content
        for host in hosts.values()
        for path, content in tree(host.env.store).items()
        if Path(path).name != name
    }
    for host in hosts.values():
        if host is alpha:
            (alpha.env.store / relative_path(name)).unlink()
        assert_right_about_its_part(host)
    told = alpha.env.call("status").stdout
    assert f"the blobs of {alpha.part} alone" in told
    assert f"{beta.part} to {gethostname()}, {gamma.part} to {gethostname()}" in told
    assert "no host" not in told
    assert f"the blobs of {beta.part} alone" in beta.env.call("check").stdout
