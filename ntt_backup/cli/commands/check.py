"""The command `check` checks everything that a run needs."""

from __future__ import annotations

import json
import sys

import click

from ntt_backup.cli.common import Common, json_option
from ntt_backup.config import SendConfig
from ntt_backup.errors import BackupError
from ntt_backup.format import printable


@click.command()
@json_option
@click.pass_obj
def check(common: Common, as_json: bool) -> None:
    """Check everything that a run needs.

    A real transfer is tried; it leaves nothing behind. The exit code is that of the first problem.
    """
    from ntt_backup.daemon.check import check as check_all

    settings = common.load(SendConfig)
    first: BackupError | None = None
    steps = []
    for step in check_all(settings):
        first = first or step.error
        verdict = "FAILED" if step.error else "warning" if step.warning else "ok"
        text = str(step.error) if step.error else step.warning or step.text
        if as_json:
            error = step.error.fields if step.error is not None else None
            found = {"name": step.name, "verdict": verdict.lower(), "text": text, "error": error}
            steps.append(found)
            continue
        click.echo(f"{verdict:<8}{step.name:<10}{printable(text)}")
        if step.error and step.error.hint:
            click.echo(f"{'':<18}{printable(step.error.hint)}")
    code = first.exit_code if first is not None else 0
    if as_json:
        click.echo(json.dumps({"target": settings.target, "steps": steps, "exit_code": code}))
    sys.exit(code)
