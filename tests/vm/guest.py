"""A guest: its machine, its disk that loses power, and how it is spoken to."""

from __future__ import annotations

import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.process.spawn import die_with_parent
from tests.helpers.processes import descendants, kill, name
from tests.helpers.waiting import PATIENCE, wait_until
from tests.power.crashes import MODES, UNITS, Images, Log, Moment
from tests.power.disks import LoggedDisk
from tests.vm.image import QEMU, Image

SECONDS: Final = PATIENCE
_DISK_BYTES: Final = 2 << 30
# As slow as a disk that turns: most power cuts come while something is not flushed.
_FLUSH_US: Final = 25_000
_NETWORK: Final = """
ip link add wire type bridge
for tap in tap1 tap2; do
    ip tuntap add $tap mode tap
    ip link set $tap master wire up
done
ip addr add 192.0.2.9/24 dev wire
ip link set wire up
echo ready
exec sleep infinity
"""
# A kernel that is a process polls its console, which no file allows.
_PIPED: Final = ("sh", "-c", '"$@" 2>&1 | cat', "sh")
# What such a kernel runs would go on without it, as processes of this machine: so all of them end
# at once, and see nothing of this machine.
_APART: Final = (
    *("bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64"),
    *("--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/net", "/dev/net"),
)


class Wire:
    """A network of two guests, in a namespace of its own."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-ec", _NETWORK],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent(),
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise RuntimeError("no network can be made for the guests")

    @property
    def within(self) -> list[str]:
        """What comes before the argv of a program that runs in the namespace."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]

    def close(self) -> None:
        with self._holder:
            self._holder.kill()


@dataclass
class Guest:
    """A machine, off at first.

    Args:
        name: Its host name, source or remote.
        number: 1 or 2, also of its address.
        image: What it boots.
        directory: An empty directory for its disk and sockets, with a short path.
        wire: Its network.
        work: Where powerdisk is built.
        memory: In MB.
        masked: Units that this guest does not have.
    """

    name: str
    number: int
    image: Image
    directory: Path
    wire: Wire
    work: Path
    memory: int
    masked: Sequence[str] = ()
    fs: str = "ext4"
    boots: int = 0
    _machine: subprocess.Popen[bytes] | None = None
    _server: subprocess.Popen[bytes] | None = None
    _disk: LoggedDisk = field(init=False)
    _cut_at: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        known = f"guest {self.image.host_key}\n"
        (self.directory / "known_hosts").write_text(known)
        self._disk = LoggedDisk(self._base, self.directory, self.work, _FLUSH_US)

    @property
    def _base(self) -> Path:
        return self.directory / "base.img"

    def new_disk(self, fs: str) -> None:
        """An empty disk: the next start makes a file system on it."""
        self.fs = fs
        self._base.unlink(missing_ok=True)
        with self._base.open("wb") as file:
            file.truncate(_DISK_BYTES)

    def start(self, *, mkfs: bool = False) -> None:
        """Switch it on; returns before it has booted."""
        assert self._machine is None
        self.boots += 1
        self._disk.start()
        for left in (self.directory / "cow", self._socket):
            left.unlink(missing_ok=True)
        if not self.image.kvm:
            export = (
                "type=vhost-user-blk,id=disk,node-name=data,writable=on"
                f",addr.type=unix,addr.path={self._socket}"
            )
            self._server = subprocess.Popen(
                ["qemu-storage-daemon", "--blockdev", self._data, "--export", export],
                preexec_fn=die_with_parent(),
            )
            wait_until(self._socket.exists, "the disk")
        with self._console.open("wb") as console:
            self._machine = subprocess.Popen(
                [*self.wire.within, *_PIPED, *self._argv(mkfs=mkfs)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "TMPDIR": str(self.directory)},
                preexec_fn=die_with_parent(),
            )

    def _argv(self, *, mkfs: bool) -> list[str]:
        kvm, mac = self.image.kvm, f"52:54:00:00:02:0{self.number}"
        root, data = ("vda", "vdb") if kvm else ("ubda", "vda")
        words = [
            *(f"root=/dev/{root}", f"vm.root={root}", f"vm.data={data}", "quiet", "net.ifnames=0"),
            "systemd.default_timeout_start_sec=30min",  # A guest may get little time.
            *(f"systemd.hostname={self.name}", f"vm.fs={self.fs}"),
            f"vm.address=192.0.2.{self.number}",
            *(f"systemd.mask={unit}" for unit in self.masked),
            *(["vm.mkfs=1"] if mkfs else []),
        ]
        if not kvm:
            # ubd forgets flushes, so it is for the root alone.
            mine, image = str(self.directory), str(self.image.directory)
            return [
                *("setarch", "--addr-no-randomize", *_APART),
                *("--bind", mine, mine, "--ro-bind", image, image),
                *("linux.uml", f"mem={self.memory}M"),
                *(f"initrd={self.image.initrd}", f"uml_dir={mine}", f"umid={self.boots}"),
                *(f"ubd0t={mine}/cow,{self.image.root}", f"virtio_uml.device={self._socket}:2"),
                *(f"eth0=tuntap,tap{self.number},{mac}", "con=null", "ssl=null", "con0=null,fd:1"),
                *words,
            ]
        words += ["console=ttyS0", "no_timer_check", "mitigations=off"]
        return [
            *(*QEMU, *self.image.kernel),
            *("-m", str(self.memory), "-append", " ".join(words)),
            *("-drive", f"file={self.image.root},format=raw,if=none,id=root,snapshot=on"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-blockdev", self._data),
            *("-device", "virtio-blk-pci,drive=data,write-cache=on"),
            *("-netdev", f"tap,id=wire,ifname=tap{self.number},script=no,downscript=no"),
            *("-device", f"virtio-net-pci,netdev=wire,romfile=,mac={mac}"),
            *("-serial", "stdio"),
        ]

    @property
    def _data(self) -> str:
        """The disk that loses power, as qemu opens it."""
        how = "aio=threads,discard=ignore,cache.direct=on"
        return f"driver=file,node-name=data,filename={self._disk.device},{how}"

    @property
    def _socket(self) -> Path:
        return self.directory / "blk"

    @property
    def _console(self) -> Path:
        return self.directory / f"console.{self.boots}"

    @property
    def console(self) -> str:
        """What this boot has written to its console."""
        return self._console.read_text(errors="replace")[-3000:] if self.boots else ""

    def await_up(self) -> None:
        wait_until(lambda: self.answers, f"the boot of {self.name}", SECONDS, lambda: self.console)

    @property
    def answers(self) -> bool:
        """Whether its sshd answers."""
        if self._machine is None or self._machine.poll() is not None:
            raise RuntimeError(f"{self.name} has ended: {self.console}")
        try:
            return self.try_to("true", seconds=300).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def check_flush(self) -> None:
        """What the guest has synced must be in the log of the disk, and a flush after it."""
        content = os.urandom(4096)
        self.run("cat >/data/synced; sync /data/synced", content)
        if not Log(self._disk).has_flushed(content):
            raise RuntimeError(f"{self.name} syncs files, and its disk is not flushed")

    def cut(self) -> None:
        """Cut its power; `lose` comes next."""
        assert self._machine is not None
        # A flush that is under way ends all the same, and counts for nothing.
        self._cut_at = time.monotonic_ns()
        if self._server is not None:
            self._server.kill()
        self._machine.kill()
        if self._server is not None:
            self._server.wait(PATIENCE)
            self._server = None

    def shut_down(self) -> None:
        """Let it end by itself, and its power with it; `lose` comes next."""
        assert self._machine is not None
        self.try_to("systemctl poweroff --no-block")
        self._machine.wait(SECONDS)
        self.cut()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the context the machine does nothing; its clocks go on."""
        assert self._machine is not None
        found = descendants(self._machine.pid)
        kernel = next(pid for pid in found if name(pid).startswith(("linux.uml", "qemu")))
        kill(kernel, signal.SIGSTOP)
        try:
            yield
        finally:
            kill(kernel, signal.SIGCONT)

    def lose(self, chance: random.Random, *, lies_from: float = math.inf) -> int:
        """After the end of its power: the disk has what was flushed, and a part of later writes.

        Args:
            chance: Decides the part.
            lies_from: The disk ignored each flush from this time on, and loses all later writes.

        Returns:
            The number of writes that no flush had covered.
        """
        self._end()
        log = Log(self._disk, lies_from=lies_from)
        moment = Moment(
            self._cut_at,
            chance.choice(MODES) if lies_from == math.inf else "none",
            chance.choice(UNITS[self.fs]),
            chance.randrange(1 << 30),
            "cut",
        )
        with closing(Images(log, self.directory)) as images:
            unsettled = images.make(moment)
            images.crash.rename(self._base)
        return unsettled

    def off(self) -> None:
        """End it, whatever it does, and forget what it did."""
        if self._machine is not None:
            self.cut()
            self._end()

    def close(self) -> None:
        """End it and remove all that it has."""
        self.off()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self) -> None:
        assert self._machine is not None
        self._machine.wait(PATIENCE)
        self._machine = None
        self._disk.stop()

    def ssh(self, *words: str) -> list[str]:
        """The argv of a command in the guest, as root."""
        options = {
            "UserKnownHostsFile": self.directory / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "HostKeyAlias": "guest",
            "IdentityFile": self.image.key,
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "ConnectTimeout": "60",
            "ControlMaster": "auto",
            "ControlPath": self.directory / f"ssh.{self.boots}",
            "ControlPersist": "300",
            "LogLevel": "ERROR",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [
            *self.wire.within,
            "ssh",
            "-F",
            "none",
            *given,
            f"root@192.0.2.{self.number}",
            *words,
        ]

    def try_to(
        self, script: str, stdin: bytes = b"", seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script in the guest."""
        argv = self.ssh(f"bash -euo pipefail -c {shlex.quote(script)}")
        return subprocess.run(argv, input=stdin, capture_output=True, timeout=seconds, check=False)

    def run(self, script: str, stdin: bytes = b"") -> str:
        """Run a script in the guest, which must succeed; its output."""
        return self.run_bytes(script, stdin).decode(errors="replace")

    def run_bytes(self, script: str, stdin: bytes = b"") -> bytes:
        done = self.try_to(script, stdin)
        if done.returncode != 0:
            said = (done.stdout[-2000:] + done.stderr[-2000:]).decode(errors="replace")
            raise RuntimeError(f"{self.name}: {script}\nstatus {done.returncode}: {said}")
        return done.stdout
