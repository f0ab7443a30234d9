"""A guest: qemu, its disk that loses power, and how it is spoken to."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.process.spawn import die_with_parent
from tests.helpers.waiting import PATIENCE, wait_until
from tests.power.crashes import MODES, UNITS, Images, Log, Moment
from tests.power.disks import LoggedDisk
from tests.vm.image import QUIETLY, Image

SECONDS: Final = PATIENCE
_DISK_BYTES: Final = 2 << 30
_FLUSH_US: Final = 2000


@dataclass
class Guest:
    """A machine, off at first.

    Args:
        name: Its host name, source or remote.
        number: 1 or 2, also of its address.
        image: What it boots.
        directory: An empty directory for its disk and sockets, with a short path.
        wire: The directory of the sockets that are the wire between the two.
        work: Where powerdisk is built.
        memory: In MB.
        masked: Units that this guest does not have.
    """

    name: str
    number: int
    image: Image
    directory: Path
    wire: Path
    work: Path
    memory: int
    masked: Sequence[str] = ()
    fs: str = "ext4"
    boots: int = 0
    port: int = field(init=False, default=0)
    _qemu: subprocess.Popen[bytes] | None = None
    _disk: LoggedDisk = field(init=False)

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
        assert self._qemu is None
        self.boots += 1
        self._disk.start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._qemu = subprocess.Popen(
            [*QUIETLY, *self._argv(mkfs=mkfs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "qemu.log").open("ab"),
            env={**os.environ, "TMPDIR": str(self.directory)},
            preexec_fn=die_with_parent(),
        )

    def _argv(self, *, mkfs: bool) -> list[str]:
        words = [
            *("root=/dev/vda", "console=ttyS0", "quiet", "net.ifnames=0", "no_timer_check"),
            "systemd.default_timeout_start_sec=30min",  # An emulated guest may get little time.
            *("mitigations=off", f"systemd.hostname={self.name}", f"vm.fs={self.fs}"),
            f"vm.address=192.0.2.{self.number}",
            *(f"systemd.mask={unit}" for unit in self.masked),
            *(["vm.mkfs=1"] if mkfs else []),
        ]
        data = (
            f"driver=file,filename={self._disk.device},aio=threads,discard=ignore,cache.direct=on"
        )
        mine, other = (self.wire / str(one) for one in (self.number, 3 - self.number))
        wire = f"local.type=unix,local.path={mine},remote.type=unix,remote.path={other}"
        return [
            *self.image.boots,
            *("-m", str(self.memory), "-append", " ".join(words)),
            *("-drive", f"file={self.image.root},format=raw,if=none,id=root,snapshot=on"),
            *("-device", "virtio-blk-pci,drive=root"),
            *("-blockdev", f"node-name=data,{data}"),
            *("-device", "virtio-blk-pci,drive=data,write-cache=on"),
            *("-netdev", f"user,id=host,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22"),
            *("-device", f"virtio-net-pci,netdev=host,romfile=,mac=52:54:00:00:01:0{self.number}"),
            *("-netdev", f"dgram,id=wire,{wire}"),
            *("-device", f"virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:00:02:0{self.number}"),
            *("-serial", f"file:{self.directory}/console.{self.boots}"),
        ]

    @property
    def console(self) -> str:
        """What this boot has written to its console."""
        path = self.directory / f"console.{self.boots}"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def await_up(self) -> None:
        wait_until(lambda: self.answers, f"the boot of {self.name}", SECONDS, lambda: self.console)

    @property
    def answers(self) -> bool:
        """Whether its sshd answers."""
        if self._qemu is None or self._qemu.poll() is not None:
            raise RuntimeError(
                f"{self.name} has ended: {(self.directory / 'qemu.log').read_text()[-2000:]}"
            )
        try:
            return self.try_to("true", seconds=300).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def cut(self) -> None:
        """Cut its power; `lose` comes next."""
        assert self._qemu is not None
        self._qemu.kill()

    def lose(self, chance: random.Random, *, lying: bool = False) -> int:
        """After a power cut: the disk has what was flushed, and a part of what was written since.

        Args:
            chance: Decides the part.
            lying: The disk has ignored each flush since the boot.

        Returns:
            The number of writes that no flush had covered.
        """
        self._end()
        log = Log(self._disk, lying=lying)
        moment = Moment(
            time.monotonic_ns(),
            "none" if lying else chance.choice(MODES),
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
        if self._qemu is not None:
            self.cut()
            self._end()

    def close(self) -> None:
        """End it and remove all that it has."""
        self.off()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self) -> None:
        assert self._qemu is not None
        self._qemu.wait(60)
        self._qemu = None
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
        return ["ssh", "-F", "none", *given, "-p", str(self.port), "root@127.0.0.1", *words]

    def try_to(
        self, script: str, stdin: bytes = b"", seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script in the guest."""
        argv = [*QUIETLY, *self.ssh(f"bash -euo pipefail -c {shlex.quote(script)}")]
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
