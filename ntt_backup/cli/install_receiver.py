"""The command `install-receiver`."""

from __future__ import annotations

from pathlib import Path

import click

from ntt_backup.cli import forced_command
from ntt_backup.cli.common import Common
from ntt_backup.config import Settings
from ntt_backup.errors import complete


@click.command("install-receiver")
@click.option("--print", "show", is_flag=True, help="Print the steps, and the line for sshd.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the receiver to this file; copy it to the remote.",
)
@click.pass_obj
def install_receiver(common: Common, show: bool, write: Path | None) -> None:
    """Prepare an ssh key that can only back up.

    This command installs nothing: it writes the receiver, and says what to do with it.
    """
    if not show and write is None:
        raise click.UsageError("give --print, --write FILE, or both")
    if write is not None:
        forced_command.write(write)
    if show:
        click.echo(complete(forced_command.steps(common.load(Settings).remote)))
