"""What the demo does, step by step, and what it shows of it.

The commands are the real ones, run as processes of their own with nothing but the settings file that
is printed before; the figures at the end are taken from the files on both sides, from the database by
its own client and from the log, not from what the commands said.

Called by `demo`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntt_backup.demo import ssh
from ntt_backup.demo.interrupts import Interrupts
from ntt_backup.demo.postgres import Postgres
from ntt_backup.demo.scratch import Scratch
from ntt_backup.demo.store import DEFAULT_SOURCES, Comparison, Made, compare, make_store
from ntt_backup.errors import ConfigError
from ntt_backup.wording import duration, printable, size

_TOOLS: Final = {"tar": "tar", "ssh": "openssh-client"}
_MEGA: Final = 10**6
_END_SECONDS: Final = 20.0
_DIFFERENCES_SHOWN: Final = 10
_COUNTS: Final = (
    "select count(*), count(*) filter (where remote_copied),"
    " count(*) filter (where remote_copy_failed) from blobs"
)


@dataclass(frozen=True, slots=True)
class Story:
    """One demo; see `demo.run` for the fields."""

    source: Path | None
    blobs: int
    workers: int
    keep: bool
    directory: Path | None
    ssh_server: ssh.Choice

    def tell(self) -> int:
        """Do all of it and clean up; the exit code."""
