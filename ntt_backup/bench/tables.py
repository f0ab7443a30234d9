"""The figures as tables for a terminal. Pure, apart from rich's own types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.box import SIMPLE
from rich.table import Table

from ntt_backup.bench import link, scenarios
from ntt_backup.bench import runs as outcome
from ntt_backup.bench.results import MEGA, Figure, Spread
from ntt_backup.format import many, printable, size

_MILLI: Final = 1e-3


def link_tables(found: link.Findings) -> list[Table]:
    """Times, and rates."""
    times = _table("times", "", "median ms", "min - max", "runs")
    for figure in (found.connect, found.opening, found.trip):
        if figure.values:
            times.add_row(figure.name, *_cells(figure, 1000.0, 1))
    rates = _table("throughput, content that does not compress unless it says so", "")
    for head in ("median MB/s", "min - max", "runs"):
        rates.add_column(head, justify="right")
    for figure in found.rates.values():
        rates.add_row(figure.name, *_cells(figure, 1 / MEGA, 1))
    return [times, rates]


def skipped_lines(skipped: Mapping[str, str]) -> list[str]:
    """What was not measured."""
    return [f"left out: {name}: {printable(why)}" for name, why in skipped.items()]


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _cells(figure: Figure, factor: float, digits: int) -> Iterable[str]:
    spread = figure.spread
    if spread is None:
        return ("", "", "0")
    shown = spread.times(factor)
    span = f"{shown.low:,.{digits}f} - {shown.high:,.{digits}f}"
    return (f"{shown.median:,.{digits}f}", span, str(len(figure.values)))


def strategies_tables(found: outcome.Findings) -> list[Table]:
    """All ways side by side, the registry's with other numbers of workers, and classes of sizes."""
    heads = ("median s", "min - max", "MB/s", "files/s", "wire MB", "CPU here", "there", "ceiling")
    title = (
        f"{many(len(found.sample.blobs), 'blob')}, {size(found.sample.size)};"
        f" ceiling {found.ceiling / MEGA:.1f} MB/s; MB = 10^6 bytes, CPU in seconds"
    )
    ways = _table(title, "way", "workers", *heads)
    for way, runs in found.compared().items():
        ways.add_row(way.name, str(found.workers), *_run_cells(runs, found.ceiling))
    if found.back:
        ways.add_row("tar-back", str(found.workers), *_run_cells(found.back, 0.0))
    tables = [ways]
    if scaling := found.scaling():
        more = _table("other numbers of workers", "way", "workers", *heads)
        for way, by_workers in scaling.items():
            for workers, runs in by_workers.items():
                more.add_row(way.name, str(workers), *_run_cells(runs, found.ceiling))
        tables.append(more)
    if classes := found.classes():
        by_size = _table("classes of sizes, each alone", "way", "files", *heads)
        for way, by_class in classes.items():
            for name, runs in by_class.items():
                cells = _run_cells(runs, found.ceiling)
                by_size.add_row(f"{way.name}, {name}", f"{runs[0].files:,}", *cells)
        tables.append(by_size)
    return tables


def _run_cells(runs: Sequence[outcome.Run], ceiling: float) -> Iterable[str]:
    seconds = Spread.of([run.seconds for run in runs])
    assert seconds is not None
    rate = outcome.median(runs, lambda run: run.rate)
    wire = outcome.known(runs, lambda run: run.wire_bytes)
    there = outcome.known(runs, lambda run: run.cpu_there)
    return (
        f"{seconds.median:,.2f}",
        f"{seconds.low:,.2f} - {seconds.high:,.2f}",
        f"{rate / MEGA:,.1f}",
        f"{outcome.median(runs, lambda run: run.files_rate):,.0f}",
        f"{wire.median / MEGA:,.1f}" if wire else "?",
        f"{outcome.median(runs, lambda run: run.cpu_here):,.2f}",
        f"{there.median:,.2f}" if there else "?",
        f"{rate / ceiling:.0%}" if ceiling else "",
    )


def scenarios_table(found: scenarios.Findings) -> Table:
    """A row for each thing that was done, a column for each layer."""
    table = _table("what each layer costs: median (min - max)", "")
    for layer in found.layers:
        table.add_column(layer, justify="right")
    for figures in found.by_work():
        table.add_row(figures[0].name, *(_scenario_cell(figure) for figure in figures))
    return table


def _scenario_cell(figure: Figure) -> str:
    spread = figure.spread
    if spread is None:
        return ""
    factor, unit, digits = (1e3, "ms", 1) if spread.median >= _MILLI else (1e6, "us", 0)
    shown = spread.times(factor)
    span = f"({shown.low:,.{digits}f} - {shown.high:,.{digits}f})"
    return f"{shown.median:,.{digits}f} {unit} {span}"
