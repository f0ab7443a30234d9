"""Several hosts share one catalog, each in a network namespace of its own; and one after another is
lost.

Only the way to the catalog is the namespace's: ssh leaves it again, so that whoever is cut off from
the catalog still has a remote.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from psycopg.conninfo import make_conninfo

from tests.helpers.environment import Environment
from tests.helpers.postgres import Postgres
from tests.helpers.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and ip"
    ),
]
_NAMES = ("cut-off", "stopped", "killed", "healthy")
_BATCH = 10
# A window of batches is under way when a host is lost, and one is being sent.
_UNDER_WAY = 5 * _BATCH
_NET = f"10.232.{os.getpid() % 256}"


def test_what_lost_hosts_have_claimed_is_free_within_a_minute(
    env: Environment, postgres: Postgres, tmp_path: Path
) -> None:
    blobids = env.fill_slowly(1500, rate="300kB")
    env.write_config(run={"workers": 1, "batch_size": _BATCH})
    with ExitStack() as stack:
        links = [stack.enter_context(_link(nth)) for nth, _ in enumerate(_NAMES)]
        _listen(postgres, stack)
        hosts = {name: _host(env, name, nth) for nth, name in enumerate(_NAMES)}
        runs = {name: stack.enter_context(host.running("run")) for name, host in hosts.items()}
        for host in hosts.values():
            host.await_event("batch_complete", 2)
        _ip("link", "set", links[0], "down")
        _signal(hosts["stopped"], signal.SIGSTOP)
        _signal(hosts["killed"], signal.SIGKILL)
        lost = time.monotonic()
        wait_until(lambda: _holders(env) <= {"healthy"}, "the ranges of the lost hosts")
        assert time.monotonic() - lost < 60 + PATIENCE / 10
        assert runs["healthy"].wait(PATIENCE * 2) == 0, hosts["healthy"].output()
        assert env.copied() == set(blobids)
        _ip("link", "set", links[0], "up")
        _signal(hosts["stopped"], signal.SIGCONT)
        for name in ("cut-off", "stopped"):
            assert runs[name].wait(PATIENCE) == 0, hosts[name].output()
    told = [line["copied"] for one in hosts.values() for line in one.events("batch_complete")]
    assert len(blobids) - _UNDER_WAY <= sum(told) <= len(blobids) + 2 * _UNDER_WAY
    env.assert_complete()


@contextmanager
def _link(nth: int) -> Iterator[str]:
    """Makes the namespace of a host and its way to ours; yields our end's name."""
    name, ours = f"{_NET}.{nth}", f"ntt{os.getpid()}-{nth}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", "veth", "netns", name)
        _ip("address", "add", f"{_NET}.{4 * nth + 1}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "address", "add", f"{_NET}.{4 * nth + 2}/30", "dev", "veth")
        _ip("-n", name, "link", "set", "veth", "up")
        yield ours
    finally:
        _ip("netns", "delete", name)


def _listen(postgres: Postgres, stack: ExitStack) -> None:
    """Has the server listen on our end of each link, too, until stack ends."""
    home = Path(stack.enter_context(TemporaryDirectory(prefix="ntt-hosts-")))
    home.chmod(0o755)
    rules = home / "pg_hba.conf"
    rules.write_text(f"local all all trust\nhost all all {_NET}.0/24 trust\n")
    addresses = ",".join(f"{_NET}.{4 * nth + 1}" for nth, _ in enumerate(_NAMES))
    postgres.stop()
    stack.callback(postgres.start)
    stack.callback(postgres.stop)
    postgres.server.start(f"listen_addresses={addresses}", f"hba_file={rules}")


def _host(env: Environment, name: str, nth: int) -> Environment:
    """Returns another host: with a name and a network of its own, but for ssh."""
    host = env.beside(name)
    url = make_conninfo(env.url, host=f"{_NET}.{4 * nth + 1}")
    host.write_config(catalog={"url": url})
    ssh = host.root / "bin" / "ssh"
    ssh.parent.mkdir()
    ours = f"/proc/{os.getpid()}/ns/net"
    ssh.write_text(f'#!/bin/sh\nexec nsenter --net={ours} {shutil.which("ssh")} "$@"\n')
    ssh.chmod(0o755)
    host.environ = {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    enter = ["nsenter", f"--net=/run/netns/{_NET}.{nth}", "unshare", "--uts"]
    host.wrapper = [*enter, "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return host


def _signal(host: Environment, number: int) -> None:
    for pid in host.processes():
        os.kill(pid, number)


def _holders(env: Environment) -> set[str]:
    """Returns the names of the hosts that hold ranges."""
    rows = env.query(
        "select application_name from pg_locks join pg_stat_activity using (pid)"
        " where locktype = 'advisory'"
    )
    return {name.split("/")[1] for (name,) in rows}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
