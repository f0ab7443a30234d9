"""The job's own way to the remote, with the few things that a measurement changes or adds.

What is measured must be what the job uses, so nothing here makes an argv: the transport's own is
taken, and options go before its own, where they win. Two things are added that the job has no need
of. ssh writes into a file how many bytes it sent, all its own included (`-E`, LogLevel VERBOSE):
with ssh's own compression nobody else knows. And the far side leaves the CPU time of its session in
a file: that of the command from the shell's `times`, that of the sshd above it from /proc.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.bench.tasks import Reach
from ntt_backup.client.channel import Channel
from ntt_backup.client.shell import shell_script
from ntt_backup.client.ssh import Ssh, varied
from ntt_backup.client.transport import Local, Transport
from ntt_backup.errors import BackupError

HELLO: Final = "LC_ALL=C; export LC_ALL; umask 022\necho; echo NTT-BENCH ready\n"
_READY: Final = re.compile(rb"^NTT-BENCH ready$")
_TRANSFERRED: Final = re.compile(r"Transferred: sent (\d+), received (\d+) bytes")
_TIMES: Final = re.compile(r"(\d+)m(\d+(?:\.\d+)?)s")
_STAT: Final = re.compile(r"^\d+ \(sshd[^)]*\) \S (.*)$", re.MULTILINE)
_TICKS_PER_SECOND: Final = 100.0  # what /proc shows, on every Linux


def transport(reach: Reach, journal: Path | None = None) -> Transport:
    """The transport of a task. journal: where ssh writes what it sent."""
    if reach.remote is None:
        return Local()
    options = dict(reach.options)
    if journal is not None:
        options["LogLevel"] = "VERBOSE"
    return Varied(Ssh(reach.remote), options, journal, reach.account)


def connect(way: Transport, script: str, **values: str) -> Channel:
    """A channel to script on the far side, which has greeted (HELLO)."""
    command, source = shell_script(script, values)
    channel = Channel(way, command)
    try:
        channel.greet(source, _READY, way.connect_timeout, doing="starting a measurement")
    except BaseException:
        channel.abort()
        raise
    return channel


@dataclass(frozen=True, slots=True)
class Varied:
    """Transport over ssh with some options of its own; see `Transport`."""

    base: Ssh
    options: Mapping[str, str]
    journal: Path | None = None
    account: str | None = None

    @property
    def connect_timeout(self) -> float:
        return self.base.connect_timeout

    def argv(self, remote_command: str) -> list[str]:
        if self.account is not None:
            remote_command = accounted(remote_command, self.account)
        argv = varied(self.base.argv(remote_command), self.options)
        return [argv[0], "-E", str(self.journal), *argv[1:]] if self.journal else argv

    def environment(self) -> Mapping[str, str]:
        return self.base.environment()

    def explain(self, status: int | None, stderr: str) -> BackupError:
        # With a journal, ssh's own words stand there.
        said = self.journal.read_text(errors="replace") if self.journal else ""
        return self.base.explain(status, f"{said}\n{stderr}".strip())


def accounted(command: str, account: str) -> str:
    """A remote command that does what command does, and then adds CPU times to a file. Pure.

    One line of words that every login shell reads alike.
    """
    figures = f"{{ times; cat /proc/$PPID/stat; }} >>{shlex.quote(account)} 2>/dev/null"
    return f"exec sh -c {shlex.quote(f'({command}); status=$?; {figures}; exit $status')}"


def remote_cpu_s(account: str) -> float | None:
    """Seconds in the text of such a file: of the commands and of the sshds that it names. Pure."""
    times = [60 * int(minutes) + float(seconds) for minutes, seconds in _TIMES.findall(account)]
    ticks = [int(field) for stat in _STAT.findall(account) for field in stat.split()[10:12]]
    return sum(times) + sum(ticks) / _TICKS_PER_SECOND if times else None


def wire_bytes(journal: str) -> int | None:
    """What ssh sent and received by its own account, over all connections. Pure."""
    counts = [int(sent) + int(received) for sent, received in _TRANSFERRED.findall(journal)]
    return sum(counts) if counts else None
