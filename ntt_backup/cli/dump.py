"""The command `dump`: its options, and what came of it, for people."""

from __future__ import annotations

import click

from ntt_backup.catalog.schema_check import verify_schema
from ntt_backup.cli.common import Common, connect
from ntt_backup.config import RemoteConfig
from ntt_backup.dump import job
from ntt_backup.format import describe


@click.command()
@click.option("--force", is_flag=True, help="Also where nothing has changed since the last one.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
@click.pass_obj
def dump(common: Common, force: bool, quiet: bool) -> None:
    """Dump the catalog's database to the remote, and remove dumps past retention."""
    settings = common.load(RemoteConfig)

    def tell(event: str, **fields: object) -> None:
        line = describe({"event": event, **fields})
        if line is not None and not quiet:
            click.echo(line)

    with connect(settings, "dump") as conn:
        verify_schema(conn, settings.target, "dump")
    job.dump(settings, tell, force=force)
