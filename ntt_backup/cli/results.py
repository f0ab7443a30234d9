"""`verify`, `restore`, `reconcile` and `drill` print a result: a JSON object, or lines of text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ntt_backup.errors import BackupError, complete
from ntt_backup.format import json_value, many, printable
from ntt_backup.model import Failure, Failures

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ntt_backup.report.lines import ProgressLine

_SHOWN: Final = 20


def report(
    fields: Mapping[str, Any], lines: Sequence[str], exit_code: int, *, as_json: bool
) -> NoReturn:
    """Prints fields for programs or lines for people, and ends the process with the exit code."""
    if as_json:
        click.echo(json.dumps({**fields, "exit_code": exit_code}))
    else:
        click.echo(complete("\n".join(lines)))
    sys.exit(exit_code)


def warn(text: str) -> None:
    """Prints a warning, which may have text of strangers in it."""
    click.echo(f"warning: {printable(text)}", err=True)


def failed(target: str, error: BackupError) -> dict[str, Any]:
    """Returns what a program is told of an error that ends a command, or a target's part of it."""
    return {"target": target, "error": error.fields, "exit_code": error.exit_code}


def fields_of(record: DataclassInstance) -> dict[str, Any]:
    """Returns a record's fields as JSON values, without `part`. Failures become their counts by
    reason; the first of them are listed as `failures`.
    """
    fields: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(record) if field.name != "part"):
        value = getattr(record, name)
        if isinstance(value, Failures):
            fields |= {name: value.counts, "failures": first_failures(value.first)}
        else:
            fields[name] = json_value(value)
    return fields


def first_failures(failures: Sequence[Failure]) -> list[dict[str, str]]:
    """Returns failures as JSON values."""
    return [
        {"blobid": one.blobid, "reason": str(one.reason), "detail": one.detail} for one in failures
    ]


def count_lines(counts: Mapping[Any, int], after: str = "") -> list[str]:
    """Returns a line for each count that is not zero, in the order of the words."""
    return [f"{count:>10,} {word}{after}" for word, count in sorted(counts.items()) if count]


def strangers(packs: int) -> list[str]:
    """Returns a line about sealed packs that this host has not signed, if there are any."""
    if not packs:
        return []
    return [
        f"{many(packs, 'sealed pack')} not signed by this host: somebody else who knows a recipient"
        " has made them, or this host before it had its key; a blob counts only if it is what its"
        " name says"
    ]


def failure_lines(failures: Failures) -> list[str]:
    """Returns a line for each of the first failures, and one for the rest."""
    lines = (f"{one.blobid} {one.reason} {one.detail}" for one in failures.first)
    return first_lines(lines, len(failures))


def first_lines(problems: Iterable[str], total: int) -> list[str]:
    """Returns a line for each of the first problems, and one for the rest of the total."""
    lines = [f"  {printable(one)}" for one in islice(problems, _SHOWN)]
    if (more := total - _SHOWN) > 0:
        lines.append(f"  and {more:,} more; --json lists the first 1000")
    return lines


class FirstLines:
    """Shows the first of many lines, even where no progress is shown. begin: of each line."""

    def __init__(self, line: ProgressLine, *, quiet: bool, begin: str = "") -> None:
        self._show = partial(click.echo, err=True) if quiet else line.say
        self._begin = begin
        self._number = 0

    def say(self, text: str) -> None:
        self._number += 1
        if self._number <= _SHOWN:
            self._show(self._begin + printable(text))
        elif self._number == _SHOWN + 1:
            self._show(f"{self._begin}more, which is not shown")
