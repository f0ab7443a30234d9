"""The command `restore`: its options, and what came of it for people and machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

import click

from ntt_backup.cli.common import Common, plain_failures
from ntt_backup.cli.param_types import HexPrefix
from ntt_backup.config import RemoteConfig
from ntt_backup.dump.restore import restore_catalog
from ntt_backup.errors import complete
from ntt_backup.format import duration, many, printable, size
from ntt_backup.model import is_blobid
from ntt_backup.restore.restore import Chosen, Everything, Restored, Wanted
from ntt_backup.restore.restore import restore as restore_blobs
from ntt_backup.ui.progress_line import Meter

_SHOWN: Final = 20


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), metavar="[DIR]", required=False)
@click.option(
    "--to",
    "destination",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the blobs go; DIR may also stand by itself.",
)
@click.option(
    "--catalog",
    "of_catalog",
    is_flag=True,
    help="The catalog instead, from its newest good dump, into the empty database of catalog.url.",
)
@click.option(
    "--prefix", type=HexPrefix(), default="", help="Only blobids that begin so, such as 3f."
)
@click.option(
    "--list",
    "names",
    type=click.File("r"),
    metavar="FILE",
    help="Blobids, one a line; - for stdin.",
)
@click.option(
    "--blobid", "blobids", multiple=True, metavar="ID", help="This blob; may be repeated."
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Side by side."
)
@click.option(
    "--trust-size",
    is_flag=True,
    help="Take a file of the right size in DIR for right, without hashing it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what came of it at the end.")
@click.pass_obj
def restore(
    common: Common,
    directory: Path | None,
    destination: Path | None,
    of_catalog: bool,
    prefix: str,
    names: TextIO | None,
    blobids: tuple[str, ...],
    workers: int,
    trust_size: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fetch blobs from the remote into DIR/aa/bb/, without the catalog; or, with --catalog, that.

    Every blob is hashed before its name appears. What DIR has already is left alone, so the same
    command goes on after an interruption. Exit code 7 when a blob could not be had.
    """
    if directory is not None and destination is not None:
        raise click.UsageError("one directory: --to DIR, or DIR by itself")
    destination = destination or directory
    if of_catalog:
        if destination is not None or prefix or names is not None or blobids:
            raise click.UsageError("--catalog goes without --to and without a choice of blobs")
        _restore_catalog(common, quiet=quiet)
        return
    if destination is None:
        raise click.UsageError("restore needs --to DIR, or --catalog")
    if bool(prefix) + (names is not None) + bool(blobids) > 1:
        raise click.UsageError("give only one of --prefix, --list and --blobid")
    wanted: Wanted = Everything(prefix)
    if names is not None:
        wanted = Chosen(_read(names))
    elif blobids:
        wanted = Chosen(_require(enumerate(blobids, 1), "--blobid"))
    settings = common.load(RemoteConfig)
    meter = Meter(sys.stderr, quiet=quiet)

    def progress(done: Restored) -> None:
        if meter.due:
            meter.show(progress_line(done))

    done = restore_blobs(
        settings,
        destination.absolute(),
        wanted,
        workers=workers,
        trust_size=trust_size,
        on_progress=progress,
        on_outage=meter.outage,
    )
    meter.close()
    click.echo(json.dumps(as_object(done)) if as_json else "\n".join(lines(done, destination)))
    sys.exit(done.exit_code)


def _restore_catalog(common: Common, *, quiet: bool) -> None:
    settings = common.load(RemoteConfig)

    def warn(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    found = restore_catalog(settings, warn)
    if not quiet:
        run = complete("ntt-backup-remote run")
        click.echo(
            f"restored the catalog of {found.dump.begun:%Y-%m-%d %H:%M:%S} UTC from"
            f" {found.dump.name}; what was copied since is pending in it, and `{run}` finds it"
            " there"
        )
        click.echo(f"all of it belongs to {found.user} now, and no grants came back")
    if found.rights:
        click.echo("owners and grants as they were: create the roles, then as a superuser run:")
        click.echo("\n".join(found.rights))


def progress_line(done: Restored) -> str:
    """How far a restore is."""
    rate = size(int(done.bytes / max(done.duration_s, 1e-3)))
    text = (
        f"{done.restored:,} restored, {done.right:,} there already, {size(done.bytes)} ({rate}/s)"
    )
    if done.wrong:
        text += f", {done.wrong.total():,} wrong"
    if done.part:
        left = done.duration_s * (1 - done.part) / done.part
        text += f", {done.part:.1%}, about {duration(left)} left"
    return text


def as_object(done: Restored) -> dict[str, Any]:
    """What came of it as plain JSON values; `failures` holds the first 1000."""
    return {
        "restored": done.restored,
        "right": done.right,
        "bytes": done.bytes,
        "duration_s": round(done.duration_s, 3),
        "wrong": {str(reason): count for reason, count in sorted(done.wrong.items())},
        "failures": plain_failures(done.failures),
        "exit_code": done.exit_code,
    }


def lines(done: Restored, destination: Path) -> list[str]:
    """What came of it for a terminal."""
    said = [
        f"restored {many(done.restored, 'blob')}, {size(done.bytes)} in"
        f" {duration(done.duration_s)}, into {destination}; {done.right:,} there already and right"
    ]
    if not done.wrong:
        return said
    said.append(f"NOT restored: {done.wrong.total():,}, which the remote has not, or not right")
    said += [f"{number:>10,} {reason}" for reason, number in sorted(done.wrong.items())]
    for failure in done.failures[:_SHOWN]:
        said.append(f"  {failure.blobid} {failure.reason} {printable(failure.detail)}")
    if done.wrong.total() > _SHOWN:
        said.append(f"  and {done.wrong.total() - _SHOWN:,} more; --json tells of the first 1000")
    return said


def _read(names: TextIO) -> Iterator[str]:
    stripped = ((number, line.strip()) for number, line in enumerate(names, 1))
    return _require(((number, line) for number, line in stripped if line), f"{names.name}, line")


def _require(names: Iterable[tuple[int, str]], where: str) -> Iterator[str]:
    for number, name in names:
        if not is_blobid(name):
            raise click.UsageError(f"{where} {number}: {printable(name[:80])} is no blobid")
        yield name
