"""The result of `verify`, `restore`, `reconcile` and `drill`: one JSON object, or lines of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import click

from ntt_backup.format import printable
from ntt_backup.model import Failure, Failures

_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Result:
    """fields: those of the JSON object, besides failures and exit_code. lines: the text.

    failures: the first of all, for JSON; None for a command that has other words for them.
    """

    exit_code: int
    fields: Mapping[str, Any]
    lines: Sequence[str]
    failures: Sequence[Failure] | None = None

    def report(self, *, as_json: bool) -> NoReturn:
        """Prints the result, and ends the process with its exit code."""
        click.echo(json.dumps(self.json()) if as_json else "\n".join(self.lines))
        sys.exit(self.exit_code)

    def json(self) -> dict[str, Any]:
        """Returns the result as plain JSON values."""
        values = dict(self.fields)
        if self.failures is not None:
            values["failures"] = [
                {"blobid": one.blobid, "reason": str(one.reason), "detail": one.detail}
                for one in self.failures
            ]
        return {**values, "exit_code": self.exit_code}


def counts(by_word: Mapping[Any, int]) -> dict[str, int]:
    """Returns counts in the order of their words."""
    return {str(word): count for word, count in sorted(by_word.items())}


def count_lines(counted: Mapping[str, int]) -> list[str]:
    """Returns a line for each count that is not zero."""
    return [f"{count:>10,} {word}" for word, count in counted.items() if count]


def failure_lines(failures: Failures) -> list[str]:
    """Returns a line for each of the first failures, and one for the rest."""
    said = [
        f"  {printable(one.blobid)} {one.reason} {printable(one.detail)}"
        for one in failures.first[:_SHOWN]
    ]
    if (more := len(failures) - _SHOWN) > 0:
        said.append(f"  and {more:,} more; --json lists the first 1000")
    return said
