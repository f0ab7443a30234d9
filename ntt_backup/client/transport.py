"""A transport says how bytes reach the remote and come back.

A transport turns a remote command into an argv for a local process whose stdin and stdout are the
remote command's, and explains that process's failures. So the same strategy runs over ssh, or
against a directory of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ntt_backup.errors import BackupError


class Transport(Protocol):
    """A way to the remote."""

    @property
    def connect_timeout(self) -> float:
        """Seconds within which the remote command must have started."""
        ...

    @property
    def hint(self) -> str:
        """What to do where the remote is silent or was lost; empty: as for a login."""
        ...

    def argv(self, remote_command: str) -> list[str]:
        """Returns the local argv that runs remote_command, with stdin and stdout wired through."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Returns the environment for that local process."""
        ...

    def explain(self, status: int | None, stderr: str) -> BackupError:
        """Returns the error for a local process that ended with status (None: it was killed) and
        said stderr.
        """
        ...
