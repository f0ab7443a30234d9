"""The command `snapshot take` makes a version of a set on the target."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ntt_backup.cli.common import Common, result_options
from ntt_backup.cli.completion import set_names
from ntt_backup.cli.results import FirstLines, fields_of, report
from ntt_backup.config import RemoteConfig
from ntt_backup.errors import RemoteUnreachable
from ntt_backup.format import duration, many, size
from ntt_backup.report.lines import ProgressLine, pace
from ntt_backup.snapshot.job import take_version
from ntt_backup.snapshot.take.new_version import Report, Taken
from ntt_backup.snapshot.take.sets import find_set


@click.command()
@click.argument("set_name", metavar="SET", shell_complete=set_names)
@click.argument("paths", type=click.Path(), nargs=-1, metavar="[PATH]...")
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out what fits: '*.tmp', or '/srv/cache/**'; may be repeated. Only with PATH.",
)
@click.option("--full", is_flag=True, help="Store everything, so that it needs no other version.")
@click.option("--paranoid", is_flag=True, help="Read files that seem unchanged, too.")
@result_options
@click.pass_obj
def take(
    common: Common,
    set_name: str,
    paths: tuple[str, ...],
    exclude: tuple[str, ...],
    full: bool,
    paranoid: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a version of a set on the target.

    The paths of SET stand under [snapshots.SET] in the configuration; without that, PATHs are named
    here each time. Only files that have changed since the last version are read: those with another
    size, time, inode, mode or owner. Only what differs in them is stored. Neither the catalog nor
    the store is needed. Exit code 7 when a file could not be read.
    """
    settings = common.load(RemoteConfig)
    chosen = find_set(settings, set_name, paths, exclude)
    began = time.monotonic()
    with ProgressLine(sys.stderr, quiet=quiet) as line, _advice():
        told = FirstLines(line, quiet=quiet)
        done = take_version(
            settings,
            chosen,
            full=full,
            paranoid=paranoid,
            report=Report(
                lambda files, _, read, stored: line.show(
                    lambda: (
                        f"{many(files, 'file')}, {pace(read, time.monotonic() - began)} read,"
                        f" {size(stored)} stored"
                    )
                ),
                lambda path, why: told.say(f"{path}: {why}"),
            ),
        )
    fields = {"target": common.target, **fields_of(done)}
    report(fields, lines(done), done.exit_code, as_json=as_json)


@contextmanager
def _advice() -> Iterator[None]:
    """Adds to an outage what becomes of the take."""
    try:
        yield
    except RemoteUnreachable as error:
        error.hint = f"take it again: that begins anew, and removes what was sent; {error.hint}"
        raise


def lines(done: Taken) -> list[str]:
    """Returns what was taken, for a terminal."""
    kind = f"on {done.parent}" if done.parent else "full"
    said = [
        f"took {done.set}@{done.version} ({kind}): {many(done.files, 'file')}, {size(done.bytes)};"
        f" {done.changed:,} changed, {size(done.read)} read, {size(done.stored)} stored, in"
        f" {duration(done.duration_s)}"
    ]
    if done.forgotten:
        said.append(f"removed {many(done.forgotten, 'version')} past retention")
    if done.unsettled:
        said.append(f"UNSETTLED: {many(done.unsettled, 'file')} changed while being read")
    if done.unreadable:
        said.append(f"NOT taken: {done.unreadable:,} that could not be read")
    return said
