"""The command `status` shows what is pending, copied and failed, and who works."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import click
from rich.console import RenderableType
from rich.text import Text

from ntt_backup.cli.common import AS_JSON, Common, json_option, open_catalog
from ntt_backup.cli.each_target import EachTarget
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import BackupError
from ntt_backup.format import render_error
from ntt_backup.report.facts import Facts
from ntt_backup.report.live import Watch, console_for, print_to
from ntt_backup.report.status import Status

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

    def __init__(self, each: EachTarget[Status], *, exact: bool) -> None:
        self.each = each
        self._exact = exact

    def look(self) -> None:
        """Asks each catalog, and each daemon."""

        def look_at(settings: CatalogConfig) -> Status:
            found = Facts.of_host(settings)
            try:
                with open_catalog(settings, "status") as conn:
                    found.read_for_status(conn, exact=self._exact)
            except BackupError as error:
                found.trouble = error
                self.each.found[settings.target] = Status(found)
                raise
            return Status(found)

        self.each.do(look_at)

    def look_at_daemons(self) -> None:
        """Asks each daemon again, and no catalog."""
        for one in self.each.found.values():
            one.facts.ask_daemon()

    def json(self) -> dict[str, Any]:
        """Returns plain JSON values: of one target, or of all by their names."""
        return self.each.json(lambda one: one.json())


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
        if one.facts.daemon is not None:
            yield shown.picture(one.facts.daemon, len(seen.each.found))
        if one.facts.trouble is not None:
            yield Text(f"target {name}: {render_error(one.facts.trouble)}", style="red")
        else:
            yield one.table()
