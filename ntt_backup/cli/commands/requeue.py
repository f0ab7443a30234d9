"""The command `requeue` makes failed blobs pending again."""

from __future__ import annotations

import json

import click

from ntt_backup.catalog import ledger
from ntt_backup.catalog.failures import find_blob
from ntt_backup.cli.common import Common, json_option, open_catalog
from ntt_backup.config import CatalogConfig
from ntt_backup.format import many
from ntt_backup.model import OF_CHECKS, Reason


@click.command()
@click.argument("blobids", nargs=-1, metavar="[BLOBID]...")
@click.option(
    "--reason",
    type=click.Choice([one.value for one in Reason if one not in OF_CHECKS]),
    help="Only blobs that failed for this reason.",
)
@json_option
@click.pass_obj
def requeue(common: Common, blobids: tuple[str, ...], reason: str | None, as_json: bool) -> None:
    """Make failed blobs pending again. The next run sends them.

    All, or those that are named: of each BLOBID its first digits are enough.
    """
    if blobids and reason is not None:
        raise click.UsageError("give blobs, or --reason")
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "requeue") as conn:
        names = {find_blob(conn, one) for one in blobids}
        count = ledger.requeue(conn, settings.target, reason, sorted(names) if names else None)
    if as_json:
        click.echo(json.dumps({"target": settings.target, "requeued": count}))
        return
    others = len(names) - count
    left = f"; {many(others, 'other was', 'others were')} not failed" if others > 0 else ""
    click.echo(f"{many(count, 'blob')} pending again{left}")
