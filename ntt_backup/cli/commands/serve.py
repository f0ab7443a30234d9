"""The command `serve` shows the state of all targets as a web page."""

from __future__ import annotations

from dataclasses import replace

import click
from click.core import ParameterSource

from ntt_backup.cli.common import Common
from ntt_backup.config import ALL_TARGETS, CatalogConfig


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:9188",
    show_default=True,
    metavar="ADDRESS:PORT",
    help="Where to listen; port 0 takes a free one.",
)
@click.option(
    "--expose",
    is_flag=True,
    help="Listen on an address that other hosts reach, too. The page has no password.",
)
@click.option(
    "--name",
    "known_as",
    multiple=True,
    metavar="HOST",
    help="Name by which a browser may ask for the page, as behind a proxy; may be repeated.",
)
@click.pass_obj
def serve(common: Common, listen: str, expose: bool, known_as: tuple[str, ...]) -> None:
    """Show the state of all targets as a web page.

    The page renews itself. The command only reads.
    """
    from datetime import UTC, datetime

    from ntt_backup.report.facts import Reader
    from ntt_backup.report.health import Level
    from ntt_backup.report.page.server import Board, PageServer, Shown
    from ntt_backup.report.page.view import Target, policy, render

    asked = click.get_current_context().find_root().get_parameter_source("target")
    wanted = ALL_TARGETS if asked is ParameterSource.DEFAULT else common.target
    targets = replace(common, target=wanted).load_each(CatalogConfig)
    reader = Reader(targets)

    def make() -> Shown:
        found = []
        for name in targets:
            common.turn_to(name)
            found.append(Target.of(reader.read(name), datetime.now(UTC)))
        healthy = all(one.verdict.level < Level.ACTION_REQUIRED for one in found)
        health = "".join(f"{one.facts.target}: {one.verdict.headline}\n" for one in found)
        return Shown(render(found, datetime.now(UTC)), policy(), health, healthy)

    board = Board(make)
    server = PageServer(listen, board, exposed=expose, names=known_as)
    server.start()
    click.echo(f"the status page is at {server.url}")
    board.serve()
