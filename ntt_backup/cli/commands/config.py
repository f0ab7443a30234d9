"""The command `config` shows what the configuration is, and whether it is right."""

from __future__ import annotations

import click

from ntt_backup.cli.lazy_group import LazyGroup

_COMMANDS = {
    "check": "Check the configuration, for all targets.",
    "show": "Show every setting with its value, and where that comes from.",
}


@click.group(cls=LazyGroup, helps=_COMMANDS, prefix="config_")
def config() -> None:
    """Show or check the configuration.

    Neither the catalog nor the remote is asked: the command `check`, without `config`, does that.
    """
