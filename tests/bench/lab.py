"""Three links on one machine: what a peer is fast at depends on the link more than on anything.

`loopback` is the machine itself. `slow` (12 MB/s, 28 ms) and `fast` (100 MB/s, 5 ms) are *shared*
links, as real ones are: the sshd stands in a network namespace behind a veth pair with a token
bucket at either end, so four streams get together what one gets. A limit in a proxy would be each
connection's own, and four workers would look four times as fast. The delay stands in front, see
`delay`. Everything stays on this machine: 127.0.0.1, and 10.231.x.x inside the veth pair.

A lab that is killed is removed by the next one, see `slots`. Namespaces need root; `loopback`
does not.
"""

from __future__ import annotations

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ntt_backup.demo.processes import Interrupts
from ntt_backup.demo.sshd import Sshd, make_key
from ntt_backup.errors import BackupError
from tests.bench.slots import Slot, end_tree, slot
from tests.helpers.processes import descendants, kill

Link = Literal["loopback", "slow", "fast"]

HOST = "127.0.0.1"
ALIAS = "lab"
_START_SECONDS = 60.0
_QUIET_SECONDS = 20.0
_PROJECT = Path(__file__).resolve().parents[2]


class LabError(Exception):
    """This machine cannot give the link; the text says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A link: megabits a second, milliseconds there and back, and the token bucket's burst.

    The burst is the least that lets a packet of 64 KB through whole.
    """

    mbit: int
    round_trip_ms: float
    burst_kb: int

    @property
    def bytes_a_second(self) -> float:
        return self.mbit * 1e6 / 8


SHAPES: dict[Link, Shape | None] = {
    "loopback": None,
    "slow": Shape(mbit=96, round_trip_ms=28, burst_kb=70),
    "fast": Shape(mbit=800, round_trip_ms=5, burst_kb=256),
}


def describe(link: Link) -> str:
    """The link in a few words."""
    shape = SHAPES[link]
    if shape is None:
        return "loopback, as fast as the machine"
    return f"shared {shape.bytes_a_second / 1e6:.0f} MB/s, {shape.round_trip_ms:g} ms"


@dataclass
class Lab:
    """One link and the sshd at its end, which lets this user in. `directory` is writable there.

    The remote is this machine, so a path there is the same path here; peers are checked by it.
    """

    link: Link
    port: int
    home: Path
    directory: Path
    sshd: Sshd
    # Where the remote's servers listen, and the argv that starts one there.
    address: str = HOST
    inside: Sequence[str] = ()
    user: str = field(default_factory=getpass.getuser)

    @property
    def description(self) -> str:
        return describe(self.link)

    @property
    def identity(self) -> Path:
        return self.home / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.home / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        return self.home / "ssh_config"

    @property
    def ssh(self) -> list[str]:
        """ssh to the remote, without the host: what rsync, restic and borg want to be told."""
        return ["ssh", "-F", str(self.ssh_config)]

    def argv(self, command: str, *options: str) -> list[str]:
        """An ssh client that runs a shell command on the remote."""
        return [*self.ssh, *options, "-T", ALIAS, command]

    def destination(self, name: str) -> Path:
        """A new, empty directory of the remote."""
        path = self.directory / name
        path.mkdir(parents=True)
        return path

    def settle(self) -> None:
        """Return once no session is left at the server, so that none disturbs the next."""
        deadline = time.monotonic() + _QUIET_SECONDS
        assert self.sshd.pid is not None
        while sessions := descendants(self.sshd.pid):
            if time.monotonic() > deadline:
                for pid in sessions:
                    kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def missing(link: Link) -> str | None:
    """Why this machine cannot give the link; None where it can."""
    tools = ["ssh", "ssh-keygen", "sshd", *(["ip", "tc", "nsenter"] if SHAPES[link] else [])]
    absent = [tool for tool in tools if _which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed; see tests/bench/install"
    if SHAPES[link] and os.geteuid() != 0:
        return "network namespaces need root"
    return None


@contextmanager
def lab(
    link: Link, directory: Path, *, cipher: str | None = None, bare: bool = False
) -> Iterator[Lab]:
    """Give a link whose remote stores below directory, an existing one; all of it goes at the end.

    cipher: what every ssh client of the lab uses; its own default where None. bare: the remote has
    only the system's Python, else one with BLAKE3 and zstd. Raises LabError.
    """
    if why := missing(link):
        raise LabError(f"no link {link}: {why}")
    with ExitStack() as stack:
        taken = stack.enter_context(slot(directory))
        home = taken.home
        for name in ("id_ed25519", "host_key"):
            make_key(home / name)
        sshd_port = free_port()
        address: str = HOST
        inside: list[str] = []
        if shape := SHAPES[link]:
            address, inside = network(taken, shape)
        sshd = _start_sshd(home, address, sshd_port, inside, bare)
        stack.callback(_end_sshd, sshd)
        port = sshd_port
        if shape:
            port, proxy = stack.enter_context(delayed(f"{address}:{sshd_port}", shape, home))
            _await_greeting(HOST, port, proxy, home / "sshd.log")
        _write_client(home, port, cipher)
        yield Lab(link, port, home, home / "remote", sshd, address, inside)


@contextmanager
def delayed(to: str, shape: Shape, home: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Gives a port of 127.0.0.1 that leads to HOST:PORT with the delay of a link."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.bench.delay", str(port), to]
    argv += [str(shape.round_trip_ms / 2), "--mark", str(home)]
    proxy = subprocess.Popen(argv, cwd=_PROJECT, start_new_session=True)
    try:
        while proxy.poll() is None:
            with suppress(OSError), socket.create_connection((HOST, port), timeout=5):
                break
            time.sleep(0.05)
        yield port, proxy
    finally:
        end_tree(proxy)


def network(slot: Slot, shape: Shape) -> tuple[str, list[str]]:
    """Make the namespace and its link; the address inside, and the argv that runs there."""
    ours, theirs = f"10.231.{slot.number}.1", f"10.231.{slot.number}.2"
    outer, inner, name = slot.veth, "veth", slot.namespace
    inside = ["nsenter", f"--net=/run/netns/{name}"]
    slot.network.touch()
    bucket = f"root tbf rate {shape.mbit}mbit burst {shape.burst_kb}kb latency 50ms".split()
    for argv in (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name],
        ["ip", "address", "add", f"{ours}/30", "dev", outer],
        ["ip", "link", "set", outer, "up"],
        [*inside, "ip", "address", "add", f"{theirs}/30", "dev", inner],
        [*inside, "ip", "link", "set", inner, "up"],
        [*inside, "ip", "link", "set", "lo", "up"],
        ["tc", "qdisc", "add", "dev", outer, *bucket],
        [*inside, "tc", "qdisc", "add", "dev", inner, *bucket],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return theirs, inside


def _write_client(home: Path, port: int, cipher: str | None) -> None:
    public = (home / "host_key.pub").read_text()
    (home / "known_hosts").write_text(f"[{HOST}]:{port} {public}")
    (home / "ssh_config").write_text(
        f"Host {ALIAS}\n"
        f"    HostName {HOST}\n"
        f"    Port {port}\n"
        f"    User {getpass.getuser()}\n"
        f'    IdentityFile "{home / "id_ed25519"}"\n'
        "    IdentitiesOnly yes\n"
        "    IdentityAgent none\n"
        f'    UserKnownHostsFile "{home / "known_hosts"}"\n'
        "    GlobalKnownHostsFile /dev/null\n"
        "    StrictHostKeyChecking yes\n"
        "    BatchMode yes\n" + (f"    Ciphers {cipher}\n" if cipher else "")
    )


def _start_sshd(home: Path, address: str, port: int, inside: list[str], bare: bool) -> Sshd:
    (home / "account").mkdir()
    # Ours has the modules that an operator may install there, as rsync, borg and others are.
    path = os.defpath if bare else f"{Path(sys.executable).parent}:{os.defpath}"
    extra = (
        "Subsystem sftp internal-sftp\n"
        # The account's startup files would be part of every session, and thus of every figure.
        f'SetEnv "HOME={home / "account"}" "PATH={path}"\n'
    )
    sshd = Sshd(
        home,
        home / "host_key",
        home / "id_ed25519.pub",
        Interrupts(),
        address=address,
        extra=extra,
        inside=inside,
    )
    try:
        sshd.start(port)
    except BackupError as error:
        raise LabError(f"the lab's server does not start: {error}") from error
    return sshd


def _end_sshd(sshd: Sshd) -> None:
    assert sshd.pid is not None
    for pid in descendants(sshd.pid):
        kill(pid, signal.SIGKILL)
    sshd.stop()


def _await_greeting(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, port), timeout=5) as client:
            if client.recv(4) == b"SSH-":
                return
        time.sleep(0.05)
    raise LabError(f"the lab's server does not answer: {log.read_text(errors='replace').strip()}")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now, below those of outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
