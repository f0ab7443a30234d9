"""`pause`, `resume`, `bwlimit`, `stop` and `now` have a running daemon do what they say.

Each asks over the control socket, and says what the daemon did, of each target that is named. Who
asks twice is told so, and nothing is done twice.
"""

from __future__ import annotations

import json
from typing import Any

import click

from ntt_backup.cli.common import Common, json_option
from ntt_backup.errors import complete
from ntt_backup.format import printable


def _ask(common: Common, do: str, *, as_json: bool, **values: str) -> None:
    from ntt_backup.cli.each_target import EachTarget
    from ntt_backup.config import CatalogConfig
    from ntt_backup.daemon.control.client import ask

    each: EachTarget[dict[str, Any]] = EachTarget(common, common.load_each(CatalogConfig))
    each.do(lambda settings: ask(settings, do, **values))
    each.complain()
    if as_json:
        click.echo(json.dumps(each.json(dict)))
    else:
        for name, said in each.found.items():
            common.turn_to(name)
            click.echo(printable(f"target {name}: {complete(said['done'])}"))
    each.end()


@click.command()
@json_option
@click.pass_obj
def pause(common: Common, as_json: bool) -> None:
    """Make a running daemon send nothing until it is resumed.

    It keeps its connections, and what it has begun. To a bucket it first ends the requests that
    have begun. A pause ends with the daemon.
    """
    _ask(common, "pause", as_json=as_json)


@click.command()
@json_option
@click.pass_obj
def resume(common: Common, as_json: bool) -> None:
    """Make a paused daemon continue."""
    _ask(common, "resume", as_json=as_json)


@click.command()
@click.argument("rate")
@json_option
@click.pass_obj
def bwlimit(common: Common, rate: str, as_json: bool) -> None:
    """Set how fast a running daemon may send.

    RATE is bytes a second of all workers together, such as 4MB/s; `off` means no limit; `timetable`
    means what run.bwlimit says. It holds until the daemon ends.
    """
    _ask(common, "bwlimit", as_json=as_json, rate=rate)


@click.command()
@json_option
@click.pass_obj
def stop(common: Common, as_json: bool) -> None:
    """End a running daemon after what is in flight.

    It ends with exit code 143, as by SIGTERM. One that is paused ends at once, and loses nothing.
    """
    _ask(common, "stop", as_json=as_json)


@click.command()
@json_option
@click.pass_obj
def now(common: Common, as_json: bool) -> None:
    """Make a running daemon look for work, and do what is due, at once.

    It tries at once whatever it waits for: new blobs, the end of an outage, the time of the next
    dump or snapshot.
    """
    _ask(common, "now", as_json=as_json)
