"""The command `runs` lists the last runs."""

from __future__ import annotations

import json

import click

from ntt_backup.catalog.history import recent_runs
from ntt_backup.cli.common import Common, json_option, open_catalog
from ntt_backup.cli.results import fields_of
from ntt_backup.config import CatalogConfig
from ntt_backup.format import duration, printable
from ntt_backup.report.status import run_line


@click.command()
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="Show the last N."
)
@json_option
@click.pass_obj
def runs(common: Common, limit: int, as_json: bool) -> None:
    """List the last runs: when, how they ended, what they copied. The newest comes first."""
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "runs") as conn:
        found = recent_runs(conn, settings.target, limit)
    if as_json:
        listed = [{**fields_of(one), "mb_per_s": one.mb_per_s} for one in found]
        click.echo(json.dumps({"target": settings.target, "runs": listed}))
        return
    for one in found:
        lasted = ""
        if one.ended_at is not None:
            lasted = f" in {duration((one.ended_at - one.started_at).total_seconds())}"
        click.echo(printable(run_line(one, lasted)))
    if not found:
        click.echo("there was no run yet")
