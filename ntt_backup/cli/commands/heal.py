"""The command `heal` brings back into the store what it lost. No other command writes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import click

from ntt_backup.cli import options, results
from ntt_backup.cli.global_options import Common, open_catalog, refuse_paths, require_blobids
from ntt_backup.cli.options import IDENTITY, RESULT, flag, repeated
from ntt_backup.config import ALL_TARGETS, Settings
from ntt_backup.config.bandwidth_timetable import Timetable
from ntt_backup.formatting import duration, many, printable, size
from ntt_backup.restore.heal import Healed, Healing, Outcome, Suspects, nearest_first

_KEPT: Final = 1000
_WORDS: Final = {
    "healed": "healed",
    "right": "right already",
    "wrong": "NOT healed",
    "would-heal": "would heal",
}


@options.command(IDENTITY, *RESULT)
@repeated("--blobid", "ID", "Examine this blob", "blobids")
@options.prefix("Examine")
@flag("--all", "Hash all blobs that the store should have, as `verify --local` does.", "everything")
@flag("--dry-run", "Examine, but fetch nothing and write nothing.")
@options.bwlimit("for fetching blobs")
@options.sessions(default=2)
def heal(
    common: Common,
    blobids: tuple[str, ...],
    prefix: str,
    everything: bool,
    dry_run: bool,
    bwlimit: Timetable | None,
    workers: int,
) -> None:
    """Restore missing or damaged blobs of the store from the targets.

    Without --blobid, --prefix or --all, the command examines the failed blobs that are missing,
    unreadable, or of another size or content in the store. With --prefix it hashes all blobs of
    that prefix. Each missing or wrong blob is fetched from the nearest target that has it, or from
    the targets of --target in their order, hashed, and put in place. Correct content is never
    replaced. No other command writes into the store. The failed marks of healed blobs are removed,
    so the next run sends these blobs. The exit code is 7 if a blob was not healed.
    """
    if bool(blobids) + bool(prefix) + everything > 1:
        raise click.UsageError("give only one of --blobid, --prefix and --all")
    named = list(dict.fromkeys(require_blobids(enumerate(blobids, 1), "--blobid")))
    chosen = common
    if common.default_target:
        chosen = replace(common, target=ALL_TARGETS)
    targets = chosen.load_each(Settings)
    if chosen.target == ALL_TARGETS:
        targets = nearest_first(targets)
    first = next(iter(targets.values()))
    refuse_paths(first, "`ntt-backup-remote restore --as-paths` brings files back")
    suspects = Suspects(named, prefix, all=bool(everything or prefix))
    command = "heal --dry-run" if dry_run else "heal"
    told: list[Outcome] = []
    as_json, quiet = options.wants("as_json"), options.wants("quiet")
    with results.noted(common, command, prefix=prefix) as note, results.progress_line() as line:

        def progress(done: Healed) -> None:
            note.saw(done.examined, done.bytes, len(done.wrong), done.exit_code)
            of = f" of {done.total:,}" if done.total else ""
            line.show(
                lambda: (
                    f"{done.examined:,}{of} examined, {done.healed:,} healed,"
                    f" {len(done.wrong):,} not, {results.pace(done.bytes, done.duration_s)} fetched"
                )
            )

        def tell(outcome: Outcome) -> None:
            if as_json:
                told[len(told) : _KEPT] = [outcome]
            elif not quiet:
                line.end_line()
                click.echo(_line(outcome))

        with open_catalog(first, command, application="heal") as conn:
            healing = Healing(
                conn,
                first.source,
                targets,
                workers,
                dry_run,
                bwlimit,
                on_progress=progress,
                on_outcome=tell,
                on_outage=line.outage,
            )
            done = healing.run(suspects)
    said = _lines(done, list(targets), chosen=bool(named or suspects.all), shown=not quiet)
    results.report_on(
        done,
        said,
        done.exit_code,
        target=common.target,
        targets=list(targets),
        dry_run=dry_run,
        outcomes=[one._asdict() for one in told],
    )


def _line(one: Outcome) -> str:
    where = f"from {one.target}" if one.target else ""
    return printable(f"{_WORDS[one.outcome]:<13} {one.blobid}  {where}  {one.detail}".rstrip())


def _lines(done: Healed, targets: Sequence[str], *, chosen: bool, shown: bool) -> Iterator[str]:
    """Yields what was examined and healed.

    Args:
        done: The result.
        targets: The names of the targets, in the order in which they are asked.
        chosen: Whether options chose the blobs, instead of the failed marks.
        shown: Whether each blob was reported before.
    """
    yield f"examined {many(done.examined, 'blob')} in {duration(done.duration_s)}"
    if done.would_heal:
        blobs = many(done.would_heal, "blob")
        yield f"would heal {blobs}, asking {', '.join(targets)} in this order; nothing was changed"
    if done.healed:
        sources = ", ".join(f"{count:,} from {name}" for name, count in done.sources.items())
        yield f"healed {many(done.healed, 'blob')}, {size(done.bytes)}: {sources}"
    if done.requeued:
        yield f"{many(done.requeued, 'failed mark')} removed; `ntt-backup-remote run` sends them"
    for name, error in done.troubles.items():
        yield printable(f"NOT asked: {name}: {error}")
    if done.wrong:
        yield f"NOT healed: {many(len(done.wrong), 'blob')}"
        yield from results.count_lines(done.wrong.counts)
        if not shown:
            yield from results.failure_lines(done.wrong)
    elif not done.healed + done.would_heal:
        if chosen:
            yield "there was nothing to heal"
        else:
            yield "no failed blob has to be healed; `ntt-backup-remote heal --all` examines all"
