"""The demo prints steps, remarks and tables between the commands that it shows.

It is printed at once, so that it stands in the right order among what the commands print.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntt_backup.demo.store import Comparison
from ntt_backup.formatting import printable

_DIFFERENCES_SHOWN: Final = 10


def step(title: str) -> None:
    """Prints the title of a new part."""
    say("")
    say(printable(title), style="bold cyan")


def say(text: str, style: str = "") -> None:
    """Prints a line, or some."""
    _console().print(Text(text, style=style), soft_wrap=True)
    sys.stdout.flush()


def tabulate(rows: Mapping[str, str]) -> None:
    """Prints names and their texts as a table."""
    table = Table(box=SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, Text(printable(text)))
    _console().print(table)


def show_differences(comparison: Comparison) -> None:
    """Prints the first names that are not the same on both sides."""
    names = [*comparison.missing, *comparison.different, *comparison.extra]
    for name in names[:_DIFFERENCES_SHOWN]:
        say(printable(name), style="red")


def _console() -> Console:
    return Console(highlight=False)
