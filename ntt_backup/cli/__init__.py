"""The command line: parses, calls, prints. No decision is taken here.

How a command begins and ends as a process is in `program`. What only one command needs, and takes
long to load, is loaded by that command: the others are asked for a quick answer.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from ntt_backup import __version__, demo
from ntt_backup.audit.scan import scan as scan_store
from ntt_backup.catalog import (
    dump_history,
    history,
    ledger,
    range_locks,
    schema,
    schema_plan,
    schema_scripts,
    stats,
    verify_schema,
)
from ntt_backup.catalog.quick_stats import glance
from ntt_backup.catalog.schema_check import PRINT_SQL
from ntt_backup.cli.app import unforeseen
from ntt_backup.cli.common import Common, connect
from ntt_backup.config import CatalogConfig, Settings, StoreConfig
from ntt_backup.errors import BackupError, complete, remember_global_options
from ntt_backup.format import many, printable
from ntt_backup.model import OF_CHECKS, Reason
from ntt_backup.source.inspection import Store
from ntt_backup.ui.run_view import ScanView, make_view
from ntt_backup.ui.status import plan_lines, scan_lines, status_json, status_table

_UNWRAPPED = 100_000  # Columns; no line is that long.
_ESTIMATE_MS = 1000
# Commands in modules of their own name, which are loaded only when they are asked for.
_ELSEWHERE = ("bench", "drill", "dump", "reconcile", "restore", "verify")


class _Commands(click.Group):
    """The commands, also those that are elsewhere."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(import_module(f"ntt_backup.cli.{cmd_name}"), cmd_name)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Configuration file (TOML); default NTT_CONFIG, else /etc/ntt/backup-remote.toml.",
)
@click.option("--target", default="remote", show_default=True, help="Which remote, by name.")
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an unforeseen error.")
@click.version_option(__version__, prog_name="ntt-backup-remote")
@click.pass_context
def cli(context: click.Context, config: Path | None, target: str, verbose: bool) -> None:
    """Back up a content-addressed store to a remote over ssh.

    Exit codes: 0 done, 2 usage or configuration, 3 another coordinator runs, 4 catalog, 5 remote
    unreachable, 6 remote cannot store, 7 finished but some blobs or the catalog's dump failed,
    130/143 stopped by a signal.
    """
    context.obj = Common(config, target)
    remember_global_options(context.obj.options)
    if not verbose:
        sys.excepthook = unforeseen


@cli.command()
@click.pass_obj
def check(common: Common) -> None:
    """Check everything a run needs, with a real transfer into a scratch directory."""
    from ntt_backup.daemon import preflight

    settings = common.load(Settings)
    first: BackupError | None = None
    for step in preflight.check(settings):
        verdict = "FAILED" if step.error else "warning" if step.warning else "ok"
        said = str(step.error) if step.error else step.warning or step.text
        click.echo(f"{verdict:<8}{step.name:<10}{printable(said)}")
        if step.error and step.error.hint:
            click.echo(f"{'':<18}{printable(step.error.hint)}")
        first = first or step.error
    if first is not None:
        sys.exit(first.exit_code)


@cli.command("init-db")
@click.option("--notify", is_flag=True, help="Have inserts into blobs wake a watching daemon.")
@click.option(
    "--print-sql",
    "script",
    type=click.Choice(["all", *(who.value for who in schema_scripts.Who)]),
    is_flag=False,
    flag_value="all",
    help="Change nothing: print what is missing as SQL for psql, a script for each who must run it,"
    " or that of one.",
)
@click.option("--role", help="With --print-sql: who will back up, if not the user of catalog.url.")
@click.option(
    "--monitor", multiple=True, metavar="ROLE", help="With --print-sql: who may look at figures."
)
@click.pass_obj
def init_db(
    common: Common, notify: bool, script: str | None, role: str | None, monitor: tuple[str, ...]
) -> None:
    """Create the catalog, or add to a live one what is missing."""
    if script is None and (role or monitor):
        raise click.UsageError("--role and --monitor are for --print-sql")
    settings = common.load(CatalogConfig)
    with connect(settings, "init-db") as conn:
        if script is not None:
            missing = schema_plan.look(
                conn, settings.target, role=role, monitors=monitor, notify=notify
            )
            click.echo(missing.script(None if script == "all" else schema_scripts.Who(script)))
            return
        not_yet = schema.init_db(conn, settings.target, notify=notify, report=click.echo)
        who = conn.info.user
    if not_yet:
        click.echo(f"{who} may not use all commands yet: {'; '.join(not_yet)}")
        click.echo(complete(PRINT_SQL))
    click.echo(
        f"the catalog is ready for target {settings.target}"
        + (", for all other commands" if not_yet else "")
    )


@cli.command()
@click.option("--restart", is_flag=True, help="Begin anew, also after an interrupted scan.")
@click.option(
    "--strays",
    type=click.Path(path_type=Path),
    help="Write every stray to this file, a JSON object a line. A scan that goes on where an"
    " earlier one was interrupted adds to it; a stray may then stand there twice.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
@click.pass_obj
def scan(common: Common, restart: bool, strays: Path | None, quiet: bool) -> None:
    """Register in the catalog what the store has and the catalog lacks.

    What is no blob (other names, other places, symlinks) is reported and never registered.
    """
    settings = common.load(StoreConfig)
    with connect(settings, "scan") as conn:
        verify_schema(conn, settings.target, "scan")
        view = ScanView(sys.stderr, strays, quiet=quiet)
        try:
            result = scan_store(
                conn,
                Store(settings.source.root),
                restart=restart,
                on_begin=view.begin,
                on_progress=view.progress,
                on_stray=view.stray,
            )
        finally:
            view.close()
    click.echo("\n".join(scan_lines(result)))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--exact",
    is_flag=True,
    help="Count everything. Without it, what takes longer than a moment is estimated.",
)
@click.pass_obj
def status(common: Common, as_json: bool, exact: bool) -> None:
    """Show what is pending, copied and failed, the last run, and who is at work."""
    settings = common.load(CatalogConfig)
    with connect(settings, "status") as conn:
        verify_schema(conn, settings.target, "status")
        answers = (
            settings.target,
            (stats.status if exact else glance)(conn, settings.target),
            history.last_run(conn, settings.target),
            dump_history.last_dumps(conn, settings.target),
            range_locks.holders(conn, settings.target),
        )
    if as_json:
        click.echo(json.dumps(status_json(*answers)))
    else:
        # A line a row for whoever reads it by grep or in a mail.
        width = None if sys.stdout.isatty() else _UNWRAPPED
        Console(highlight=False, width=width).print(status_table(*answers))


@cli.command()
@click.option(
    "--reason",
    type=click.Choice([one.value for one in Reason if one not in OF_CHECKS]),
    help="Only those failed for this.",
)
@click.pass_obj
def requeue(common: Common, reason: str | None) -> None:
    """Make failed blobs pending again."""
    settings = common.load(CatalogConfig)
    with connect(settings, "requeue") as conn:
        verify_schema(conn, settings.target, "requeue")
        count = ledger.requeue(conn, settings.target, reason)
    click.echo(f"{many(count, 'blob')} pending again")


@cli.command()
@click.option("--once", is_flag=True, help="Send what is pending, end; the default.")
@click.option("--watch", is_flag=True, help="Go on for ever, waiting for new blobs.")
@click.option("--workers", help="How many workers send side by side.")
@click.option("--batch-size", help="Blobs in a batch, at most.")
@click.option("--batch-bytes", help="Content of a batch, at most, for example 256MiB.")
@click.option("--strategy", help="How batches travel: auto, stream or tar.")
@click.option("--codec", help="What stream compresses with: auto, none, zlib, zstd-1 or zstd-3.")
@click.option("--bwlimit", metavar="RATE", help="Bytes a second, all workers together: 10MB.")
@click.option("--skip-pgdump", is_flag=True, help="Send no dump of the catalog.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and send nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print only errors.")
@click.pass_obj
def run(
    common: Common,
    once: bool,
    watch: bool,
    workers: str | None,
    batch_size: str | None,
    batch_bytes: str | None,
    strategy: str | None,
    codec: str | None,
    bwlimit: str | None,
    skip_pgdump: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Send what is pending to the remote."""
    if once and watch:
        raise click.UsageError("give only one of --once and --watch")
    settings = common.load(
        Settings,
        {
            "run.workers": workers,
            "run.batch_size": batch_size,
            "run.batch_bytes": batch_bytes,
            "run.strategy": strategy,
            "run.codec": codec,
            "run.bwlimit": bwlimit,
            "run.skip_pgdump": True if skip_pgdump else None,
        },
    )
    if dry_run:
        with connect(settings, "dry-run") as conn:
            verify_schema(conn, settings.target, "run --dry-run")
            pending = stats.pending_estimate(conn, settings.target, _ESTIMATE_MS)
            if not pending.blobs:
                from ntt_backup.daemon import preflight

                preflight.require_known(conn, settings)
        click.echo("\n".join(plan_lines(settings, pending)))
        return
    from ntt_backup.daemon import coordinator

    view = make_view(sys.stderr if quiet else sys.stdout, quiet=quiet)
    code = coordinator.run(settings, watch=watch, view=view)
    sys.exit(code)


@cli.command("install-receiver")
@click.option("--print", "show", is_flag=True, help="Print the steps and the line for sshd.")
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    help="Write the receiver to this file, to be copied.",
)
@click.pass_obj
def install_receiver(common: Common, show: bool, write: Path | None) -> None:
    """Make ready a key that can do nothing on the remote but back up."""
    from ntt_backup.client import forced_command

    if not show and write is None:
        raise click.UsageError("say --print, --write FILE, or both")
    if write is not None:
        forced_command.write(write)
    if show:
        click.echo(complete(forced_command.steps(common.load(Settings).remote)))


@cli.command("demo")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Make the store from the files below this directory; default: system directories.",
)
@click.option("--blobs", type=click.IntRange(1), default=5000, show_default=True, help="How many.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--keep", is_flag=True, help="Leave everything, and say how to play on.")
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where to work; absent or empty."
)
@click.option(
    "--ssh-server",
    type=click.Choice(["auto", "openssh", "embedded"]),
    default="auto",
    help="OpenSSH's sshd, or one in Python; auto: sshd where it is installed.",
)
@click.option(
    "--drill",
    is_flag=True,
    help="Then lose the store and the database, and come back from the remote alone.",
)
def show_demo(
    source: Path | None,
    blobs: int,
    workers: int,
    keep: bool,
    directory: Path | None,
    ssh_server: Literal["auto", "openssh", "embedded"],
    drill: bool,
) -> None:
    """Back up a made-up store on this machine, for real, and compare every byte.

    Exit code 1 when the two sides differ, 7 when not everything came back in the drill.
    """
    sys.exit(
        demo.run(
            source=source,
            blobs=blobs,
            workers=workers,
            keep=keep,
            directory=directory,
            ssh_server=ssh_server,
            drill=drill,
        )
    )
