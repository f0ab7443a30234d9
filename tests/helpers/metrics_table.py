"""Makes the table of docs/monitoring.md; `python -m tests.helpers.metrics_table` writes it."""

from __future__ import annotations

from itertools import dropwhile
from pathlib import Path

from ntt_backup.daemon.metrics.figures import METRICS, PREFIX

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "monitoring.md"
_BEGIN = "| metric | labels | what it says |\n|---|---|---|\n"


def table() -> str:
    """The lines of the table."""
    return "".join(
        f"| `{PREFIX}{name}` | {', '.join(one.labels)} | {_sentence(one.kind, one.text)} |\n"
        for name, one in METRICS.items()
    )


def _sentence(kind: str, text: str) -> str:
    return f"{text} A histogram." if kind == "histogram" else text


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, begin, rest = page.partition(_BEGIN)
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True))
    return before + begin + table() + "".join(after)


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
