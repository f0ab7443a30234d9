"""The command `demo` backs up an example store, all on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from ntt_backup import demo as demonstration
from ntt_backup.cli import options


@click.command()
@click.option(
    "--from",
    "source",
    type=options.PATH,
    help="Make the store from the files below this directory; default: system directories.",
)
@click.option(
    "--blobs", type=click.IntRange(1), default=5000, show_default=True, help="Number of blobs."
)
@options.count("--workers", 4, "Number of workers that send in parallel.")
@options.flag("--keep", "Remove nothing at the end, and say how to continue.")
@click.option("--directory", type=options.PATH, help="Where to work; must be absent or empty.")
@click.option(
    "--ssh-server",
    type=click.Choice(["auto", "openssh", "embedded"]),
    default="auto",
    help="OpenSSH's sshd, or one written in Python; auto: sshd where it is installed.",
)
@options.flag("--s3", "The remote is a bucket of an object store, SeaweedFS.")
@options.flag(
    "--drill",
    "Then delete the store and the database, and restore both from the remote alone.",
)
def demo(**chosen: Any) -> None:
    """Back up an example store, all on this machine.

    The servers are real, and every byte is compared. Exit code 1 when store and remote differ, 7
    when the drill did not restore everything.
    """
    if chosen["s3"] and chosen["ssh_server"] != "auto":
        raise click.UsageError("--s3 takes no --ssh-server: a bucket is reached without ssh")
    sys.exit(demonstration.run(**chosen))
