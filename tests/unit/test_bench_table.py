"""The tables of a bench: every figure with its least and greatest, in units that can be read."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from ntt_backup.bench import runs as outcome
from ntt_backup.bench import scenarios, tables
from ntt_backup.bench.link import Cell, Findings
from ntt_backup.bench.results import Figure
from ntt_backup.bench.sample import Sample
from ntt_backup.bench.ways import PLAIN, Way
from ntt_backup.model import Blob


def text(*tables: Table) -> list[list[str]]:
    """What is printed, line by line, as words."""
    stream = io.StringIO()
    console = Console(file=stream, width=160)
    for one in tables:
        console.print(one)
    return [line.split() for line in stream.getvalue().splitlines() if line.strip()]


def figure(name: str, *values: float) -> Figure:
    return Figure(name, "", values=list(values))


def test_a_links_rates_are_in_megabytes_and_its_times_in_milliseconds() -> None:
    found = Findings(
        rates={Cell("up"): figure("up, 1 stream", 11.4e6, 11.5e6, 11.6e6)},
        zeros=figure("zeros", 480e6),
        connect=figure("TCP connection"),
        opening=figure("ssh session", 0.2, 0.25, 0.3),
        trip=figure("round trip", 0.028, 0.029, 0.0305),
    )
    lines = text(*tables.link_tables(found))
    assert ["up,", "1", "stream", "11.5", "11.4", "-", "11.6", "3"] in lines
    assert ["round", "trip", "29.0", "28.0", "-", "30.5", "3"] in lines
    assert ["ssh", "session", "250.0", "200.0", "-", "300.0", "3"] in lines
    words = [word for line in lines for word in line]
    assert "TCP" not in words  # there was nothing to measure
    assert "480.0" not in words


def test_ways_are_shown_with_all_their_costs() -> None:
    tar = Way("tar", strategy="tar")
    runs = [outcome.Run(s, 1000, 10**8, 101_000_000, 0.5, 0.25) for s in (10.0, 9.0, 11.0)]
    unknown = [outcome.Run(20.0, 1000, 10**8, None, 0.5, None)]
    found = outcome.Findings(Sample((Blob("a" * 64, 10**8),), ()), 0, 4)
    found.ceilings = {1: [12.5e6]}
    found.runs = {
        outcome.Cell(tar, 4): runs,
        outcome.Cell(PLAIN, 4): unknown,
        outcome.Cell(tar, 1): runs,
        outcome.Cell(tar, 4, "1-10 KB"): runs,
    }
    found.back = unknown
    lines = text(*tables.strategies_tables(found))
    tail = ["10.00", "9.00", "-", "11.00", "10.0", "100", "101.0", "0.50", "0.25", "80%"]
    assert ["tar", "4", *tail] in lines
    assert ["tar", "1", *tail] in lines
    assert ["tar,", "1-10", "KB", "1,000", *tail] in lines
    assert [
        "tar-pipe",
        "4",
        "20.00",
        "20.00",
        "-",
        "20.00",
        "5.0",
        "50",
        "?",
        "0.50",
        "?",
        "40%",
    ] in lines
    assert ["tar-back", "4", "20.00", "20.00", "-", "20.00", "5.0", "50", "?", "0.50", "?"] in lines


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.000_012, "12 us (12 - 12)"), (0.0305, "30.5 ms (30.5 - 30.5)")]
)
def test_a_layers_times_are_in_the_unit_that_suits_them(seconds: float, shown: str) -> None:
    found = scenarios.Findings({"ssh": [figure("round trip", seconds)]})
    (row,) = (line for line in text(tables.scenarios_table(found)) if line[0] == "round")
    assert row == ["round", "trip", *shown.split()]


def test_what_was_left_out_is_one_line_each() -> None:
    said = tables.skipped_lines({"tar-zst-1": "no zstd\nhere"})
    assert said == ["left out: tar-zst-1: no zstd; here"]
