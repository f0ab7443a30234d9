"""The command `run`, and its plan for --dry-run."""

from __future__ import annotations

import math
import sys

import click

from ntt_backup.cli.common import Common, only_errors_option, open_catalog
from ntt_backup.config import SendConfig, Settings
from ntt_backup.format import amount, many, size
from ntt_backup.model import PendingEstimate
from ntt_backup.ui.plain import make_view

_ESTIMATE_MS = 1000
_SETTINGS = ("workers", "batch_size", "batch_bytes", "strategy", "codec", "bwlimit")


@click.command()
@click.option("--once", is_flag=True, help="Send what is pending, then end. This is the default.")
@click.option("--watch", is_flag=True, help="Run until stopped, and send new blobs as they come.")
@click.option("--workers", help="Number of workers that send in parallel.")
@click.option("--batch-size", help="Largest number of blobs in a batch.")
@click.option("--batch-bytes", help="Largest content of a batch, for example 256MiB.")
@click.option(
    "--strategy", help="How batches are sent: auto, stream or tar; to a bucket always objects."
)
@click.option("--codec", help="Compression of stream: auto, none, zlib, zstd-1, ... zstd-12.")
@click.option(
    "--bwlimit", metavar="RATE", help="Bytes a second of all workers together, for example 10MB."
)
@click.option("--skip-pgdump", is_flag=True, help="Send no dump of the catalog.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@only_errors_option
@click.pass_obj
def run(
    common: Common,
    /,
    once: bool,
    watch: bool,
    skip_pgdump: bool,
    dry_run: bool,
    quiet: bool,
    **flags: str | None,
) -> None:
    """Send the pending blobs to the remote."""
    if once and watch:
        raise click.UsageError("give only one of --once and --watch")
    given = {f"run.{name}": flags[name] for name in _SETTINGS}
    settings = common.load(SendConfig, {**given, "run.skip_pgdump": True if skip_pgdump else None})
    if dry_run:
        from ntt_backup.catalog.stats import pending_estimate

        with open_catalog(settings, "run --dry-run", application="dry-run") as conn:
            pending = pending_estimate(conn, settings.target, _ESTIMATE_MS)
            if not pending.blobs:
                from ntt_backup.daemon import preflight

                preflight.require_known(conn, settings)
        click.echo("\n".join(plan(settings, pending)))
        return
    from ntt_backup.daemon import coordinator

    view = make_view(sys.stderr if quiet else sys.stdout, quiet=quiet)
    sys.exit(coordinator.run(settings, watch=watch, view=view))


def plan(settings: Settings, pending: PendingEstimate) -> list[str]:
    """Returns what a run would send, for a terminal."""
    run = settings.run
    limit = f", at most {size(run.bwlimit)}/s" if run.bwlimit else ""
    least = max(pending.blobs / run.batch_size, pending.bytes / run.batch_bytes)
    batches = many(math.ceil(least), "batch", "batches")
    remote = settings.remote
    where = remote.url if remote.kind == "s3" else f"{remote.where}/by-hash"
    return [
        f"would send {amount(pending.blobs, pending.bytes, estimated=not pending.exact)}"
        + (f" ({pending.unsized:,} of unknown size)" if pending.unsized else ""),
        f"from {settings.source.root} to {where}",
        f"in about {batches} of at most {many(run.batch_size, 'blob')} and {size(run.batch_bytes)}",
        f"by {many(run.workers, 'worker')}, strategy {run.strategy}{limit}",
    ]
