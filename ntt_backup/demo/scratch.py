"""The demo's directory: what lies where, the settings file, the keys, and the way back to nothing.

Everything the demo makes is below one directory, which is removed at the end. One thing may have to
live elsewhere: PostgreSQL's home. Its socket's path may have 107 bytes at most, and run by root the
server works as another user, who must be able to get there. Then the home is a directory of its own
below /tmp, and a symbolic link in the directory leads to it.

Called by `demo` and `demo.play`.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ntt_backup.errors import BackupError, ConfigError

_SOCKET_PATH_LIMIT: Final = 107
_SOCKET: Final = "data/.s.PGSQL.5432"
_REMOVE_SECONDS: Final = 10.0

_SETTINGS = """\
# Written by ntt-backup-remote demo.

[catalog]
url = {url}

[source]
root = {source}

[remote]
host = {host}
port = {port}
path = {remote}
identity_file = {identity}
known_hosts = {known_hosts}
ssh_config = {ssh_config}

[log]
jsonl = {log}

[lock]
file = {lock}
"""

_PLAY = """\
#!/bin/sh
# Starts the servers of this demo again and opens a shell to play in; they stop when it ends.
{environment}exec {python} -m ntt_backup.demo.play {root}
"""

_COMMAND = """\
#!/bin/sh
exec {python} -m ntt_backup "$@"
"""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Paths below the demo's directory; all are absolute. store and remote hold `aa/bb/<blobid>`
    below `by-hash`.
    """

    root: Path

    @property
    def source(self) -> Path:
        return self.root / "store" / "by-hash"

    @property
    def remote(self) -> Path:
        return self.root / "remote"

    @property
    def destination(self) -> Path:
        return self.remote / "by-hash"

    @property
    def postgres(self) -> Path:
        return self.root / "postgres"

    @property
    def ssh(self) -> Path:
        return self.root / "ssh"

    @property
    def settings(self) -> Path:
        return self.root / "backup-remote.toml"

    @property
    def log(self) -> Path:
        return self.root / "backup-remote.jsonl"

    @property
    def play(self) -> Path:
        return self.root / "play"

    @property
    def bin(self) -> Path:
        return self.root / "bin"
