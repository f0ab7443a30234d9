"""The command `dump` dumps the catalog to the remote, and removes old dumps."""

from __future__ import annotations

import json

import click

from ntt_backup.cli.common import Common, json_option, only_errors_option, open_catalog
from ntt_backup.config import RemoteConfig
from ntt_backup.dump import job
from ntt_backup.dump.events import DumpComplete, DumpSkipped
from ntt_backup.events import Event


@click.command()
@click.option("--force", is_flag=True, help="Dump even if nothing has changed since the last dump.")
@click.option("--whole", is_flag=True, help="Dump, and not as an increment on the last dump.")
@json_option
@only_errors_option
@click.pass_obj
def dump(common: Common, force: bool, whole: bool, as_json: bool, quiet: bool) -> None:
    """Dump the catalog to the remote, and remove old dumps."""
    settings = common.load(RemoteConfig)

    def show(event: Event) -> None:
        if as_json and isinstance(event, DumpComplete | DumpSkipped):
            fields = {"target": settings.target, "event": event.kind, **event.fields}
            click.echo(json.dumps(fields))
        elif event.line is not None and not quiet:
            click.echo(event.line, err=as_json)

    with open_catalog(settings, "dump"):
        pass  # What the command needs is missing before the work, not at its end.
    job.dump(settings, show, force=force, whole=whole)
