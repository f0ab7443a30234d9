"""`ntt-backup-remote demo`: shows a whole backup on this machine alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from ntt_backup.demo import run


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Make the store from the files below this directory; default: system directories.",
)
@click.option("--blobs", type=click.IntRange(1), default=5000, show_default=True, help="How many.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--keep", is_flag=True, help="Leave everything, and say how to play on.")
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where to work; absent or empty."
)
@click.option(
    "--ssh-server",
    type=click.Choice(["auto", "openssh", "embedded"]),
    default="auto",
    help="OpenSSH's sshd, or one in Python; auto: sshd where it is installed.",
)
@click.option(
    "--drill",
    is_flag=True,
    help="Then lose the store and the database, and come back from the remote alone.",
)
def demo(
    source: Path | None,
    blobs: int,
    workers: int,
    keep: bool,
    directory: Path | None,
    ssh_server: Literal["auto", "openssh", "embedded"],
    drill: bool,
) -> None:
    """Back up a made-up store on this machine, for real, and compare every byte.

    Exit code 1 when the two sides differ, 7 when not everything came back in the drill.
    """
    sys.exit(
        run(
            source=source,
            blobs=blobs,
            workers=workers,
            keep=keep,
            directory=directory,
            ssh_server=ssh_server,
            drill=drill,
        )
    )
