"""The command `check`."""

from __future__ import annotations

import sys

import click

from ntt_backup.cli.common import Common
from ntt_backup.config import SendConfig
from ntt_backup.errors import BackupError
from ntt_backup.format import printable


@click.command()
@click.pass_obj
def check(common: Common) -> None:
    """Check everything that a run needs.

    A real transfer is tried; it leaves nothing behind. The exit code is that of the first problem.
    """
    from ntt_backup.daemon import preflight

    settings = common.load(SendConfig)
    first: BackupError | None = None
    for step in preflight.check(settings):
        verdict = "FAILED" if step.error else "warning" if step.warning else "ok"
        text = str(step.error) if step.error else step.warning or step.text
        click.echo(f"{verdict:<8}{step.name:<10}{printable(text)}")
        if step.error and step.error.hint:
            click.echo(f"{'':<18}{printable(step.error.hint)}")
        first = first or step.error
    if first is not None:
        sys.exit(first.exit_code)
