"""A bench shows a person a line for each step on stderr, and tables on stdout at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TextIO

from rich.box import SIMPLE
from rich.table import Table

from ntt_backup.bench.results import MEGA, Figure
from ntt_backup.bench.runs import Findings, Runs
from ntt_backup.formatting import amount, printable

_RUN_HEADS = ("median s", "min - max", "MB/s", "files/s", "wire MB", "CPU s", "ceiling")


class Progress:
    """Prints steps to stream. A stream that goes away ends no bench; then nothing is printed."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream: TextIO | None = None if quiet else stream
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        try:
            if self._stream is not None:
                print(
                    f"[{minutes:2d}:{seconds:02d}] {printable(text)}", file=self._stream, flush=True
                )
        except OSError:
            self._stream = None


def link_tables(figures: Iterable[Figure]) -> list[Table]:
    """Returns a table of times and one of rates."""
    times = _table("times", "", "median ms", "min - max", "runs")
    rates = _table("throughput of random bytes", "", "median MB/s", "min - max", "runs")
    for figure in figures:
        table, factor = (times, 1000.0) if figure.unit == "s" else (rates, 1 / MEGA)
        if spread := figure.spread:
            low, high = spread.low * factor, spread.high * factor
            span, runs = f"{low:,.1f} - {high:,.1f}", str(len(figure.values))
            table.add_row(figure.name, f"{spread.median * factor:,.1f}", span, runs)
    return [times, rates]


def strategies_tables(found: Findings) -> list[Table]:
    """Returns a table of all ways, and one of other numbers of workers."""
    title = (
        f"{amount(len(found.sample.blobs), found.sample.size)};"
        f" ceiling {found.ceiling / MEGA:.1f} MB/s; MB = 10^6 bytes"
    )
    return [_compared(found, title, {}), *_scaling(found)]


def bucket_tables(out: Findings, back: Findings) -> list[Table]:
    """Returns a table of the ways out, one of other numbers of workers, one of the ways back."""
    title = (
        f"out: {amount(len(out.sample.blobs), out.sample.size)};"
        f" ceiling {out.ceiling / MEGA:.1f} MB/s; MB = 10^6 bytes"
    )
    counts = {name: partial(_told, name, "{:,.0f}") for name in ("objects", "writes")}
    tables = [_compared(out, title, counts), *_scaling(out)]
    if back.runs:
        title = f"back: ceiling {back.ceiling / MEGA:.1f} MB/s; first s: until a blob can be read"
        tables.append(_compared(back, title, {"first s": partial(_told, "first_s", "{:.2f}")}))
    return tables


def _compared(found: Findings, title: str, more: Mapping[str, Callable[[Runs], str]]) -> Table:
    """Returns a table of all ways with the common number of workers. more: other columns."""
    table = _table(title, "way", "workers", *_RUN_HEADS, *more)
    for way, mine in found.compared().items():
        told = (tell(mine) for tell in more.values())
        table.add_row(way.name, str(found.workers), *_cells(mine, found.ceiling), *told)
    return table


def _scaling(found: Findings) -> list[Table]:
    table = _table("other numbers of workers", "way", "workers", *_RUN_HEADS)
    for way, by_workers in found.scaling().items():
        for workers, mine in by_workers.items():
            table.add_row(way.name, str(workers), *_cells(mine, found.ceiling))
    return [table] if table.row_count else []


def _told(name: str, form: str, mine: Runs) -> str:
    """Returns the median of a value; "" where a run lacks it."""
    known = mine.known(name)
    return form.format(known.median) if known else ""


def _table(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _cells(mine: Runs, ceiling: float) -> Iterable[str]:
    seconds, rate, wire = mine.spread("seconds"), mine.rate.median, mine.known("wire_bytes")
    return (
        f"{seconds.median:,.2f}",
        f"{seconds.low:,.2f} - {seconds.high:,.2f}",
        f"{rate / MEGA:,.1f}",
        f"{mine.spread('files_rate').median:,.0f}",
        f"{wire.median / MEGA:,.1f}" if wire else "?",
        f"{mine.spread('cpu').median:,.2f}",
        f"{rate / ceiling:.0%}",
    )
