"""`play` runs the servers of a kept demo again while a shell is open.

Ports and socket may be others than before, so the settings are written anew. The script that
`demo --keep` leaves runs this as `python -m ntt_backup.demo.play DIRECTORY`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ntt_backup.demo.postgres import Postgres
from ntt_backup.demo.processes import Interrupts, end
from ntt_backup.demo.scratch import Scratch
from ntt_backup.demo.story import Remote, start_servers
from ntt_backup.errors import BackupError
from ntt_backup.formatting import render_error


def play(root: Path) -> int:
    """Opens a shell while the servers of the demo in root run; returns the shell's exit code."""
    interrupts = Interrupts()
    with interrupts.installed() as stack:
        scratch = Scratch(root, ours=True)
        postgres, remote = start_servers(scratch, "auto", stack, interrupts)
        return _shell(scratch, postgres, remote)


def _shell(scratch: Scratch, postgres: Postgres, remote: Remote) -> int:
    print(
        "NTT_CONFIG and PGHOST are set. Try: ntt-backup-remote status, psql -c 'table blobs'\n"
        f"The store is {scratch.source}, the remote {remote.where}.\n"
        "The servers stop when this shell ends.",
        flush=True,
    )
    # Ctrl-C is for what runs in the shell.
    signal.signal(signal.SIGINT, lambda *_: None)
    environment = {**scratch.environment(), **postgres.environment}
    environment["NTT_CONFIG"] = str(scratch.settings)
    environment["PATH"] += f"{os.pathsep}{postgres.programs}"
    shell = subprocess.Popen(
        [os.environ.get("SHELL", "/bin/sh")], cwd=scratch.root, env=environment
    )
    try:
        return shell.wait()
    finally:
        end(shell)


if __name__ == "__main__":
    try:
        sys.exit(play(Path(sys.argv[1])))
    except BackupError as error:
        print(render_error(error), file=sys.stderr)
        sys.exit(error.exit_code)
