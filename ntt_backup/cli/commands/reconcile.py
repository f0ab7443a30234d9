"""The command `reconcile` compares catalog, store and remote by name and size."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, TextIO

import click

from ntt_backup.audit.reconcile import SERIOUS, Comparison, Difference
from ntt_backup.audit.reconcile import reconcile as compare
from ntt_backup.cli.check_note import noted
from ntt_backup.cli.common import (
    Common,
    GivenPath,
    identity_flag,
    identity_option,
    open_catalog,
    result_options,
    writing,
    written,
)
from ntt_backup.cli.results import fields_of, report, strangers
from ntt_backup.config import Settings
from ntt_backup.format import duration, many, printable
from ntt_backup.report.lines import ProgressLine, time_left

_ANOTHER: Final = "name another directory with --out"
_ADVICE: Final = {
    Difference.LOST: "`ntt-backup-remote reconcile --apply` makes them pending, and the next run"
    " sends them",
    Difference.REMOTE_SIZE: "`ntt-backup-remote reconcile --apply` makes them pending; the next run"
    " replaces them",
    Difference.UNREADABLE: "look at their directories on the remote; nothing is known about them",
    Difference.PACK_LOST: "whether blobs are lost with it is said beside; --apply forgets the pack",
    Difference.UNMARKED: "the next run marks the right ones and replaces the others; failed ones"
    " wait for `ntt-backup-remote requeue`",
    Difference.UNRECORDED: "`ntt-backup-remote reconcile --apply` records it",
    Difference.UNKNOWN: "their rows were deleted, or they belong to another catalog; left alone",
    Difference.UNREGISTERED: "`ntt-backup-remote scan` registers them",
    Difference.SOURCELESS: "`ntt-backup-remote restore` brings back what is copied; find the"
    " others, or delete their rows",
    Difference.STORE_SIZE: "for copied blobs `ntt-backup-remote verify --local` tells whether the"
    " store is right",
    Difference.BAD_BLOBID: "correct or delete the rows",
    Difference.STRAY_STORE: "not blobs; never sent",
    Difference.STRAY_REMOTE: "not blobs; never touched",
}
_ADVICE_FOR_BUCKETS: Final = _ADVICE | {
    Difference.REMOTE_SIZE: "`ntt-backup-remote reconcile --apply` makes them pending; the next run"
    " sends them in another pack",
    Difference.UNMARKED: "`ntt-backup-remote reconcile --apply` marks them as copied, but for what"
    " `verify` has found damaged; the next run sends the rest again, in another pack",
}


@click.command()
@click.option(
    "--out",
    type=GivenPath(file_okay=False),
    metavar="DIR",
    help="Write all differences into this directory, one file for each kind.",
)
@click.option(
    "--apply",
    is_flag=True,
    help="Make copied blobs pending again that the remote lacks or has with another size.",
)
@identity_option
@result_options
@click.pass_obj
def reconcile(
    common: Common,
    as_json: bool,
    out: Path | None,
    apply: bool,
    identity: Path | None,
    quiet: bool,
) -> None:
    """Compare catalog, store and remote by name and size.

    Contents are not read; `verify` does that. Exit code 7 when the remote lacks what the catalog
    calls copied.
    """
    settings = common.load(Settings, identity_flag(identity))
    command = "reconcile --apply" if apply else "reconcile"
    with ExitStack() as stack:
        note = stack.enter_context(noted(common, "reconcile"))
        line = stack.enter_context(ProgressLine(sys.stderr, quiet=quiet))
        files = _Files(out, stack)
        conn = stack.enter_context(open_catalog(settings, command, application="reconcile"))
        seen = compare(
            conn,
            settings,
            apply=apply,
            on_progress=lambda seen: line.show(lambda: progress_text(seen)),
            on_difference=files.write,
            on_outage=line.outage,
        )
        wrong = sum(seen.differences[what] for what in SERIOUS)
        note.saw(seen.rows, 0, wrong, seen.exit_code)
    fields = {"target": settings.target, **fields_of(seen)}
    said = lines(seen, applied=apply, bucket=settings.remote.kind == "s3")
    report(fields, said, seen.exit_code, as_json=as_json)


class _Files:
    """A file for each kind of difference. A line is a blobid or path, a tab, and a remark."""

    def __init__(self, directory: Path | None, stack: ExitStack) -> None:
        self._files: dict[Difference, TextIO] = {}
        if directory is not None:
            self._directory = directory
            with self._writing():
                directory.mkdir(exist_ok=True)
                # All kinds, so that no file of an earlier call is left beside the new ones.
                for what in Difference:
                    path = directory / f"{what}.txt"
                    self._files[what] = stack.enter_context(written(path, _ANOTHER))

    def write(self, what: Difference, name: str, remark: str) -> None:
        if what in self._files:
            with self._writing():
                self._files[what].write(f"{printable(name)}\t{printable(remark)}\n")

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory, _ANOTHER)


def progress_text(seen: Comparison) -> str:
    """Returns how far a comparison is."""
    return (
        f"{seen.part:.0%}, {many(seen.rows, 'row')}, {seen.in_store:,} in the store,"
        f" {seen.on_remote:,} on the remote{time_left(seen.part, seen.duration_s)}"
    )


def lines(seen: Comparison, *, applied: bool, bucket: bool) -> list[str]:
    """Returns what was compared and what differs, for a terminal."""
    said = [
        f"{many(seen.rows, 'row')} in the catalog, {many(seen.in_store, 'blob')} in the store,"
        f" {seen.on_remote:,} on the remote, compared in {duration(seen.duration_s)}",
        f"{many(seen.agreed, 'row agrees', 'rows agree')} with both",
    ]
    advice = _ADVICE_FOR_BUCKETS if bucket else _ADVICE
    for what in Difference:
        if count := seen.differences[what]:
            said.append(f"{count:>12,} {what}: {advice[what]}")
            said += [f"{'':>14}{printable(example)}" for example in seen.examples[what]]
    said += strangers(seen.strangers)
    if applied:
        pending = many(seen.requeued, "blob is", "blobs are")
        said.append(f"{pending} pending again; `ntt-backup-remote run` sends what is pending")
        if seen.marked:
            said.append(f"{many(seen.marked, 'blob counts', 'blobs count')} as copied now")
    return said
