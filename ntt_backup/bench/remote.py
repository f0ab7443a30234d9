"""A measurement connects by the job's own ssh, so that what is measured is what the job uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.client.channel import Channel
from ntt_backup.client.remote_shell import shell_script
from ntt_backup.client.transport import Ssh, Transport
from ntt_backup.errors import BackupError

_HELLO: Final = "LC_ALL=C; export LC_ALL; umask 022\necho; echo NTT-BENCH ready\n"
_READY: Final = re.compile(rb"^NTT-BENCH ready$")
_TRANSFERRED: Final = re.compile(r"Transferred: sent (\d+), received (\d+) bytes")


def connect(transport: Transport, script: str, **values: str) -> Channel:
    """Starts a script on the remote, and returns the channel to the script once that runs."""
    command, source = shell_script(_HELLO + script, values)
    channel = Channel(transport, command)
    try:
        channel.greet(source, _READY, transport.connect_timeout, doing="starting a measurement")
    except BaseException:
        channel.abort()
        raise
    return channel


@dataclass(frozen=True, slots=True)
class CountingSsh:
    """A `Transport` over ssh that notes the bytes of its connections in a local file."""

    base: Ssh
    journal: Path
    hint: str = ""

    @property
    def connect_timeout(self) -> float:
        return self.base.connect_timeout

    def argv(self, remote_command: str) -> list[str]:
        # Of an option that is given twice, ssh keeps the first.
        ssh, *rest = self.base.argv(remote_command)
        return [ssh, "-o", "LogLevel=VERBOSE", "-E", str(self.journal), *rest]

    def environment(self) -> Mapping[str, str]:
        return self.base.environment()

    def explain(self, status: int | None, stderr: str) -> BackupError:
        # ssh's own messages are in the journal, too.
        said = self.journal.read_text(errors="replace") if self.journal.exists() else ""
        return self.base.explain(status, f"{said}\n{stderr}".strip())


def wire_bytes(journal: str) -> int | None:
    """Returns the bytes that ssh sent and received, over all connections in the journal's text."""
    counts = [int(sent) + int(received) for sent, received in _TRANSFERRED.findall(journal)]
    return sum(counts) if counts else None
