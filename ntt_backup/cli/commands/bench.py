"""The command `bench` measures the link, and the ways to send blobs over it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ntt_backup.bench import bucket_back, bucket_out, buckets, link, sending, strategies, verdict
from ntt_backup.bench.output import Progress, bucket_tables, link_tables, strategies_tables
from ntt_backup.bench.results import LEAST_ROUNDS, SCHEMA, describe_machine, now
from ntt_backup.cli import options
from ntt_backup.cli.global_options import Common, writing
from ntt_backup.cli.options import SIZE, flag, value
from ntt_backup.config import RemoteConfig, Settings
from ntt_backup.formatting import printable


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    if not all(1 <= number <= 64 for number in numbers):
        raise ValueError(text)
    return numbers


_NUMBERS = options.parsed("list", _numbers, "a list of numbers from 1 to 64, such as 1,2,4")


def _ways(text: str) -> tuple[str, ...]:
    """Returns the names of ways to send: to a machine, or to and from a bucket."""
    names = tuple(filter(None, text.split(",")))
    ways = (*sending.WAYS, *bucket_out.WAYS_OUT, *bucket_back.WAYS_BACK)
    known = tuple(dict.fromkeys(way.name for way in ways))
    if unknown := sorted(set(names) - set(known)):
        raise click.BadParameter(f"{', '.join(unknown)}: none of {', '.join(known)}")
    return names


_ROUNDS = value("--rounds", click.IntRange(LEAST_ROUNDS), "Number of rounds.", default=LEAST_ROUNDS)
_JSON = value(
    "--json",
    options.GivenPath("file", dir_okay=False, writable=True),
    "Write every figure to this file.",
    "json_file",
)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")


@options.command(name="link")
@_ROUNDS
@value("--seconds", click.FloatRange(0.2), "Seconds for each throughput measurement.", default=3.0)
@value("--streams", _NUMBERS, "Numbers of parallel connections.", default="1,2,4,8")
@value("--round-trips", click.IntRange(3), "Round trips in all rounds.", "trips", default=1000)
@_JSON
@_QUIET
def bench_link(common: Common, /, json_file: Path | None, quiet: bool, **chosen: Any) -> None:
    """Measure the link: round trip, handshake, and throughput by number of streams.

    Random bytes are sent and received; nothing is stored. This takes about three minutes.
    """
    settings = common.load(RemoteConfig)
    report = _Report("link", settings, chosen, json_file)
    found = link.measure(settings, Progress(sys.stderr, quiet=quiet), **chosen)
    figures = found.figures()
    measured = {"figures": [one.json() for one in figures]}
    report.end(link_tables(figures), measured, verdict.of_link(found))


@options.command(name="strategies")
@_ROUNDS
@value("--seconds", click.FloatRange(0.2), "Seconds for the ceiling: a bare stream.", default=3.0)
@value("--sample", SIZE, "Size of the sample, such as 1GB; default: what the link carries in 10 s.")
@value("--workers", _NUMBERS, "Numbers of workers to compare strategies with.", default="1,2,4,8")
@value("--only", _ways, "Comma-separated names of ways; default: all.", metavar="LIST")
@flag("--yes", "Allow an append-only bucket, in which the sample stays.")
@_JSON
@_QUIET
def bench_strategies(
    common: Common,
    /,
    only: tuple[str, ...] | None,
    yes: bool,
    json_file: Path | None,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Compare the ways to send, on a sample of your blobs; for a bucket also the ways back.

    The blobs are stored in a directory on the remote, or below bench/ in the bucket, which is
    removed again. The comparison takes ten minutes or more, depending on the link and --sample; see
    docs/benchmarks.md.
    """
    settings = common.load(Settings)
    bucket = settings.remote.kind == "s3"
    names = only or ()
    try:
        (bucket_back if bucket else sending).choose(names)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    plan = strategies.Options(**chosen, ways=names)
    report = _Report("strategies", settings, asdict(plan), json_file)
    progress = Progress(sys.stderr, quiet=quiet)
    if bucket:
        both = buckets.measure(settings, plan, progress, accepted=yes)
        tables = bucket_tables(both.out, both.back)
        said = verdict.of_bucket(both.out, both.back, both.left)
        report.end(tables, both.json(), said, both.skipped)
    else:
        found = strategies.measure(settings, plan, progress)
        said = verdict.of_strategies(found)
        report.end(strategies_tables(found), found.json(), said, found.skipped)


class _Report:
    """The end of a bench: what is printed, and the JSON file."""

    def __init__(
        self, name: str, settings: RemoteConfig, chosen: Mapping[str, Any], file: Path | None
    ) -> None:
        if file is not None and not file.parent.is_dir():  # Else that is known at the end only.
            raise click.BadParameter(
                f"the directory {str(file.parent)!r} does not exist", param_hint="--json"
            )
        self._file = file
        self._started = time.monotonic()
        self._head = {
            "schema": SCHEMA,
            "bench": name,
            "started": now(),
            "machine": describe_machine(),
            "remote": {
                "target": settings.target,
                "host": settings.remote.host,
                "url": settings.remote.url,
            },
            "options": chosen,
        }

    def end(
        self,
        tables: Iterable[Table],
        measured: Mapping[str, Any],
        said: Sequence[str],
        skipped: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prints the tables, what was left out, and the verdict; writes everything to the file."""
        # A pipe has no width; tables must not be cut for it.
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        for table in tables:
            console.print(table)
        left_out = [f"left out: {name}: {printable(why)}" for name, why in skipped.items()]
        click.echo("\n".join([*left_out, *(f"* {line}" for line in said)]))
        if self._file is not None:
            took = {"took_s": round(time.monotonic() - self._started, 3)}
            report = {**self._head, **took, **measured, "skipped": dict(skipped), "verdict": said}
            with writing(self._file):
                self._file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
