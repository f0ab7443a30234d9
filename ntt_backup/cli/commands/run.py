"""The command `run` sends the pending blobs; `pause`, `stop` and others ask a daemon that runs.

These ask over the control socket, and say what the daemon did, of each target that is named. Who
asks twice is told so, and nothing is done twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, open_catalog
from ntt_backup.cli.options import JSON, ONLY_ERRORS, flag, value
from ntt_backup.config import CatalogConfig, SendConfig, Settings
from ntt_backup.config.bandwidth_timetable import describe_limit
from ntt_backup.daemon.listeners import Listener
from ntt_backup.errors import complete
from ntt_backup.formatting import amount, many, printable, size
from ntt_backup.model import PendingEstimate
from ntt_backup.report.plain_output import JsonResult, make_views

if TYPE_CHECKING:
    from ntt_backup.daemon.listeners import ListenerProcess

_ESTIMATE_MS = 1000
_SIGNALLED = 128  # Who stops a run waits for its end alone.


@options.command(JSON, ONLY_ERRORS)
@flag("--once", "Send what is pending, then end. This is the default.")
@flag("--watch", "Run until stopped, and send new blobs as they arrive.")
@value("--workers", "N", "Number of workers that send in parallel, 1 to 256.")
@value("--batch-size", "N", "Largest number of blobs in a batch.")
@value("--batch-bytes", "SIZE", "Largest total size of a batch, such as 256MiB.")
@value("--strategy", str, "How batches are sent: auto, stream or tar; packs for that layout.")
@value("--codec", str, "Compression of stream: auto, none, zlib, zstd-1, ... zstd-12.")
@value("--bwlimit", "RATE", "Bytes a second of all workers together, such as 10MB, or a timetable.")
@flag("--skip-pgdump", "Send no dump of the catalog.")
@value("--log-level", click.Choice(["info", "warning", "error"]), "Lowest level to log; info: all.")
@flag("--dry-run", "Show what would be sent, and send nothing.")
def run(
    common: Common,
    /,
    once: bool,
    watch: bool,
    skip_pgdump: bool,
    dry_run: bool,
    log_level: str | None,
    **flags: str | None,
) -> None:
    """Send the pending blobs to the remote.

    Options that are not given are taken from the settings [run] and [log], see `config show`.
    """
    if once and watch:
        raise click.UsageError("give only one of --once and --watch")
    given: dict[str, object] = {f"run.{name}": text for name, text in flags.items()}
    given |= {"run.skip_pgdump": True if skip_pgdump else None, "log.level": log_level}
    each = common.load_each(SendConfig, given)
    if dry_run:
        for name, settings in each.items():
            common.turn_to(name)
            _show_plan(settings, f"{name}: " if len(each) > 1 else "")
        return
    as_json, quiet = options.wants("as_json"), options.wants("quiet")
    views = make_views(sys.stderr if quiet or as_json else sys.stdout, each, quiet=quiet)
    heard_by: list[ListenerProcess] = []  # What nobody wants is not even loaded.
    of_all = next(iter(each.values()))
    if of_all.metrics.wanted:
        from ntt_backup.report.metrics import metrics_process

        heard_by.append(metrics_process(each))
    if of_all.notify.wanted:
        from ntt_backup.report.notices import notice_process

        heard_by.append(notice_process(each))

    def listeners(name: str) -> list[Listener]:
        result = [JsonResult(sys.stdout, name)] if as_json else []
        return [views[name], *result, *(process.of(name) for process in heard_by)]

    def reread(name: str) -> Settings:
        return replace(common, target=name).load(SendConfig, given)

    if len(each) > 1:
        from ntt_backup.daemon import target_supervisor

        code = target_supervisor.run(
            each,
            watch=watch,
            listeners=listeners,
            reread=reread,
            names=common.names,
            turn_to=common.turn_to,
        )
    else:
        from ntt_backup.daemon import coordinator

        ((name, settings),) = each.items()
        common.turn_to(name)
        code = coordinator.run(
            settings,
            watch=watch,
            listeners=listeners(name),
            reread=partial(reread, name),
            names=common.names,
        )
    if not (as_json or quiet or code > _SIGNALLED):
        _say_how_safe(each)
    sys.exit(code)


def _say_how_safe(each: Mapping[str, Settings]) -> None:
    """Prints as the last line for each target how safe its blobs are, where that is soon known."""
    from ntt_backup.report.health import judge
    from ntt_backup.report.target_facts import FactsReader

    with closing(FactsReader(each, "run", page=False)) as reader:
        for name in each:
            if said := judge(reader.read(name), datetime.now(UTC)).safety:
                prefix = f"{name}: " if len(each) > 1 else ""
                with suppress(OSError):
                    click.echo(f"{prefix}{said}")


def _show_plan(settings: Settings, prefix: str) -> None:
    from ntt_backup.catalog.stats import pending_estimate

    with open_catalog(settings, "run --dry-run", application="dry-run") as conn:
        pending = pending_estimate(conn, settings.target, _ESTIMATE_MS)
        if not pending.blobs:
            from ntt_backup.daemon import preflight

            preflight.require_known(conn, settings)
    said = [f"{prefix}{line}" for line in plan(settings, pending)]
    results.tell({"target": settings.target, **results.fields_of(pending)}, said)


def plan(settings: Settings, pending: PendingEstimate) -> list[str]:
    """Returns what a run would send, for a terminal."""
    run = settings.run
    limit = f", {describe_limit(run.bwlimit, datetime.now())}" if run.bwlimit else ""
    least = max(pending.blobs / run.most_blobs, pending.bytes / run.batch_bytes)
    batches = many(math.ceil(least), "batch", "batches")
    remote = settings.remote
    where = remote.where if remote.packs else f"{remote.where}/by-hash"
    return [
        f"would send {amount(pending.blobs, pending.bytes, estimated=not pending.exact)}"
        + (f" ({pending.unsized:,} of unknown size)" if pending.unsized else ""),
        f"from {settings.source.root} to {where}",
        *settings.part.words,
        f"in at least {batches} of at most {many(run.most_blobs, 'blob')}"
        f" and {size(run.batch_bytes)}",
        f"by {many(run.workers, 'worker')}, strategy {run.strategy}{limit}",
    ]


def _ask(common: Common, do: str, **values: str) -> None:
    from ntt_backup.daemon.control_socket import ask

    each = results.EachTarget[dict[str, Any]](common, common.load_each(CatalogConfig))
    each.do(lambda settings: ask(settings, do, **values))

    def show() -> None:
        for name, said in each.found.items():
            common.turn_to(name)
            click.echo(printable(f"target {name}: {complete(said['done'])}"))

    each.report(dict, show)


@options.command(JSON)
def pause(common: Common) -> None:
    """Make a running daemon send nothing until it is resumed.

    The daemon keeps its connections and the batches in flight. With a bucket it first completes the
    requests that have begun. A pause ends with the daemon.
    """
    _ask(common, "pause")


@options.command(JSON)
def resume(common: Common) -> None:
    """Make a paused daemon continue."""
    _ask(common, "resume")


@options.command(JSON)
@click.argument("rate")
def bwlimit(common: Common, rate: str) -> None:
    """Limit the bandwidth of a running daemon.

    RATE limits all workers together, in bytes per second, such as 4MB/s. `off` removes the limit,
    and `timetable` returns to run.bwlimit. The limit is in effect until the daemon ends.
    """
    _ask(common, "bwlimit", rate=rate)


@options.command(JSON)
def stop(common: Common) -> None:
    """Stop a running daemon after the batches in flight.

    The daemon ends with exit code 143, as after SIGTERM. A paused daemon ends immediately, and
    nothing is lost.
    """
    _ask(common, "stop")


@options.command(JSON)
def now(common: Common) -> None:
    """Make a running daemon look for work, and do what is due, immediately.

    The daemon immediately tries everything that it waits for: new blobs, the end of an outage, the
    next dump or snapshot.
    """
    _ask(common, "now")
