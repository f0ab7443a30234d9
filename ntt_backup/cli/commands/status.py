"""The command `status` shows what is pending, copied and failed, and who works."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.text import Text

from ntt_backup.catalog import dump_history, history, range_locks, stats
from ntt_backup.cli.common import AS_JSON, Common, json_option, open_catalog
from ntt_backup.cli.each_target import EachTarget
from ntt_backup.config import CatalogConfig
from ntt_backup.daemon.control.client import report
from ntt_backup.daemon.control.run_report import DaemonReport
from ntt_backup.errors import BackupError
from ntt_backup.format import render_error
from ntt_backup.newest import missed
from ntt_backup.objects.keys import LARGE_BLOB
from ntt_backup.report.live import Watch, console_for, print_to
from ntt_backup.report.status import Status, Unavailable
from ntt_backup.snapshot.last_take import last

_CATALOG_SECONDS: Final = 10.0


@click.command()
@json_option
@click.option(
    "--exact",
    is_flag=True,
    help="Count everything. Without it, figures that take long to count are estimated.",
)
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C ends it.")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: time between two looks. The catalog is asked every 10 seconds at most.",
)
@click.pass_obj
def status(common: Common, as_json: bool, exact: bool, watch: bool, interval: float) -> None:
    """Show what is pending, copied and failed, and who works."""
    seen = Seen(EachTarget(common, common.load_each(CatalogConfig)), exact=exact)
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(seen, interval, as_json=as_json)
        return
    seen.look()
    if as_json:
        click.echo(json.dumps(seen.json()))
    else:
        print_to(console_for(sys.stdout), (one.table() for one in seen.each.found.values()))
    click.get_current_context().meta[AS_JSON] = False  # An error has been told.
    seen.each.complain()
    seen.each.end()


class Seen:
    """What was seen of each target by the last look."""

    def __init__(self, each: EachTarget[Status | Unavailable], *, exact: bool) -> None:
        self.each = each
        self.daemons: dict[str, DaemonReport | str] = {}
        self._exact = exact

    def look(self) -> None:
        """Asks each catalog, and each daemon."""
        self.each.do(self._look_at)
        for name, error in self.each.errors.items():
            remote = self.each.settings[name].remote
            url = None if remote is None else remote.url
            self.each.found[name] = Unavailable(name, error, url, self.daemons[name])

    def look_at_daemons(self) -> None:
        """Asks each daemon again, and no catalog."""
        self.daemons = {name: _daemon(one) for name, one in self.each.settings.items()}
        for name, one in self.each.found.items():
            self.each.found[name] = replace(one, daemon=self.daemons[name])

    def json(self) -> dict[str, Any]:
        """Returns plain JSON values: of one target, or of all by their names."""
        return self.each.json(lambda one: one.json())

    def _look_at(self, settings: CatalogConfig) -> Status:
        daemon = self.daemons[settings.target] = _daemon(settings)
        return _status(settings, self._exact, daemon)


def _watch(seen: Seen, interval: float, *, as_json: bool) -> None:
    """Shows how things are, for ever."""
    asked = -math.inf
    with Watch(sys.stdout) as shown:
        while True:
            began = time.monotonic()
            if began - asked >= _CATALOG_SECONDS:
                seen.look()
                # Counted from here: a catalog that is away may let us wait for as long.
                asked = time.monotonic()
            else:
                seen.look_at_daemons()
            if as_json:
                click.echo(json.dumps(seen.json()))
                sys.stdout.flush()
            else:
                shown.show(picture(seen, shown))
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def picture(seen: Seen, shown: Watch) -> Iterator[RenderableType]:
    """Yields what --watch shows: each daemon, also one whose catalog is away, and the figures."""
    for name, one in seen.each.found.items():
        if not isinstance(one.daemon, str):
            yield shown.picture(one.daemon, len(seen.daemons))
        if isinstance(one, Unavailable):
            yield Text(f"target {name}: {render_error(one.error)}", style="red")
        else:
            yield one.table()


def _daemon(settings: CatalogConfig) -> DaemonReport | str:
    """Returns what runs for the target on this host, or why nothing is known of it."""
    try:
        return report(settings)
    except BackupError as error:
        return error.message


def _status(settings: CatalogConfig, exact: bool, daemon: DaemonReport | str) -> Status:
    """Asks the catalog. Raises CatalogError."""
    remote = settings.remote
    with open_catalog(settings, "status") as conn:
        return Status(
            settings.target,
            (stats.exact_totals if exact else stats.quick_totals)(conn, settings.target),
            history.latest_runs(conn, settings.target),
            dump_history.last_dumps(conn, settings.target),
            range_locks.holders(conn, settings.target),
            remote.url if remote is not None else None,
            stats.stored_objects(conn, settings.target, LARGE_BLOB, exact=exact)
            if remote is not None and remote.kind == "s3"
            else None,
            {name: last(settings, name) for name in settings.snapshots},
            settings.scheduled,
            daemon,
            missed(settings),
        )
