"""The command `notify` sends a notice, to see whether it arrives."""

from __future__ import annotations

import click

from ntt_backup.cli.common import Common
from ntt_backup.config import CatalogConfig
from ntt_backup.errors import ConfigError


@click.command()
@click.argument("text", default="this is a test")
@click.pass_obj
def notify(common: Common, text: str) -> None:
    """Send a notice, to see whether it arrives.

    It goes to notify.command, notify.webhook_url and notify.ping_url, as far as they are set.
    """
    from ntt_backup.daemon.notices import Notice, send, told

    settings = common.load(CatalogConfig)
    if not told(settings):
        raise ConfigError(
            "nobody is to be told",
            hint="set notify.command, notify.webhook_url or notify.ping_url",
        )
    if not (ways := told(settings, "test")):
        raise ConfigError("notify.on leaves out the notice 'test'", hint='add "test" to notify.on')
    if problems := send(settings, Notice("test", settings.target, text, {})):
        raise ConfigError(
            "; ".join(problems),
            hint="correct that under [notify], or at the other end; a URL is not shown, since"
            " whoever knows it can post there",
        )
    click.echo(f"sent by {', '.join(ways)}")
