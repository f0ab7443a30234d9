"""What the demo prints between the commands it shows: steps, remarks, tables.

Printed at once, so that it stands in the right order among what the commands print themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntt_backup.demo.store import Comparison
from ntt_backup.format import printable

_DIFFERENCES_SHOWN: Final = 10


def step(title: str) -> None:
    """A new part of the story."""
    say("")
    say(printable(title), style="bold cyan")


def say(text: str, style: str = "") -> None:
    """A line, or some."""
    _console().print(Text(text, style=style), soft_wrap=True)
    sys.stdout.flush()


def tabulate(rows: Iterable[tuple[str, str]]) -> None:
    """Names and what there is to say of them."""
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(printable(text)))
    _console().print(table)


def show_differences(comparison: Comparison) -> None:
    """The first names that are not the same on both sides."""
    names = [*comparison.missing, *comparison.different, *comparison.extra]
    for name in names[:_DIFFERENCES_SHOWN]:
        say(printable(name), style="red")


def _console() -> Console:
    return Console(highlight=False)
