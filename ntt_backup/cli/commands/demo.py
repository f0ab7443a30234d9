"""The command `demo` backs up an example store, all on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from ntt_backup import demo as demonstration
from ntt_backup.cli import options
from ntt_backup.cli.options import PATH, flag, value


@click.command()
@value("--from", PATH, "Directory with files for the store; default: system files.", "source")
@value("--blobs", click.IntRange(1), "Number of blobs.", default=5000)
@options.count("--workers", 4, "Number of workers that send in parallel.")
@flag("--keep", "Remove nothing at the end, and say how to continue.")
@value("--directory", PATH, "Working directory; must be missing or empty.")
@value(
    "--ssh-server",
    click.Choice(["auto", "openssh", "embedded"]),
    "OpenSSH's sshd, or one written in Python; auto: sshd where it is installed.",
    default="auto",
)
@flag("--s3", "The remote is a bucket of an object store, SeaweedFS.")
@flag("--drill", "Then delete the store and the database, and restore both from the remote alone.")
def demo(**chosen: Any) -> None:
    """Back up an example store, all on this machine.

    The servers are real, and every byte is compared. The exit code is 1 if store and remote differ,
    and 7 if the drill did not restore everything.
    """
    if chosen["s3"] and chosen["ssh_server"] != "auto":
        raise click.UsageError("--s3 takes no --ssh-server: a bucket is reached without ssh")
    sys.exit(demonstration.run(**chosen))
