"""A connection that measures: the job's own ssh, with a few options added.

What is measured must be what the job uses, so the argv is the job's; options of a measurement stand
before it, where they win. Two accounts are kept besides. ssh writes the bytes of its own connection
into a file (`-E`, LogLevel VERBOSE), because ssh's compression is known to nobody else. The remote
appends the CPU time of each session to another file: that of the command from the shell's `times`,
that of the sshd above it from /proc.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.shell import shell_script
from ntt_backup.client.ssh import Ssh, varied
from ntt_backup.client.transport import Transport
from ntt_backup.errors import BackupError

HELLO: Final = "LC_ALL=C; export LC_ALL; umask 022\necho; echo NTT-BENCH ready\n"
_READY: Final = re.compile(rb"^NTT-BENCH ready$")
_TRANSFERRED: Final = re.compile(r"Transferred: sent (\d+), received (\d+) bytes")
_TIMES: Final = re.compile(r"(\d+)m(\d+(?:\.\d+)?)s")
_STAT: Final = re.compile(r"^\d+ \(sshd[^)]*\) \S (.*)$", re.MULTILINE)
_TICKS_PER_SECOND: Final = 100.0  # in /proc, on every Linux


def connect(transport: Transport, script: str, **values: str) -> Channel:
    """Starts script on the remote and returns the channel to it, once it has printed HELLO."""
    command, source = shell_script(script, values)
    channel = Channel(transport, command)
    try:
        channel.greet(source, _READY, transport.connect_timeout, doing="starting a measurement")
    except BaseException:
        channel.abort()
        raise
    return channel


@dataclass(frozen=True, slots=True)
class MeasuredSsh:
    """Transport over ssh with some options of its own; see `Transport`.

    journal: the local file for ssh's byte counts. account: the remote file for CPU times.
    """

    base: Ssh
    options: Mapping[str, str] = field(default_factory=dict)
    journal: Path | None = None
    account: str | None = None

    @property
    def connect_timeout(self) -> float:
        return self.base.connect_timeout

    def argv(self, remote_command: str) -> list[str]:
        if self.account is not None:
            remote_command = accounted(remote_command, self.account)
        if self.journal is None:
            return varied(self.base.argv(remote_command), self.options)
        options = {**self.options, "LogLevel": "VERBOSE"}
        argv = varied(self.base.argv(remote_command), options)
        return [argv[0], "-E", str(self.journal), *argv[1:]]

    def environment(self) -> Mapping[str, str]:
        return self.base.environment()

    def explain(self, status: int | None, stderr: str) -> BackupError:
        # With -E ssh's own messages are in the journal, too.
        journal = self.journal
        said = journal.read_text(errors="replace") if journal and journal.exists() else ""
        return self.base.explain(status, f"{said}\n{stderr}".strip())


def accounted(command: str, account: str) -> str:
    """Returns a command that does the same and then appends CPU times to a file on the remote.

    It is one line of words that every login shell reads alike.
    """
    figures = f"{{ times; cat /proc/$PPID/stat; }} >>{shlex.quote(account)} 2>/dev/null"
    return f"exec sh -c {shlex.quote(f'({command}); status=$?; {figures}; exit $status')}"


def remote_cpu_s(account: str) -> float | None:
    """Returns the seconds in the text of such a file: of commands, and of the sshds above them."""
    times = [60 * int(minutes) + float(seconds) for minutes, seconds in _TIMES.findall(account)]
    ticks = [int(field) for stat in _STAT.findall(account) for field in stat.split()[10:12]]
    return sum(times) + sum(ticks) / _TICKS_PER_SECOND if times else None


def wire_bytes(journal: str) -> int | None:
    """Returns the bytes that ssh sent and received, over all connections in the journal's text."""
    counts = [int(sent) + int(received) for sent, received in _TRANSFERRED.findall(journal)]
    return sum(counts) if counts else None
