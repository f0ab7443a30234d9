"""The commands `status`, `why`, `runs`, `serve` show how things are, on a terminal or as a page."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NoReturn

import click
from rich.console import RenderableType
from rich.text import Text

from ntt_backup.catalog import history
from ntt_backup.catalog.proofs import count_proofs
from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, open_catalog
from ntt_backup.cli.options import JSON, flag, repeated, value
from ntt_backup.cli.results import EachTarget
from ntt_backup.config import ALL_TARGETS, CatalogConfig
from ntt_backup.errors import SOME_FAILED, BackupError, ConfigError, worst
from ntt_backup.formatting import duration, printable, render_error
from ntt_backup.report.health import Health, HealthVerdict, judge
from ntt_backup.report.live import Watch, console_for, print_to
from ntt_backup.report.status import Status, policy_fields, policy_lines, run_line
from ntt_backup.report.target_facts import FactsReader, TargetFacts

_CATALOG_SECONDS: Final = 10.0


@options.command(JSON)
@flag("--exact", "Count everything. Otherwise figures that take long to count are estimated.")
@flag(
    "--policy", "Count the blobs with fewer proved copies, on all targets, than [policy] asks for."
)
@flag("--watch", "Refresh the status until Ctrl-C ends the command.")
@value(
    "--interval",
    click.FloatRange(0.2, 3600),
    "With --watch: seconds between two refreshes; the catalog is read at most every 10 seconds.",
    default=2.0,
)
def status(common: Common, exact: bool, policy: bool, watch: bool, interval: float) -> None:
    """Show what is pending, copied and failed, and which workers run.

    With --policy, the exit code is 7 if blobs have fewer proved copies than promised.
    """
    if policy and watch:
        raise click.UsageError("--policy is shown once, not with --watch")
    if policy:
        _show_policy(common, exact=exact)
    each = EachTarget[Status](common, common.load_each(CatalogConfig))
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(each, interval, exact=exact)
        return
    look(each, exact=exact)
    tables = (one.table() for one in each.found.values())
    each.report(lambda one: one.json(), lambda: print_to(console_for(sys.stdout), tables))


def _show_policy(common: Common, *, exact: bool) -> NoReturn:
    """Shows whether the promise of the settings is kept, which is one for all targets."""
    settings = next(iter(common.load_each(CatalogConfig).values()))
    copies = settings.policy.copies
    if copies is None:
        raise ConfigError(
            "policy.copies is not set",
            hint='set copies, and how long a check proves a copy: copies = 2, proved = "90d"',
        )
    with open_catalog(settings, "status") as conn:
        count = count_proofs(conn, settings.targets, settings.policy.proved, renew=exact)
    lines = [*policy_lines(count, copies, datetime.now(UTC)), *settings.part.words]
    fields = policy_fields(count, copies)
    assert fields is not None
    results.report(fields, lines, SOME_FAILED if count.short(copies) else 0)


def look(each: EachTarget[Status], *, exact: bool) -> None:
    """Asks each catalog, and each daemon."""

    def look_at(settings: CatalogConfig) -> Status:
        found = TargetFacts.of_host(settings)
        try:
            with open_catalog(settings, "status") as conn:
                found.read_for_status(conn, exact=exact)
        except BackupError as error:
            found.trouble = error
            each.found[settings.target] = Status(found)
            raise
        return Status(found)

    each.do(look_at)


def look_at_daemons(each: EachTarget[Status]) -> None:
    """Asks each daemon again, and no catalog. The health is judged again, too."""
    known = {name: one.facts for name, one in each.found.items()}

    def look_at(settings: CatalogConfig) -> Status:
        found = known[settings.target]
        found.ask_daemon()
        return Status(found)

    each.do(look_at)


def _watch(each: EachTarget[Status], interval: float, *, exact: bool) -> None:
    """Shows how things are, for ever."""
    asked = -math.inf
    with Watch(sys.stdout) as shown:
        while True:
            began = time.monotonic()
            if began - asked >= _CATALOG_SECONDS:
                look(each, exact=exact)
                # Counted from here: a catalog that is away may let us wait for as long.
                asked = time.monotonic()
            else:
                look_at_daemons(each)
            if options.wants("as_json"):
                click.echo(json.dumps(each.json(lambda one: one.json())))
                sys.stdout.flush()
            else:
                shown.show(picture(each, shown))
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def picture(each: EachTarget[Status], shown: Watch) -> Iterator[RenderableType]:
    """Yields what --watch shows: each daemon, also one whose catalog is away, and the figures."""
    for name, one in each.found.items():
        if one.facts.daemon is not None:
            yield shown.picture(one.facts.daemon, len(each.found))
        if one.facts.trouble is not None:
            yield Text(f"target {name}: {render_error(one.facts.trouble)}", style="red")
        else:
            yield one.table()


def _targets(common: Common) -> dict[str, CatalogConfig]:
    """Returns the settings of each target of --target, by default of all."""
    wanted = ALL_TARGETS if common.default_target else common.target
    return replace(common, target=wanted).load_each(CatalogConfig)


def _judged(common: Common, reader: FactsReader) -> Iterator[tuple[TargetFacts, HealthVerdict]]:
    """Yields the facts of each target, with the verdict; command lines in it name the target."""
    for name in reader.targets:
        common.turn_to(name)
        facts = reader.read(name)
        yield facts, judge(facts, datetime.now(UTC))


@options.command(JSON)
def why(common: Common) -> None:
    """Say whether anybody has to act, why, and what to do.

    All targets are examined, or those of --target. The exit code is 0 if no action is required, 7
    if a target requires action, and 4 if a catalog cannot be read.
    """
    said, found, codes = [], {}, [0]
    reader = FactsReader(_targets(common), "why", page=False, patience=30.0)
    for facts, verdict in _judged(common, reader):
        begin = f"{facts.target}: "
        found[facts.target] = verdict.fields
        said += [begin + verdict.lines[0], *verdict.lines[1:]]
        codes += [facts.trouble.exit_code] if facts.trouble is not None else []
        codes += [SOME_FAILED] if verdict.level is Health.ACTION_REQUIRED else []
    results.report({"targets": found}, map(printable, said), worst(codes))


@options.command(JSON)
@value("--limit", click.IntRange(1), "Show the last N.", default=20)
def runs(common: Common, limit: int) -> None:
    """List the last runs: when, how they ended, what they copied. The newest comes first."""
    settings = common.load(CatalogConfig)
    with open_catalog(settings, "runs") as conn:
        found = history.recent_runs(conn, settings.target, limit)
    listed = [{**results.fields_of(one), "mb_per_s": one.mb_per_s} for one in found]
    said = []
    for one in found:
        seconds = (one.ended_at - one.started_at).total_seconds() if one.ended_at else 0.0
        said.append(printable(run_line(one, f" in {duration(seconds)}")))
    results.tell({"target": settings.target, "runs": listed}, said or ["there was no run yet"])


@options.command()
@value("--listen", "ADDRESS:PORT", "Where to listen; port 0: a free one.", default="127.0.0.1:9188")
@flag("--expose", "Allow an address that other hosts can reach. The page has no password.")
@repeated("--name", "HOST", "Host name by which a browser may ask, as behind a proxy", "known_as")
def serve(common: Common, listen: str, expose: bool, known_as: tuple[str, ...]) -> None:
    """Show the state of all targets as a web page.

    The page refreshes itself. The command only reads.
    """
    from ntt_backup.process.memory import collect_often
    from ntt_backup.report.page import Target, policy, render
    from ntt_backup.report.web_server import PageServer, Shown

    reader = FactsReader(_targets(common))

    def draw() -> Shown:
        found = [Target.of(*judged) for judged in _judged(common, reader)]
        healthy = all(one.verdict.level < Health.ACTION_REQUIRED for one in found)
        health = "".join(f"{one.facts.target}: {one.verdict.headline}\n" for one in found)
        return Shown(render(found, datetime.now(UTC)), policy(), health, healthy)

    server = PageServer(listen, draw, exposed=expose, names=known_as)
    click.echo(f"the status page is at {server.url}")
    collect_often()
    server.serve()
