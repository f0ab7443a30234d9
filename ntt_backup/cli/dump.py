"""The command `dump`."""

from __future__ import annotations

import click

from ntt_backup.cli.common import Common, only_errors_option, open_catalog
from ntt_backup.config import RemoteConfig
from ntt_backup.dump import job
from ntt_backup.events import Event


@click.command()
@click.option("--force", is_flag=True, help="Dump even if nothing has changed since the last dump.")
@only_errors_option
@click.pass_obj
def dump(common: Common, force: bool, quiet: bool) -> None:
    """Dump the catalog to the remote, and remove old dumps."""
    settings = common.load(RemoteConfig)

    def show(event: Event) -> None:
        if event.line is not None and not quiet:
            click.echo(event.line)

    with open_catalog(settings, "dump"):
        pass  # What the command needs is missing before the work, not at its end.
    job.dump(settings, show, force=force)
