"""The command `reconcile`: its options, and what differs for people, machines, and as files."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TextIO

import click

from ntt_backup.audit.reconcile import Comparison, Difference
from ntt_backup.audit.reconcile import reconcile as compare
from ntt_backup.catalog import verify_schema
from ntt_backup.cli.common import Common, connect
from ntt_backup.config import Settings
from ntt_backup.errors import ConfigError, complete
from ntt_backup.format import duration, many, printable
from ntt_backup.ui.progress_line import Meter

_ADVICE: Final = {
    Difference.LOST: "`ntt-backup-remote reconcile --apply` makes them pending, and the next run"
    " sends them",
    Difference.REMOTE_SIZE: "`ntt-backup-remote reconcile --apply` makes them pending; the next run"
    " replaces them",
    Difference.UNREADABLE: "look at those directories there; nothing is known of these",
    Difference.UNMARKED: "the next run marks the right ones and replaces the others; failed ones"
    " wait for `ntt-backup-remote requeue`",
    Difference.UNKNOWN: "rows that were deleted here, or blobs of another catalog; left alone",
    Difference.UNREGISTERED: "`ntt-backup-remote scan` registers them",
    Difference.SOURCELESS: "what is copied comes back by `ntt-backup-remote restore`; else find"
    " it or delete the row",
    Difference.STORE_SIZE: "of copied blobs `ntt-backup-remote verify --local` tells which is"
    " right",
    Difference.BAD_BLOBID: "correct or delete the rows",
    Difference.STRAY_STORE: "no blobs; never sent",
    Difference.STRAY_REMOTE: "no blobs; never touched",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write every difference to a file of its kind in this directory.",
)
@click.option(
    "--apply", is_flag=True, help="Make pending again what is copied and absent, or cut short."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only what was found at the end.")
@click.pass_obj
def reconcile(common: Common, as_json: bool, out: Path | None, apply: bool, quiet: bool) -> None:
    """Compare the catalog, the store and the remote by name and size, in one pass.

    Exit code 7 when the remote has not what the catalog calls copied. Contents are for `verify`.
    """
    settings = common.load(Settings)
    meter = Meter(sys.stderr, quiet=quiet)

    def progress(seen: Comparison) -> None:
        left = seen.duration_s * (1 - seen.part) / seen.part
        meter.show(
            f"{seen.part:.0%}, {many(seen.rows, 'row')}, {seen.in_store:,} in the store,"
            f" {seen.on_remote:,} on the remote, about {duration(left)} left"
        )

    with ExitStack() as stack:
        files = _Files(out, stack)
        conn = stack.enter_context(connect(settings, "reconcile"))
        verify_schema(conn, settings.target, "reconcile --apply" if apply else "reconcile")
        seen = compare(
            conn,
            settings,
            apply=apply,
            on_progress=progress,
            on_difference=files.write,
            on_outage=meter.outage,
        )
    meter.close()
    if as_json:
        click.echo(json.dumps(as_object(seen, settings.target)))
    else:
        click.echo("\n".join(lines(seen, applied=apply)))
    sys.exit(seen.exit_code)


class _Files:
    """A file for each kind of difference, a line for each: the blobid or path, a tab, a word."""

    def __init__(self, directory: Path | None, stack: ExitStack) -> None:
        self._directory = directory
        self._files: dict[Difference, TextIO] = {}
        try:
            if directory is not None:
                directory.mkdir(exist_ok=True)
                # All of them, so that none of an earlier call is left beside the new ones.
                for what in Difference:
                    path = directory / f"{what}.txt"
                    self._files[what] = stack.enter_context(path.open("w", encoding="utf-8"))
        except OSError as error:
            raise self._problem(error) from error

    def write(self, what: Difference, name: str, word: str) -> None:
        if what in self._files:
            try:
                self._files[what].write(f"{printable(name)}\t{printable(word)}\n")
            except OSError as error:
                raise self._problem(error) from error

    def _problem(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write into {self._directory}",
            detail=error.strerror or str(error),
            hint="name another directory with --out",
        )


def as_object(seen: Comparison, target: str) -> dict[str, Any]:
    """What was seen as plain JSON values."""
    return {
        "target": target,
        "rows": seen.rows,
        "in_store": seen.in_store,
        "on_remote": seen.on_remote,
        "agreed": seen.agreed,
        "differences": {str(what): seen.differences[what] for what in Difference},
        "examples": {str(what): found for what, found in seen.examples.items()},
        "requeued": seen.requeued,
        "duration_s": round(seen.duration_s, 3),
        "exit_code": seen.exit_code,
    }


def lines(seen: Comparison, *, applied: bool) -> list[str]:
    """What was seen for a terminal."""
    said = [
        f"{many(seen.rows, 'row')} in the catalog, {many(seen.in_store, 'blob')} in the store,"
        f" {seen.on_remote:,} on the remote, compared in {duration(seen.duration_s)}",
        f"{many(seen.agreed, 'row agrees', 'rows agree')} with both",
    ]
    for what in Difference:
        if count := seen.differences[what]:
            said.append(f"{count:>12,} {what}: {complete(_ADVICE[what])}")
            said += [f"{'':>14}{printable(example)}" for example in seen.examples[what]]
    if applied:
        run = complete("ntt-backup-remote run")
        pending = many(seen.requeued, "blob is", "blobs are")
        said.append(f"{pending} pending again; `{run}` sends what is pending")
    return said
