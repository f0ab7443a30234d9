"""The tables of docs/measurements.md become bar charts, one a topic.

The figures are in the tables alone. The JSON of `tests/bench/run --json` becomes the same chart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.peers import OURS
from tests.pictures.drawing import bar, svg, text

MEASUREMENTS: Final = Path(__file__).parents[2] / "docs" / "measurements.md"
_OURS: Final = "ours"
_ROW: Final = 17.0
_LABEL: Final = 118.0
_PANEL: Final = 300.0
_LONGEST: Final = 130.0
_GAP: Final = 24.0


def table(heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading of the page, without the heads' rule."""
    below = re.split(rf"(?m)^#+ {re.escape(heading)}$", MEASUREMENTS.read_text())[1]
    found = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert found is not None, heading
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in found[0].splitlines()]
    plain = [[re.sub(r"[*`\\]", "", cell).strip() for cell in row] for row in rows]
    return [plain[0], *plain[2:]]


def _number(cell: str) -> float | None:
    found = re.match(r"[\d,.]+", cell)
    return float(found[0].replace(",", "")) if found else None


def panels(
    title: str,
    below: str,
    each: Mapping[str, Mapping[str, float]],
    unit: str,
    columns: int,
    marked: str = _OURS,
) -> str:
    """Returns a chart with a panel for each case: a bar for each name. marked: The name of ours."""
    most = max(map(len, each.values()))
    high = most * _ROW + 44
    rows = -(-len(each) // columns)
    parts = [text(20, 30, title, "text bold"), text(20, 48, below, "soft small")]
    for nth, (case, figures) in enumerate(each.items()):
        x, y = 20 + nth % columns * (_PANEL + _GAP), 72 + nth // columns * high
        parts.append(text(x, y + 8, case, "text"))
        longest = max(figures.values())
        for line, (name, figure) in enumerate(figures.items()):
            at, width = y + 18 + line * _ROW, max(1.0, figure / longest * _LONGEST)
            kind, weight = ("ours", "text bold") if name == marked else ("other", "soft")
            parts.append(text(x + _LABEL - 8, at + 10, name, f"{weight} small right"))
            parts.append(bar(x + _LABEL, at + 1, width, _ROW - 5, kind))
            parts.append(text(x + _LABEL + width + 5, at + 10, f"{figure:g} {unit}", "soft small"))
    width = 40 + columns * (_PANEL + _GAP) - _GAP
    return svg(width, 72 + rows * high, f"{title}: {below}", parts)


def times() -> str:
    """Returns our time beside those of other programs."""
    heads, *rows = table("Comparison with other programs")
    each = {}
    for case, blobs, *cells in rows:
        named = zip(heads[2:], map(_number, cells), strict=True)
        each[f"{case}: {blobs.replace(', ', ' blobs, ')}"] = {
            name: figure for name, figure in named if figure is not None
        }
    below = "Seconds until all is stored; shorter is better. ssh cat sends the bare bytes."
    return panels("Time beside other programs", below, each, "s", 3)


def catalog() -> str:
    """Returns what a batch costs in a small catalog and in a large one."""
    heads, *rows = table("The size of the table")
    each = {row[0]: dict(zip(heads[1:], map(float, row[1:]), strict=True)) for row in rows}
    below = "Milliseconds for 1,000 blobs, one worker, in memory."
    return panels("Cost as the catalog grows", below, each, "ms", 2, marked=heads[-1])


def blob() -> str:
    """Returns the CPU of a small blob: ours by its parts, and that of other programs."""
    _, *rows = table("CPU of a small blob")
    figures = {name: figure for name, cell, *_ in rows if (figure := _number(cell)) is not None}
    names = list(figures)
    last = next(nth for nth, name in enumerate(names) if "bare run" in name)
    parts_of_ours, others = names[1:last], [names[0], *names[last:]]
    longest, width, left = max(figures.values()), 560.0, 150.0
    below = "Microseconds of CPU at both ends, for a blob of 2.5 KB; shorter is better."
    drawn = [text(20, 30, "CPU of a small blob", "text bold"), text(20, 48, below, "soft small")]
    for line, name in enumerate(others):
        y, x = 68 + line * 26, left
        ours = not line
        short = name.split(" (")[0]
        drawn.append(
            text(left - 10, y + 14, short, f"{'text bold' if ours else 'soft'} small right")
        )
        for nth, part in enumerate(parts_of_ours if ours else [name]):
            length = figures[part] / longest * width
            kind = f"p{nth}" if ours else "other"
            drawn.append(bar(x, y, length, 19, kind, f"{part}: {figures[part]:g} us"))
            x += length
        drawn.append(text(x + 6, y + 14, f"{figures[name]:g}", "soft small"))
    y = 68 + len(others) * 26 + 16
    for nth, part in enumerate(parts_of_ours):
        x, down = 20 + nth % 2 * 370, y + nth // 2 * 20
        drawn.append(bar(x, down, 12, 12, f"p{nth}"))
        drawn.append(text(x + 20, down + 10, f"{part}: {figures[part]:g}", "text small"))
    height = y + -(-len(parts_of_ours) // 2) * 20 + 12
    return svg(left + width + 60, height, f"CPU of a small blob. {below}", drawn)


def of_bench(report: Mapping[str, Any]) -> str:
    """Returns the times of a report of `tests/bench/run --json`."""
    each: dict[str, Mapping[str, float]] = {}
    for case in report["cases"]:
        store = case["store"]
        name = f"{store['kind']}, {case['link']['name']}: {store['blobs']:,} blobs"
        figures: Sequence[Mapping[str, Any]] = case["figures"]
        medians = {one["contender"]: one["seconds"]["median"] for one in figures if one["seconds"]}
        each[name] = {one: round(seconds, 2) for one, seconds in medians.items()}
    return panels("Time beside other programs", "Seconds; shorter is better.", each, "s", 3, OURS)
