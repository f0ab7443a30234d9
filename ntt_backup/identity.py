"""The names by which this host's work for a target is known elsewhere.

On the remote, a session's scratch directory carries `owner`, so that the next run can remove what a
dead one left and touches nobody else's. In the catalog, connections carry `application`, so that
`status` can say who holds which range.
"""

from __future__ import annotations

import socket
from pathlib import Path

from blake3 import blake3

from ntt_backup.config import CatalogConfig

_MACHINE_ID = Path("/etc/machine-id")


def owner(settings: CatalogConfig) -> str:
    """12 hex digits for this machine, its store and the target. Two runs of one lock share it."""
    try:
        machine = _MACHINE_ID.read_text(encoding="ascii")
    except OSError:
        machine = ""
    root = settings.source.root if settings.source is not None else ""
    parts = (
        socket.gethostname(),
        machine.strip(),
        str(settings.lock.file),
        str(root),
        settings.target,
    )
    return blake3("\0".join(parts).encode()).hexdigest(length=6)


def application(part: str = "") -> str:
    """The application_name of a connection of ours, `ntt-backup-remote/HOST/PART`. part: the
    command, or whatever else it is for.
    """
    return "/".join(filter(None, ("ntt-backup-remote", socket.gethostname()[:30], part)))
