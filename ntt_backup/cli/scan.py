"""The command `scan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ntt_backup.audit.scan import ScanResult
from ntt_backup.audit.scan import scan as scan_store
from ntt_backup.cli.common import Common, only_errors_option, open_catalog
from ntt_backup.config import StoreConfig
from ntt_backup.format import amount, duration, many
from ntt_backup.source.inspection import Store
from ntt_backup.ui.scan_view import ScanView


@click.command()
@click.option("--restart", is_flag=True, help="Begin anew, even if an earlier scan did not finish.")
@click.option(
    "--strays",
    type=click.Path(path_type=Path),
    help="Write every stray to this file, one JSON object a line. A scan that continues an"
    " interrupted one adds to the file, and may write a stray twice.",
)
@only_errors_option
@click.pass_obj
def scan(common: Common, restart: bool, strays: Path | None, quiet: bool) -> None:
    """Register in the catalog what only the store has.

    What is not a blob (another name, another place, a symlink) is a stray: it is reported and never
    registered.
    """
    settings = common.load(StoreConfig)
    with open_catalog(settings, "scan") as conn, ScanView(sys.stderr, strays, quiet=quiet) as view:
        result = scan_store(
            conn,
            Store(settings.source.root),
            restart=restart,
            on_begin=view.begin,
            on_progress=view.progress,
            on_stray=view.stray,
        )
    click.echo("\n".join(lines(result)))


def lines(result: ScanResult) -> list[str]:
    """Returns what a scan found, for a terminal."""
    resumed = f", continued after {result.resumed_from}" if result.resumed_from else ""
    return [
        f"registered {amount(result.registered, result.bytes)}; {result.known:,} known before",
        f"looked at {many(result.directories, 'directory', 'directories')} in"
        f" {duration(result.duration_s)}{resumed}",
        *(
            f"left aside {many(count, 'stray')}: {kind.value}"
            for kind, count in sorted(result.strays.items())
        ),
    ]
