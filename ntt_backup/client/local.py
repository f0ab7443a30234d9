"""A remote that is a child process on this machine: the same strategies, no network.

Contract tests and measurements want to know what a strategy does apart from ssh. Here the remote
command is given to /bin/sh directly, as sshd gives it to a login shell.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ntt_backup.errors import BackupError, RemoteUnreachable


@dataclass(frozen=True, slots=True)
class Local:
    """Transport to a shell on this machine; see `Transport`."""

    connect_timeout: float = 15.0

    def argv(self, remote_command: str) -> list[str]:
        return ["/bin/sh", "-c", remote_command]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def explain(self, status: int | None, stderr: str) -> BackupError:
        last = stderr.splitlines()[-1] if stderr else f"status {status}"
        return RemoteUnreachable("the local receiver ended", detail=last)
