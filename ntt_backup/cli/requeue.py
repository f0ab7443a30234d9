"""The command `requeue`."""

from __future__ import annotations

import click

from ntt_backup.catalog import ledger
from ntt_backup.cli.common import Common, open_catalog
from ntt_backup.config import CatalogConfig
from ntt_backup.format import many
from ntt_backup.model import OF_CHECKS, Reason


@click.command()
@click.option(
    "--reason",
    type=click.Choice([one.value for one in Reason if one not in OF_CHECKS]),
    help="Only blobs that failed for this reason.",
)
@click.pass_obj
def requeue(common: Common, reason: str | None) -> None:
    """Make failed blobs pending again. The next run sends them."""
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "requeue") as conn:
        count = ledger.requeue(conn, settings.target, reason)
    click.echo(f"{many(count, 'blob')} pending again")
