"""A transport to this machine, for tests of what needs no network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ntt_backup.errors import BackupError, RemoteUnreachable


@dataclass(frozen=True, slots=True)
class Local:
    """Transport to /bin/sh on this machine: the strategies without a network."""

    connect_timeout: float = 15.0

    def argv(self, remote_command: str) -> list[str]:
        return ["/bin/sh", "-c", remote_command]

    def environment(self) -> Mapping[str, str]:
        return os.environ

    def explain(self, status: int | None, stderr: str) -> BackupError:
        last = stderr.splitlines()[-1] if stderr else f"status {status}"
        return RemoteUnreachable("the local receiver ended", detail=last)
