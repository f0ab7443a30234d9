"""The command `status`."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console

from ntt_backup.catalog import dump_history, history, range_locks, stats
from ntt_backup.cli.common import Common, json_option, open_catalog
from ntt_backup.config import CatalogConfig
from ntt_backup.objects.keys import LARGE_BLOB
from ntt_backup.ui.status import Status

_UNWRAPPED = 100_000  # Columns; no line is that long.


@click.command()
@json_option
@click.option(
    "--exact",
    is_flag=True,
    help="Count everything. Without it, figures that take long to count are estimated.",
)
@click.pass_obj
def status(common: Common, as_json: bool, exact: bool) -> None:
    """Show what is pending, copied and failed, and who works."""
    settings = common.load(CatalogConfig)
    remote = settings.remote
    with open_catalog(settings, "status") as conn:
        found = Status(
            settings.target,
            (stats.exact_totals if exact else stats.quick_totals)(conn, settings.target),
            history.latest_runs(conn, settings.target),
            dump_history.last_dumps(conn, settings.target),
            range_locks.holders(conn, settings.target),
            remote.url if remote is not None else None,
            stats.stored_objects(conn, settings.target, LARGE_BLOB, exact=exact)
            if remote is not None and remote.kind == "s3"
            else None,
        )
    if as_json:
        click.echo(json.dumps(found.json()))
    else:
        # For grep and for mail each row is one line.
        width = None if sys.stdout.isatty() else _UNWRAPPED
        Console(highlight=False, width=width).print(found.table())
