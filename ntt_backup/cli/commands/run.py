"""The command `run` sends the pending blobs, or tells with --dry-run what it would send."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from ntt_backup.cli.common import Common, json_option, only_errors_option, open_catalog
from ntt_backup.cli.results import fields_of
from ntt_backup.config import SendConfig, Settings
from ntt_backup.config.timetable import describe
from ntt_backup.daemon.listeners import Listener
from ntt_backup.format import amount, many, size
from ntt_backup.model import PendingEstimate
from ntt_backup.report.lines import JsonResult, make_views

if TYPE_CHECKING:
    from ntt_backup.daemon.listeners import ListenerProcess

_ESTIMATE_MS = 1000
_SETTINGS = ("workers", "batch_size", "batch_bytes", "strategy", "codec", "bwlimit")


@click.command()
@click.option("--once", is_flag=True, help="Send what is pending, then end. This is the default.")
@click.option("--watch", is_flag=True, help="Run until stopped, and send new blobs as they come.")
@click.option("--workers", metavar="N", help="Number of workers that send in parallel, 1 to 256.")
@click.option("--batch-size", metavar="N", help="Largest number of blobs in a batch.")
@click.option("--batch-bytes", metavar="SIZE", help="Largest content of a batch, such as 256MiB.")
@click.option(
    "--strategy", help="How batches are sent: auto, stream or tar; to a bucket always objects."
)
@click.option("--codec", help="Compression of stream: auto, none, zlib, zstd-1, ... zstd-12.")
@click.option(
    "--bwlimit",
    metavar="RATE",
    help="Bytes a second of all workers together, such as 10MB, or a timetable.",
)
@click.option("--skip-pgdump", is_flag=True, help="Send no dump of the catalog.")
@click.option(
    "--log-level",
    type=click.Choice(["info", "warning", "error"]),
    help="Write only events of this level and above into the log; info: all.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@json_option
@only_errors_option
@click.pass_obj
def run(
    common: Common,
    /,
    once: bool,
    watch: bool,
    skip_pgdump: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    log_level: str | None,
    **flags: str | None,
) -> None:
    """Send the pending blobs to the remote.

    What no option says is taken from the settings [run] and [log]: `config show` lists them.
    """
    if once and watch:
        raise click.UsageError("give only one of --once and --watch")
    given: dict[str, object] = {f"run.{name}": flags[name] for name in _SETTINGS}
    given |= {"run.skip_pgdump": True if skip_pgdump else None, "log.level": log_level}
    each = common.load_each(SendConfig, given)
    if dry_run:
        for name, settings in each.items():
            common.turn_to(name)
            _show_plan(settings, f"{name}: " if len(each) > 1 else "", as_json=as_json)
        return
    views = make_views(sys.stderr if quiet or as_json else sys.stdout, each, quiet=quiet)
    any_of_them = next(iter(each.values()))
    heard_by = list(_listener_processes(any_of_them))

    def listeners(name: str) -> list[Listener]:
        result = [JsonResult(sys.stdout, name)] if as_json else []
        return [views[name], *result, *(process.of(name) for process in heard_by)]

    def reread(name: str) -> Settings:
        return replace(common, target=name).load(SendConfig, given)

    if len(each) > 1:
        from ntt_backup.daemon import targets

        sys.exit(
            targets.run(
                each,
                watch=watch,
                listeners=listeners,
                reread=reread,
                names=common.names,
                turn_to=common.turn_to,
            )
        )
    from ntt_backup.daemon import coordinator

    ((name, settings),) = each.items()
    common.turn_to(name)
    sys.exit(
        coordinator.run(
            settings,
            watch=watch,
            listeners=listeners(name),
            reread=partial(reread, name),
            names=common.names,
        )
    )


def _listener_processes(settings: Settings) -> Iterator[ListenerProcess]:
    """Yields the processes that hear of all runs; what nobody wants is not even loaded."""
    if settings.metrics.wanted:
        from ntt_backup.daemon.metrics.process import metrics_process

        yield metrics_process(settings)
    if settings.notify.wanted:
        from ntt_backup.daemon.notices import notice_process

        yield notice_process(settings)


def _show_plan(settings: Settings, prefix: str, *, as_json: bool) -> None:
    from ntt_backup.catalog.stats import pending_estimate

    with open_catalog(settings, "run --dry-run", application="dry-run") as conn:
        pending = pending_estimate(conn, settings.target, _ESTIMATE_MS)
        if not pending.blobs:
            from ntt_backup.daemon import preflight

            preflight.require_known(conn, settings)
    if as_json:
        click.echo(json.dumps({"target": settings.target, **fields_of(pending)}))
        return
    click.echo("\n".join(f"{prefix}{line}" for line in plan(settings, pending)))


def plan(settings: Settings, pending: PendingEstimate) -> list[str]:
    """Returns what a run would send, for a terminal."""
    run = settings.run
    limit = f", {describe(run.bwlimit, datetime.now())}" if run.bwlimit else ""
    least = max(pending.blobs / run.most_blobs, pending.bytes / run.batch_bytes)
    batches = many(math.ceil(least), "batch", "batches")
    remote = settings.remote
    where = remote.url if remote.kind == "s3" else f"{remote.where}/by-hash"
    return [
        f"would send {amount(pending.blobs, pending.bytes, estimated=not pending.exact)}"
        + (f" ({pending.unsized:,} of unknown size)" if pending.unsized else ""),
        f"from {settings.source.root} to {where}",
        f"in at least {batches} of at most {many(run.most_blobs, 'blob')}"
        f" and {size(run.batch_bytes)}",
        f"by {many(run.workers, 'worker')}, strategy {run.strategy}{limit}",
    ]
