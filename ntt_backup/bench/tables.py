"""The figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE
from rich.table import Table

from ntt_backup.bench import link, runs
from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.format import many, size

_RUN_HEADS = (
    "median s",
    "min - max",
    "MB/s",
    "files/s",
    "wire MB",
    "CPU local",
    "CPU remote",
    "ceiling",
)


def link_tables(found: link.Findings) -> list[Table]:
    """Returns a table of times and one of rates."""
    times = _table("times", "", "median ms", "min - max", "runs")
    rates = _table("throughput of random bytes", "", "median MB/s", "min - max", "runs")
    for figure in (found.connect, found.opening, found.trip):
        _add(times, figure, 1000.0)
    for figure in found.rates.values():
        _add(rates, figure, 1 / MEGA)
    return [times, rates]


def strategies_tables(found: runs.Findings) -> list[Table]:
    """Returns tables of all ways, of other numbers of workers, and of classes of sizes."""
    title = (
        f"{many(len(found.sample.blobs), 'blob')}, {size(found.sample.size)};"
        f" ceiling {found.ceiling / MEGA:.1f} MB/s; MB = 10^6 bytes, CPU in seconds"
    )
    ways = _table(title, "way", "workers", *_RUN_HEADS)
    for way, mine in found.compared().items():
        ways.add_row(way.name, str(found.workers), *_cells(mine, found.ceiling))
    more = _table("other numbers of workers", "way", "workers", *_RUN_HEADS)
    for way, by_workers in found.scaling().items():
        for workers, mine in by_workers.items():
            more.add_row(way.name, str(workers), *_cells(mine, found.ceiling))
    by_size = _table("classes of sizes, each alone", "way", "files", *_RUN_HEADS)
    for way, classes in found.classes().items():
        for name, mine in classes.items():
            cells = _cells(mine, found.ceiling)
            by_size.add_row(f"{way.name}, {name}", f"{mine[0].files:,}", *cells)
    return [table for table in (ways, more, by_size) if table.row_count]


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _add(table: Table, figure: Figure, factor: float) -> None:
    if spread := figure.spread:
        median, low, high = (value * factor for value in (spread.median, spread.low, spread.high))
        span = f"{low:,.1f} - {high:,.1f}"
        table.add_row(figure.name, f"{median:,.1f}", span, str(len(figure.values)))


def _cells(mine: runs.Runs, ceiling: float) -> Iterable[str]:
    seconds, rate = mine.spread("seconds"), mine.rate.median
    wire, remote = mine.known("wire_bytes"), mine.known("cpu_there")
    return (
        f"{seconds.median:,.2f}",
        f"{seconds.low:,.2f} - {seconds.high:,.2f}",
        f"{rate / MEGA:,.1f}",
        f"{mine.spread('files_rate').median:,.0f}",
        f"{wire.median / MEGA:,.1f}" if wire else "?",
        f"{mine.spread('cpu_here').median:,.2f}",
        f"{remote.median:,.2f}" if remote else "?",
        f"{rate / ceiling:.0%}" if ceiling else "",
    )
