"""The command `config check` tells all that is wrong with the configuration."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from ntt_backup.cli.common import Common, json_option
from ntt_backup.cli.results import report
from ntt_backup.config import (
    CatalogConfig,
    Found,
    RemoteConfig,
    SendConfig,
    examine,
    misspelt,
    shared_files,
    shared_places,
    sources,
)
from ntt_backup.errors import ConfigError
from ntt_backup.format import many, printable


@click.command()
@json_option
@click.pass_context
def check(context: click.Context, as_json: bool) -> None:
    """Check the configuration, for all targets.

    With --target, which may name several, check only these. All problems are told at once. Where
    there are only snapshot sets, no store is needed. Exit code 2 when there is a problem.
    """
    common: Common = context.obj
    file, environ = common.config, os.environ
    path = sources.path_of(file, environ)
    targets: list[str] = []
    problems: dict[str, str] = {}
    sound: dict[str, CatalogConfig] = {}
    try:
        targets = sources.targets(file, environ)
        if context.find_root().get_parameter_source("target") != ParameterSource.DEFAULT:
            targets = common.names()
    except ConfigError as error:
        problems[str(error)] = error.hint
    for target in targets:
        found: Found[Any] = examine(SendConfig, environ=environ, file=file, target=target)
        if "source.root" not in found.layer and sources.snapshot_sets(file, environ):
            found = examine(RemoteConfig, environ=environ, file=file, target=target)
        problems |= dict(found.problems)
        if found.settings is not None:
            sound[target] = found.settings
    problems |= dict(shared_files(sound) + shared_places(sound))
    for warning in misspelt(environ):
        click.echo(f"warning: {warning}", err=True)
    lines = []
    for text, hint in problems.items():
        lines += [f"FAILED  {printable(text)}", *([f"        {printable(hint)}"] if hint else [])]
    end = f"{many(len(problems), 'problem')} in" if problems else "ok     "
    end += f" {printable(str(path))}"
    if targets:  # Else nothing in it could be read.
        end += " (there is no such file)" * (not path.exists())
        end += f": {many(len(targets), 'target')} ({', '.join(targets)})"
    report(
        {
            "file": str(path),
            "targets": targets,
            "problems": [{"text": text, "hint": hint} for text, hint in problems.items()],
        },
        [*lines, end],
        ConfigError.exit_code if problems else 0,
        as_json=as_json,
    )
