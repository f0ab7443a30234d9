"""The result of `verify`, `restore`, `reconcile` and `drill`: one JSON object, or lines of text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ntt_backup.errors import complete
from ntt_backup.format import printable
from ntt_backup.model import Failure, Failures

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
            fields[name] = round(value, 3) if isinstance(value, float) else value
    return fields


def first_failures(failures: Sequence[Failure]) -> list[dict[str, str]]:
    """Returns failures as JSON values."""
    return [
        {"blobid": one.blobid, "reason": str(one.reason), "detail": one.detail} for one in failures
    ]


def count_lines(counts: Mapping[Any, int], after: str = "") -> list[str]:
    """Returns a line for each count that is not zero, in the order of the words."""
    return [f"{count:>10,} {word}{after}" for word, count in sorted(counts.items()) if count]


def failure_lines(failures: Failures) -> list[str]:
    """Returns a line for each of the first failures, and one for the rest."""
    lines = [
        f"  {printable(one.blobid)} {one.reason} {printable(one.detail)}"
        for one in failures.first[:_SHOWN]
    ]
    if (more := len(failures) - _SHOWN) > 0:
        lines.append(f"  and {more:,} more; --json lists the first 1000")
    return lines
