"""`ntt-backup-remote bench`: what the link, the store and the remote really give."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ntt_backup.bench import (
    link,
    link_verdict,
    machine,
    plot,
    scenarios,
    strategies,
    strategies_verdict,
    tables,
    ways,
)
from ntt_backup.bench.progress import StepView
from ntt_backup.bench.results import LEAST_ROUNDS, Setting, report_json
from ntt_backup.cli.common import Common
from ntt_backup.config import RemoteConfig, Settings, parse_size
from ntt_backup.errors import ConfigError
from ntt_backup.process.interrupts import Interrupts


class _Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in new versions only
    """Whole numbers in a list: 1,2,4,8."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(word) for word in str(value).split(",")))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 1,2,4", param, ctx)
        if not all(1 <= number <= 64 for number in numbers):
            self.fail(f"{value!r} has numbers below 1 or above 64", param, ctx)
        return numbers


class _Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes as the settings take them: 200MB, 1GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_size(value)
        except ValueError:
            self.fail(f"{value!r} is no size such as 200MB", param, ctx)


class _Target(click.Path):
    """A file that is written at the end; that it can be is looked at before the work."""

    def __init__(self, endings: Sequence[str] = ()) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"the directory {str(path.parent)!r} does not exist", param, ctx)
        if self._endings and path.suffix not in self._endings:
            self.fail(f"{path.name!r} ends in none of {', '.join(self._endings)}", param, ctx)
        return path


_ROUNDS = click.option(
    "--rounds",
    type=click.IntRange(LEAST_ROUNDS),
    default=LEAST_ROUNDS,
    show_default=True,
    help="How often everything is measured.",
)
_JSON = click.option("--json", "json_file", type=_Target(), help="Write every figure to this file.")
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


@click.group()
def bench() -> None:
    """Measure the link, the ways to send, and what each layer costs.

    Nothing is marked in the catalog, and what is sent is removed from the remote again.
    """


@bench.command("link")
@_ROUNDS
@click.option("--seconds", type=click.FloatRange(0.2), default=3.0, show_default=True)
@click.option("--streams", type=_Numbers(), default="1,2,4,8", show_default=True)
@click.option("--round-trips", type=click.IntRange(3), default=1000, show_default=True)
@click.option("--ciphers", help="Comma-separated; default: those that are in wide use.")
@_JSON
@_QUIET
@click.pass_obj
def bench_link(
    common: Common,
    rounds: int,
    seconds: float,
    streams: tuple[int, ...],
    round_trips: int,
    ciphers: str | None,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """What the link gives: round trip, handshake, throughput by streams, cipher, compression.

    Sends random bytes and receives some; stores nothing. Takes about three minutes.
    """
    settings = common.load(RemoteConfig)
    options = link.Options(
        rounds=rounds,
        seconds=seconds,
        trips=round_trips,
        streams=streams,
        ciphers=link.CIPHERS if ciphers is None else tuple(filter(None, ciphers.split(","))),
    )
    report = _Report("link", settings, asdict(options), json_file)
    with _watched(quiet, Interrupts()) as view:
        found = link.measure(settings.remote, settings.run.stall_timeout, options, view)
    said = link_verdict.of_link(found)
    report.show(tables.link_tables(found), found.skipped, said)
    report.write([figure.json() for figure in found.figures()], found.skipped, said)


@bench.command("strategies")
@_ROUNDS
@click.option("--seconds", type=click.FloatRange(0.2), default=3.0, help="For the ceiling.")
@click.option(
    "--sample", type=_Size(), help="Bytes, such as 1GB; default: what the link carries in 10 s."
)
@click.option(
    "--workers",
    type=_Numbers(),
    default="1,2,4,8",
    show_default=True,
    help="Numbers to try the strategies with; all ways are compared with run.workers.",
)
@click.option("--only", help="Comma-separated names of ways; default: all.")
@click.option("--plot", "plot_file", type=_Target(plot.FORMATS), help="Draw an .svg or .png.")
@_JSON
@_QUIET
@click.pass_obj
def bench_strategies(
    common: Common,
    rounds: int,
    seconds: float,
    sample: int | None,
    workers: tuple[int, ...],
    only: str | None,
    plot_file: Path | None,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Every way to send, on a sample of your blobs, into a directory that is removed again.

    Takes ten minutes and more, by the link and --sample; see docs/benchmarks.md.
    """
    settings = common.load(Settings)
    if plot_file is not None:
        plot.require()
    names = tuple(filter(None, (only or "").split(",")))
    try:
        ways.choose(names, ())
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    options = strategies.Options(rounds, seconds, sample, workers, names)
    report = _Report("strategies", settings, asdict(options), json_file)
    interrupts = Interrupts()
    with _watched(quiet, interrupts) as view:
        found = strategies.measure(settings, options, interrupts, view)
    said = strategies_verdict.of_strategies(found)
    report.show(tables.strategies_tables(found), found.skipped, said)
    report.write(**found.json(), skipped=found.skipped, said=said)
    if plot_file is not None:
        plot.draw(found, plot_file, settings.remote.host)


@bench.command("scenarios")
@_ROUNDS
@click.option("--size", type=_Size(), default="20MB", show_default=True, help="Each way.")
@click.option("--round-trips", type=click.IntRange(3), default=1000, show_default=True)
@_JSON
@_QUIET
@click.pass_obj
def bench_scenarios(
    common: Common,
    rounds: int,
    size: int,
    round_trips: int,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """The same bytes through a pipe, a child process, and ssh: what each layer costs."""
    settings = common.load(RemoteConfig)
    options = scenarios.Options(rounds, size, round_trips)
    report = _Report("scenarios", settings, asdict(options), json_file)
    with _watched(quiet, Interrupts()) as view:
        patience = settings.run.stall_timeout
        found = scenarios.measure(settings.remote, patience, options, view)
    said = scenarios.costs(found)
    report.show([tables.scenarios_table(found)], {}, said)
    report.write([figure.json() for figure in found.figures()], {}, said)


@contextmanager
def _watched(quiet: bool, interrupts: Interrupts) -> Iterator[StepView]:
    """A view of the work, in which Ctrl-C and SIGTERM are raised as Stopped."""
    with interrupts.installed(), StepView(sys.stderr, quiet=quiet) as view:
        yield view


class _Report:
    """What is said at the end, and where it is written."""

    def __init__(
        self,
        name: str,
        settings: RemoteConfig,
        options: Mapping[str, Any],
        file: Path | None,
    ) -> None:
        self._name = name
        self._file = file
        self._started = time.monotonic()
        remote = {"target": settings.target, "host": settings.remote.host}
        self._setting = Setting(machine.now(), machine.describe(), remote, options)

    def show(
        self, shown: Sequence[Table], skipped: Mapping[str, str], said: Sequence[str]
    ) -> None:
        """Tables, what was left out, and the verdict."""
        # A pipe has no width; tables must not be cut for it.
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        for one in shown:
            console.print(one)
        click.echo("\n".join([*tables.skipped_lines(skipped), *(f"* {line}" for line in said)]))

    def write(
        self,
        figures: Sequence[Mapping[str, Any]],
        skipped: Mapping[str, str],
        said: Sequence[str],
        **more: Mapping[str, Any],
    ) -> None:
        """Everything as JSON, where a file was named. Raises ConfigError."""
        if self._file is None:
            return
        report = report_json(
            self._name,
            self._setting,
            took_s=time.monotonic() - self._started,
            figures=figures,
            skipped=skipped,
            verdict=said,
            **more,
        )
        try:
            self._file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{self._file} cannot be written", detail=error.strerror or str(error)
            ) from error
