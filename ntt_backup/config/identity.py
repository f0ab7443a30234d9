"""This host's work for a target has names, on the remote and in the catalog.

A session's directory on the remote carries `owner`, so that the next run removes what a dead one of
this host has left, and nothing else. Connections to the catalog carry `application`, so that
`status` shows who holds which range.
"""

from __future__ import annotations

import socket
from pathlib import Path

from blake3 import blake3

from ntt_backup.config import CatalogConfig

_MACHINE_ID = Path("/etc/machine-id")


def owner(settings: CatalogConfig) -> str:
    """Returns 12 hex digits for this machine, its store, its lock and the target."""
    try:
        machine = _MACHINE_ID.read_text(encoding="ascii")
    except OSError:
        machine = ""
    root = settings.source.root if settings.source is not None else ""
    parts = (socket.gethostname(), machine.strip(), settings.lock.file, root, settings.target)
    return blake3("\0".join(map(str, parts)).encode()).hexdigest(length=6)


def application(part: str = "") -> str:
    """Returns a connection's application_name, `ntt-backup-remote/HOST/PART`; part: its purpose."""
    return "/".join(filter(None, ("ntt-backup-remote", socket.gethostname()[:30], part)))
