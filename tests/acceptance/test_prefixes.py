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


def drain_at_once(hosts: Hosts, patience: float) -> None:
    """Runs all hosts at the same time. Each must end with 0."""
    with ExitStack() as stack:
        runs = {name: stack.enter_context(one.env.running("run")) for name, one in hosts.items()}
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
    status = host.json("status", "--exact")
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


@pytest.mark.long
@pytest.mark.parametrize("count", [300, 200_000])
def test_hosts_that_hold_parts_of_a_store_drain_one_catalog(
    env: Environment, hosts: Hosts, count: int
) -> None:
    blobids, patience = fill(hosts, count), PATIENCE + count / 100
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
    alpha.env.run("run", expect=0, timeout=patience)
    assert env.copied() == alpha.blobids
    assert beta.json("status", "--exact")["pending"] == len(beta.blobids)
    assert "nothing to send" not in beta.env.call("run", "--dry-run", expect=0).stdout
    drain_at_once(hosts, patience)
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


@pytest.mark.long
def test_what_fails_is_the_matter_of_the_host_that_holds_it(env: Environment, hosts: Hosts) -> None:
    """A lost blob, and a malformed row, which lies behind all hashes."""
    fill(hosts, 60)
    alpha, beta, gamma = hosts.values()
    for host in hosts.values():
        host.json("scan")
    lost, bad = min(beta.blobids), "zz-no-blobid"
    (beta.env.store / relative_path(lost)).unlink()
    env.register([bad])
    codes = {name: host.env.run("run").returncode for name, host in hosts.items()}
    assert codes == {"alpha": 0, "beta": 7, "gamma": 7}
    assert env.failures() == {lost: "missing", bad: "bad-blobid"}
    # Also a run with nothing to do tells of failures of its part alone.
    codes = {name: host.env.run("run").returncode for name, host in hosts.items()}
    assert codes["alpha"] == 0
    assert [len(host.env.events("still_failed")) for host in hosts.values()] == [0, 2, 2]
    for host, failed in ((alpha, {}), (beta, {"missing": 1}), (gamma, {"bad-blobid": 1})):
        status = host.env.status()
        assert status["failed_by_reason"] == failed
        level = "action_required" if failed else "healthy"
        assert status["health"]["level"] == level, status["health"]
    assert lost in beta.env.call("failed").stdout
    assert alpha.env.call("failed").stdout == "nothing failed\n"
    assert alpha.json("requeue")["requeued"] == 0
    assert alpha.json("reconcile")["differences"]["in-catalog-but-not-in-store"] == 0

    shown = alpha.json("show", lost)
    assert (shown["mine"], shown["source"], shown["hosts"]) == (False, None, [gethostname()])
    assert f"not in the part of this host (00-5f): it is in that of {gethostname()}" in (
        alpha.env.call("show", lost).stdout
    )
    assert [host.json("show", bad)["mine"] for host in hosts.values()] == [False, False, True]
    assert beta.json("show", lost)["source"]["problem"] == "missing"

    done = alpha.env.call("heal", "--blobid", lost, expect=2)
    assert f"{lost} belongs to another host" in done.stderr
    assert not (alpha.env.store / relative_path(lost)).exists()


def test_a_part_whose_disk_is_away_fails_no_blob_although_the_store_has_others(
    env: Environment, hosts: Hosts
) -> None:
    fill(hosts, 60)
    alpha, beta, _ = hosts.values()
    alpha.json("scan")
    put(alpha.env.store, b"left by somebody")
    for content in range(9):  # Readable blobs of others are no sign of life.
        put(alpha.env.store, b"%d" % content)
    for prefix in alpha.env.store.iterdir():
        if _part(_PARTS["alpha"]).has(prefix.name):
            prefix.rename(alpha.env.root / f"away-{prefix.name}")
    done = alpha.env.run("run", expect=2)
    assert "of 00-5f" in done.stdout + done.stderr
    assert "source.prefixes" in done.stdout + done.stderr
    assert env.failures() == {}
    # A catalog that knows the other parts alone knows no blob of this one.
    done = beta.env.run("run", expect=2)
    assert "the catalog knows no blob, and the store has some" in done.stdout + done.stderr
    assert "the blobs of 60-af f3 alone" in done.stdout + done.stderr


@pytest.mark.long
def test_a_watching_host_checks_its_part_and_no_other(env: Environment, hosts: Hosts) -> None:
    blobids = fill(hosts, 90)
    alpha, beta, _ = hosts.values()
    for host in hosts.values():
        host.json("scan")
        host.env.run("run", expect=0)
    assert env.copied() == blobids
    gone = {name: min(host.blobids) for name, host in hosts.items()}
    for blobid in gone.values():
        env.remote_path(blobid).unlink()
    new = next(
        content
        for content in (b"new %d" % nth for nth in range(999))
        if _part(_PARTS["alpha"]).has(blake3(content).hexdigest())
    )
    registered = put(alpha.env.store, new).blobid
    text = alpha.env.config.read_text()
    alpha.env.config.write_text(
        f"{text}[checks]\n"
        + "".join(f"{one} = {{every = 3600}}\n" for one in ("scan", "reconcile"))
    )
    with alpha.env.running("run", "--watch") as run:
        alpha.env.await_event("check_complete", 2)
        env.await_copied({registered, gone["alpha"]})
        run.terminate()
        assert run.wait(PATIENCE) == 143, alpha.env.output()
    checks = {one["command"]: one for one in alpha.env.events("check_complete")}
    assert checks["scan"]["changed"] == 1
    assert (checks["reconcile"]["wrong"], checks["reconcile"]["changed"]) == (1, 1)
    # What the others have lost is for them to find.
    assert {gone["beta"], gone["gamma"]} <= env.copied()
    assert beta.json("reconcile", expect=7)["differences"]["copied-but-absent"] == 1
    assert alpha.json("reconcile")["differences"]["copied-but-absent"] == 0


def test_packs_are_checked_by_the_host_that_has_their_smallest_blob(
    env: Environment, hosts: Hosts, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    blobids = fill(hosts, 90)
    for host in hosts.values():
        host.env.settings["remote"] = {"url": f"file://{target}", "layout": "packs"}
        host.env.write_config(run={"batch_size": 1000})
        host.json("scan")
    alpha, beta, _ = hosts.values()
    for host in hosts.values():
        host.env.run("run", expect=0)
    assert env.copied() == blobids
    for host in hosts.values():
        compared = host.json("reconcile")
        assert (compared["rows"], compared["agreed"]) == (len(host.blobids),) * 2
        assert host.json("verify")["checked"] == len(host.blobids)
    (pack,) = [one for one in target.rglob("*.tar") if one.name < "6"]
    pack.unlink()
    assert beta.json("reconcile")["differences"]["pack-recorded-but-absent"] == 0
    assert beta.json("verify")["lost_packs"] == 0
    found = alpha.json("reconcile", expect=7)["differences"]
    assert found["pack-recorded-but-absent"] == 1
    assert found["copied-but-absent"] == len(alpha.blobids)
    assert alpha.json("verify", expect=7)["requeued"] == len(alpha.blobids)
    alpha.env.run("run", expect=0)
    assert env.copied() == blobids
