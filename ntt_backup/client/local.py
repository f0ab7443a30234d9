"""This machine is the remote: the receiver, and the scripts, run as children of ours.

A disk of this machine gets what another machine gets: the same receiver with its own checks, syncs
and receipts, which dies alone. It runs with our own Python, so that it has our BLAKE3, and with our
priority.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ntt_backup.client.bootstrap import PYTHON
from ntt_backup.errors import BackupError, RemoteUnreachable


@dataclass(frozen=True, slots=True)
class Local:
    """Transport to /bin/sh on this machine; see `Transport`."""

    connect_timeout: float = 30.0
    hint: str = "see whether the disk at remote.path is still there (dmesg, df), and free memory"

    def argv(self, remote_command: str) -> list[str]:
        command = remote_command.replace(PYTHON, 'exec "$NTT_PYTHON"', 1)
        # What is killed is the first shell with its session, as it would be ssh: the receiver
        # hears the end of its input, and clears up.
        return ["/bin/sh", "-c", 'setsid /bin/sh -c "$1"; exit $?', "sh", command]

    def environment(self) -> Mapping[str, str]:
        """Returns our variables, with messages in the language that errors are recognized in."""
        return {**os.environ, "LC_ALL": "C", "NTT_PYTHON": sys.executable}

    def explain(self, status: int | None, stderr: str) -> BackupError:
        last = stderr.splitlines()[-1] if stderr else f"status {status}"
        return RemoteUnreachable("the local receiver ended", detail=last, hint=self.hint)
