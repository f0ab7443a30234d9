"""The command `config show` prints every setting with its value and where that comes from."""

from __future__ import annotations

import json
import os

import click

from ntt_backup.cli.common import Common, json_option
from ntt_backup.config import CatalogConfig, examine, sources
from ntt_backup.config.effective import Effective, effective
from ntt_backup.format import printable


@click.command()
@json_option
@click.pass_obj
def show(common: Common, as_json: bool) -> None:
    """Show every setting with its value, and where that comes from.

    Sizes are in bytes, times in seconds. Passwords, and the addresses of notices, are not shown.
    """
    settings = common.load(CatalogConfig)
    found = examine(CatalogConfig, environ=os.environ, file=common.config, target=settings.target)
    path = sources.path_of(common.config, os.environ)
    rows = list(effective(settings, found.layer))
    if as_json:
        said = {row.key: {"value": row.value, "origin": row.origin} for row in rows}
        file = str(path) if path.exists() else None
        click.echo(json.dumps({"target": settings.target, "file": file, "settings": said}))
        return
    there = "" if path.exists() else " (there is no such file)"
    click.echo(f"target {settings.target}, configuration {printable(str(path))}{there}")
    key_width = max(len(row.key) for row in rows)
    value_width = min(40, max(len(_text(row)) for row in rows))
    for row in rows:
        # The name that stands in the file is nearly always that of the key.
        origin = printable(row.origin.removeprefix(f"{row.key} in "))
        click.echo(f"{row.key:<{key_width}}  {_text(row):<{value_width}}  {origin}")


def _text(row: Effective) -> str:
    if row.value is None or row.value == "":
        return "-"
    return printable(row.value if isinstance(row.value, str) else json.dumps(row.value))
